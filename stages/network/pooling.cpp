// max_pool2d, avg_pool2d, global_avg_pool2d.
#include <algorithm>
#include <cmath>
#include <limits>

#include <sluice/layers.hpp>

#include "stages/cpu/parallel.hpp"
#include "stages/network/image.hpp"

namespace sluice::nn {
namespace {

// Of one channel of one sample.
struct Plane {
  std::int64_t height = 0, width = 0, out_height = 0, out_width = 0;
  Plane(const Tensor& in, const Tensor& out)
      : height(in.shape()[2]),
        width(in.shape()[3]),
        out_height(out.shape()[2]),
        out_width(out.shape()[3]) {}
  [[nodiscard]] std::int64_t in() const { return height * width; }
  [[nodiscard]] std::int64_t out() const { return out_height * out_width; }
};

// What a window has of a plane.
struct Covered {
  std::int64_t first_row, end_row, first_column, end_column, width;

  [[nodiscard]] std::int64_t first() const { return first_row * width + first_column; }
  // body(place in the plane)
  template <typename Body>
  void for_places(const Body& body) const {
    for (std::int64_t row = first_row; row < end_row; ++row) {
      for (std::int64_t column = first_column; column < end_column; ++column) {
        body(row * width + column);
      }
    }
  }
};

// body(plane's number) for all channels of all samples.
template <typename Body>
void for_planes(const LayerCall& call, const Body& body) {
  parallel_range(call.compute(), call.x.shape()[0] * call.x.shape()[1], 1,
                 [&](std::int64_t begin, std::int64_t end) {
                   for (std::int64_t plane = begin; plane < end; ++plane) body(plane);
                 });
}

class PoolingLayer : public OwnLayer<kOnCpus> {
 public:
  PoolingLayer(HeightWidth kernel, const PoolOptions& options)
      : window_(kernel, options.stride.value_or(kernel), options.padding) {
    for (std::size_t d = 0; d < 2; ++d) {
      if (2 * window_.padding[d] > window_.kernel[d]) {
        throw_usage("the padding is {}; legal with a kernel of {}: at most {}", window_.padding[d],
                    window_.kernel[d], window_.kernel[d] / 2);
      }
    }
  }
  [[nodiscard]] TensorSpec output(const TensorSpec& input) const override {
    require_image(input, 0);
    return window_.places(input, input.shape[1]);
  }

 protected:
  // body(what the window covers, output's index)
  template <typename Body>
  void for_windows(const Plane& plane, const Body& body) const {
    for (std::int64_t i = 0; i < plane.out_height; ++i) {
      const std::int64_t top = i * window_.stride[0] - window_.padding[0];
      const std::int64_t first_row = std::max<std::int64_t>(top, 0);
      const std::int64_t end_row = std::min(top + window_.kernel[0], plane.height);
      for (std::int64_t j = 0; j < plane.out_width; ++j) {
        const std::int64_t left = j * window_.stride[1] - window_.padding[1];
        body(Covered{first_row, end_row, std::max<std::int64_t>(left, 0),
                     std::min(left + window_.kernel[1], plane.width), plane.width},
             i * plane.out_width + j);
      }
    }
  }
  [[nodiscard]] float area() const {
    return static_cast<float>(window_.kernel[0] * window_.kernel[1]);
  }

 private:
  Window window_;
};

class MaxPooling final : public PoolingLayer {
 public:
  using PoolingLayer::PoolingLayer;

  // Where each largest number was, in its plane.
  [[nodiscard]] LayerNeeds needs(const TensorSpec& input,
                                 ComputeContext& /*compute*/) const override {
    if (input.shape[2] * input.shape[3] > std::numeric_limits<std::int32_t>::max()) {
      throw_usage("the input is {}; legal: images of less than 2^31 numbers", to_string(input));
    }
    return {.memory = {.until_input = TensorSpec{DType::kI32, output(input).shape}.bytes()}};
  }
  void forward(LayerCall& call, const Tensor& y) override {
    const Plane plane(call.x, y);
    auto* const places = reinterpret_cast<std::int32_t*>(call.until_input);
    for_planes(call, [&](std::int64_t p) {
      const float* const x = call.x.as<float>() + p * plane.in();
      for_windows(plane, [&](const Covered& covered, std::int64_t out) {
        std::int64_t best = covered.first();
        covered.for_places([&](std::int64_t at) {
          if (x[at] > x[best] || std::isnan(x[at])) best = at;
        });
        y.as<float>()[p * plane.out() + out] = x[best];
        places[p * plane.out() + out] = static_cast<std::int32_t>(best);
      });
    });
  }
  void backward_input(LayerCall& call, const Tensor& dy, const Tensor& dx) override {
    const Plane plane(call.x, dy);
    const auto* const places = reinterpret_cast<const std::int32_t*>(call.until_input);
    for_planes(call, [&](std::int64_t p) {
      float* const to = dx.as<float>() + p * plane.in();
      std::fill(to, to + plane.in(), 0.0F);
      for (std::int64_t out = p * plane.out(); out < (p + 1) * plane.out(); ++out) {
        to[places[out]] += dy.as<float>()[out];
      }
    });
  }
};

class AveragePooling final : public PoolingLayer {
 public:
  using PoolingLayer::PoolingLayer;

  void forward(LayerCall& call, const Tensor& y) override {
    const Plane plane(call.x, y);
    for_planes(call, [&](std::int64_t p) {
      const float* const x = call.x.as<float>() + p * plane.in();
      for_windows(plane, [&](const Covered& covered, std::int64_t out) {
        float sum = 0;
        covered.for_places([&](std::int64_t at) { sum += x[at]; });
        y.as<float>()[p * plane.out() + out] = sum / area();
      });
    });
  }
  void backward_input(LayerCall& call, const Tensor& dy, const Tensor& dx) override {
    const Plane plane(call.x, dy);
    for_planes(call, [&](std::int64_t p) {
      float* const to = dx.as<float>() + p * plane.in();
      std::fill(to, to + plane.in(), 0.0F);
      for_windows(plane, [&](const Covered& covered, std::int64_t out) {
        const float share = dy.as<float>()[p * plane.out() + out] / area();
        covered.for_places([&](std::int64_t at) { to[at] += share; });
      });
    });
  }
};

class GlobalAverage final : public OwnLayer<kOnCpus> {
 public:
  [[nodiscard]] TensorSpec output(const TensorSpec& input) const override {
    require_image(input, 0);
    return {DType::kF32, {input.shape[0], input.shape[1]}};
  }
  void forward(LayerCall& call, const Tensor& y) override {
    const std::int64_t size = call.x.shape()[2] * call.x.shape()[3];
    for_planes(call, [&](std::int64_t p) {
      const float* const x = call.x.as<float>() + p * size;
      double sum = 0;
      for (std::int64_t i = 0; i < size; ++i) sum += x[i];
      y.at(p) = static_cast<float>(sum / static_cast<double>(size));
    });
  }
  void backward_input(LayerCall& call, const Tensor& dy, const Tensor& dx) override {
    const std::int64_t size = call.x.shape()[2] * call.x.shape()[3];
    for_planes(call, [&](std::int64_t p) {
      float* const to = dx.as<float>() + p * size;
      std::fill(to, to + size, dy.at(p) / static_cast<float>(size));
    });
  }
};

template <typename T>
LayerSpec pooling(const char* kind, HeightWidth kernel, const PoolOptions& options) {
  LayerSpec spec = layer<T>(kind, kernel, options);
  const HeightWidth stride = options.stride.value_or(kernel);
  spec.settings = settings_of(kernel.height, kernel.width, stride.height, stride.width,
                              options.padding.height, options.padding.width);
  return spec;
}

}  // namespace

LayerSpec max_pool2d(HeightWidth kernel, const PoolOptions& options) {
  return pooling<MaxPooling>("max_pool2d", kernel, options);
}

LayerSpec avg_pool2d(HeightWidth kernel, const PoolOptions& options) {
  return pooling<AveragePooling>("avg_pool2d", kernel, options);
}

LayerSpec global_avg_pool2d() { return layer<GlobalAverage>("global_avg_pool2d"); }

}  // namespace sluice::nn
