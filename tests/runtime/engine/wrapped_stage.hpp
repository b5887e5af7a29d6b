// A stage in a test's own, which passes every call on: tests derive from it and change some calls.
#pragma once

#include <memory>
#include <span>
#include <utility>

#include <sluice/stage.hpp>

namespace sluice::testing {

// Of a stage with all interfaces, such as a whole transformer. Calls of one that it lacks are
// std::bad_cast.
class WrappedStage : public Stage, public SplitBackward, public LossStage {
 public:
  explicit WrappedStage(std::unique_ptr<Stage> inner) : inner_(std::move(inner)) {}

  StageDescription describe(std::span<const TensorSpec> inputs,
                            ComputeContext& compute) const override {
    return inner_->describe(inputs, compute);
  }
  void prepare(const StageSetup& setup) override { inner_->prepare(setup); }
  void begin_step(ComputeContext& compute) override { inner_->begin_step(compute); }
  bool graph_capturable() const override { return inner_->graph_capturable(); }
  ParameterSet* parameters() override { return inner_->parameters(); }
  void check_inputs(std::span<const Tensor> inputs) const override { inner_->check_inputs(inputs); }
  void forward(StageContext& ctx, std::span<const Tensor> inputs,
               std::span<const Tensor> outputs) override {
    inner_->forward(ctx, inputs, outputs);
  }
  void backward(StageContext& ctx, std::span<const Tensor> grad_outputs,
                std::span<const Tensor> grad_inputs) override {
    inner_->backward(ctx, grad_outputs, grad_inputs);
  }
  void backward_input(StageContext& ctx, std::span<const Tensor> grad_outputs,
                      std::span<const Tensor> grad_inputs) override {
    as<SplitBackward>().backward_input(ctx, grad_outputs, grad_inputs);
  }
  void backward_weight(StageContext& ctx, std::span<const Tensor> grad_outputs) override {
    as<SplitBackward>().backward_weight(ctx, grad_outputs);
  }
  void loss(StageContext& ctx, std::span<const Tensor> outputs, std::span<const Tensor> targets,
            double* sum) override {
    as<LossStage>().loss(ctx, outputs, targets, sum);
  }
  double target_weight(std::span<const Tensor> targets) const override {
    return as<const LossStage>().target_weight(targets);
  }

 private:
  template <typename Interface>
  Interface& as() const {
    return dynamic_cast<Interface&>(*inner_);
  }

  std::unique_ptr<Stage> inner_;
};

}  // namespace sluice::testing
