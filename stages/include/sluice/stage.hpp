// Stage: one contiguous piece of the model on one device. This is what users write.
//
// The runtime calls describe() first, for every known micro-batch size, before anything is
// allocated, and again for sizes that come later. It allocates the parameters, and calls prepare()
// once. Then it calls forward and backward in the order of the schedule. Several micro-batches may
// be in flight: a stage keeps what lives between the two calls in ctx.state, which has the bytes
// that it describes.
//
// All calls come from one thread. On a GPU, work is asynchronous on ctx.compute.stream(). Tensors
// lie on the stage's device unless a comment says host memory. The runtime owns them; they are
// valid during the call unless a comment says longer.
//
// A schedule that splits the backward pass needs SplitBackward too. The last stage must be a
// LossStage, except where a pipeline only answers infer(). The runtime finds both by dynamic_cast;
// a stage without them is Error(kUsage) with the stage's number.
//
// A Partition, at the end of this header, divides a model's layers into stages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <sluice/compute.hpp>
#include <sluice/detail/planned_collective.hpp>
#include <sluice/parameter.hpp>
#include <sluice/tensor.hpp>

#pragma GCC visibility push(default)
namespace sluice {

enum class Phase : std::uint8_t { kTrain = 0, kEvaluate = 1, kGenerate = 2 };

// A model of shards computes each product of its layers by parts, of which a shard has one, and
// adds what the shards make by a binary tree that splits at the largest power of two below their
// number. Ranks that share a stage have equally many consecutive shards each: an aligned subtree.
// So the bits depend on `count`, not on the ranks.
struct Shards {
  int count = 1;             // of the model
  int first = 0, local = 1;  // this rank's
  // Ranks that share a stage deal the positions of each sample between its layers (sequence
  // parallelism, Korthikanti et al. 2022), where shards have equally many and every layer takes
  // them. No bit depends on it.
  bool deals_positions = true;
  // Where the part of shard `shard` of so many equal units begins; that of the next one is its end.
  [[nodiscard]] std::int64_t begin(int shard, std::int64_t units) const {
    return units * shard / count;
  }
  friend bool operator==(const Shards&, const Shards&) = default;
};

// Which stage a factory is to make: global stage `stage` of `stages`, on the `tensor`-th of
// `tensors` ranks that share it (PipelineOptions::Shape::tensor).
struct StagePlace {
  int stage = 0, stages = 1;
  int tensor = 0, tensors = 1;
  int shards = 1;               // of the model: PipelineOptions::Shape::tensor_shards
  bool deals_positions = true;  // Shards'

  // This rank's part of a parameter's dimension `axis` of `whole` rows, for ParameterSet::add().
  // Parts follow each other in order of ranks; they differ by at most one row, the first ones are
  // the larger. All of it where `tensors` is 1.
  [[nodiscard]] Slice slice(int axis, std::int64_t whole) const;
  [[nodiscard]] Shards shards_here() const {
    return {shards, shards / tensors * tensor, shards / tensors, deals_positions};
  }
};

// How large a micro-batch is. `positions` of each sample, such as tokens of a sequence, where the
// data counts them (DataSource::position_dimension()); 0: all that the data has.
struct UnitShape {
  std::int64_t samples = 0, positions = 0;
  friend bool operator==(const UnitShape&, const UnitShape&) = default;
};

struct StageDescription {
  std::vector<TensorSpec> outputs = {};
  std::size_t state_bytes_until_input = 0;   // per micro-batch in flight, free after I (or B)
  std::size_t state_bytes_until_weight = 0;  // per micro-batch in flight, kept until W (or B)
  // Gradients kept from I to W, per micro-batch in flight, if the schedule splits the backward
  // pass (StageSetup::split_backward). Otherwise shared_gradient_bytes, once.
  std::size_t gradient_bytes_until_weight = 0;
  std::size_t shared_gradient_bytes = 0;
  std::size_t workspace_bytes = 0;  // the stage's own, shared by its calls; without operators'
  std::size_t copy_bytes = 0;       // of parameters in another precision
  // What its operators take from the compute context: the largest <operator>_workspace(), and the
  // tables. All stages of a rank share both.
  std::size_t operator_bytes = 0;
  std::size_t table_bytes = 0;
  // The memory described here comes from another allocator than compute.memory(), such as a
  // framework's. It counts in the memory table, but not in the rank's arena.
  // StageContext::state is empty then.
  bool own_memory = false;
  // What it keeps of a micro-batch is in StageContext::state alone, which may lie elsewhere, and in
  // another slot, after forward(): while the micro-batch waits for its backward, others use the
  // memory (PipelineOptions::Offload). There are no addresses in it.
  bool state_moves = false;
  // It calls ctx.units->use() before each unit of its parameters that an action reads: ascending in
  // forward() and loss(), descending in backward calls; where StageSetup::split_backward, B may go
  // through them twice, for I and for W. recompute() reads the last one alone. In begin_step() it
  // reads none. It also tells ctx.final_gradients of each unit, before it writes
  // gradients of the next one. Else all of its parameters are there in each of these calls. In
  // prepare() a stage has this replica's part alone.
  bool uses_units = false;
  // backward_weight() reads values of parameters. Else they need not be there.
  bool weight_reads = true;
  // Calls of ctx.collective and ctx.tensor, which become part of the plan. For every size of
  // micro-batch the same axes, kinds and types in the same order; for smaller ones no more bytes.
  StageCollectives collectives = {};
  // Each backward() and backward_input() begins with what recompute() can do before. The plan then
  // has it called before each, and before the wait for the gradients.
  bool recomputes = false;
  // One line or none for Pipeline::notes(), which `sluice train` prints at the start, such as
  // "attention: cuDNN". That of the largest micro-batch is used.
  std::string note = {};
  // Lines about the whole model, which all ranks whose stages have some must have alike:
  // Error(kMismatch) names the first one that differs. None: nothing is compared.
  std::string model = {};
  std::vector<bool> input_gradients = {};  // [input] needs a gradient; empty: all floats
  // Of a LossStage: type and shape of the targets that its loss takes with these inputs. The
  // pipeline refuses data with others when it is made. Empty: nothing is compared.
  std::vector<TensorSpec> targets = {};
  // Of a LossStage whose outputs are not what infer() gives: what it gives, as answer() writes it.
  // Empty: the outputs.
  std::vector<TensorSpec> answers = {};
};

// A call of a Collective, for those who implement one: the runtime, and tests of a stage.
struct CollectiveCall {
  CollectiveKind kind = CollectiveKind::kSum;
  DType type = DType::kF32;
  std::span<const std::byte> in = {};  // PlannedCollective::bytes
  std::span<std::byte> out = {};       // of a sum: `in`
  std::size_t segments = 1;            // more than 1: of a gather or a reduce-scatter alone
  ComputeContext* compute = nullptr;   // whose device's memory has the values; null: the host's
  // Set by the runtime: the action, and the place among its collectives, from 0.
  int stage = -1, micro_batch = -1, index = -1;
};

// Collectives over this stage's replicas, or over the ranks that share it, within one action: all
// of them compute the same micro-batch. For batch statistics and partial results. Values are as
// many on every rank, in host memory or, with `compute`, in that of its device, in order of its
// stream: NCCL carries a GPU's over tensor ranks, or they pass through page-locked memory, for
// which the host blocks. Each call keeps messages moving. It throws Error(kUsage) for a call that
// is not the next one of the stage's description, and for memory that overlaps where that is not
// said, Error(kMismatch) where the ranks make different ones (NCCL's are not compared), and another
// rank's error.
//
// Sums add the ranks' values as a binary tree over the ranks in order, which splits at the largest
// power of two below their number; up to three ranks that is from left to right.
class Collective {
 public:
  virtual ~Collective() = default;
  virtual void make(const CollectiveCall& call) = 0;

  // In place.
  void sum(std::span<double> values, ComputeContext* compute = nullptr) {
    sum(std::as_writable_bytes(values), DType::kF64, compute);
  }
  void sum(std::span<float> values, ComputeContext* compute = nullptr) {
    sum(std::as_writable_bytes(values), DType::kF32, compute);
  }
  // `all` has a part like `mine` for each rank, in their order. Of several segments each is
  // gathered by itself: mine [segments, n], all [segments, ranks, n]. Of one segment `mine` may be
  // this rank's part of `all`.
  void all_gather(const Tensor& mine, const Tensor& all, ComputeContext* compute = nullptr,
                  std::int64_t segments = 1) {
    make(CollectiveKind::kAllGather, mine, all, compute, segments);
  }
  // `all` has a part like `mine` for each rank; `mine` gets the sum of this rank's. f32 or f64.
  // Segments as above.
  void reduce_scatter(const Tensor& all, const Tensor& mine, ComputeContext* compute = nullptr,
                      std::int64_t segments = 1) {
    make(CollectiveKind::kReduceScatter, all, mine, compute, segments);
  }
  // Both have an equal part for each rank: `receive` gets what each rank has for this one.
  void all_to_all(const Tensor& send, const Tensor& receive, ComputeContext* compute = nullptr) {
    make(CollectiveKind::kAllToAll, send, receive, compute);
  }

  // Of one rank alone: hands on what fits. For trial calls, too.
  [[nodiscard]] static Collective& alone();

 private:
  void sum(std::span<std::byte> values, DType type, ComputeContext* compute) {
    make({.kind = CollectiveKind::kSum,
          .type = type,
          .in = values,
          .out = values,
          .compute = compute});
  }
  void make(CollectiveKind kind, const Tensor& in, const Tensor& out, ComputeContext* compute,
            std::int64_t segments = 1) {
    make({.kind = kind,
          .type = in.spec.dtype,
          .in = {in.as<const std::byte>(), in.spec.bytes()},
          .out = {out.as<std::byte>(), out.spec.bytes()},
          .segments = static_cast<std::size_t>(segments),
          .compute = compute});
  }
};

// A stage reports which of its gradients are final. Their sum over replicas can then start before
// the stage's backward ends. The runtime implements it.
class FinalGradients {
 public:
  virtual ~FinalGradients() = default;
  // The work on the compute stream so far completes parameters()->flat_grads() from float `begin`
  // on. Later work of this call must neither read nor write them. Does not wait for the device, and
  // may wait for the sums of the call before; with GradientOrder::kMicroBatch, where a GPU's sums
  // pass through host memory, it waits for both. Throws what a sum over replicas throws.
  virtual void from(std::size_t begin) = 0;
};

// Where each replica has a part of the parameters at rest (ShardLevel::kParameters), the units of a
// stage that says `uses_units` are whole one at a time. The runtime implements it.
class ParameterUnits {
 public:
  virtual ~ParameterUnits() = default;
  // Returns when the values of the unit's parameters (Parameter::unit), or their bf16 copies where
  // they have some, are whole, for later work of the compute stream. They are up to the next use of
  // another unit, or the end of the action. Collective over the replicas, or those of a group
  // (PipelineOptions::Shape::shard_group), which make the same calls. Throws Error(kUsage) for a
  // unit out of order.
  virtual void use(int unit) = 0;
};

struct StageContext {
  // What a stage keeps of one micro-batch in flight: memory of the runtime on the stage's device,
  // as many bytes as described for the largest micro-batch. Each part starts at a multiple of
  // kBufferAlignment.
  struct State {
    std::span<std::byte> until_input = {};   // StageDescription::state_bytes_until_input
    std::span<std::byte> until_weight = {};  // state_bytes_until_weight
    // gradient_bytes_until_weight; empty unless StageSetup::split_backward.
    std::span<std::byte> gradients = {};
  };

  ComputeContext& compute;
  int stage = 0;
  // Within this call of train_step(), accumulate() and the like, of one virtual replica. forward()
  // of one virtual replica's micro-batches comes before that of the next one's, and so does what
  // adds to gradients. Micro-batches of two virtual replicas that are in flight at once may have
  // one number: `state` and `slot` tell them apart.
  int micro_batch = 0;
  int micro_batches = 1;
  // The micro-batch's own from forward() to the end of backward() or backward_weight(), at the same
  // address in all of its calls, unless it may move (StageDescription::state_moves). Other
  // micro-batches have it before and after: forward() finds any content. In evaluation it lasts for
  // forward() and loss().
  State state = {};
  // Where `state` lies, for a stage that keeps something else: 0 <= slot < StageSetup::slots.
  int slot = 0;
  Phase phase = Phase::kTrain;
  StepValue<std::uint64_t> step = 0;
  std::uint64_t seed = 0;              // key of dropout and the like; see RandomKey
  std::int64_t first_sample = 0;       // of the micro-batch, within the global batch
  std::int64_t samples = 0;            // in this micro-batch
  std::int64_t positions = 0;          // of each sample; 0: all that the data has (UnitShape)
  std::int64_t first_position = 0;     // of these positions, within the sample; always 0 so far
  StepValue<double> loss_scale = 1.0;  // 1/N: loss gradients are multiplied by it
  // The tensors that forward() had. In backward calls too; valid until W is done.
  std::span<const Tensor> inputs = {};
  Collective* collective = nullptr;           // over replicas; null in evaluation
  Collective* tensor = &Collective::alone();  // over the ranks that share the stage; never null
  // Set in the last call of a step (backward or backward_weight) that adds to the stage's
  // gradients, if sums over replicas can overlap, or in each with GradientOrder::kMicroBatch; else
  // null. Use is optional. All replicas make the
  // same calls in the same order.
  FinalGradients* final_gradients = nullptr;
  ParameterUnits* units = nullptr;  // null: all parameters are whole
  // In backward calls: recompute() was the stage's last call, for this micro-batch.
  bool recomputed = false;
  // Whether the step's batches before this one, and after it, are none: accumulate() adds batches.
  // A stage whose work depends on these is not graph_capturable().
  bool first_batch = true, last_batch = true;
};

struct StageSetup {
  ComputeContext* compute = nullptr;
  int slots = 1;  // micro-batches in flight at once, by the plan
  // The state of one slot, for trial calls in prepare() and prepare_size(): no micro-batch is in
  // flight then. Valid as long as the stage.
  StageContext::State state = {};
  // False: the runtime calls only backward(), never its halves. A stage may then share between its
  // slots what lives between I and W.
  bool split_backward = true;
  // False: the runtime calls forward() alone (PipelineOptions::Training::inference). Parameters
  // have no gradients then, and uses of one name share a value: prepare() runs no backward.
  bool trains = true;
  std::uint64_t seed = 0;  // of initial values
  // Input specs of the micro-batch sizes that are known to occur, the largest first. Others, with
  // fewer samples or positions, come to prepare_size() first.
  std::vector<std::vector<TensorSpec>> input_sizes = {};
};

class Stage {
 public:
  virtual ~Stage() = default;

  // Pure: allocates no device memory and does not depend on prepare(). `inputs`: of one
  // micro-batch. `compute`: the context the stage will run with; what operators need depends on its
  // device and libraries.
  [[nodiscard]] virtual StageDescription describe(std::span<const TensorSpec> inputs,
                                                  ComputeContext& compute) const = 0;
  // Allocates what calls share, such as workspace. The parameters have their memory and their
  // initial values: the pipeline has called ParameterSet::allocate(). Micro-batches have theirs,
  // setup.state. Device memory comes from setup.compute->memory(), which has set aside the rest of
  // what describe() returned; more is taken from the device, if it has any, and counted. On a GPU
  // every library call and every kernel without <sluice/cuda.hpp> must have run once when this
  // returns: CUDA loads a kernel at its first launch, and a load during an NCCL kernel can
  // deadlock.
  virtual void prepare(const StageSetup& /*setup*/) {}
  // Runs before the first micro-batch of a size that StageSetup::input_sizes does not have, which
  // has fewer samples or positions than the largest. On a GPU it does for this size what prepare()
  // does: it runs every library call and kernel once. Gradients stay as they are. Takes no memory
  // that lasts.
  virtual void prepare_size(ComputeContext& /*compute*/, std::span<const TensorSpec> /*inputs*/) {}
  // Runs before the first forward of a step or an evaluation. Computes what depends on parameters
  // alone, such as copies in another precision.
  virtual void begin_step(ComputeContext& /*compute*/) {}
  // Whether calls with equal arguments put equal work on the stream in every step, except for what
  // kernels read of ctx.step and ctx.loss_scale through on_device. With
  // PipelineOptions::Devices::cuda_graphs such a call is made once more after the first step,
  // without running, to be recorded; the record is replayed in later steps. A recorded call may
  // neither wait for the device nor allocate on it.
  [[nodiscard]] virtual bool graph_capturable() const { return false; }
  // Whether it calls next_write() before each write to a gradient, in loss() too: the runtime then
  // does not zero those with Parameter::asks_next_write. False, also for a stage that adds to
  // gradients of another one inside it: all gradients are zero before a step's first call.
  [[nodiscard]] virtual bool overwrites_gradients() const { return false; }
  // Writes every output, and no input. `inputs` stay valid until backward is done; `outputs` only
  // until forward returns.
  virtual void forward(StageContext& ctx, std::span<const Tensor> inputs,
                       std::span<const Tensor> outputs) = 0;
  // Where the description `recomputes`: what the next call, backward() or backward_input() for the
  // same micro-batch with ctx.recomputed, would compute again before it reads a gradient. No other
  // call of the stage comes between them, so it may lie in memory that micro-batches share.
  virtual void recompute(StageContext& /*ctx*/) {}
  // Adds to parameter gradients (see overwrites_gradients()) and overwrites grad_inputs. An entry
  // of either list whose tensor needs no gradient, such as one of integers, has null data; stage 0
  // gets no grad_inputs. Equals backward_input then backward_weight.
  virtual void backward(StageContext& ctx, std::span<const Tensor> grad_outputs,
                        std::span<const Tensor> grad_inputs) = 0;
  // Null for a stage without parameters. The same set at all times; the pipeline keeps the address,
  // and gives memory to this set alone. A stage inside another one that is not in it has its
  // parameters from whoever made it.
  [[nodiscard]] virtual ParameterSet* parameters() { return nullptr; }
  // Stage 0 only, before the first message of a step, an evaluation or an inference, with the
  // inputs of each micro-batch in host memory. Throws Error(kData) for values that forward cannot
  // take: all ranks then refuse the call, and the pipeline stays usable. To name the sample, the
  // pipeline calls it again with the samples one by one.
  virtual void check_inputs(std::span<const Tensor> /*inputs*/) const {}
};

class SplitBackward {
 public:
  virtual ~SplitBackward() = default;
  // Overwrites grad_inputs; keeps what backward_weight needs. grad_outputs stay valid until then.
  virtual void backward_input(StageContext& ctx, std::span<const Tensor> grad_outputs,
                              std::span<const Tensor> grad_inputs) = 0;
  // Adds to parameter gradients (see overwrites_gradients()).
  virtual void backward_weight(StageContext& ctx, std::span<const Tensor> grad_outputs) = 0;
};

class LossStage {
 public:
  virtual ~LossStage() = default;
  // Runs right after forward(). `outputs` are what forward wrote. In training, replaces them by the
  // gradient of (sum * ctx.loss_scale) with respect to them, which comes back as backward's
  // grad_outputs; it may add to gradients too (Parameter::written_by_loss). In evaluation they stay
  // or not. *sum = the loss over the counted targets, in stream order; on a GPU page-locked, so
  // that kernels write it. Where the first gradient in training is all of what forward wrote, as of
  // a loss y^2 / 2, a CPU asks twice more, to tell it from a loss that writes none.
  virtual void loss(StageContext& ctx, std::span<const Tensor> outputs,
                    std::span<const Tensor> targets, double* sum) = 0;
  // How many targets of a micro-batch count: a finite number from 0, else Error(kUsage). `targets`
  // are in host memory. Throws Error(kData) for values that loss() cannot take. Runs when
  // check_inputs() does, and again before loss(); what it throws is refused alike.
  [[nodiscard]] virtual double target_weight(std::span<const Tensor> targets) const = 0;
  // One line why forward()'s outputs are no answer to infer(), which then refuses; empty: they are.
  [[nodiscard]] virtual std::string why_no_answers() const { return {}; }
  // In inference, after forward(), where the description has `answers`: writes them, from what
  // forward wrote. Runs on all ranks that share the stage, which write equal ones.
  virtual void answer(StageContext& /*ctx*/, std::span<const Tensor> /*outputs*/,
                      std::span<const Tensor> /*answers*/) {}
};

// --- skip connections ---
// A stage in whose place `inner` computes on the first `inputs` tensors of the edge. The tensors
// after them pass by: they are the last outputs, unchanged, and so are their gradients. So a tensor
// that one stage makes reaches a later one over the edges between them. It has the interfaces that
// `inner` has. Throws Error(kUsage) for a null `inner` and for `inputs` below 1; a stage that gets
// fewer tensors is Error(kUsage) when it is described.
[[nodiscard]] std::unique_ptr<Stage> pass_through(std::unique_ptr<Stage> inner, int inputs);

// --- which layers sit on which stage: plain integers, no tensors ---
// Stage s owns layers [first[s], first[s + 1]). first has stages + 1 entries, first[0] = 0 and
// first[stages] = the number of layers. A stage without layers passes its input on.
struct Partition {
  std::vector<int> first;
  [[nodiscard]] int stages() const { return static_cast<int>(first.size()) - 1; }
  friend bool operator==(const Partition&, const Partition&) = default;
};

// The contiguous partition with the smallest largest cost, by bisection in time linear in the
// layers. Of equal ones, the one whose later stages are lighter. costs[i] >= 0 is layer i's work,
// embedding and head included. Stage 0 always owns the first layer and the last stage the last one.
// No stage is empty if there are at least as many layers as stages; else each layer has its own
// stage and stages before the last are empty. Throws Error(kUsage) for stages < 1, for one layer on
// several stages, and for a cost that is negative or not finite.
[[nodiscard]] Partition partition_by_cost(std::span<const double> costs, int stages);

// "auto" (by cost), "even" (equal counts of blocks, the first stages take one more; embedding with
// the first block, head with the last), or a list of blocks per stage such as "2,3,0,2". `costs`
// has 1 + blocks + 1 entries: embedding, at least one block, head. Throws Error(kUsage) naming what
// was given and what the counts must add up to.
[[nodiscard]] Partition parse_partition(std::string_view text, std::span<const double> costs,
                                        int stages);

}  // namespace sluice
#pragma GCC visibility pop
