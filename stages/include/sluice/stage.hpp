// Stage: one contiguous piece of the model on one device. This is what users write.
//
// The runtime calls describe() first, for every micro-batch size, before anything is allocated;
// then prepare() once; then, as the schedule says, forward and backward of micro-batches, several
// of which may be in flight: whatever a stage keeps between the two, it keeps per ctx.slot
// (0 <= slot < setup.slots). All calls come from one thread. Everything is asynchronous on
// ctx.compute.stream() where the device has streams; every tensor a stage is given lies on its
// device, unless said to be in host memory.
//
// A split-backward schedule needs SplitBackward as well; the last stage must be a LossStage. The
// runtime asks once, by dynamic_cast, and refuses with the stage's number.
//
// A model of many layers becomes stages by a Partition of them, at the end of this header.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <sluice/compute.hpp>
#include <sluice/parameter.hpp>
#include <sluice/tensor.hpp>

namespace sluice {

enum class Phase : std::uint8_t { kTrain = 0, kEvaluate = 1, kGenerate = 2 };

struct StageDescription {
  std::vector<TensorSpec> outputs = {};
  std::size_t state_bytes_until_input = 0;   // per micro-batch in flight, free after I (or B)
  std::size_t state_bytes_until_weight = 0;  // per micro-batch in flight, kept until W (or B)
  // Gradients kept from I to W: per micro-batch in flight where the schedule parts the two
  // (StageSetup::split_backward); otherwise, once for all, shared_gradient_bytes.
  std::size_t gradient_bytes_until_weight = 0;
  std::size_t shared_gradient_bytes = 0;
  std::size_t workspace_bytes = 0;  // the stage's own, shared by its calls; without operators'
  std::size_t copy_bytes = 0;       // of parameters in another precision
  // What its operators take of the compute context: the most that one takes of its workspace(), by
  // the operators' own <name>_workspace(), and the tables it keeps. All stages of a rank share
  // both.
  std::size_t operator_bytes = 0;
  std::size_t table_bytes = 0;
  // The stage takes what it describes here elsewhere than from compute.memory(), by a framework's
  // allocator for instance: it then counts in the plan's table, and not for the rank's block.
  bool own_memory = false;
  // For the report at the start, of the largest micro-batch: "attention: cuDNN". One line or none.
  std::string note = {};
  std::vector<bool> input_gradients = {};  // which inputs want gradients; empty: all f32 and bf16
};

struct StageSetup {
  ComputeContext* compute = nullptr;
  int slots = 1;  // micro-batches in flight at once, by the plan
  // False: only backward() will be called, never its halves; a stage may then share among its slots
  // what lives between I and W.
  bool split_backward = true;
  std::uint64_t seed = 0;  // of initial values
  // Input specs of every micro-batch size that will occur, the largest first.
  std::vector<std::vector<TensorSpec>> input_sizes = {};
};

// Sums over this stage's replicas, for batch statistics; handed in by the runtime.
class Collective {
 public:
  virtual ~Collective() = default;
  virtual void sum(std::span<float> values) = 0;  // in replica order, in place
};

// Told by a stage which of its gradients are final, so that their sum over replicas can start while
// the rest of its backward is still to come; handed in by the runtime.
class FinalGradients {
 public:
  virtual ~FinalGradients() = default;
  // What is on the compute stream so far completes parameters()->flat_grads() from float `begin`
  // on: nothing the stage does later in this step reads or writes them. Asynchronous; never blocks
  // for the device. Throws what a sum over replicas throws.
  virtual void from(std::size_t begin) = 0;
};

struct StageContext {
  ComputeContext& compute;
  int stage = 0;
  int micro_batch = 0;
  int slot = 0;
  Phase phase = Phase::kTrain;
  StepValue<std::uint64_t> step = 0;
  std::uint64_t seed = 0;              // key of dropout and the like; see RandomKey
  std::int64_t first_sample = 0;       // of the micro-batch, within the global batch
  std::int64_t samples = 0;            // in this micro-batch
  StepValue<double> loss_scale = 1.0;  // 1/N: loss gradients are multiplied by it
  // The same tensors forward() had; in backward calls too (valid until W is done).
  std::span<const Tensor> inputs = {};
  Collective* collective = nullptr;
  // Set in the call, backward or backward_weight, that is the last of a step to add to the stage's
  // gradients, where somebody wants to know; a stage may leave it alone. The same calls in the same
  // order on all replicas.
  FinalGradients* final_gradients = nullptr;
};

class Stage {
 public:
  virtual ~Stage() = default;

  // Pure: no allocation of device memory, no dependence on prepare(). `inputs`: of one micro-batch;
  // `compute`: what the stage will run with (what operators keep and take depends on its device and
  // libraries).
  [[nodiscard]] virtual StageDescription describe(std::span<const TensorSpec> inputs,
                                                  ComputeContext& compute) const = 0;
  // Parameters allocated (parameters()->allocate), state for `slots` made, primitives built; all
  // memory of the device from setup.compute->memory(), where what was described is set aside. More
  // is taken from the device apart, while it has any. On a GPU every library call and every kernel
  // that Sluice does not know (<sluice/cuda.hpp>) has run once when it returns: loading one
  // later, beside NCCL, may wait for ever.
  virtual void prepare(const StageSetup& setup) = 0;
  // Before the first forward of a step or an evaluation: what follows from the parameters alone,
  // such as copies of them in another precision.
  virtual void begin_step(ComputeContext& /*compute*/) {}
  // Whether calls with equal arguments put equal work on the stream in every step, but for what
  // kernels read of ctx.step and ctx.loss_scale through on_device. With --cuda-graphs such a call
  // is made twice on a GPU, the second time recorded, and the record replayed in its place from
  // then on. While it is recorded it may neither wait for the device nor take memory of it.
  [[nodiscard]] virtual bool replayable() const { return false; }
  // Writes every output. `inputs` stay as they are until backward is done; `outputs` are gone
  // once forward returns.
  virtual void forward(StageContext& ctx, std::span<const Tensor> inputs,
                       std::span<const Tensor> outputs) = 0;
  // Adds to parameter gradients and overwrites grad_inputs (an entry whose input wants no gradient
  // has null data; stage 0 gets none). Equals backward_input then backward_weight.
  virtual void backward(StageContext& ctx, std::span<const Tensor> grad_outputs,
                        std::span<const Tensor> grad_inputs) = 0;
  // Null for a stage without any.
  [[nodiscard]] virtual ParameterSet* parameters() { return nullptr; }
  // Asked of stage 0 before each forward, with the micro-batch's inputs in host memory:
  // Error(kData) for values that forward cannot take.
  virtual void check_inputs(std::span<const Tensor> /*inputs*/) const {}
};

class SplitBackward {
 public:
  virtual ~SplitBackward() = default;
  // Overwrites grad_inputs; keeps what backward_weight needs. grad_outputs stay valid until then.
  virtual void backward_input(StageContext& ctx, std::span<const Tensor> grad_outputs,
                              std::span<const Tensor> grad_inputs) = 0;
  // Adds to parameter gradients.
  virtual void backward_weight(StageContext& ctx, std::span<const Tensor> grad_outputs) = 0;
};

class LossStage {
 public:
  virtual ~LossStage() = default;
  // Right after forward(). `outputs` are what forward wrote. In training they are replaced by the
  // gradient of (sum * ctx.loss_scale) with respect to them, and come back as backward's
  // grad_outputs; in evaluation they may be left as they are. *sum = the loss over the counted
  // targets, written in stream order; on a GPU it is page-locked host memory that kernels may
  // write.
  virtual void loss(StageContext& ctx, std::span<const Tensor> outputs,
                    std::span<const Tensor> targets, double* sum) = 0;
  // How many targets of a micro-batch count; `targets` are in host memory. Known before any
  // forward.
  [[nodiscard]] virtual double target_weight(std::span<const Tensor> targets) const = 0;
};

// --- which layers sit on which stage: plain integers, no tensors ---
// A model is a row of layers; stage s owns layers [first[s], first[s + 1]). first has stages + 1
// entries, first[0] = 0, first[stages] = number of layers; empty stages pass their input on.
struct Partition {
  std::vector<int> first;
  [[nodiscard]] int stages() const { return static_cast<int>(first.size()) - 1; }
  friend bool operator==(const Partition&, const Partition&) = default;
};

// Contiguous, smallest possible largest cost, found by bisection in time linear in the layers; ties
// go to the partition whose later stages are lighter. costs[i] >= 0 is layer i's work (embedding
// and head included). Stage 0 always owns the first layer and the last stage the last one. With at
// least as many layers as stages no stage is empty; with fewer, each layer has a stage of its own
// and the stages before the last are empty. Throws Error(kUsage) for stages < 1, and for one layer
// on several stages.
[[nodiscard]] Partition partition_by_cost(std::span<const double> costs, int stages);

// "auto" (by cost), "even" (equal counts of blocks, the first stages take one more; embedding with
// the first block, head with the last), or a list of blocks per stage such as "2,3,0,2". `costs`
// has 1 + blocks + 1 entries: embedding, blocks, head. Throws Error(kUsage) naming what was given
// and what the counts must add up to.
[[nodiscard]] Partition parse_partition(std::string_view text, std::span<const double> costs,
                                        int stages);

}  // namespace sluice
