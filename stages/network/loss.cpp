// Losses of a Sequential.
#include <sluice/error.hpp>
#include <sluice/layers.hpp>
#include <sluice/operators.hpp>

#include "stages/network/specs.hpp"

namespace sluice {
namespace {

class SquaredError final : public Loss {
 public:
  [[nodiscard]] TensorSpec targets(const TensorSpec& outputs) const override {
    if (outputs.dtype == DType::kF32 && outputs.shape.rank() > 0) return outputs;
    throw_usage("the outputs are {}; legal: f32 [samples, ...]", to_string(outputs));
  }
  [[nodiscard]] bool runs_on_gpu() const override { return true; }
  [[nodiscard]] std::size_t operator_bytes(const TensorSpec& outputs) const override {
    return mean_squared_error_workspace(outputs.shape.elements());
  }
  [[nodiscard]] double weight(const TensorSpec& /*outputs*/, const Tensor& targets) const override {
    return static_cast<double>(targets.elements());
  }
  void compute(StageContext& ctx, const Tensor& outputs, const Tensor& targets,
               double* sum) override {
    mean_squared_error(ctx.compute, outputs, targets, ctx.loss_scale, ctx.phase == Phase::kTrain,
                       sum);
  }
};

class CrossEntropy final : public Loss {
 public:
  [[nodiscard]] TensorSpec targets(const TensorSpec& outputs) const override {
    const int rank = outputs.shape.rank();
    if (outputs.dtype != DType::kF32 || rank < 2 || outputs.shape[rank - 1] < 1) {
      throw_usage("the outputs are {}; legal: f32 [samples, ..., classes]", to_string(outputs));
    }
    std::int64_t dims[Shape::kMaxDims] = {};
    for (int d = 0; d + 1 < rank; ++d) dims[d] = outputs.shape[d];
    return {DType::kI32, Shape(std::span<const std::int64_t>(dims, static_cast<size_t>(rank - 1)))};
  }
  [[nodiscard]] bool runs_on_gpu() const override { return true; }
  [[nodiscard]] std::size_t operator_bytes(const TensorSpec& outputs) const override {
    return softmax_cross_entropy_workspace(rows_of(outputs));
  }
  [[nodiscard]] double weight(const TensorSpec& outputs, const Tensor& targets) const override {
    const std::int64_t classes = outputs.shape[outputs.shape.rank() - 1];
    const std::int32_t* const values = targets.as<std::int32_t>();
    std::int64_t counted = 0;
    for (std::int64_t i = 0; i < targets.elements(); ++i) {
      if (values[i] >= classes) {
        throw_error(ErrorCode::kData,
                    "class {} of sample {} of the micro-batch; legal: 0 to {}, or negative for "
                    "none",
                    values[i], i / (targets.elements() / targets.shape()[0]), classes - 1);
      }
      counted += values[i] >= 0 ? 1 : 0;
    }
    return static_cast<double>(counted);
  }
  void compute(StageContext& ctx, const Tensor& outputs, const Tensor& targets,
               double* sum) override {
    const std::int64_t rows = rows_of(outputs.spec);
    const Tensor logits{outputs.data,
                        {DType::kF32, {rows, outputs.shape()[outputs.shape().rank() - 1]}}};
    softmax_cross_entropy(ctx.compute, logits, {targets.data, {DType::kI32, {rows}}},
                          ctx.loss_scale, ctx.phase == Phase::kTrain, sum);
  }
};

}  // namespace

LossSpec mse_loss() {
  return {"mse_loss", [] { return std::make_unique<SquaredError>(); }};
}

LossSpec cross_entropy_loss() {
  return {"cross_entropy_loss", [] { return std::make_unique<CrossEntropy>(); }};
}

}  // namespace sluice
