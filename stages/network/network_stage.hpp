// A run of a Sequential's layers as a pipeline stage. Internal to stages/.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <sluice/layers.hpp>
#include <sluice/stage.hpp>

#include "stages/network/skips.hpp"
#include "stages/network/slot_memory.hpp"

namespace sluice {

struct NumberedLayer {
  int number = 0;    // in the model
  std::string kind;  // "linear"
  std::unique_ptr<Layer> layer;
  bool forward_watched = false, backward_watched = false;  // the first call was

  // "layer 3 (linear)"
  [[nodiscard]] std::string name() const;
};

// Makes the layer; an Error names it. `drawn`: its number for random numbers.
[[nodiscard]] NumberedLayer make_layer(const LayerSpec& spec, int number, int drawn);
// The layer's output; an Error names the layer.
[[nodiscard]] TensorSpec output_of(const NumberedLayer& layer, const TensorSpec& input);

// The layer's calls; an Error names the layer. The first of each on a CPU must write every number
// of y, or of dx where it has data, else Error(kUsage).
void layer_forward(NumberedLayer& layer, LayerCall& call, const Tensor& y);
void layer_backward_input(NumberedLayer& layer, LayerCall& call, const Tensor& dy,
                          const Tensor& dx);

// What a stage is made of.
struct StageLayers {
  std::vector<NumberedLayer> layers;
  int begin = 0;  // the number of the first one, or of the next one where there is none
  StageSkips skips;
  std::string model = {};  // StageDescription::model
};

// Without layers it passes its input on. Its edges have the main tensor, then those that skip
// layers.
class NetworkStage : public Stage, public SplitBackward {
 public:
  explicit NetworkStage(StageLayers parts);

  [[nodiscard]] StageDescription describe(std::span<const TensorSpec> inputs,
                                          ComputeContext& compute) const override;
  void check_inputs(std::span<const Tensor> inputs) const override;
  void prepare(const StageSetup& setup) override;
  void prepare_size(ComputeContext& compute, std::span<const TensorSpec> inputs) override;
  [[nodiscard]] bool overwrites_gradients() const override { return true; }
  void forward(StageContext& ctx, std::span<const Tensor> inputs,
               std::span<const Tensor> outputs) override;
  void backward(StageContext& ctx, std::span<const Tensor> grad_outputs,
                std::span<const Tensor> grad_inputs) override;
  void backward_input(StageContext& ctx, std::span<const Tensor> grad_outputs,
                      std::span<const Tensor> grad_inputs) override;
  void backward_weight(StageContext& ctx, std::span<const Tensor> grad_outputs) override;
  [[nodiscard]] ParameterSet* parameters() override;

 protected:
  // Runs every primitive for one size, on zeros; changes only gradients and buffers.
  virtual void warm_up(StageContext& ctx, std::span<const Tensor> outputs);

 private:
  // A layer, or a join before one.
  struct Part {
    std::size_t index = 0;  // of layers_, or of skips_.joins()
    bool join = false;
  };
  // What the parts see of one size of micro-batch: specs[i] is the main input of part i, the last
  // one the stage's main output.
  struct Size {
    std::vector<TensorSpec> inputs;  // of the stage
    std::vector<TensorSpec> specs;
    std::vector<TensorSpec> sources;  // [source]
    std::vector<SlotMemory::Need> needs;
    std::size_t operator_bytes = 0, table_bytes = 0;
    int forward_sums = 0, backward_sums = 0;
    std::string note = {};
  };
  // Gradients of the sources, of one call.
  struct SourceGradient {
    Tensor sum;  // null data: not needed
    bool begun = false;
  };

  [[nodiscard]] Size size_of(std::span<const TensorSpec> inputs, ComputeContext& compute) const;
  [[nodiscard]] TensorSpec measure(const Part& part, const TensorSpec& in, ComputeContext& compute,
                                   Size& size) const;
  [[nodiscard]] std::vector<TensorSpec> outputs_of(const Size& size) const;
  // Of a size that was prepared before.
  [[nodiscard]] const Size& size_of(const StageContext& ctx) const;
  // Bytes of the gradients of sources that lie in no message; `places`: [source] where.
  std::size_t place_gradients(std::span<const Size> sizes, std::vector<std::size_t>* places) const;
  void warm_up_size(ComputeContext& compute, const Size& size);
  [[nodiscard]] LayerCall call_of(StageContext& ctx, const Size& size, std::size_t part) const;
  [[nodiscard]] Tensor source(const StageContext& ctx, const Size& size, std::size_t index) const;
  // With respect to the part's output, and to its input.
  [[nodiscard]] Tensor output_gradient(const StageContext& ctx, const Size& size, std::size_t part,
                                       const Tensor& grad_output) const;
  [[nodiscard]] Tensor input_gradient(const StageContext& ctx, const Size& size, std::size_t part,
                                      std::span<const Tensor> grad_inputs) const;
  void run_forward(StageContext& ctx, const Size& size, std::size_t part, const Tensor& y);
  void begin_source_gradients(StageContext& ctx, const Size& size,
                              std::span<const Tensor> grad_outputs,
                              std::span<const Tensor> grad_inputs);
  // The part's input gradient. Before it, adds to dy what the part's output gets past layers.
  void run_backward_input(StageContext& ctx, const Size& size, std::size_t part, const Tensor& dy,
                          const Tensor& dx);
  void run_backward_weight(StageContext& ctx, const Size& size, std::size_t part, const Tensor& dy);
  void end_source_gradients(StageContext& ctx, std::span<const Tensor> grad_inputs);
  // Both gradients of every part, or the input's alone.
  void run_backward(StageContext& ctx, std::span<const Tensor> grad_outputs,
                    std::span<const Tensor> grad_inputs, bool weights);

  std::vector<NumberedLayer> layers_;
  int begin_;
  StageSkips skips_;
  std::string model_;
  std::vector<Part> parts_;
  std::vector<std::size_t> made_by_;  // [source] part that makes it; parts_.size(): an input
  ParameterSet parameters_;
  SlotMemory memory_;
  bool trains_ = true;       // of StageSetup
  std::vector<Size> sizes_;  // prepared ones
  std::vector<SourceGradient> source_gradients_;
  std::vector<std::size_t> gradient_places_;  // [source] in source_memory_
  Buffer source_memory_;
};

class LossNetworkStage final : public NetworkStage, public LossStage {
 public:
  LossNetworkStage(StageLayers parts, std::string kind, std::unique_ptr<Loss> loss);

  [[nodiscard]] StageDescription describe(std::span<const TensorSpec> inputs,
                                          ComputeContext& compute) const override;
  void prepare(const StageSetup& setup) override;
  void loss(StageContext& ctx, std::span<const Tensor> outputs, std::span<const Tensor> targets,
            double* sum) override;
  [[nodiscard]] double target_weight(std::span<const Tensor> targets) const override;

 protected:
  void warm_up(StageContext& ctx, std::span<const Tensor> outputs) override;

 private:
  [[nodiscard]] TensorSpec targets_of(const TensorSpec& outputs) const;
  void require_targets(const TensorSpec& outputs, std::span<const Tensor> targets) const;

  std::string kind_;
  std::unique_ptr<Loss> loss_;
  TensorSpec outputs_;  // of the largest micro-batch
};

}  // namespace sluice
