// Losses of a Sequential.
#include <utility>
#include <vector>

#include <sluice/error.hpp>
#include <sluice/layers.hpp>
#include <sluice/operators.hpp>

#include "stages/network/specs.hpp"
#include "stages/tensor/bump_allocator.hpp"

namespace sluice::nn {
namespace {

// Of targets with the outputs' shape, which all count.
class NumbersLoss : public Loss {
 public:
  bool set_shards(const Shards& /*shards*/) override { return true; }
  [[nodiscard]] bool leaves_gradients() const override { return true; }
  [[nodiscard]] TensorSpec targets(const TensorSpec& outputs) const override {
    if (outputs.dtype == DType::kF32 && outputs.shape.rank() > 0) return outputs;
    throw_usage("the outputs are {}; legal: f32 [samples, ...]", to_string(outputs));
  }
  [[nodiscard]] double weight(const TensorSpec& /*outputs*/, const Tensor& targets) const override {
    return static_cast<double>(targets.elements());
  }
};

class SquaredError final : public NumbersLoss {
 public:
  [[nodiscard]] bool runs_on_gpu() const override { return true; }
  [[nodiscard]] bool capturable() const override { return true; }
  [[nodiscard]] std::size_t operator_bytes(const TensorSpec& outputs) const override {
    return mean_squared_error_workspace(outputs.shape.elements());
  }
  void compute(StageContext& ctx, const Tensor& outputs, const Tensor& targets,
               double* sum) override {
    mean_squared_error(ctx.compute, outputs, targets, ctx.loss_scale, ctx.phase == Phase::kTrain,
                       sum);
  }
};

// The classes are one dimension of the outputs: [outer, classes, inner].
class CrossEntropy final : public Loss {
 public:
  explicit CrossEntropy(const CrossEntropyOptions& options) : options_(options) {
    if (options.targets != DType::kI32 && options.targets != DType::kI64) {
      throw_usage("targets are {}; legal: i32 or i64", name_of(options.targets));
    }
    if (!(options.smoothing >= 0 && options.smoothing < 1)) {
      throw_usage("smoothing is {}; legal: at least 0 and below 1", options.smoothing);
    }
    if (options.axis == 0 || options.axis < -1) {
      throw_usage("axis is {}; legal: -1, or from 1 on (0 is the sample)", options.axis);
    }
  }

  bool set_shards(const Shards& /*shards*/) override { return true; }
  [[nodiscard]] bool leaves_gradients() const override { return true; }
  [[nodiscard]] TensorSpec targets(const TensorSpec& outputs) const override {
    const int rank = outputs.shape.rank();
    const int axis = axis_of(outputs);
    if (outputs.dtype != DType::kF32 || rank < 2 || axis >= rank || outputs.shape[axis] < 1) {
      throw_usage("the outputs are {}; legal: f32 [samples, ...] with the classes in dimension {}",
                  to_string(outputs), options_.axis);
    }
    std::vector<std::int64_t> dims;
    for (int d = 0; d < rank; ++d) {
      if (d != axis) dims.push_back(outputs.shape[d]);
    }
    return {options_.targets, Shape(std::span<const std::int64_t>(dims))};
  }
  [[nodiscard]] bool capturable() const override { return true; }
  [[nodiscard]] bool runs_on_gpu() const override {
    return options_.axis == -1 && options_.targets == DType::kI32 && options_.smoothing == 0 &&
           options_.ignored < 0;
  }
  [[nodiscard]] std::size_t operator_bytes(const TensorSpec& outputs) const override {
    const Extent extent = extent_of(outputs);
    std::size_t bytes = softmax_cross_entropy_workspace(extent.rows());
    if (!runs_on_gpu()) bytes += classes_spec(extent).bytes() + kBufferAlignment;
    if (extent.inner > 1) bytes += rows_spec(extent).bytes() + kBufferAlignment;
    return bytes;
  }
  [[nodiscard]] double weight(const TensorSpec& outputs, const Tensor& targets) const override {
    const std::int64_t classes = outputs.shape[axis_of(outputs)];
    std::int64_t counted = 0;
    for (std::int64_t i = 0; i < targets.elements(); ++i) {
      const std::int64_t value = class_at(targets, i);
      if (value < 0 || value == options_.ignored) continue;
      ++counted;
      if (value < classes) continue;
      throw_error(ErrorCode::kData, "class {}; legal: 0 to {}, or negative for none", value,
                  classes - 1);
    }
    return static_cast<double>(counted);
  }
  void compute(StageContext& ctx, const Tensor& outputs, const Tensor& targets,
               double* sum) override {
    const Extent extent = extent_of(outputs.spec);
    const bool trains = ctx.phase == Phase::kTrain;
    if (runs_on_gpu()) {
      return softmax_cross_entropy(ctx.compute, {outputs.data, rows_spec(extent)},
                                   {targets.data, classes_spec(extent)}, ctx.loss_scale, trains,
                                   sum);
    }
    // The operator has its own scratch at the front.
    const std::size_t operators =
        round_up(softmax_cross_entropy_workspace(extent.rows()), kBufferAlignment);
    std::byte* const scratch = ctx.compute.workspace(operator_bytes(outputs.spec)) + operators;
    const Tensor classes{scratch, classes_spec(extent)};
    for (std::int64_t i = 0; i < extent.rows(); ++i) {
      const std::int64_t value = class_at(targets, i);
      classes.as<std::int32_t>()[i] =
          value == options_.ignored ? -1 : static_cast<std::int32_t>(value);
    }
    Tensor rows{outputs.data, rows_spec(extent)};
    if (extent.inner > 1) {
      rows.data = scratch + round_up(classes.spec.bytes(), kBufferAlignment);
      for_places(extent,
                 [&](std::int64_t from, std::int64_t to) { rows.at(to) = outputs.at(from); });
    }
    const double smoothed = smoothed_sum(rows, classes, extent.classes);
    softmax_cross_entropy(ctx.compute, rows, classes, ctx.loss_scale, trains, sum);
    *sum += smoothed;
    if (!trains) return;
    smooth_gradient(rows, classes, extent.classes, static_cast<float>(ctx.loss_scale));
    if (extent.inner == 1) return;
    for_places(extent, [&](std::int64_t to, std::int64_t from) { outputs.at(to) = rows.at(from); });
  }

 private:
  struct Extent {
    std::int64_t outer = 1, classes = 1, inner = 1;
    [[nodiscard]] std::int64_t rows() const { return outer * inner; }
  };

  [[nodiscard]] int axis_of(const TensorSpec& outputs) const {
    return options_.axis == -1 ? outputs.shape.rank() - 1 : options_.axis;
  }
  [[nodiscard]] Extent extent_of(const TensorSpec& outputs) const {
    Extent extent;
    const int axis = axis_of(outputs);
    for (int d = 0; d < outputs.shape.rank(); ++d) {
      (d < axis ? extent.outer : d == axis ? extent.classes : extent.inner) *= outputs.shape[d];
    }
    return extent;
  }
  static TensorSpec rows_spec(const Extent& extent) {
    return {DType::kF32, {extent.rows(), extent.classes}};
  }
  static TensorSpec classes_spec(const Extent& extent) { return {DType::kI32, {extent.rows()}}; }
  static std::int64_t class_at(const Tensor& targets, std::int64_t i) {
    return targets.spec.dtype == DType::kI64 ? targets.as<std::int64_t>()[i]
                                             : targets.as<std::int32_t>()[i];
  }
  // body(a number's place in the outputs, its place in rows of classes)
  template <typename Body>
  static void for_places(const Extent& extent, const Body& body) {
    std::int64_t place = 0;
    for (std::int64_t o = 0; o < extent.outer; ++o) {
      for (std::int64_t c = 0; c < extent.classes; ++c) {
        for (std::int64_t i = 0; i < extent.inner; ++i) {
          body(place++, (o * extent.inner + i) * extent.classes + c);
        }
      }
    }
  }
  // What smoothing adds to the sum: smoothing * (the target's logit - the mean logit).
  [[nodiscard]] double smoothed_sum(const Tensor& rows, const Tensor& classes,
                                    std::int64_t count) const {
    if (options_.smoothing == 0) return 0;
    double sum = 0;
    for (std::int64_t row = 0; row < classes.elements(); ++row) {
      const std::int32_t wanted = classes.as<std::int32_t>()[row];
      if (wanted < 0) continue;
      const float* const logits = rows.as<float>() + row * count;
      double total = 0;
      for (std::int64_t c = 0; c < count; ++c) total += logits[c];
      sum += static_cast<double>(logits[wanted]) - total / static_cast<double>(count);
    }
    return options_.smoothing * sum;
  }
  void smooth_gradient(const Tensor& rows, const Tensor& classes, std::int64_t count,
                       float scale) const {
    if (options_.smoothing == 0) return;
    const float moved = scale * static_cast<float>(options_.smoothing);
    const float each = moved / static_cast<float>(count);
    for (std::int64_t row = 0; row < classes.elements(); ++row) {
      const std::int32_t wanted = classes.as<std::int32_t>()[row];
      if (wanted < 0) continue;
      float* const gradient = rows.as<float>() + row * count;
      for (std::int64_t c = 0; c < count; ++c) gradient[c] -= each;
      gradient[wanted] += moved;
    }
  }

  CrossEntropyOptions options_;
};

class ElementwiseLoss final : public NumbersLoss {
 public:
  explicit ElementwiseLoss(std::function<LossTerm(float, float)> term) : term_(std::move(term)) {
    if (!term_) throw_usage("elementwise_loss() without a function");
  }
  void compute(StageContext& ctx, const Tensor& outputs, const Tensor& targets,
               double* sum) override {
    const double scale = ctx.loss_scale;
    *sum = 0;
    for (std::int64_t i = 0; i < outputs.elements(); ++i) {
      const LossTerm term = term_(outputs.at(i), targets.at(i));
      *sum += term.value;
      if (ctx.phase == Phase::kTrain) outputs.at(i) = static_cast<float>(scale * term.derivative);
    }
  }

 private:
  std::function<LossTerm(float, float)> term_;
};

}  // namespace

LossSpec mse_loss() { return loss<SquaredError>("mse_loss"); }

LossSpec cross_entropy_loss(const CrossEntropyOptions& options) {
  LossSpec spec = loss<CrossEntropy>("cross_entropy_loss", options);
  spec.settings = settings_of(options.axis, static_cast<int>(options.targets), options.ignored,
                              options.smoothing);
  return spec;
}

LossSpec elementwise_loss(std::string kind, std::function<LossTerm(float, float)> term) {
  return loss<ElementwiseLoss>(std::move(kind), std::move(term));
}

}  // namespace sluice::nn
