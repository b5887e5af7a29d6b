// Parameters: named values with gradients, laid out in two flat fp32 buffers per stage so that a
// reduction or an optimizer walks memory once.
//
// Names are global ("blocks.3.attention.qkv.weight"): they do not depend on the layout, and files
// use them as keys. A parameter with several uses is `tied`: each use has an entry of the same
// name, a copy of the value and a gradient; without gradients, the uses in a stage share a value.
// All uses have one shape and one Init, so all begin with the same values. The first use in the
// lowest stage is the owner, alone updated, saved and counted in the norm.
//
// Settings of optimizers and learning rates are at the end.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <initializer_list>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <sluice/device.hpp>
#include <sluice/tensor.hpp>

#pragma GCC visibility push(default)
namespace sluice {

class ComputeContext;  // <sluice/compute.hpp>

struct Init {
  enum class Kind { kConstant, kNormal, kUniform };
  Kind kind = Kind::kConstant;
  double value = 0;  // the constant, the standard deviation, or the bound b of [-b, b)

  static Init constant(double value) { return {Kind::kConstant, value}; }
  static Init normal(double deviation) { return {Kind::kNormal, deviation}; }
  static Init uniform(double bound) { return {Kind::kUniform, bound}; }
};
[[nodiscard]] std::string to_string(const Init& init);  // "normal 0.02"

// How replicas keep a buffer equal: at the end of each step all take the mean of what the virtual
// replicas made of it, each from what it was before the step; or replica 0's values. kNothing: each
// keeps its own, and a save has replica 0's. The last two need as many virtual replicas as
// replicas.
enum class ReplicaRule { kMean, kFirst, kNothing };

// Where a set keeps a bf16 copy of a parameter: Parameter::bf16_copy.
enum class Bf16Copy { kNowhere, kOnGpus, kEverywhere };

struct Parameter {
  std::string name;
  Shape shape;  // of what this rank has
  Init init;
  bool decay = true;  // weight decay applies (not to norms and biases)
  bool tied = false;  // other uses of the same name exist
  int unit = 0;       // its number in the set: ParameterSet::begin_unit()
  Slice slice = {};   // of the whole
  // Of a parameter that shards divide: what its memory is, in order; slices along `slice.axis`,
  // whose rows are those of `shape`. Empty: it is `slice` in its order.
  std::vector<SlicePart> parts = {};
  [[nodiscard]] Shape whole_shape() const;
  // fp32, set by allocate(); they start at multiples of kBufferAlignment. grad: null data without
  // gradients. Where replicas have parts of the values (ShardLevel::kParameters) and there is a
  // bf16_copy, a stage may read that alone.
  Tensor value, grad;
  std::shared_ptr<const void> memory;        // owns what both lie in
  ReplicaRule across = ReplicaRule::kMean;   // of a buffer, which has no gradient
  Bf16Copy keeps_bf16 = Bf16Copy::kNowhere;  // to be set before allocate(), so before prepare()
  // A bf16 copy of the value, to nearest, that its stage renews for matmuls; null data:
  // none. It starts at a multiple of kBufferAlignment and has room up to the next. Who writes the
  // value either writes the copy too, or calls ParameterSet::mark_values_changed().
  Tensor bf16_copy = {};
  bool bf16_copy_is_current = false;

  // Whether its stage calls next_write() before each write to the gradient
  // (Stage::overwrites_gradients()). To be set before the first step. Nobody then zeroes the
  // gradient between steps: it becomes stale.
  bool asks_next_write = false;
  // Whether LossStage::loss() writes the gradient, and nothing else does: to be set before the
  // first step. A loss writes no other gradient where a rank computes several virtual
  // replicas; CPUs refuse one that does.
  bool written_by_loss = false;
  // Of a parameter that all ranks have whole in a model of shards: how many shares of its gradient
  // this rank adds up, one for each of its shards; to be set before allocate(). The gradient is the
  // tree of all shards' shares, which the runtime makes where a virtual replica's gradients end. 0:
  // the stage adds to `grad`.
  int shares = 0;
  std::vector<Tensor> share_grads = {};  // [shares] f32, with gradients; set by allocate()

  // Stale: left by the previous step, to be overwritten by the step's first write.
  [[nodiscard]] bool is_stale() const { return stale_; }

 private:
  friend struct GradientAccess;  // internal
  bool stale_ = false, asked_ = false;
};

// How the next operator writes the gradients of these parameters (null: none): kOverwrite where all
// are stale. Where only some are, zeroes those in order of `stream`. None is stale after that.
[[nodiscard]] Write next_write(std::initializer_list<Parameter*> parameters, StreamView stream);

// Whether its set keeps a bf16 copy of it on such a device.
[[nodiscard]] bool keeps_bf16(const Parameter& parameter, DeviceKind device);

// Bytes of a parameter's values in their set's memory; its gradients take as many.
[[nodiscard]] std::size_t parameter_bytes(std::int64_t elements);

class ParameterSet {
 public:
  ParameterSet() = default;
  ParameterSet(ParameterSet&&) = default;
  ParameterSet& operator=(ParameterSet&&) = default;

  // `shape` is that of the whole parameter, of which this rank has `slice`; its initial values do
  // not depend on the slice. A parameter that all ranks of a tensor group have whole has the same
  // gradient on each of them: the stage sees to it.
  // The reference stays valid for the life of the set. A pipeline refuses names that no file holds:
  // an empty one, "__metadata__", and those with control characters or other bytes than UTF-8.
  // Throws Error(kUsage) after allocate(), for an Init that is none or not a number from 0 (a
  // constant: any finite one), and for a slice that does not lie in the shape.
  Parameter& add(std::string name, Shape shape, Init init, bool decay = true, bool tied = false,
                 const Slice& slice = {});

  // A parameter that shards divide: this rank has `parts`, slices of `shape` along one dimension.
  // Else as add(). Throws Error(kUsage) for no parts, and for parts that do not lie in the shape.
  Parameter& add_parts(std::string name, Shape shape, Init init, bool decay, bool tied,
                       std::vector<SlicePart> parts);

  // What add() gets from now on is one unit, such as a block of layers: the grain in which ranks
  // divide parameters among them. Without a call all parameters are one unit. Throws Error(kUsage)
  // after allocate().
  void begin_unit();

  // State that is not trained, such as running statistics: fp32, saved with the parameters, under a
  // name that no parameter has. A stage writes it in forward(), which the runtime calls once for
  // every micro-batch. A step that is refused or skipped leaves it as it was. Else as add().
  Parameter& add_buffer(std::string name, Shape shape, Init init,
                        ReplicaRule across = ReplicaRule::kMean, const Slice& slice = {});

  // A pipeline calls it once, before Stage::prepare(). Allocates every value, gradient, buffer and
  // copy, draws initial values (a function of seed, name and position alone) and zeroes gradients.
  // `gradients` false: the stage never runs backward (StageSetup::trains). It then has no
  // gradients, and uses of one name share the first one's value. Throws Error(kUsage) for a second
  // call, for a name used twice and not tied, for uses of different shapes or initial values and
  // for more bytes than a std::size_t holds, and what `memory` throws. `drawn`, if any, gets each
  // parameter whose initial values are there, before the next one's are written.
  void allocate(const DeviceMemory& memory, std::uint64_t seed, bool gradients = true,
                const std::function<void(const Parameter&)>& drawn = {});

  // Throws Error(kUsage) before allocate(), but for an empty set.
  void require_memory() const;

  [[nodiscard]] std::vector<Parameter*> all();      // without buffers, in order of add()
  [[nodiscard]] std::vector<Parameter*> buffers();  // in order of add_buffer()
  [[nodiscard]] std::size_t size() const { return parameters_.size(); }
  [[nodiscard]] Parameter* find(std::string_view name);  // first use, or null
  // All gradients (values) as one vector, padding between parameters included and always zero.
  // Memory that allocate() was given, like the parameters' tensors. Empty without gradients.
  [[nodiscard]] std::span<float> flat_grads() const;
  [[nodiscard]] std::span<float> flat_values() const;
  [[nodiscard]] std::span<float> flat_buffers() const;
  void zero_grads(StreamView stream);  // shares too; in stream order; none is stale then
  // Share `share` of the gradients of all parameters that have some, in order of add(), each padded
  // as in flat_grads(). Empty without such parameters.
  [[nodiscard]] std::span<float> flat_shares(int share) const;
  // Bytes of the bf16 copies that allocate() takes besides values, gradients and buffers.
  [[nodiscard]] std::size_t bf16_copy_bytes(DeviceKind device) const;
  // Owns what all values and gradients lie in.
  [[nodiscard]] std::shared_ptr<const void> memory() const { return memory_; }
  // Call it after writing values: the bf16 copies are made again, and who keeps something of the
  // values compares version().
  void mark_values_changed();
  [[nodiscard]] std::uint64_t version() const { return version_; }

 private:
  friend struct GradientAccess;  // internal
  friend struct ValueAccess;     // internal
  std::deque<Parameter> parameters_, buffers_;
  struct Memory {
    Buffer values, grads, shares, buffers, bf16_copies;
    // Own values and copies, and gradients, where they are not above.
    std::shared_ptr<const void> given, given_grads;
  };
  std::shared_ptr<Memory> memory_ = std::make_shared<Memory>();
  void allocate_buffers(const DeviceMemory& memory, std::uint64_t seed);
  void allocate_shares(const DeviceMemory& memory);
  void place_bf16_copies(Device device);
  void draw_values(Device device, std::uint64_t seed,
                   const std::function<void(const Parameter&)>& drawn);

  bool allocated_ = false;
  std::byte *values_ = nullptr, *grads_ = nullptr, *bf16_copies_ = nullptr;
  int unit_ = 0;
  std::size_t flat_floats_ = 0, buffer_floats_ = 0;
  std::uint64_t version_ = 0;
};

// --- what parameters are called in files ---
// A tensor of a model's files that holds consecutive rows of a parameter, which is [rows, ...].
struct FilePart {
  std::string name;         // of the tensor
  std::int64_t rows = 0;    // of a vector: elements
  bool transposed = false;  // a matrix that lies in the file as [columns, rows]
};
// By parameter: the tensors that hold it, in order of rows. A parameter that is not listed is one
// tensor of its own name.
using FileLayout = std::map<std::string, std::vector<FilePart>>;

// --- how parameters are updated ---
// The rules are those of torch.optim's SGD, Adam and AdamW.
struct OptimizerConfig {
  // AdamW (Loshchilov and Hutter 2019) takes weight decay from the values, Adam (Kingma and Ba
  // 2015) and SGD add it to the gradient.
  enum class Kind { kAdamW, kSgd, kAdam };
  Kind kind = Kind::kAdamW;
  float beta1 = 0.9F, beta2 = 0.95F, epsilon = 1e-8F;  // AdamW and Adam
  float momentum = 0;                                  // SGD
  bool nesterov = false;   // SGD with momentum alone: the step looks ahead (Sutskever et al. 2013)
  float weight_decay = 0;  // only where Parameter::decay
  // AdamW and Adam: what both moments are kept in, f32 or bf16. bf16 takes 4 bytes a parameter in
  // place of 8, in saves too. A step computes in f32 and rounds what it stores at random, without
  // bias, by a number that the seed, the step and the place in the parameter determine; in a slice
  // or a part along another dimension than the first, places count on from that of its first
  // element.
  DType moments = DType::kF32;

  // With the constants that torch takes by default.
  static OptimizerConfig sgd(float momentum = 0, bool nesterov = false) {
    return {.kind = Kind::kSgd, .momentum = momentum, .nesterov = nesterov};
  }
  static OptimizerConfig adam() { return {.kind = Kind::kAdam, .beta2 = 0.999F}; }
  static OptimizerConfig adamw() { return {.beta2 = 0.999F, .weight_decay = 0.01F}; }
};

// Consecutive elements of a parameter, in the order of its memory: all of them, or the part that
// one of several ranks updates (PipelineOptions::Shape::shard).
struct ParameterSlice {
  Parameter* parameter = nullptr;
  std::int64_t first = 0, count = 0;  // elements; count is at least 1 unless the parameter has none
  [[nodiscard]] bool whole() const { return count == parameter->shape.elements(); }
};

// A parameter's state by name ("exp_avg", "exp_avg_sq" or "momentum"), for checkpoints.
struct OptimizerState {
  std::string parameter, kind;
  // f32 or bf16, owned by the optimizer: the parameter's shape, or [count] of a slice that is not
  // whole.
  Tensor tensor;
  std::int64_t first = 0;  // the slice's
};

// Updates parameters. One object per rank and per kind of settings, over the slices that the rank
// updates. A pipeline makes it from OptimizerConfig, or from the program's OptimizerFactory.
class Optimizer {
 public:
  virtual ~Optimizer() = default;
  // Changes the values of its slices by their gradients, in order of the compute stream. `step`
  // counts from 1. `grad_scale` multiplies gradients (clipping). The calls have equal arguments on
  // all ranks and replicas, and equal gradients give equal values. Outside its slices, values and
  // gradients have any content. It should allocate nothing. What it throws ends the pipeline. Ranks
  // that have done theirs throw the same in this call, if they wait for that rank's values, or in
  // their next call, at the latest in Pipeline::close().
  virtual void update(ComputeContext& compute, std::uint64_t step, float learning_rate,
                      float grad_scale) = 0;
  // What a save has of it: f32 or bf16 tensors, owned by this, whose addresses and shapes stay.
  // Each is of one of the slices, from its first element on, which has no other of that kind; where
  // ranks have or update parts of the parameter, it is of exactly the slice. The pipeline asks when
  // it is made, and for saves and loads, and throws Error(kUsage) for anything else.
  [[nodiscard]] virtual std::vector<OptimizerState> state() = 0;
};

// Makes optimizers: by a copyable function of (std::span<Parameter* const>, const DeviceMemory&),
// or of (std::span<const ParameterSlice>, const DeviceMemory&); one that takes both gets
// parameters. Only the latter can be used where ranks update parts of parameters
// (PipelineOptions::Shape::shard) or have parts of them (Parameter::slice). The parameters outlive
// the optimizer; their memory is there. `memory`: of the rank's device. Memory that a program's own
// optimizer takes is not in the plan.
class OptimizerFactory {
  using Made = std::unique_ptr<Optimizer>;
  using Parameters = std::span<Parameter* const>;
  using Slices = std::span<const ParameterSlice>;
  template <typename Make>
  static constexpr bool kWhole =
      std::is_invocable_r_v<Made, Make&, Parameters, const DeviceMemory&>;

 public:
  OptimizerFactory() = default;        // none: OptimizerConfig counts
  OptimizerFactory(std::nullptr_t) {}  // NOLINT(google-explicit-constructor)
  template <typename Make>
  requires(!std::is_same_v<Make, OptimizerFactory> && std::is_copy_constructible_v<Make> &&
           (kWhole<Make> || std::is_invocable_r_v<Made, Make&, Slices, const DeviceMemory&>))
      OptimizerFactory(Make make)  // NOLINT(google-explicit-constructor)
      : takes_slices_(!kWhole<Make>) {
    if constexpr (requires { make == nullptr; }) {
      if (make == nullptr) return;
    }
    if constexpr (!kWhole<Make>) {
      make_ = std::move(make);
    } else {
      make_ = [make = std::move(make)](Slices slices, const DeviceMemory& memory) mutable -> Made {
        std::vector<Parameter*> parameters;
        for (const ParameterSlice& slice : slices) parameters.push_back(slice.parameter);
        return make(parameters, memory);
      };
    }
  }

  [[nodiscard]] explicit operator bool() const { return make_ != nullptr; }
  // Whether slices may be parts of parameters.
  [[nodiscard]] bool takes_slices() const { return takes_slices_; }
  [[nodiscard]] Made operator()(Slices slices, const DeviceMemory& memory) const {
    return make_(slices, memory);
  }

 private:
  std::function<Made(Slices, const DeviceMemory&)> make_;
  bool takes_slices_ = false;
};

// Other settings for the parameters whose names match.
struct ParameterGroup {
  std::string names = {};          // '*' stands for any characters: "blocks.0.*", "*.bias"
  double learning_rate_scale = 1;  // a factor of the learning rate, at least 0
  // In place of OptimizerConfig's, also where Parameter::decay is false.
  std::optional<float> weight_decay = {};
  // Never updated, without optimizer state, not in the gradient's norm. Its gradient is computed.
  bool frozen = false;
};
// The first group whose names match; null: none.
[[nodiscard]] const ParameterGroup* group_of(std::span<const ParameterGroup> groups,
                                             std::string_view name);

// Linear warmup from 0 over `warmup` steps, then the peak, which falls. step counts from 1.
struct LearningRate {
  // kCosine, kLinear: from `warmup` to `steps`, along half a cosine or a line, down to
  // `final_share` of the peak. kStep: times `factor` after every `every` steps.
  enum class Decay { kCosine, kLinear, kStep };
  double peak = 1e-3, final_share = 0.1;
  std::uint64_t warmup = 0;
  std::uint64_t steps = 0;  // 0: no decay, but for kStep
  Decay decay = Decay::kCosine;
  double factor = 0.1;
  std::uint64_t every = 0;  // 0: never
  [[nodiscard]] double at(std::uint64_t step) const;
};

}  // namespace sluice
#pragma GCC visibility pop
