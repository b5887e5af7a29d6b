// Layers with parameters over the last dimension: linear, layer_norm, rms_norm, embedding.
#include <algorithm>
#include <cmath>

#include <sluice/layers.hpp>
#include <sluice/operators.hpp>

#include "stages/compute/product.hpp"
#include "stages/network/specs.hpp"
#include "stages/tensor/bump_allocator.hpp"

namespace sluice {
namespace {

// As the other one, of a layer's input: by sample where that costs no time. Sums of an RMSNorm go
// row by row anyway.
template <typename Work>
void for_summed_rows(const LayerCall& call, const Work& work) {
  const std::int64_t samples = call.x.shape()[0], rows = leading_rows(call.x) / samples;
  const bool on_cpu = call.compute().device().kind == DeviceKind::kCpu;
  sluice::for_summed_rows(samples, rows, on_cpu && rows >= kRowsToSumBySample, work);
}

class LinearLayer final : public Layer {
 public:
  LinearLayer(std::int64_t in, std::int64_t out, bool has_bias)
      : in_(in), out_(out), has_bias_(has_bias) {
    require_positive(in, "in");
    require_positive(out, "out");
  }

  [[nodiscard]] TensorSpec output(const TensorSpec& input) const override {
    require_width(input, in_);
    return with_width(input, out_);
  }
  void add_parameters(ParameterSet& set, const std::string& name) override {
    const Init init = Init::uniform(1 / std::sqrt(static_cast<double>(in_)));
    weight_ = &set.add(name + "weight", {out_, in_}, init);
    if (has_bias_) bias_ = &set.add(name + "bias", {out_}, init, /*decay=*/false);
  }
  [[nodiscard]] LayerNeeds needs(const TensorSpec& input, ComputeContext& compute) const override {
    const LinearShape shape{.rows = rows_of(input), .in = in_, .out = out_, .bias = has_bias_};
    return {.operator_bytes = std::max(linear_forward_workspace(compute, shape),
                                       linear_backward_weight_workspace(compute, shape))};
  }
  [[nodiscard]] bool overwrites_gradients() const override { return true; }
  [[nodiscard]] bool runs_on_gpu() const override { return true; }
  [[nodiscard]] double cost(const TensorSpec& input) const override {
    return static_cast<double>(input.shape.elements()) * static_cast<double>(out_);
  }
  void forward(LayerCall& call, const Tensor& y) override {
    linear_forward(call.compute(), call.x, weight_->value,
                   bias_ != nullptr ? bias_->value : Tensor{}, y);
  }
  void backward_input(LayerCall& call, const Tensor& dy, const Tensor& dx) override {
    linear_backward_input(call.compute(), dy, weight_->value, dx);
  }
  void backward_weight(LayerCall& call, const Tensor& dy) override {
    for_summed_rows(call, [&](std::int64_t first, std::int64_t rows) {
      linear_backward_weight(call.compute(), rows_from(call.x, first, rows),
                             rows_from(dy, first, rows), weight_->grad,
                             bias_ != nullptr ? bias_->grad : Tensor{},
                             next_write({weight_, bias_}, call.compute().stream()));
    });
  }

 private:
  std::int64_t in_, out_;
  bool has_bias_;
  Parameter* weight_ = nullptr;
  Parameter* bias_ = nullptr;
};

class LayerNormLayer final : public Layer {
 public:
  LayerNormLayer(std::int64_t width, double epsilon) : width_(width) {
    require_positive(width, "width");
    require_epsilon(epsilon);
    epsilon_ = static_cast<float>(epsilon);
  }

  [[nodiscard]] TensorSpec output(const TensorSpec& input) const override {
    require_width(input, width_);
    return input;
  }
  void add_parameters(ParameterSet& set, const std::string& name) override {
    weight_ = &set.add(name + "weight", {width_}, Init::constant(1), /*decay=*/false);
    bias_ = &set.add(name + "bias", {width_}, Init::constant(0), /*decay=*/false);
  }
  [[nodiscard]] LayerNeeds needs(const TensorSpec& input, ComputeContext& compute) const override {
    const std::int64_t rows = rows_of(input);
    return {.memory = {.until_weight = stats_of({}, rows).spec.bytes()},
            .operator_bytes = norm_backward_workspace(compute, rows, width_, /*terms=*/2)};
  }
  [[nodiscard]] bool overwrites_gradients() const override { return true; }
  [[nodiscard]] bool runs_on_gpu() const override { return true; }
  void forward(LayerCall& call, const Tensor& y) override {
    layer_norm_forward(call.compute(), call.x, weight_->value, bias_->value, epsilon_, y,
                       stats_of(call.until_weight, rows_of(y.spec)));
  }
  void backward_input(LayerCall& call, const Tensor& dy, const Tensor& dx) override {
    layer_norm_backward(call.compute(), dy, call.x, weight_->value,
                        stats_of(call.until_weight, rows_of(dy.spec)), {.dx = dx});
  }
  void backward_weight(LayerCall& call, const Tensor& dy) override {
    const Tensor stats = stats_of(call.until_weight, rows_of(dy.spec));
    for_summed_rows(call, [&](std::int64_t first, std::int64_t rows) {
      layer_norm_backward(call.compute(), rows_from(dy, first, rows),
                          rows_from(call.x, first, rows), weight_->value,
                          rows_from(stats, first, rows),
                          {.dgamma = weight_->grad,
                           .dbeta = bias_->grad,
                           .write = next_write({weight_, bias_}, call.compute().stream())});
    });
  }

 private:
  // Mean and 1 / deviation of each row.
  static Tensor stats_of(std::byte* memory, std::int64_t rows) {
    return {memory, {DType::kF32, {rows, 2}}};
  }

  std::int64_t width_;
  float epsilon_ = 0;
  Parameter* weight_ = nullptr;
  Parameter* bias_ = nullptr;
};

class RmsNormLayer final : public Layer {
 public:
  RmsNormLayer(std::int64_t width, double epsilon) : width_(width) {
    require_positive(width, "width");
    require_epsilon(epsilon);
    epsilon_ = static_cast<float>(epsilon);
  }

  [[nodiscard]] TensorSpec output(const TensorSpec& input) const override {
    require_width(input, width_);
    return input;
  }
  void add_parameters(ParameterSet& set, const std::string& name) override {
    weight_ = &set.add(name + "weight", {width_}, Init::constant(1), /*decay=*/false);
  }
  [[nodiscard]] LayerNeeds needs(const TensorSpec& input, ComputeContext& compute) const override {
    const std::int64_t rows = rows_of(input);
    return {.memory = {.until_weight = stats_of({}, rows).spec.bytes()},
            .operator_bytes = norm_backward_workspace(compute, rows, width_, /*terms=*/1)};
  }
  [[nodiscard]] bool overwrites_gradients() const override { return true; }
  [[nodiscard]] bool runs_on_gpu() const override { return true; }
  void forward(LayerCall& call, const Tensor& y) override {
    rms_norm_forward(call.compute(), call.x, weight_->value, epsilon_, y,
                     stats_of(call.until_weight, rows_of(y.spec)));
  }
  void backward_input(LayerCall& call, const Tensor& dy, const Tensor& dx) override {
    rms_norm_backward(call.compute(), dy, call.x, weight_->value,
                      stats_of(call.until_weight, rows_of(dy.spec)), {.dx = dx});
  }
  void backward_weight(LayerCall& call, const Tensor& dy) override {
    rms_norm_backward(
        call.compute(), dy, call.x, weight_->value, stats_of(call.until_weight, rows_of(dy.spec)),
        {.dgamma = weight_->grad, .write = next_write({weight_}, call.compute().stream())});
  }

 private:
  // 1 / root mean square of each row.
  static Tensor stats_of(std::byte* memory, std::int64_t rows) {
    return {memory, {DType::kF32, {rows, 1}}};
  }

  std::int64_t width_;
  float epsilon_ = 0;
  Parameter* weight_ = nullptr;
};

class EmbeddingTable final : public Layer {
 public:
  EmbeddingTable(std::int64_t classes, std::int64_t width, std::int64_t places)
      : classes_(classes), width_(width), places_(places) {
    require_positive(classes, "classes");
    require_positive(width, "width");
    if (places < 0) throw_usage("positions is {}; legal: at least 0", places);
  }

  [[nodiscard]] TensorSpec output(const TensorSpec& input) const override {
    const int rank = input.shape.rank();
    if (input.dtype != DType::kI32 || rank < 1 || rank > 2) {
      throw_usage("the input is {}; legal: i32 [samples] or [samples, n]", to_string(input));
    }
    if (places_ > 0 && (rank == 1 || input.shape[1] > places_)) {
      throw_usage("the input is {}; legal with {} positions: i32 [samples, n] with n up to {}",
                  to_string(input), places_, places_);
    }
    if (rank == 1) return {DType::kF32, {input.shape[0], width_}};
    return {DType::kF32, {input.shape[0], input.shape[1], width_}};
  }
  void add_parameters(ParameterSet& set, const std::string& name) override {
    table_ = &set.add(name + "weight", {classes_, width_}, Init::normal(1));
    if (places_ > 0) positions_ = &set.add(name + "positions", {places_, width_}, Init::normal(1));
  }
  [[nodiscard]] LayerNeeds needs(const TensorSpec& input, ComputeContext& compute) const override {
    return {.operator_bytes = embedding_backward_weight_workspace(compute, input.shape.elements(),
                                                                  classes_, width_)};
  }
  [[nodiscard]] bool overwrites_gradients() const override { return true; }
  [[nodiscard]] bool runs_on_gpu() const override { return true; }
  void check_inputs(const Tensor& x) const override {
    const std::int32_t* const begin = x.as<std::int32_t>();
    for (std::int64_t i = 0; i < x.elements(); ++i) {
      if (begin[i] >= 0 && begin[i] < classes_) continue;
      throw_error(ErrorCode::kData, "class {}; legal: 0 to {}", begin[i], classes_ - 1);
    }
  }
  void forward(LayerCall& call, const Tensor& y) override {
    embedding_forward(call.compute(), classes_of(call), table_->value,
                      positions_ != nullptr ? positions_->value : Tensor{}, rows(y));
  }
  void backward_input(LayerCall& /*call*/, const Tensor& /*dy*/, const Tensor& /*dx*/) override {}
  void backward_weight(LayerCall& call, const Tensor& dy) override {
    embedding_backward_weight(call.compute(), classes_of(call), rows(dy), table_->grad,
                              positions_ != nullptr ? positions_->grad : Tensor{},
                              next_write({table_, positions_}, call.compute().stream()));
  }

 private:
  // As the operator takes them: [samples, n], and rows of the table.
  static Tensor classes_of(const LayerCall& call) {
    const std::int64_t samples = call.x.shape()[0];
    return {call.x.data, {DType::kI32, {samples, samples == 0 ? 0 : call.x.elements() / samples}}};
  }
  [[nodiscard]] Tensor rows(const Tensor& y) const {
    return {y.data, {DType::kF32, {y.elements() / width_, width_}}};
  }

  std::int64_t classes_, width_, places_;
  Parameter *table_ = nullptr, *positions_ = nullptr;
};

}  // namespace

LayerSpec linear(std::int64_t in, std::int64_t out, bool bias) {
  return layer<LinearLayer>("linear", in, out, bias);
}

LayerSpec layer_norm(std::int64_t width, double epsilon) {
  return layer<LayerNormLayer>("layer_norm", width, epsilon);
}

LayerSpec rms_norm(std::int64_t width, double epsilon) {
  return layer<RmsNormLayer>("rms_norm", width, epsilon);
}

LayerSpec embedding(std::int64_t classes, std::int64_t width, std::int64_t positions) {
  return layer<EmbeddingTable>("embedding", classes, width, positions);
}

}  // namespace sluice
