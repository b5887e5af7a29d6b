// conv2d, by oneDNN.
#include "stages/cpu/convolution.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>
#include <vector>

#include <sluice/error.hpp>
#include <sluice/layers.hpp>
#include <sluice/operators.hpp>

#include "stages/cpu/parallel.hpp"
#include "stages/network/image.hpp"
#include "stages/tensor/bump_allocator.hpp"

namespace sluice::nn {
namespace {

class ConvolutionLayer final : public OwnLayer<kOnCpus> {
 public:
  ConvolutionLayer(std::int64_t in, std::int64_t out, HeightWidth kernel,
                   const ConvolutionOptions& options)
      : in_(in),
        out_(out),
        groups_(options.groups),
        has_bias_(options.bias),
        window_(kernel, options.stride, options.padding) {
    require_positive(in, "in");
    require_positive(out, "out");
    require_positive(groups_, "groups");
    if (in % groups_ != 0 || out % groups_ != 0) {
      throw_usage("{} groups of {} and {} channels; legal: divisors of both numbers, at most {}",
                  groups_, in, out, std::gcd(in, out));
    }
  }

  [[nodiscard]] TensorSpec output(const TensorSpec& input) const override {
    require_image(input, in_);
    return window_.places(input, out_);
  }
  void add_parameters(ParameterSet& set, const std::string& name) override {
    const Shape shape{out_, in_ / groups_, window_.kernel[0], window_.kernel[1]};
    const Init init =
        Init::uniform(1 / std::sqrt(static_cast<double>(shape[1] * shape[2] * shape[3])));
    weight_ = &set.add(name + "weight", shape, init);
    if (has_bias_) bias_ = &set.add(name + "bias", {out_}, init, /*decay=*/false);
  }
  [[nodiscard]] LayerNeeds needs(const TensorSpec& input,
                                 ComputeContext& /*compute*/) const override {
    return {.memory = {.scratch = scratch_of(input, nullptr).used}};
  }
  [[nodiscard]] double cost(const TensorSpec& input) const override {
    const std::int64_t taps = in_ / groups_ * window_.kernel[0] * window_.kernel[1];
    return static_cast<double>(output(input).shape.elements()) * static_cast<double>(taps);
  }

  void forward(LayerCall& call, const Tensor& y) override {
    made(call.x.spec)
        .forward(call.x.as<float>(), weight_->value.as<float>(),
                 bias_ != nullptr ? bias_->value.as<float>() : nullptr, y.as<float>(),
                 scratch_of(call.x.spec, call.scratch).library);
  }
  void backward_input(LayerCall& call, const Tensor& dy, const Tensor& dx) override {
    made(call.x.spec)
        .backward_input(dy.as<float>(), weight_->value.as<float>(), dx.as<float>(),
                        scratch_of(call.x.spec, call.scratch).library);
  }
  void backward_weight(LayerCall& call, const Tensor& dy) override {
    const Scratch scratch = scratch_of(call.x.spec, call.scratch);
    made(call.x.spec)
        .backward_weight(call.x.as<float>(), dy.as<float>(), scratch.dweight, scratch.library);
    const Write write = next_write({weight_, bias_}, call.compute().stream());
    if (write == Write::kOverwrite) {
      copy_async(weight_->grad.data, scratch.dweight, weight_->grad.spec.bytes(),
                 call.compute().stream());
    } else {
      add(call.compute(), {scratch.dweight, weight_->grad.spec}, weight_->grad);
    }
    if (has_bias_) write_bias_gradient(call, dy, write);
  }

 private:
  // Not by the library, whose sums in f32 lose digits over large images.
  void write_bias_gradient(const LayerCall& call, const Tensor& dy, Write write) const {
    const Shape& shape = dy.shape();
    const std::int64_t size = shape[2] * shape[3];
    parallel_range(call.compute(), out_, 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t c = begin; c < end; ++c) {
        double sum = 0;
        for (std::int64_t sample = 0; sample < shape[0]; ++sample) {
          const float* const from = dy.as<float>() + (sample * out_ + c) * size;
          sum += sum_of(size, [&](std::int64_t i) { return from[i]; });
        }
        const float before = write == Write::kAdd ? bias_->grad.at(c) : 0.0F;
        bias_->grad.at(c) = before + static_cast<float>(sum);
      }
    });
  }

  // The library overwrites the gradient, which is added to the parameter's afterwards.
  struct Scratch {
    float* dweight;
    std::byte* library;
    std::size_t used;
  };
  Scratch scratch_of(const TensorSpec& input, std::byte* memory) const {
    BumpAllocator allocator(memory);
    Scratch scratch{};
    scratch.dweight =
        allocator.take<float>(out_ * (in_ / groups_) * window_.kernel[0] * window_.kernel[1]);
    scratch.library = allocator.bytes(made(input).scratch_bytes());
    scratch.used = allocator.used();
    return scratch;
  }

  // Made when a size of micro-batch is described, found in a step.
  Convolution& made(const TensorSpec& input) const {
    for (auto& [spec, convolution] : made_) {
      if (spec == input) return convolution;
    }
    const ConvolutionShape shape{.samples = input.shape[0],
                                 .in = in_,
                                 .out = out_,
                                 .groups = groups_,
                                 .size = {input.shape[2], input.shape[3]},
                                 .kernel = window_.kernel,
                                 .stride = window_.stride,
                                 .padding = window_.padding,
                                 .bias = has_bias_};
    return made_.emplace_back(input, Convolution(shape)).second;
  }

  std::int64_t in_, out_, groups_;
  bool has_bias_;
  Window window_;
  Parameter* weight_ = nullptr;
  Parameter* bias_ = nullptr;
  mutable std::vector<std::pair<TensorSpec, Convolution>> made_;
};

}  // namespace

LayerSpec conv2d(std::int64_t in, std::int64_t out, HeightWidth kernel,
                 const ConvolutionOptions& options) {
  LayerSpec spec = layer<ConvolutionLayer>("conv2d", in, out, kernel, options);
  spec.settings =
      settings_of(in, out, kernel.height, kernel.width, options.stride.height, options.stride.width,
                  options.padding.height, options.padding.width, options.groups, options.bias);
  return spec;
}

}  // namespace sluice::nn
