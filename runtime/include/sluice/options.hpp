// What a pipeline is told: its shape, its schedule, its devices and how it trains. The same on
// every rank, but for what says otherwise; ranks compare it before anything else.
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
  int pipeline = 0;  // p; 0: all ranks / replicas
  int replicas = 1;  // d
  RankOrder rank_order = RankOrder::kPipelineFirst;
  std::string schedule = "1f1b";  // a name of schedule_names(), for `chunks` stages per rank
  int chunks = 1;
  // The order itself, in place of those two: read from a file, searched, or the caller's own.
  // Compute actions only, for `pipeline` ranks and `micro_batches`; the same on every rank.
  std::shared_ptr<const Schedule> order = nullptr;
  int micro_batches = 1;
  std::int64_t micro_batch_size = 1;  // samples
  std::int64_t batch_size = 0;        // samples per step over all replicas; 0: d * m * size
  std::uint64_t seed = 1;
  int threads = 1;
  bool tf32 = false;  // a GPU's fp32 products may round their operands to TF32
  // What ranks compute on: one entry for all of them, or one per rank of a pipeline, or one per
  // rank of the job; see DeviceChoice.
  std::vector<DeviceChoice> devices = {{}};
  TransportChoice transport = TransportChoice::kAuto;  // between GPUs
  // Where NCCL sums over replicas: its own all-reduce instead of the order of replicas. Faster, and
  // the bits are NCCL's: not depth-invariant.
  bool all_reduce = false;
  // On GPUs: record what stages that allow it (Stage::replayable) put on the stream, and replay it.
  // Evaluations are not recorded.
  bool cuda_graphs = false;
  // Where NCCL sums over replicas: bytes of gradients summed at a time, beside the rest of backward
  // (the default is the field's usual one). Changes no bits but NCCL's own all-reduce's.
  std::size_t bucket_bytes = std::size_t{25} << 20;
  OptimizerConfig optimizer = {};
  LearningRate learning_rate = {};
  double clip = 0;                             // of the global gradient norm; 0: off
  std::vector<std::int64_t> evaluations = {};  // sample counts that evaluate() may be asked for
  std::uint64_t check_replicas = 0;  // compare replicas and tied copies every that many steps
  bool inference = false;            // infer() only: no gradients are computed
  bool trace = false;
  // More values that must agree on all ranks, by name.
  std::vector<std::pair<std::string, std::string>> configuration = {};
};

}  // namespace sluice
