// Stages whose forward and backward are a few integer operations in floats, so that an engine test
// can say what must come out, to the bit.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <stdexcept>
#include <vector>

#include <sluice/data.hpp>
#include <sluice/pipeline.hpp>

namespace sluice::testing {

// Forward of that micro-batch of that step calls `act`.
struct PlannedFailure {
  std::uint64_t step = 0;
  int micro_batch = 0;
  std::function<void()> act;
};

// y = x * w with one parameter w, of rows [samples, 1]; the last stage's loss is the sum of its
// outputs times the targets.
class ArithmeticStage : public Stage, public SplitBackward, public LossStage {
 public:
  // `tied`: the name of a parameter that all stages share, instead of one of its own.
  explicit ArithmeticStage(int stage, PlannedFailure failure = {}, const std::string& tied = "")
      : weight_(&set_.add(tied.empty() ? "w" + std::to_string(stage) : tied, Shape{1},
                          Init::constant(tied.empty() ? stage + 1 : 1), true, !tied.empty())),
        failure_(std::move(failure)) {}

  StageDescription describe(std::span<const TensorSpec> inputs, ComputeContext&) const override {
    return {{inputs[0]}};
  }
  ParameterSet* parameters() override { return &set_; }

  void forward(StageContext& ctx, std::span<const Tensor> x, std::span<const Tensor> y) override {
    if (failure_.act && ctx.step == failure_.step && ctx.micro_batch == failure_.micro_batch) {
      failure_.act();
    }
    for (std::int64_t i = 0; i < x[0].elements(); ++i) y[0].at(i) = x[0].at(i) * value();
  }
  void backward(StageContext& ctx, std::span<const Tensor> dy,
                std::span<const Tensor> dx) override {
    backward_input(ctx, dy, dx);
    backward_weight(ctx, dy);
  }
  void backward_input(StageContext&, std::span<const Tensor> dy,
                      std::span<const Tensor> dx) override {
    if (dx.empty()) return;
    for (std::int64_t i = 0; i < dy[0].elements(); ++i) dx[0].at(i) = dy[0].at(i) * value();
  }
  void backward_weight(StageContext& ctx, std::span<const Tensor> dy) override {
    for (std::int64_t i = 0; i < dy[0].elements(); ++i) {
      weight_->grad.at(0) += dy[0].at(i) * ctx.inputs[0].at(i);
    }
    if (ctx.final_gradients != nullptr) ctx.final_gradients->from(0);
  }
  void loss(StageContext& ctx, std::span<const Tensor> y, std::span<const Tensor> targets,
            double* sum) override {
    *sum = 0;
    for (std::int64_t i = 0; i < y[0].elements(); ++i) {
      *sum += static_cast<double>(y[0].at(i)) * static_cast<double>(targets[0].at(i));
      if (ctx.phase == Phase::kTrain) {
        y[0].at(i) = targets[0].at(i) * static_cast<float>(ctx.loss_scale);
      }
    }
  }
  double target_weight(std::span<const Tensor> targets) const override {
    return static_cast<double>(targets[0].elements());
  }

 private:
  float value() const { return weight_->value.at(0); }
  ParameterSet set_;
  Parameter* weight_;
  PlannedFailure failure_;
};

// 8 samples 1..8, targets all one.
inline std::unique_ptr<DataSource> counting_source(std::int64_t batch_size) {
  return make_array_source({1, 2, 3, 4, 5, 6, 7, 8}, 1, std::vector<float>(8, 1), 1, batch_size);
}

}  // namespace sluice::testing
