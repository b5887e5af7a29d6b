// The options of a pipeline: its shape, schedule, devices, training and checks. They are the same
// on every rank; the ranks compare them before anything else.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <sluice/communicator.hpp>
#include <sluice/parameter.hpp>

namespace sluice {

struct Schedule;  // <sluice/schedule.hpp>
class Stage;      // <sluice/stage.hpp>

// "cpu"; "cuda": the GPU whose index is the rank's number among the ranks of its host (modulo their
// count: ranks share GPUs where there are more of them); "cuda:1": that one; "auto": as cuda where
// the host has a GPU that can be used, else cpu.
struct DeviceChoice {
  enum class Kind { kCpu, kCuda, kCudaIndex, kAuto };
  Kind kind = Kind::kCpu;
  int index = 0;  // of kCudaIndex
};
// A list such as "cuda,cpu", whole text, else Error(kUsage) naming the entry.
[[nodiscard]] std::vector<DeviceChoice> parse_devices(std::string_view text);
[[nodiscard]] std::string to_string(const std::vector<DeviceChoice>& choices);

// "auto" | "mpi" | "nccl" (--transport), else Error(kUsage).
enum class TransportChoice { kAuto, kMpi, kNccl };
[[nodiscard]] TransportChoice parse_transport(std::string_view text);
[[nodiscard]] const char* name_of(TransportChoice choice);

// Makes global stage `stage` of `stages`; called on the owning rank only.
using StageFactory = std::function<std::unique_ptr<Stage>(int stage, int stages)>;

struct PipelineOptions {
  // How many ranks there are, and how a step's samples are divided among them.
  struct Shape {
    int pipeline = 0;  // p; 0: all ranks / replicas
    int replicas = 1;  // d
    RankOrder rank_order = RankOrder::kPipelineFirst;
    int micro_batches = 1;
    std::int64_t micro_batch_size = 1;  // samples
    std::int64_t batch_size = 0;        // samples per step over all replicas; 0: d * m * size
  };

  // The order in which each rank runs its micro-batches.
  struct Order {
    std::string schedule = "1f1b";  // a name of schedule_names()
    int chunks = 1;                 // stages per rank
    // Replaces the two above: an order that was read from a file, searched for or written by the
    // caller. Compute actions only, for `pipeline` ranks and `micro_batches`; the same on every
    // rank.
    std::shared_ptr<const Schedule> given = nullptr;
  };

  // What the ranks compute on, and how they reach each other.
  struct Devices {
    // One entry for all ranks, or one per rank of a pipeline, or one per rank of the job.
    std::vector<DeviceChoice> choices = {{}};
    TransportChoice transport = TransportChoice::kAuto;  // between GPUs
    int threads = 1;                                     // per rank, on a CPU
    bool tf32 = false;  // a GPU's fp32 products may round their operands to TF32
    // Where NCCL sums over replicas: its own all-reduce replaces the sum in the order of replicas.
    // It is faster; its bits depend on NCCL and on the depth of the pipeline.
    bool all_reduce = false;
    // On GPUs: record what stages that allow it (Stage::graph_capturable) put on the stream, and
    // replay it. Evaluations are not recorded.
    bool cuda_graphs = false;
    // Where NCCL sums over replicas: bytes of gradients per sum, which overlaps with the rest of
    // backward. It changes the bits of NCCL's own all-reduce only.
    std::size_t bucket_bytes = std::size_t{25} << 20;
  };

  struct Training {
    std::uint64_t seed = 1;
    OptimizerConfig optimizer = {};
    LearningRate learning_rate = {};
    double clip = 0;                             // of the global gradient norm; 0: off
    std::vector<std::int64_t> evaluations = {};  // sample counts that evaluate() accepts
    bool inference = false;                      // infer() only: no gradients are computed
  };

  struct Checks {
    std::uint64_t replicas_every = 0;  // steps between comparisons of replicas and tied copies
    bool trace = false;                // record a timeline of every training step
    // More values that must agree on all ranks, by name.
    std::vector<std::pair<std::string, std::string>> configuration = {};
  };

  Shape shape = {};
  Order order = {};
  Devices devices = {};
  Training training = {};
  Checks checks = {};
};

}  // namespace sluice
