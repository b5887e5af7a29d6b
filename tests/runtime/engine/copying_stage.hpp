// A stage that hands its inputs on, on any device: tests derive from it and change some calls.
#pragma once

#include <span>

#include <sluice/device.hpp>
#include <sluice/stage.hpp>

namespace sluice::testing {

// Without parameters, but for those that a derived stage adds to `set_`. The loss is 1 for each
// micro-batch, with gradients of zero.
class CopyingStage : public Stage, public LossStage {
 public:
  StageDescription describe(std::span<const TensorSpec> inputs, ComputeContext&) const override {
    return {.outputs = {inputs.begin(), inputs.end()}};
  }
  ParameterSet* parameters() override { return &set_; }
  void forward(StageContext& ctx, std::span<const Tensor> x, std::span<const Tensor> y) override {
    copy(ctx, x, y);
  }
  void backward(StageContext& ctx, std::span<const Tensor> dy,
                std::span<const Tensor> dx) override {
    copy(ctx, dy, dx);
  }
  void loss(StageContext& ctx, std::span<const Tensor> y, std::span<const Tensor>,
            double* sum) override {
    *sum = 1;
    for (const Tensor& each : y) {
      if (!is_float(each.spec.dtype)) continue;
      fill_zero_async(each.data, each.spec.bytes(), ctx.compute.stream());
    }
  }
  double target_weight(std::span<const Tensor>) const override { return 1; }

 protected:
  ParameterSet set_;

 private:
  static void copy(StageContext& ctx, std::span<const Tensor> from, std::span<const Tensor> to) {
    for (std::size_t i = 0; i < to.size(); ++i) {
      if (to[i].data == nullptr) continue;
      copy_async(to[i].data, from[i].data, to[i].spec.bytes(), ctx.compute.stream());
    }
  }
};

}  // namespace sluice::testing
