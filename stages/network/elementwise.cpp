// Layers without parameters: activations, softmax, dropout, flatten, unflatten; and cut().
#include <algorithm>
#include <cmath>
#include <optional>
#include <vector>

#include <sluice/layers.hpp>
#include <sluice/operators.hpp>

#include "stages/network/parts.hpp"
#include "stages/network/specs.hpp"

namespace sluice::nn {
namespace {

constexpr LayerTraits kInPlace{
    .promises = {.recomputes = true, .capturable = true, .in_place = true}};

class ActivationLayer final : public OwnLayer<kInPlace> {
 public:
  explicit ActivationLayer(Pointwise function) : function_(function) {}

  [[nodiscard]] TensorSpec output(const TensorSpec& input) const override {
    require_numbers(input);
    return input;
  }
  void forward(LayerCall& call, const Tensor& y) override {
    pointwise_forward(call.compute(), function_, call.x, y);
  }
  void backward_input(LayerCall& call, const Tensor& dy, const Tensor& dx) override {
    pointwise_backward(call.compute(), function_, call.x, dy, dx);
  }

 private:
  Pointwise function_;
};

// Keeps its output for the gradient.
class SoftmaxLayer final
    : public OwnLayer<LayerTraits{Edges::kWidened, false, {.recomputes = true, .in_place = true}}> {
 public:
  [[nodiscard]] TensorSpec output(const TensorSpec& input) const override {
    if (input.dtype == DType::kF32 && input.shape.rank() > 1) return input;
    throw_usage("the input is {}; legal: f32 [samples, ..., classes]", to_string(input));
  }
  [[nodiscard]] LayerNeeds needs(const TensorSpec& input,
                                 ComputeContext& /*compute*/) const override {
    return {.memory = {.until_input = input.bytes()}};
  }
  void forward(LayerCall& call, const Tensor& y) override {
    const Rows rows(call, y.spec);
    for (std::int64_t first = 0; first < y.elements(); first += rows.width) {
      const float* const x = call.x.as<float>() + first;
      float* const kept = rows.kept + first;
      const float most = *std::max_element(x, x + rows.width);
      double sum = 0;
      for (std::int64_t i = 0; i < rows.width; ++i) sum += kept[i] = std::exp(x[i] - most);
      const auto factor = static_cast<float>(1 / sum);
      for (std::int64_t i = 0; i < rows.width; ++i) kept[i] *= factor;
      std::copy_n(kept, rows.width, y.as<float>() + first);
    }
  }
  void backward_input(LayerCall& call, const Tensor& dy, const Tensor& dx) override {
    const Rows rows(call, dy.spec);
    for (std::int64_t first = 0; first < dy.elements(); first += rows.width) {
      const float* const y = rows.kept + first;
      const float* const gradient = dy.as<float>() + first;
      double sum = 0;
      for (std::int64_t i = 0; i < rows.width; ++i) sum += double{y[i]} * double{gradient[i]};
      const auto mean = static_cast<float>(sum);
      float* const to = dx.as<float>() + first;
      for (std::int64_t i = 0; i < rows.width; ++i) to[i] = y[i] * (gradient[i] - mean);
    }
  }

 private:
  struct Rows {
    Rows(const LayerCall& call, const TensorSpec& spec)
        : kept(reinterpret_cast<float*>(call.until_input)),
          width(std::max<std::int64_t>(spec.shape[spec.shape.rank() - 1], 1)) {}
    float* kept;
    std::int64_t width;
  };
};

class DropoutLayer final : public OwnLayer<kInPlace> {
 public:
  DropoutLayer(double probability, int number)
      : site_{static_cast<float>(probability), random_site(static_cast<std::uint32_t>(number), 0)} {
    if (!(probability >= 0 && probability < 1)) {
      throw_usage("the probability is {}; legal: at least 0 and below 1", probability);
    }
  }

  [[nodiscard]] TensorSpec output(const TensorSpec& input) const override {
    require_numbers(input);
    return input;
  }
  void forward(LayerCall& call, const Tensor& y) override { drop(call, call.x, y); }
  void backward_input(LayerCall& call, const Tensor& dy, const Tensor& dx) override {
    drop(call, dy, dx);
  }

 private:
  void drop(const LayerCall& call, const Tensor& from, const Tensor& to) const {
    const std::int64_t samples = std::max<std::int64_t>(call.stage.samples, 1);
    dropout(call.compute(), from, site_.at(call, from.elements() / samples), to);
  }

  DropoutSite site_;
};

// The numbers of a sample in another shape.
class ReshapeLayer final : public OwnLayer<kOnGpus> {
 public:
  // Without `dims`: all of them in a row.
  explicit ReshapeLayer(const std::optional<Shape>& dims) : dims_(dims) {
    if (dims && dims->rank() == Shape::kMaxDims) {
      throw_usage("{} dimensions; legal: at most {}", dims->rank(), Shape::kMaxDims - 1);
    }
  }

  [[nodiscard]] TensorSpec output(const TensorSpec& input) const override {
    require_numbers(input);
    std::int64_t numbers = 1;
    for (int d = 1; d < input.shape.rank(); ++d) numbers *= input.shape[d];
    if (!dims_) return {input.dtype, {input.shape[0], numbers}};
    if (dims_->elements() != numbers) {
      throw_usage("the input is {}; legal: {} numbers a sample, for {}", to_string(input),
                  dims_->elements(), to_string(*dims_));
    }
    std::vector<std::int64_t> dims = {input.shape[0]};
    for (int d = 0; d < dims_->rank(); ++d) dims.push_back((*dims_)[d]);
    return {input.dtype, Shape(std::span<const std::int64_t>(dims))};
  }
  [[nodiscard]] double cost(const TensorSpec& /*input*/) const override { return 0; }
  void forward(LayerCall& call, const Tensor& y) override { copy(call, call.x, y); }
  void backward_input(LayerCall& call, const Tensor& dy, const Tensor& dx) override {
    copy(call, dy, dx);
  }

 private:
  static void copy(const LayerCall& call, const Tensor& from, const Tensor& to) {
    copy_async(to.data, from.data, from.spec.bytes(), call.compute().stream());
  }

  std::optional<Shape> dims_;
};

LayerSpec activation(const char* kind, Pointwise function) {
  LayerSpec spec = layer<ActivationLayer>(kind, function);
  spec.forms = {.of_panels = ShardForms::kPanels, .dealt = true};
  return spec;
}

}  // namespace

LayerSpec cut() { return {"cut", nullptr}; }
LayerSpec skip(int from, int to, Join join, int axis) {
  return {"skip", nullptr, Skip{from, to, join, axis},
          settings_of(from, to, static_cast<int>(join), axis)};
}
LayerSpec relu() { return activation("relu", Pointwise::kRelu); }
LayerSpec gelu() { return activation("gelu", Pointwise::kGelu); }
LayerSpec gelu_tanh() { return activation("gelu_tanh", Pointwise::kGeluTanh); }
LayerSpec silu() { return activation("silu", Pointwise::kSilu); }
LayerSpec tanh() { return activation("tanh", Pointwise::kTanh); }
LayerSpec sigmoid() { return activation("sigmoid", Pointwise::kSigmoid); }
LayerSpec softmax() { return layer<SoftmaxLayer>("softmax"); }
LayerSpec flatten() { return layer<ReshapeLayer>("flatten", std::optional<Shape>()); }
LayerSpec unflatten(const Shape& dims) {
  LayerSpec spec = layer<ReshapeLayer>("unflatten", std::optional<Shape>(dims));
  spec.settings = to_string(dims);
  return spec;
}

LayerSpec dropout(double probability) {
  return {"dropout",
          [=](int number) { return std::make_unique<DropoutLayer>(probability, number); },
          {},
          settings_of(probability)};
}

}  // namespace sluice::nn
