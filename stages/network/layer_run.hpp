// Layers one after the other, with connections past them: where their memory lies, and their calls.
// A stage has one, and so has each layer that is made of layers. Internal to stages/.
//
// Memory is handed in with every call, one span a lifetime; a run owns none. What lies where in the
// spans is a function of the input's shape (Plan). Outputs of all layers but the last live until
// the weight gradient. Gradients of outputs live from the input gradient to the weight gradient.
//
// Where nothing lives between the two halves of backward (backward() alone is called), all layers
// and micro-batches share one area of gradients. A layer's own gradients lie between that of its
// output and that of its input, which grow from the two ends of the area. A layer that promises
// `in_place` writes one over the other.
//
// A run that recomputes keeps its input alone, and what its layers keep in LayerMemory::lasting.
// What they keep until the input gradient is scratch then, what they keep until the weight gradient
// is part of the gradients, the outputs between them too. backward_input() makes all of it again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <sluice/layers.hpp>
#include <sluice/stage.hpp>

#include "stages/network/skips.hpp"

namespace sluice::nn {

struct NumberedLayer {
  int number = 0;         // in the model
  std::string path = {};  // "3", or "3.0" in a group: for messages
  std::string name = {};  // of its parameters: "3."
  std::string kind = {};  // "linear"
  std::unique_ptr<Layer> layer = nullptr;
  bool forward_watched = false, backward_watched = false;  // the first call was
  bool replicated = false;

  // "layer 3 (linear)"
  [[nodiscard]] std::string full_name() const;
};

// "linear(10, 50)", "group(linear(10, 50), relu())": what ranks compare.
[[nodiscard]] std::string text_of(const LayerSpec& spec);
[[nodiscard]] std::string text_of(std::span<const LayerSpec> specs);

// What it makes of an input, if there is one that it can take.
[[nodiscard]] std::optional<ShardForms::Form> made_of(const ShardForms& forms,
                                                      std::optional<ShardForms::Form> input);
// Of a layer, or a group; of layers one after the other; of two whose results are added.
[[nodiscard]] ShardForms forms_of(const LayerSpec& layer);
[[nodiscard]] ShardForms forms_of(std::span<const LayerSpec> layers);
[[nodiscard]] ShardForms forms_of_sum(const ShardForms& first, const ShardForms& second);

// Makes the layer, or those of a group; an Error names the layer. `drawn`: its number for random
// numbers.
[[nodiscard]] std::vector<NumberedLayer> make_layers(const LayerSpec& spec, int number, int drawn);
// Those within the layer that has `number` for random numbers.
enum class ResidualPart : std::uint32_t { kMain, kShortcut };
[[nodiscard]] std::vector<NumberedLayer> make_inner_layers(std::span<const LayerSpec> specs,
                                                           int number, ResidualPart part);

// Adds what a part needs besides its memory, of parts that run one after the other.
void add_needs(LayerNeeds& all, const LayerNeeds& part, bool backward_first);

// Null stays null.
inline std::byte* at(std::byte* base, std::size_t offset) {
  return base == nullptr ? nullptr : base + offset;
}

// Makes one layer of a group too.
[[nodiscard]] std::unique_ptr<Layer> make_layer(const LayerSpec& spec, int number);

// A layer that computes again at the start of its backward, or before it: LayerCall::recomputed.
class Recomputing {
 public:
  virtual ~Recomputing() = default;
  virtual void recompute(LayerCall& call) = 0;
};

class LayerRun {
 public:
  struct Options {
    bool recomputes = false;
    // The run of a stage: it says which gradients are final.
    bool outermost = false;
    Precision precision = {};
    Shards shards = {};
    // Makes LayerCall::rounded_dy of its last layer. Else its owner has it from promises().
    bool rounds = false;
    StageSkips skips = {};
    int begin = 0;  // the number of the first layer, or of the next one where there is none
  };
  LayerRun(std::vector<NumberedLayer> layers, Options options);

  // A part of the run and its memory: offsets within the spans.
  struct Place {
    LayerNeeds needs;    // none for a connection
    bool again = false;  // made again in backward: in scratch and gradients
    std::size_t until_input = 0, until_weight = 0, output = 0, lasting = 0;
    struct Gradients {
      std::size_t own = 0, input = 0, rounded = 0;  // rounded: of its output's gradient
    };
    Gradients split, shared;
  };
  // What the parts see of one size of micro-batch: specs[i] is the main input of part i, the last
  // one the run's main output.
  struct Plan {
    std::vector<TensorSpec> inputs, specs, sources;
    std::vector<Place> places;
    std::vector<std::size_t> source_gradients;  // [source] offset in scratch
    // Of the whole run; memory.gradients where each micro-batch has its own, else
    // shared_gradients.
    LayerNeeds needs;
    std::size_t shared_gradients = 0;
    std::size_t scratch_of_layers = 0;  // where it begins
    // Of the last layer's keep_again(), which has memory for it behind its scratch.
    std::optional<TensorSpec> again_output;
  };
  // Begins of the spans.
  struct Memory {
    std::byte *until_input = nullptr, *until_weight = nullptr, *lasting = nullptr;
    std::byte *gradients = nullptr, *scratch = nullptr;
    bool shared = false;  // gradients: as many bytes as Plan::shared_gradients
  };
  struct Call {
    StageContext& stage;
    const Plan& plan;
    std::span<const Tensor> inputs;
    Memory memory;
    bool again = false, recomputed = false;   // as LayerCall's
    Tensor rounded_dy = {}, rounded_dx = {};  // likewise
  };

  // Before set_precision(): tells the layers. An Error names one that computes by no shards.
  void set_shards(const Shards& shards);
  // Before all other calls: tells the layers, and puts conversions around those that need some.
  void set_precision(const Precision& precision);
  [[nodiscard]] bool empty() const { return parts_.empty(); }
  [[nodiscard]] const std::vector<NumberedLayer>& layers() const { return layers_; }
  [[nodiscard]] const StageSkips& skips() const { return skips_; }
  void add_parameters(ParameterSet& set, const std::string& name = {});
  // Whether all layers that have added parameters do.
  [[nodiscard]] bool overwrites_gradients() const { return overwrites_gradients_; }
  [[nodiscard]] bool runs_on_gpu() const;
  [[nodiscard]] LayerPromises promises() const;
  // The output of a run without connections, an Error names the layer; likewise below.
  [[nodiscard]] TensorSpec output(TensorSpec spec) const;
  [[nodiscard]] double cost(TensorSpec spec) const;
  void check_inputs(const Tensor& x) const;

  // Made when a size of micro-batch is described, found in a step; stays valid.
  [[nodiscard]] const Plan& plan_of(std::span<const TensorSpec> inputs,
                                    ComputeContext& compute) const;
  [[nodiscard]] std::vector<TensorSpec> outputs_of(const Plan& plan) const;

  void forward(Call call, std::span<const Tensor> outputs);
  // As Layer's, of a run within a layer.
  void keep_again(Call call, const Tensor& y);
  // Whether its backward begins with what recompute() does: the last layer's, which is the first
  // to go back, and whose scratch no other layer of the run has used then.
  [[nodiscard]] bool recomputes_first() const { return recomputing_ != nullptr; }
  void recompute(Call call);
  // kInput: backward_weight() follows.
  enum class Halves { kInput, kBoth };
  void backward(Call call, Halves halves, std::span<const Tensor> grad_outputs,
                std::span<const Tensor> grad_inputs);
  void backward_weight(Call call, std::span<const Tensor> grad_outputs);
  // Once the parameters have memory.
  void find_gradients(ParameterSet& set);

 private:
  // A layer, or a join before one.
  struct Part {
    std::size_t index = 0;  // of layers_, or of skips_.joins()
    bool join = false;
    LayerPromises promises;
    bool overwrites = false, falls_back = false;  // falls back: Edges::kF32
    std::size_t first_parameter = 0, parameters = 0;
    int unit = 0;                    // of the parameters
    std::size_t first_gradient = 0;  // in flat_grads(), in floats
  };
  // Gradients of the sources, of one call.
  struct SourceGradient {
    Tensor sum;  // null data: not needed
    bool begun = false;
  };

  [[nodiscard]] TensorSpec measure(std::size_t part, const TensorSpec& in, ComputeContext& compute,
                                   Plan& plan) const;
  void plan_again(Plan& plan) const;
  // Whether keep_again() has something to make.
  [[nodiscard]] static bool keeps(const Place& place);
  void lay_out(Plan& plan) const;
  void lay_out_shared(Plan& plan) const;
  [[nodiscard]] bool in_place(const Plan& plan, std::size_t part) const;
  [[nodiscard]] bool reads_rounded(const Plan& plan, std::size_t part) const;

  [[nodiscard]] LayerCall call_of(Call& call, std::size_t part) const;
  [[nodiscard]] Tensor output_of(const Call& call, std::size_t part) const;
  [[nodiscard]] Tensor input_of(const Call& call, std::size_t part) const;
  [[nodiscard]] Tensor source(const Call& call, std::size_t index) const;
  // With respect to the part's output, and to its input; the copies in bf16 of both.
  [[nodiscard]] Tensor output_gradient(const Call& call, std::size_t part, const Tensor& dy) const;
  [[nodiscard]] Tensor input_gradient(const Call& call, std::size_t part,
                                      std::span<const Tensor> grad_inputs) const;
  [[nodiscard]] Tensor rounded(const Call& call, std::size_t part) const;
  [[nodiscard]] Tensor rounded_input(const Call& call, std::size_t part) const;

  void run_forward(Call& call, std::size_t part, const Tensor& y);
  void part_backward(Call& call, std::size_t part, const Tensor& dy, const Tensor& dx,
                     Halves halves);
  void layer_backward(Call& call, std::size_t part, const Tensor& dy, const Tensor& dx,
                      Halves halves);
  void begin_source_gradients(Call& call, std::span<const Tensor> grad_outputs,
                              std::span<const Tensor> grad_inputs);
  void end_source_gradients(Call& call, std::span<const Tensor> grad_inputs);
  void announce(const StageContext& ctx, const Part& part) const;
  // Before the part's parameters are read.
  void use(const StageContext& ctx, const Part& part) const;

  std::vector<NumberedLayer> layers_;
  bool recomputes_, outermost_, rounds_;
  Recomputing* recomputing_ = nullptr;  // the last part of an outermost run, where it is one
  StageSkips skips_;
  std::vector<Part> parts_;
  std::vector<std::size_t> made_by_;  // [source] part that makes it; parts_.size(): an input
  std::vector<SourceGradient> source_gradients_;
  bool overwrites_gradients_ = true;
  mutable std::deque<Plan> plans_;
};

}  // namespace sluice::nn
