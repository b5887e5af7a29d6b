// Layers: a model put together from parts, in place of a stage written by hand.
//
//   const Sequential model({nn::linear(10, 50), nn::relu(), nn::cut(), nn::linear(50, 1)},
//                          nn::mse_loss());
//   Pipeline pipeline(world, model, batches, options);
//
// Layers and losses are in sluice::nn. The model is in sluice, beside Transformer and Pipeline.
// A Sequential describes the model; each rank makes only the layers of its own stages. It makes
// the stages of a StageFactory. skip() lets outputs pass layers and stages. All ranks need the same
// one: kinds and numbers of layers are compared when the pipeline is made, Error(kMismatch) where
// they differ. Every layer has its input gradient and its weight gradient apart, so every schedule
// runs every model. Parameters have the names that torch.nn.Sequential gives them: "0.weight",
// "0.bias", "2.weight"; cut() has no number. Initial values are drawn from torch's distributions.
//
// Tensors. Dimension 0 is the sample. Layers compute in f32 unless ModelOptions, or a transformer's
// configuration, say otherwise. What a layer keeps of a micro-batch is in memory that the stage
// hands it: a step allocates nothing. On a GPU a layer runs if its operators exist there; another
// one is Error(kUsage) that names it, when the pipeline is made.
//
// Errors. Layers and losses throw Error(kUsage) for numbers that cannot work when they are made,
// and for shapes and types that do not fit when the stage is described. The message names the layer
// by number and kind.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <sluice/compute.hpp>
#include <sluice/parameter.hpp>
#include <sluice/stage.hpp>
#include <sluice/tensor.hpp>

#pragma GCC visibility push(default)
namespace sluice::nn {

// --- what a layer is ---
// Bytes of a layer per micro-batch, by lifetime.
struct LayerMemory {
  std::size_t until_input = 0;   // from forward to the input gradient
  std::size_t until_weight = 0;  // from forward to the weight gradient
  std::size_t lasting = 0;       // the same, also where the layer is recomputed: see recompute()
  std::size_t gradients = 0;     // from the input gradient to the weight gradient
  std::size_t scratch = 0;       // within one call
};

struct LayerNeeds {
  LayerMemory memory = {};
  // What its operators take from the compute context: the largest <operator>_workspace().
  std::size_t operator_bytes = 0;
  // Of constants, such as rotary_table_bytes(); all layers of a rank share the largest.
  std::size_t table_bytes = 0;
  // Of a layer in forward() and backward_input(), of a loss in compute() as `forward`. The others
  // stay empty. A layer whose backward_input() makes some has LayerMemory::gradients: it is called
  // in any case then.
  StageCollectives collectives = {};
  // What keep_again() makes of those. None: what forward() makes with LayerCall::again, which is
  // all over the ranks that share the stage.
  std::optional<std::vector<PlannedCollective>> again = {};
  std::string note = {};  // one line or none for StageDescription::note
};

// One call of a layer. The memory has as many bytes as LayerNeeds says for this input, at multiples
// of kBufferAlignment.
struct LayerCall {
  StageContext& stage;
  // The layer's input: in forward and, with the same values, in the backward calls.
  Tensor x;
  std::byte* until_input = nullptr;
  std::byte* until_weight = nullptr;
  std::byte* lasting = nullptr;
  std::byte* gradients = nullptr;  // null without LayerMemory::gradients
  std::byte* scratch = nullptr;
  // forward() runs once more for this micro-batch, in backward. `lasting` has what it kept there.
  bool again = false;
  // In backward calls of a recompute(): what it keeps is computed again already.
  bool recomputed = false;
  // In backward calls: copies of dy and dx in bf16. dy's has data if reads_rounded(); dx's is to be
  // written with dx where it has data.
  Tensor rounded_dy = {}, rounded_dx = {};

  [[nodiscard]] ComputeContext& compute() const { return stage.compute; }
};

// What may be asked of a layer. Where it promises nothing, a stage takes the safe way.
struct LayerPromises {
  // forward() with LayerCall::again writes the same y and the same memory, moves no buffer and
  // makes no collective over replicas: what it needs of those is in LayerMemory::lasting. Others
  // keep all that they keep inside recompute() too.
  bool recomputes = false;
  // keep_again() needs no memory for y, which then has null data.
  bool keeps_alone = false;
  // As Stage::graph_capturable().
  bool capturable = false;
  // backward() takes dy's memory as dx where both have one shape and type. A layer whose
  // backward_weight() reads what backward_input() then overwrites has a backward() of its own.
  bool in_place = false;
  // Reads LayerCall::rounded_dy. If dy is bf16 it never has data. In backward() rounded_dx may be
  // its memory.
  bool reads_rounded = false;
  // Writes LayerCall::rounded_dx where that has data. If not, Sluice converts dx.
  bool writes_rounded = false;
};

// Types of a model's numbers. Parameters, their gradients and statistics are f32.
struct Precision {
  DType operands = DType::kF32;  // of matmuls: f32 or bf16
  DType stream = DType::kF32;    // of what layers hand on, and of its gradient: f32, or operands'
};

// What a layer takes and gives in a model with a precision; gradients have the types of what they
// belong to. Integers stay. Where a neighbour hands on another type, Sluice converts in scratch.
enum class Edges {
  kF32,       // f32, as in any other model. StageDescription::note names the layer's kind.
  kWidened,   // the same without a note
  kOperands,  // takes Precision::operands, gives Precision::stream
  kStream,    // takes and gives Precision::stream
};

// A layer of one input and one output. It keeps no state of a micro-batch but in the memory of the
// call, which may lie elsewhere in backward: it holds no addresses. All work is in order of
// call.compute().stream().
class Layer {
 public:
  virtual ~Layer() = default;

  // Before all other calls but promises(), in a model with a precision of bf16 alone.
  virtual Edges set_precision(const Precision& /*precision*/) { return Edges::kF32; }
  // Before all other calls but promises(), in a model of several shards alone. Whether the layer
  // computes by these shards, or does all of its work alike on each rank that shares the stage; if
  // not, Error(kUsage) names it, unless it is replicated(). One that computes by shards declares
  // its weights by ParameterSet::add_parts(), makes each product by shard, and adds what shards
  // make by the tree that Shards describes: its own first, then over ranks by call.stage.tensor,
  // which LayerNeeds::collectives has with CollectiveAxis::kTensor where `local` is below `count`.
  // Gradients of parameters that each rank has whole are whole on each, or Parameter::shares. What
  // its input and output are is in LayerSpec::forms.
  virtual bool set_shards(const Shards& /*shards*/) { return false; }
  // Type and shape of the output. Pure. Throws Error(kUsage) that says what is legal.
  [[nodiscard]] virtual TensorSpec output(const TensorSpec& input) const = 0;
  // Adds its parameters and buffers to `set`, once. Their names begin with `name`: "3.".
  virtual void add_parameters(ParameterSet& /*set*/, const std::string& /*name*/) {}
  [[nodiscard]] virtual LayerNeeds needs(const TensorSpec& /*input*/,
                                         ComputeContext& /*compute*/) const {
    return {};
  }
  // After add_parameters(): whether the layer calls next_write() before each write to a gradient of
  // its parameters, and overwrites where it says so. False, also for a layer that adds to gradients
  // of layers inside it: they are zero before the step's first forward.
  [[nodiscard]] virtual bool overwrites_gradients() const { return false; }
  // Whether it runs on a GPU. A layer that reads its tensors on the host does not.
  [[nodiscard]] virtual bool runs_on_gpu() const { return false; }
  [[nodiscard]] virtual LayerPromises promises() const { return {}; }
  // Work of one call, for cuts by cost; in multiply-adds, at least 0.
  [[nodiscard]] virtual double cost(const TensorSpec& input) const {
    return static_cast<double>(input.shape.elements());
  }

  // Of the model's first layer alone: its input in host memory, before any conversion. Throws
  // Error(kData) for values that forward cannot take, as Stage::check_inputs().
  virtual void check_inputs(const Tensor& /*x*/) const {}

  // Writes y; x stays as it is, here and in backward_input.
  virtual void forward(LayerCall& call, const Tensor& y) = 0;
  // As forward() with LayerCall::again where nobody needs y: writes what forward keeps. The last
  // layer of recompute() that keeps something gets this call.
  virtual void keep_again(LayerCall& call, const Tensor& y) { forward(call, y); }
  // Overwrites dx. Where nobody needs dx it is not called, except for a layer that has
  // LayerMemory::gradients; dx then has null data. dx is dy in a backward() that is in_place alone.
  virtual void backward_input(LayerCall& call, const Tensor& dy, const Tensor& dx) = 0;
  // Adds to the gradients of its own parameters (see overwrites_gradients()), which no other layer
  // writes: they may be final after the step's last call. dy: as in the backward_input
  // before it.
  virtual void backward_weight(LayerCall& /*call*/, const Tensor& /*dy*/) {}
  // Both, with the same bits. Where nobody needs dx it has null data. See LayerPromises::in_place.
  virtual void backward(LayerCall& call, const Tensor& dy, const Tensor& dx) {
    if (dx.data != nullptr || call.gradients != nullptr) backward_input(call, dy, dx);
    backward_weight(call, dy);
  }
};

// A connection past layers; see skip().
enum class Join { kAdd, kConcatenate };
struct Skip {
  int from = 0, to = 0;
  Join join = Join::kAdd;
  int axis = 1;
};

// What a layer makes of an input of each form in a model of several shards; none: it cannot take
// it.
struct ShardForms {
  // Whole: on each rank that shares the stage alike. Panels: this rank's columns, of each of its
  // shards dense [rows, columns], one after the other in memory.
  enum Form { kWhole, kPanels };
  std::optional<Form> of_whole = kWhole, of_panels = {};
  // Takes the stream of a transformer where ranks deal its positions, too: Shards::deals_positions.
  bool dealt = false;
};

// A layer in the description of a model: how to make it. Copyable.
struct LayerSpec {
  std::string kind;  // "linear", for messages
  // `number` is the layer's number in the model, for random numbers. Null: a cut, or a connection.
  std::function<std::unique_ptr<Layer>(int number)> make;
  std::optional<Skip> skip = {};
  // What it is made from, "10, 50": ranks compare the models that they have by kinds and settings.
  std::string settings = {};
  // Of group(): its layers, which a model runs as its own.
  std::vector<LayerSpec> parts = {};
  // What the names of its parameters begin with in place of its number: "blocks.3."; in a group,
  // after the group's. Empty: nothing.
  std::optional<std::string> name = {};
  // Trusted parts of a group have the group's `number`; otherwise each part has its own.
  bool one_number = false;
  // Its first calls are not watched. On a CPU too, a stage of trusted layers alone calls each once
  // on zeros when it is prepared.
  bool trusted = false;
  // Made of layers: ModelOptions::recompute applies to it.
  bool composed = false;
  ShardForms forms = {};  // of a layer without parts
  bool replicated = false;
};

// "10, 0.5": the numbers among the arguments.
[[nodiscard]] std::string settings_of(std::initializer_list<double> numbers);
template <typename... Arguments>
[[nodiscard]] std::string settings_of(const Arguments&... arguments) {
  std::string all;
  [[maybe_unused]] const auto add = [&all](const auto& argument) {
    if constexpr (std::is_arithmetic_v<std::decay_t<decltype(argument)>>) {
      if (!all.empty()) all += ", ";
      all += settings_of({static_cast<double>(argument)});
    }
  };
  (add(arguments), ...);
  return all;
}

// A layer of the program's own, made from copies of `arguments`.
template <typename T, typename... Arguments>
[[nodiscard]] LayerSpec layer(std::string kind, Arguments... arguments) {
  return {std::move(kind),
          [=](int) { return std::make_unique<T>(arguments...); },
          {},
          settings_of(arguments...)};
}

// --- layers ---
// The next layer begins a stage.
[[nodiscard]] LayerSpec cut();
// The output of layer `from` goes to layer `to` too, past the layers between them and, where they
// are on other stages, over the edges between. Layer `to` takes the sum of its input and that
// output, or both one after the other in dimension `axis`, its input first (on CPUs alone). Layers
// are counted from 0 as in their names; from -1 is the model's input, and to the number of layers
// the model's output. Both of one type, f32 or bf16. It may stand anywhere in a Sequential's list.
[[nodiscard]] LayerSpec skip(int from, int to, Join join = Join::kAdd, int axis = 1);
// How shards divide a linear(); one shard does not. kColumns: each has columns of the output, in
// units of 16, which are panels. Layers that go element by element follow, but for dropout, and a
// kRows of as many inputs, on the same stage. That adds the products of all shards: its output is
// whole. kNone: each rank computes all of it.
enum class Split { kNone, kColumns, kRows };
struct LinearOptions {
  bool bias = true;
  Split split = Split::kNone;
};
// y = x weightᵀ + bias over the last dimension; weight [out, in], bias [out]; both from
// U(-1/sqrt(in), 1/sqrt(in)).
[[nodiscard]] LayerSpec linear(std::int64_t in, std::int64_t out, bool bias = true);
[[nodiscard]] LayerSpec linear(std::int64_t in, std::int64_t out, const LinearOptions& options);
// Element by element, of any shape. silu is x sigmoid(x). gelu is x times the normal
// distribution's function of x, as torch's GELU() is; gelu_tanh is GPT-2's form, within 5e-4 of it,
// which torch calls approximate="tanh".
[[nodiscard]] LayerSpec relu();
[[nodiscard]] LayerSpec gelu();
[[nodiscard]] LayerSpec gelu_tanh();
[[nodiscard]] LayerSpec silu();
[[nodiscard]] LayerSpec tanh();
[[nodiscard]] LayerSpec sigmoid();
// In training an element becomes 0 with this probability, else it is divided by 1 - probability. It
// follows from seed, step, sample and the layer's number alone.
[[nodiscard]] LayerSpec dropout(double probability);
// [samples, ...] becomes [samples, product of the others].
[[nodiscard]] LayerSpec flatten();
// [samples, ...] becomes [samples, dims], with as many numbers.
[[nodiscard]] LayerSpec unflatten(const Shape& dims);
// Over the last dimension, which is `width`; weight and bias [width].
[[nodiscard]] LayerSpec layer_norm(std::int64_t width, double epsilon = 1e-5);
// x / sqrt(mean of x^2 + epsilon) * weight over the last dimension, which is `width`.
[[nodiscard]] LayerSpec rms_norm(std::int64_t width, double epsilon = 1e-5);
// Over the last dimension; on CPUs alone. Models with cross_entropy_loss() end without it.
[[nodiscard]] LayerSpec softmax();
// Several layers as one for cuts and connections, with names of parameters such as "3.0.weight".
[[nodiscard]] LayerSpec group(std::vector<LayerSpec> layers);
// Activation checkpointing: of the layer, or of all layers of a group() or residual(), only the
// input is kept per micro-batch. Backward computes the rest again (Chen et al. 2016), to the bit,
// without a sum over replicas and without moving a buffer. Names of parameters stay. A layer of the
// program's own keeps what it keeps unless it promises `recomputes`.
[[nodiscard]] LayerSpec recompute(LayerSpec layer);
[[nodiscard]] LayerSpec recompute(std::vector<LayerSpec> layers);  // of group(layers)
// In a model of several shards each rank that shares the stage computes all of the layer: it is not
// told of shards. On all of them the same input must give the same bits.
[[nodiscard]] LayerSpec replicated(LayerSpec layer);
// y = sum of the layers' result and the shortcut's, which is the input itself without layers. Names
// of parameters: "3.0.weight" of the first layer, "3.shortcut.0.weight" of the shortcut's.
[[nodiscard]] LayerSpec residual(std::vector<LayerSpec> layers,
                                 std::vector<LayerSpec> shortcut = {});
// Classes i32 [samples] or [samples, n] become rows of a table "weight" [classes, width], from
// N(0, 1). With positions, row i of a second table "positions" [positions, width] is added to class
// i of each sample, n <= positions. Shards divide the classes, in units of 16 of which each has
// one.
[[nodiscard]] LayerSpec embedding(std::int64_t classes, std::int64_t width,
                                  std::int64_t positions = 0);

struct AttentionOptions {
  int kv_heads = 0;                       // heads of keys and values; 0: as many as heads
  std::optional<float> rotary_base = {};  // set: rotary positions (Su et al. 2021)
  double dropout = 0;                     // of the probabilities
  bool bias = true;
};
// Causal self-attention over [samples, sequence, width] with heads of width / heads: each place
// attends to itself and those before it. qkv.weight [width + 2 * kv width, width] has the rows of
// queries, keys and values; output.weight [width, width]; from N(0, 0.02), biases 0. Shards divide
// the heads of keys. A block of a transformer, with norms and MLP: transformer_block() in
// <sluice/transformer.hpp>.
[[nodiscard]] LayerSpec attention(std::int64_t width, int heads,
                                  const AttentionOptions& options = {});

// --- layers of images: f32 [samples, channels, height, width]; on CPUs alone. In a model with a
// precision they compute in f32 on copies (Edges::kWidened). ---
// One number for height and width, or two.
struct HeightWidth {
  std::int64_t height = 0, width = 0;
  constexpr HeightWidth(std::int64_t both) : height(both), width(both) {}  // NOLINT: 3 is 3 x 3
  constexpr HeightWidth(std::int64_t high, std::int64_t wide) : height(high), width(wide) {}
};

struct ConvolutionOptions {
  HeightWidth stride = 1, padding = 0;  // of zeros, on each side
  std::int64_t groups = 1;              // channels [in / groups] of a group make [out / groups]
  bool bias = true;
};
// weight [out, in / groups, height, width], bias [out], from U(-b, b) with b = 1 / sqrt(in / groups
// * height * width). By oneDNN.
[[nodiscard]] LayerSpec conv2d(std::int64_t in, std::int64_t out, HeightWidth kernel,
                               const ConvolutionOptions& options = {});

struct PoolOptions {
  std::optional<HeightWidth> stride = {};  // none: the kernel's size
  HeightWidth padding = 0;                 // at most half of the kernel
};
// The largest number, or the mean, of each window. Padding of max_pool2d is never the largest; that
// of avg_pool2d counts as zeros.
[[nodiscard]] LayerSpec max_pool2d(HeightWidth kernel, const PoolOptions& options = {});
[[nodiscard]] LayerSpec avg_pool2d(HeightWidth kernel, const PoolOptions& options = {});
// [samples, channels, height, width] becomes [samples, channels]: the mean of each channel.
[[nodiscard]] LayerSpec global_avg_pool2d();

// Whose numbers a training step takes mean and variance of: those of the micro-batch on this
// replica, or of the micro-batches with its number on all replicas, as torch's SyncBatchNorm does;
// the latter needs as many virtual replicas as replicas.
enum class BatchStatistics { kMicroBatch, kReplicas };

struct BatchNormOptions {
  double epsilon = 1e-5;
  double momentum = 0.1;  // of the running statistics
  BatchStatistics statistics = BatchStatistics::kMicroBatch;
};
// (x - mean) / sqrt(variance + epsilon) * weight + bias for each channel. In training, mean and
// variance are those of the micro-batch: they are not those of the whole batch, so a model with
// this layer depends on the size of micro-batches, as it does with gradient accumulation in torch.
// With BatchStatistics::kReplicas the number of replicas that share a micro-batch of samples
// changes the results by rounding alone; each F, and each B or I, then has a sum over replicas in
// the plan. Otherwise they are the running ones: buffers "running_mean" and "running_var". Each
// step moves them once, in its last batch, towards the mean and unbiased variance of all samples of
// the step in a virtual replica, as torchgpipe's DeferredBatchNorm does; then all take the mean of
// theirs. kReplicas: of all replicas. A step that is refused, skipped or dropped moves them not at
// all. Throws Error(kData) in training for a micro-batch with one number a channel.
[[nodiscard]] LayerSpec batch_norm2d(std::int64_t channels, const BatchNormOptions& options = {});
// The same with mean and variance of one sample, over `groups` groups of neighbouring channels (Wu
// and He 2018): it depends on no other sample, so neither on micro-batches nor on replicas.
[[nodiscard]] LayerSpec group_norm(std::int64_t groups, std::int64_t channels,
                                   double epsilon = 1e-5);

// --- losses ---
// What the last stage minimises. The loss of a step is the mean over the counted targets.
class Loss {
 public:
  virtual ~Loss() = default;
  // Before all other calls, in a model with a precision of bf16 alone. False: it takes f32 outputs,
  // and Sluice converts them and their gradient in scratch.
  virtual bool set_precision(const Precision& /*precision*/) { return false; }
  // As Layer's.
  virtual bool set_shards(const Shards& /*shards*/) { return false; }
  // Type and shape of the targets of these outputs. Pure. Throws Error(kUsage) for outputs that it
  // cannot take.
  [[nodiscard]] virtual TensorSpec targets(const TensorSpec& outputs) const = 0;
  [[nodiscard]] virtual bool runs_on_gpu() const { return false; }
  // Bytes that it takes from ctx.workspace().
  [[nodiscard]] virtual std::size_t operator_bytes(const TensorSpec& /*outputs*/) const {
    return 0;
  }
  // As Stage::graph_capturable(), of compute().
  [[nodiscard]] virtual bool capturable() const { return false; }
  // memory.scratch, which compute() gets, operator_bytes, collectives.forward, and
  // collectives.answer.
  [[nodiscard]] virtual LayerNeeds needs(const TensorSpec& outputs,
                                         ComputeContext& /*compute*/) const {
    return {.operator_bytes = operator_bytes(outputs)};
  }
  // Adds its own parameters to `set`, once.
  virtual void add_parameters(ParameterSet& /*set*/) {}
  // How many targets of a micro-batch count; `targets` are in host memory, and like targets() of
  // `outputs` but for the number of samples. Throws Error(kData) for values that it cannot take.
  [[nodiscard]] virtual double weight(const TensorSpec& outputs, const Tensor& targets) const = 0;
  // Whether compute() leaves the gradients of the layers' parameters alone, and calls next_write()
  // before it writes to those of its own. If not, all of its stage are zero before the step's first
  // call.
  [[nodiscard]] virtual bool leaves_gradients() const { return false; }
  // As LossStage::loss().
  virtual void compute(StageContext& ctx, const Tensor& outputs, const Tensor& targets,
                       double* sum) = 0;
  // The same with memory of needs(). A loss that takes some overrides this one too.
  virtual void compute_in(std::byte* /*scratch*/, StageContext& ctx, const Tensor& outputs,
                          const Tensor& targets, double* sum) {
    compute(ctx, outputs, targets, sum);
  }
  // As LossStage::why_no_answers().
  [[nodiscard]] virtual std::string why_no_answers() const { return {}; }
  // What infer() gives of these outputs where it is not they themselves: answer() writes it, as
  // LossStage's does, and makes collectives.answer of needs().
  [[nodiscard]] virtual std::optional<TensorSpec> answer_spec(const TensorSpec& /*outputs*/) const {
    return {};
  }
  virtual void answer(StageContext& /*ctx*/, const Tensor& /*outputs*/, const Tensor& /*answer*/) {}
};

struct LossSpec {
  std::string kind;
  std::function<std::unique_ptr<Loss>()> make;
  std::string settings = {};                    // as LayerSpec's
  ShardForms::Form takes = ShardForms::kWhole;  // of the outputs
};

// The squared difference; each element counts. Targets f32, in the shape of the outputs.
[[nodiscard]] LossSpec mse_loss();

struct CrossEntropyOptions {
  int axis = -1;                // of the outputs, which counts the classes; -1: the last one
  DType targets = DType::kI32;  // or kI64
  std::int64_t ignored = -1;    // targets of this class do not count, nor do negative ones
  // Share of the target's probability that all classes have alike (Szegedy et al. 2016).
  double smoothing = 0;
};
// -log softmax(outputs)[class] over one dimension of the outputs, f32. Targets in the shape of the
// outputs without it. On a GPU with i32 targets, the last dimension and no smoothing alone.
[[nodiscard]] LossSpec cross_entropy_loss(const CrossEntropyOptions& options = {});

// A loss of the program's own that is a sum over elements: `term` returns its value and its
// derivative by the output. Each element counts. Targets f32, in the shape of the outputs. On CPUs
// alone; called by one thread.
struct LossTerm {
  double value = 0;
  double derivative = 0;
};
[[nodiscard]] LossSpec elementwise_loss(std::string kind,
                                        std::function<LossTerm(float output, float target)> term);
// Any other one, made from copies of `arguments`.
template <typename T, typename... Arguments>
[[nodiscard]] LossSpec loss(std::string kind, Arguments... arguments) {
  return {std::move(kind), [=] { return std::make_unique<T>(arguments...); },
          settings_of(arguments...)};
}

// --- checks for tests of a program's own layers and losses ---
struct GradientCheck {
  // Fill what the layer, or the loss, gets of micro-batch 0 and 1, in host memory. None: f32
  // numbers in [-2, 2) that are far from each other, and the integers 0 and 1.
  std::function<void(int micro_batch, const Tensor& x)> input = {};  // or a loss's outputs
  std::function<void(int micro_batch, const Tensor& targets)> targets = {};
  double tolerance = 1e-2;  // of gradients, as a share of the tensor's largest
  int numbers = 100;        // of each tensor that are compared, evenly spread; 0: all
  std::uint64_t seed = 1;   // of parameters and random numbers
};
// Runs the layer on a CPU with this input: its gradients agree with finite differences; it writes
// all of its outputs and gradients, and nothing next to them or to its memory, and changes nothing
// else; it adds to gradients of parameters, and overwrites stale ones where it says so; needs()
// names all that it takes; two micro-batches in flight have the bits of one after the other; what
// it promises of `recomputes`, `keeps_alone` and `in_place` holds; in bf16 it makes what it makes
// in f32, if its set_precision() says that it takes bf16. Parameters are moved off their initial
// values. Differences are of f32 outputs, summed in double precision. Throws Error(kUsage) that
// names the layer's kind, what is wrong, where, what was found and what was expected, and what the
// layer throws. For small inputs: it calls forward some hundred times for each parameter.
void check_gradients(const LayerSpec& layer, const TensorSpec& input,
                     const GradientCheck& options = {});
// The same for a loss of these outputs.
void check_gradients(const LossSpec& loss, const TensorSpec& outputs,
                     const GradientCheck& options = {});

}  // namespace sluice::nn

namespace sluice {

// --- models ---
// Properties of the whole model. With a bf16 stream, what layers hand on and keep takes half the
// memory, and so do messages. An f32 input of the model is converted to the stream's type first,
// and infer() returns outputs in it. See nn::Layer::set_precision(). A model whose precision is f32
// leaves its layers as they are, those of a transformer's configuration in bf16 too.
struct ModelOptions {
  DType precision = DType::kF32;         // Precision::operands
  DType stream_precision = DType::kF32;  // Precision::stream
  bool recompute = false;                // each group() and residual() is a recompute()
};

class Sequential {
 public:
  // Without a loss the model only computes outputs. Throws Error(kUsage) for no layers, a cut at an
  // end or two in a row, and numbers that a layer or the options cannot have.
  Sequential(std::initializer_list<nn::LayerSpec> layers, nn::LossSpec loss = {},
             const ModelOptions& options = {});
  explicit Sequential(std::vector<nn::LayerSpec> layers, nn::LossSpec loss = {},
                      const ModelOptions& options = {});

  // The same model with the type and shape of one sample, as in BatchSpec::inputs: shapes are
  // checked now, and a model without cut() is cut by cost.
  [[nodiscard]] Sequential with_input(const TensorSpec& sample) const;

  // For a StageFactory. One stage has all layers. Several follow the cut()s, or else the cost of
  // the layers. Throws Error(kUsage) where neither is given, or the cuts make another number of
  // stages.
  [[nodiscard]] std::unique_ptr<Stage> operator()(int stage, int stages) const;
  // The same of a model of shards, where a layer that computes by none is Error(kUsage).
  [[nodiscard]] std::unique_ptr<Stage> operator()(const StagePlace& place) const;
  // Stage `stage` of another partition of the layers.
  [[nodiscard]] std::unique_ptr<Stage> stage_of(const Partition& partition, int stage,
                                                const Shards& shards = {}) const;
  // Which layers are on which stage; cut() does not count.
  [[nodiscard]] Partition partition(int stages) const;

 private:
  struct Model;
  std::shared_ptr<const Model> model_;
};

}  // namespace sluice
#pragma GCC visibility pop
