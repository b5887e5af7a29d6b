// The options of a pipeline: its shape, order, devices, training and checks. They are the same on
// every rank: the ranks compare them first, and throw Error(kMismatch) where they differ.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <sluice/parameter.hpp>
#include <sluice/stage.hpp>
#include <sluice/world.hpp>

#pragma GCC visibility push(default)
namespace sluice {

struct Schedule;  // <sluice/schedule.hpp>
class Stage;      // <sluice/stage.hpp>

// "cpu".
// "cuda": the GPU whose index is the rank's number among the ranks of its host, modulo the number
// of GPUs: ranks share GPUs where there are more ranks.
// "cuda:1": GPU 1 of the host.
// "auto": as "cuda" where that GPU can be used, else "cpu".
struct DeviceChoice {
  enum class Kind { kCpu, kCuda, kCudaIndex, kAuto };
  Kind kind = Kind::kCpu;
  int index = 0;  // of kCudaIndex
};
// Parses a list such as "cuda,cpu". Throws Error(kUsage) that names the wrong entry.
[[nodiscard]] std::vector<DeviceChoice> parse_devices(std::string_view text);
[[nodiscard]] std::string to_string(const std::vector<DeviceChoice>& choices);

enum class TransportChoice { kAuto, kMpi, kNccl };
// "auto" | "mpi" | "nccl".
[[nodiscard]] const char* name_of(TransportChoice choice);

// Makes stages: by a copyable function of a stage and the number of stages as two ints, or of a
// const StagePlace&; the former are refused where several ranks share a stage. Called on each rank
// that runs the stage, once, by the thread that constructs the pipeline; must not return null.
class StageFactory {
  using Made = std::unique_ptr<Stage>;
  // Of a generic function of two numbers, whose body may compile with nothing else.
  template <typename Make>
  static constexpr bool kGeneric = requires {
    &Make::template operator()<int, int>;
  };
  template <typename Make>
  static constexpr bool kByPlace =
      std::conjunction_v<std::bool_constant<!kGeneric<Make>>,
                         std::is_invocable_r<Made, Make&, const StagePlace&>>;
  template <typename Make>
  static constexpr bool kByNumbers =
      !kByPlace<Make> && std::is_invocable_r_v<Made, Make&, int, int>;

 public:
  StageFactory() = default;        // null: refused by a Pipeline, as is one of a null function
  StageFactory(std::nullptr_t) {}  // NOLINT(google-explicit-constructor)
  template <typename Make>
  requires(!std::is_same_v<Make, StageFactory> && std::is_copy_constructible_v<Make> &&
           (kByNumbers<Make> || kByPlace<Make>))
      StageFactory(Make make)  // NOLINT(google-explicit-constructor)
      : takes_place_(!kByNumbers<Make>) {
    if constexpr (requires { make == nullptr; }) {
      if (make == nullptr) return;
    }
    if constexpr (kByNumbers<Make>) {
      make_ = [make = std::move(make)](const StagePlace& place) mutable -> Made {
        return make(place.stage, place.stages);
      };
    } else {
      make_ = std::move(make);
    }
  }

  [[nodiscard]] explicit operator bool() const { return make_ != nullptr; }
  // Whether it can make a stage that several ranks share.
  [[nodiscard]] bool takes_place() const { return takes_place_; }
  [[nodiscard]] Made operator()(const StagePlace& place) const;

 private:
  std::function<Made(const StagePlace&)> make_;
  bool takes_place_ = false;
};

// What the replicas of a stage divide among them, where each holds all of it else.
enum class ShardLevel {
  kNone,
  // The state of the optimizer (ZeRO stage 1, Rajbhandari et al. 2020): each replica updates a part
  // of the parameters and sends it to the others. No bit of a training changes.
  kOptimizer,
  // The gradients too (ZeRO stage 2): before another stage of a rank begins to write gradients, the
  // rank waits for the sums of stages that have ended, and each replica keeps those of the part
  // that it updates alone. So a rank whose stages end their backward one after the other needs
  // less. The plan is for train_step(): accumulate() and forward_backward() leave whole gradients.
  // On GPUs with GradientOrder::kMicroBatch alone. No bit of a training changes.
  kGradients,
  // The parameters too (ZeRO stage 3; FSDP, Zhao et al. 2023): each replica has the part that it
  // updates alone, and units of layers (ParameterSet::begin_unit()) are gathered while they are
  // used. Of frozen parameters each has all. No bit of a training changes.
  kParameters,
};
// "none", "optimizer", "gradients", "parameters".
[[nodiscard]] const char* name_of(ShardLevel level);

// When gradients are added over the replicas. The two differ in the order of sums, so in bits.
enum class GradientOrder {
  kStep,  // once a step: of all micro-batches of a replica
  // After each micro-batch: what replicas then keep of gradients is their own parts, and two units
  // of layers, in place of all of a stage's. A step sends its bytes once per micro-batch. For
  // ShardLevel::kGradients and kParameters, with as many virtual replicas as replicas, two or more.
  // A GPU has its part twice, and what makes less than 2 MiB of a unit stays. For stages whose
  // gradients are overwritten in backward alone and have no shares (Stage::overwrites_gradients(),
  // Parameter::written_by_loss, Parameter::shares); and without forward_backward(). A training has
  // the same bits for every depth, schedule and partition.
  kMicroBatch,
};
// "step", "micro-batch".
[[nodiscard]] const char* name_of(GradientOrder order);

// When the parameters of a stage are gathered, with ShardLevel::kParameters.
enum class ShardGather {
  kAuto,  // kStep where Devices::memory has a limit and a rank needs no more then, else kUse
  kUse,   // each unit before each use, one ahead: two units are there at once
  kStep,  // once a step: all of the stage's, from its first action to its last
};

struct PipelineOptions {
  // How many ranks there are, and how a step's samples are divided among them.
  struct Shape {
    int pipeline = 0;  // ranks from the first stage to the last; 0: all ranks / replicas / tensor
    int replicas = 1;  // of the pipeline
    // Among how many parts a step's samples are divided: each adds the gradients of its
    // micro-batches in order, and a tree of sums joins the parts. A replica computes
    // virtual_replicas / replicas of them, one after the other. The bits of a training depend on
    // this number, not on `replicas`. Legal: any number for one replica, else `replicas` times a
    // power of two. 0: as many as replicas.
    int virtual_replicas = 0;
    // Ranks that share each stage, of which each has a part of the stage's parameters. The stages
    // see to the parts (StagePlace, Slice) and to the sums between these ranks
    // (StageContext::tensor).
    int tensor = 1;
    // The shards of the model, of which a rank computes tensor_shards / tensor (Shards). The bits
    // of a training depend on this number, not on `tensor`. Legal: any number for one rank, else
    // `tensor` times a power of two. 0: as many as `tensor`.
    int tensor_shards = 0;
    // Ranks that share a stage of Sluice's transformers deal the positions of each sample in norms,
    // sums and dropout, and what they keep of them, where the shards have equally many: sequence
    // parallelism. No bit depends on it. A pipeline for inference alone (Training::inference) deals
    // none where the data counts positions: samples may have any number of them. One that trains
    // and deals them infers from as many as shards divide.
    bool sequence_parallel = true;
    RankOrder rank_order = RankOrder::kAuto;
    int micro_batches = 1;              // per virtual replica and step
    std::int64_t micro_batch_size = 1;  // samples
    // Samples per step; 0: virtual replicas * micro_batches * micro_batch_size.
    std::int64_t batch_size = 0;
    ShardLevel shard = ShardLevel::kNone;
    ShardGather shard_gather = ShardGather::kAuto;
    // With ShardLevel::kParameters: groups of so many consecutive replicas have a copy of the
    // values each, which is gathered within the group alone. Where a group is on one host, only
    // sums and one exchange of the updated values in a step go between hosts. Gradients and the
    // optimizer's state are divided among all replicas. A divisor of `replicas` from 2 on; 0: all
    // replicas; kWithinHosts: the largest groups whose replicas of each stage are on one host.
    static constexpr int kWithinHosts = -1;
    int shard_group = 0;
  };

  // The order in which each rank runs its micro-batches.
  struct Order {
    std::string schedule = "1f1b";  // a name of schedule_names()
    int chunks = 0;                 // stages per rank; 0: 2 if the schedule takes several, else 1
    // Unless null, replaces the two above: compute actions only, for `pipeline` ranks and
    // `micro_batches`.
    std::shared_ptr<const Schedule> given = nullptr;
  };

  // What the ranks compute on, and what carries tensors between them.
  struct Devices {
    // One entry for all ranks, or one per rank of a pipeline, which all ranks that share its stages
    // take, or one per rank of the job.
    std::vector<DeviceChoice> choices = {{}};
    TransportChoice transport = TransportChoice::kAuto;  // between GPUs
    // Per rank, on a CPU, at most ComputeContext::kMostThreads. Calls of the pipeline compute in an
    // OpenMP team of this size; the program's own team is afterwards what it was.
    int threads = 1;
    bool tf32 = false;  // GPUs may round operands of fp32 matmuls to TF32
    // Where NCCL sums gradients over replicas: use its all-reduce, not the sum in the order of
    // replicas. It is faster; its bits depend on NCCL and on the depth of the pipeline.
    bool all_reduce = false;
    // On GPUs: record the work of stages that allow it (Stage::graph_capturable), and
    // replay it. Evaluations are not recorded.
    bool cuda_graphs = false;
    // Bytes that a rank may take on its device by the plan; 0: what the device has. A plan that
    // needs more is Error(kUsage) before anything is allocated.
    std::size_t memory = 0;
  };

  // What leaves a rank's device between its uses. No bit of a training changes.
  struct Offload {
    // kHost: page-locked host memory, of a rank on a GPU. kDisk: a file without a name in
    // `directory`, past the system's page cache; kCachedDisk: through it. Both take the room on the
    // disk when the pipeline is made.
    enum class To { kNowhere, kHost, kDisk, kCachedDisk };
    // What stages keep of micro-batches between forward and backward: a stage has half of what it
    // would keep at once on its device, rounded up, and at least two or three micro-batches. Those
    // that wait longest for their backward leave. Every stage that keeps more has to say that this
    // may move (StageDescription::state_moves).
    To activations = To::kNowhere;
    // The optimizer's state, on CPUs, to kDisk or kCachedDisk: an update reads, changes and writes
    // it piece by piece. For `optimizer` of Training alone.
    To optimizer = To::kNowhere;
    std::string directory = {};
    // [stage] How many micro-batches a stage keeps on its device in place of half; below 2: all.
    // Where so few cannot be reached, by as little more as that takes. Empty: half.
    std::vector<int> resident = {};
    // Memory through which the optimizer's state passes, at most: 64 KiB at least.
    std::size_t pool = std::size_t{64} << 20;
  };

  struct Training {
    std::uint64_t seed = 1;
    OptimizerConfig optimizer = {};
    // Replaces `optimizer`. Ranks must pass the same factory; Sluice cannot check it.
    OptimizerFactory make_optimizer = {};
    std::vector<ParameterGroup> groups = {};  // the first that matches a parameter counts
    LearningRate learning_rate = {};
    double clip = 0;  // largest global gradient norm; 0: no clipping
    GradientOrder gradient_order = GradientOrder::kStep;
    bool inference = false;  // infer() and evaluate() only
    // A step whose loss or gradient is not finite changes nothing and is reported as skipped. Else
    // it is Error(kNumeric) on all ranks; the pipeline can be used after that as well.
    bool skip_nonfinite = false;
  };

  struct Checks {
    // Steps between comparisons of the parameters of replicas and of tied copies; 0: never.
    std::uint64_t replicas_every = 0;
    bool trace = false;  // record a timeline of every training step
  };

  // What watches the job's ranks, and says who stopped or died. It has a thread of its own on each
  // rank, and TCP connections between them: runtime/README.md, "When it hangs".
  struct Watch {
    bool on = false;
    // Seconds without a sign of life after which a rank is lost, and without progress of any rank
    // after which the job is deadlocked: 1 to 1,000,000. 0: the larger of 30 and ten times the
    // slowest recent step; 300 before the third step.
    double timeout = 0;
    // Seconds that one action, save or batch may take: 1 to 1,000,000. 0: no limit.
    double action_timeout = 0;
    // Gets hang-<time>.txt and status.json; empty: neither is written.
    std::string directory = {};
    // A lost rank or a deadlock ends all processes of the job with exit_code(kPeer). Else each rank
    // that is left throws Error(kPeer) from the wait that it is in; the pipeline is then unusable.
    bool ends_process = false;
    // TCP ports that the ranks listen on; 0: any. With both, at least one port a rank of a host.
    int first_port = 0, last_port = 0;
  };

  // What few programs need to set.
  struct Expert {
    // What RankOrder::kAuto weighs: the bytes that two neighbouring stages of one pipeline exchange
    // in a step, and the bytes of one pipeline rank's gradients. Both 0: not known; the ranks of a
    // pipeline are neighbours then.
    double edge_bytes = 0, gradient_bytes = 0;
    // On a CPU, messages and sums advance between operators too, not only between actions. Most MPI
    // libraries move large messages only while they are called.
    bool progress_in_actions = true;
    // Bytes per sum of gradients over replicas, at least 1; on a CPU at most 1 MiB. A sum overlaps
    // with the rest of backward. The size changes no bits, except those of Devices::all_reduce.
    std::size_t bucket_bytes = std::size_t{25} << 20;
    // Numbers of samples of later evaluations: planned at once, and in the memory table.
    std::vector<std::int64_t> evaluations = {};
    // Plans host memory for a Checkpointer's copy of this rank's share of parameters and optimizer
    // state.
    bool save_copy = false;
    // More values that must be the same on all ranks, by name.
    Facts configuration = {};
  };

  Shape shape = {};
  Order order = {};
  Devices devices = {};
  Offload offload = {};
  Training training = {};
  Checks checks = {};
  Watch watch = {};
  Expert expert = {};
};

}  // namespace sluice
#pragma GCC visibility pop
