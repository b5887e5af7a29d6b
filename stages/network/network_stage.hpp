// A run of a Sequential's layers as a pipeline stage. Internal to stages/.
//
// What the layers keep of a micro-batch lies in StageContext::state. Gradients do where the
// schedule splits the backward pass, otherwise in one area: see LayerRun.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <sluice/layers.hpp>
#include <sluice/stage.hpp>

#include "stages/compute/internal_operators.hpp"
#include "stages/network/layer_run.hpp"

namespace sluice::nn {

// What a stage is made of.
struct StageLayers {
  std::vector<NumberedLayer> layers;
  int begin = 0;  // the number of the first one, or of the next one where there is none
  StageSkips skips = {};
  std::string model = {};  // StageDescription::model
  Precision precision = {};
  Shards shards = {};
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
  // Renews the bf16 copies that are stale. An optimizer may have written both.
  void begin_step(ComputeContext& compute) override;
  [[nodiscard]] bool graph_capturable() const override { return run_.promises().capturable; }
  [[nodiscard]] bool overwrites_gradients() const override { return true; }
  void forward(StageContext& ctx, std::span<const Tensor> inputs,
               std::span<const Tensor> outputs) override;
  void recompute(StageContext& ctx) override { run_.recompute(call_of(ctx)); }
  void backward(StageContext& ctx, std::span<const Tensor> grad_outputs,
                std::span<const Tensor> grad_inputs) override;
  void backward_input(StageContext& ctx, std::span<const Tensor> grad_outputs,
                      std::span<const Tensor> grad_inputs) override;
  void backward_weight(StageContext& ctx, std::span<const Tensor> grad_outputs) override;
  [[nodiscard]] ParameterSet* parameters() override;
  // Bytes that prepare() took for what describe() returned: all but parameters and states.
  [[nodiscard]] std::size_t prepared_bytes() const { return gradients_.size() + scratch_.size(); }

 protected:
  // Runs every primitive for one size, on zeros; changes only gradients and buffers.
  virtual void warm_up(StageContext& ctx, std::span<const Tensor> outputs);
  [[nodiscard]] ParameterSet& set() { return parameters_; }
  [[nodiscard]] bool trains() const { return trains_; }
  [[nodiscard]] std::byte* scratch() const { return scratch_.data(); }
  [[nodiscard]] std::span<const LayerRun::Plan* const> prepared() const { return prepared_; }
  // Scratch that is not its layers'.
  [[nodiscard]] virtual std::size_t other_scratch(const TensorSpec& /*outputs*/,
                                                  ComputeContext& /*compute*/) const {
    return 0;
  }

 private:
  using Plan = LayerRun::Plan;

  [[nodiscard]] LayerRun::Call call_of(StageContext& ctx);
  // The inputs as the layers take them: see at_entry().
  [[nodiscard]] std::vector<TensorSpec> taken(std::span<const TensorSpec> inputs) const;
  // Of a converted input, per micro-batch.
  [[nodiscard]] std::size_t entry_bytes(const TensorSpec& input) const;
  void warm_up_size(ComputeContext& compute, const Plan& plan);
  void allocate(const StageSetup& setup, std::size_t gradients, std::size_t scratch);

  LayerRun run_;
  std::string model_;
  Precision entry_;  // of the model's input; f32 where it is taken as it is
  bool trusted_;     // LayerSpec::trusted of all layers
  ParameterSet parameters_;
  std::vector<Parameter*> copied_;       // those with a bf16 copy
  std::vector<Conversion> conversions_;  // of one begin_step()
  bool split_ = true, trains_ = true;    // of StageSetup
  std::vector<const Plan*> prepared_;    // sizes
  std::vector<Tensor> inputs_;           // of a call, where the first one is converted
  StageContext::State trial_;            // of StageSetup
  Buffer gradients_, scratch_;           // gradients: those that micro-batches share
};

class LossNetworkStage final : public NetworkStage, public LossStage {
 public:
  LossNetworkStage(StageLayers parts, std::string kind, std::unique_ptr<Loss> loss);

  [[nodiscard]] StageDescription describe(std::span<const TensorSpec> inputs,
                                          ComputeContext& compute) const override;
  void loss(StageContext& ctx, std::span<const Tensor> outputs, std::span<const Tensor> targets,
            double* sum) override;
  [[nodiscard]] double target_weight(std::span<const Tensor> targets) const override;
  [[nodiscard]] std::string why_no_answers() const override { return loss_->why_no_answers(); }
  void answer(StageContext& ctx, std::span<const Tensor> outputs,
              std::span<const Tensor> answers) override;
  [[nodiscard]] bool graph_capturable() const override {
    return NetworkStage::graph_capturable() && loss_->capturable();
  }

 protected:
  void warm_up(StageContext& ctx, std::span<const Tensor> outputs) override;
  [[nodiscard]] std::size_t other_scratch(const TensorSpec& outputs,
                                          ComputeContext& compute) const override;

 private:
  [[nodiscard]] TensorSpec targets_of(const TensorSpec& outputs) const;
  [[nodiscard]] const TensorSpec& outputs_for(std::span<const Tensor> targets) const;
  // Before they are read.
  void use_parameters(const StageContext& ctx) const;

  std::string kind_;
  std::unique_ptr<Loss> loss_;
  std::optional<int> unit_;  // of its parameters; none: it has no parameters
};

}  // namespace sluice::nn
