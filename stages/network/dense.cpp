// Layers with parameters over the last dimension: linear, layer_norm, rms_norm, embedding.
#include <algorithm>
#include <cmath>
#include <optional>

#include <sluice/layers.hpp>
#include <sluice/operators.hpp>

#include "stages/network/parts.hpp"
#include "stages/network/specs.hpp"

namespace sluice {
namespace {

constexpr LayerPromises kPromises{.recomputes = true, .capturable = true};

BlockShape shape_of(const LayerCall& call) {
  return block_shape(call.x.spec, call.compute().device().kind);
}

class LinearLayer final : public Layer {
 public:
  LinearLayer(std::int64_t in, std::int64_t out, bool bias)
      : options_{.in = in, .out = out, .bias = bias} {
    require_positive(in, "in");
    require_positive(out, "out");
    options_.weight = options_.bias_init = Init::uniform(1 / std::sqrt(static_cast<double>(in)));
  }

  Edges set_precision(const Precision& precision) override {
    options_.precision = precision.operands;
    options_.rounds_bias = precision.stream != DType::kF32;
    stream_ = precision.stream;
    return Edges::kOperands;
  }
  [[nodiscard]] TensorSpec output(const TensorSpec& input) const override {
    require_width(input, options_.in, options_.precision);
    return {stream_, with_width(input, options_.out).shape};
  }
  void add_parameters(ParameterSet& set, const std::string& name) override {
    linear_.emplace(name, options_, set);
  }
  [[nodiscard]] LayerNeeds needs(const TensorSpec& input, ComputeContext& compute) const override {
    return {.operator_bytes = linear_->workspace(compute, rows_of(input), stream_)};
  }
  [[nodiscard]] bool overwrites_gradients() const override { return true; }
  [[nodiscard]] bool runs_on_gpu() const override { return true; }
  [[nodiscard]] LayerPromises promises() const override {
    LayerPromises promises = kPromises;
    promises.reads_rounded = options_.precision != stream_;
    return promises;
  }
  [[nodiscard]] double cost(const TensorSpec& input) const override {
    return static_cast<double>(input.shape.elements()) * static_cast<double>(options_.out);
  }
  void forward(LayerCall& call, const Tensor& y) override {
    linear_->forward(call.compute(), call.x, y);
  }
  void backward_input(LayerCall& call, const Tensor& dy, const Tensor& dx) override {
    linear_->backward_input(call.compute(), operand_gradient(call, dy), dx);
  }
  void backward_weight(LayerCall& call, const Tensor& dy) override {
    linear_->backward_weight(call.compute(), shape_of(call), call.x, operand_gradient(call, dy));
  }

 private:
  Linear::Options options_;
  DType stream_ = DType::kF32;
  std::optional<Linear> linear_;  // once there are parameters
};

class NormLayer final : public Layer {
 public:
  NormLayer(Norm::Kind kind, std::int64_t width, double epsilon) : kind_(kind), width_(width) {
    require_positive(width, "width");
    require_epsilon(epsilon);
    epsilon_ = static_cast<float>(epsilon);
  }

  Edges set_precision(const Precision& /*precision*/) override { return Edges::kStream; }
  [[nodiscard]] TensorSpec output(const TensorSpec& input) const override {
    require_width(input, width_, input.dtype == DType::kBf16 ? DType::kBf16 : DType::kF32);
    return input;
  }
  void add_parameters(ParameterSet& set, const std::string& name) override {
    norm_.emplace(kind_, name, width_, epsilon_, set);
  }
  [[nodiscard]] LayerNeeds needs(const TensorSpec& input, ComputeContext& compute) const override {
    const std::int64_t rows = rows_of(input);
    return {.memory = {.until_weight = norm_->stats({}, rows).spec.bytes()},
            .operator_bytes = norm_->workspace(compute, rows)};
  }
  [[nodiscard]] bool overwrites_gradients() const override { return true; }
  [[nodiscard]] bool runs_on_gpu() const override { return true; }
  [[nodiscard]] LayerPromises promises() const override {
    return {.recomputes = true, .capturable = true, .writes_rounded = true};
  }
  void forward(LayerCall& call, const Tensor& y) override {
    norm_->forward(call.compute(), call.x, y, stats_of(call));
  }
  void backward_input(LayerCall& call, const Tensor& dy, const Tensor& dx) override {
    norm_->backward_input(call.compute(), dy, call.x, stats_of(call), {}, {dx, call.rounded_dx});
  }
  void backward_weight(LayerCall& call, const Tensor& dy) override {
    norm_->backward_weight(call.compute(), shape_of(call), dy, call.x, stats_of(call));
  }
  void backward(LayerCall& call, const Tensor& dy, const Tensor& dx) override {
    norm_->backward(call.compute(), shape_of(call), dy, call.x, stats_of(call), {},
                    {dx, call.rounded_dx});
  }

 private:
  [[nodiscard]] Tensor stats_of(const LayerCall& call) const {
    return norm_->stats(call.until_weight, rows_of(call.x.spec));
  }

  Norm::Kind kind_;
  std::int64_t width_;
  float epsilon_ = 0;
  std::optional<Norm> norm_;  // once there are parameters
};

class EmbeddingTable final : public Layer {
 public:
  EmbeddingTable(std::int64_t classes, std::int64_t width, std::int64_t places)
      : classes_(classes), width_(width), places_(places) {
    require_positive(classes, "classes");
    require_positive(width, "width");
    if (places < 0) throw_usage("positions is {}; legal: at least 0", places);
  }

  Edges set_precision(const Precision& precision) override {
    stream_ = precision.stream;
    return Edges::kStream;
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
    if (rank == 1) return {stream_, {input.shape[0], width_}};
    return {stream_, {input.shape[0], input.shape[1], width_}};
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
  [[nodiscard]] LayerPromises promises() const override { return kPromises; }
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
    return {y.data, {y.spec.dtype, {y.elements() / width_, width_}}};
  }

  std::int64_t classes_, width_, places_;
  DType stream_ = DType::kF32;
  Parameter *table_ = nullptr, *positions_ = nullptr;
};

LayerSpec norm(const char* name, Norm::Kind kind, std::int64_t width, double epsilon) {
  LayerSpec spec = layer<NormLayer>(name, kind, width, epsilon);
  spec.settings = settings_of(width, epsilon);
  return spec;
}

}  // namespace

LayerSpec linear(std::int64_t in, std::int64_t out, bool bias) {
  return layer<LinearLayer>("linear", in, out, bias);
}

LayerSpec layer_norm(std::int64_t width, double epsilon) {
  return norm("layer_norm", Norm::Kind::kLayer, width, epsilon);
}

LayerSpec rms_norm(std::int64_t width, double epsilon) {
  return norm("rms_norm", Norm::Kind::kRms, width, epsilon);
}

LayerSpec embedding(std::int64_t classes, std::int64_t width, std::int64_t positions) {
  return layer<EmbeddingTable>("embedding", classes, width, positions);
}

}  // namespace sluice
