// group_norm: Wu and He, "Group Normalization", ECCV 2018.
#include <algorithm>
#include <cmath>

#include <sluice/layers.hpp>

#include "stages/cpu/parallel.hpp"
#include "stages/network/image.hpp"

namespace sluice::nn {
namespace {

class GroupNormLayer final : public OwnLayer<kOnCpus> {
 public:
  GroupNormLayer(std::int64_t groups, std::int64_t channels, double epsilon)
      : groups_(groups), channels_(channels), epsilon_(epsilon) {
    require_positive(groups, "groups");
    require_positive(channels, "channels");
    if (channels % groups != 0) {
      throw_usage("{} channels in {} groups; legal: groups that divide the channels", channels,
                  groups);
    }
    require_epsilon(epsilon);
  }

  [[nodiscard]] TensorSpec output(const TensorSpec& input) const override {
    require_image(input, channels_);
    return input;
  }
  void add_parameters(ParameterSet& set, const std::string& name) override {
    weight_ = &set.add(name + "weight", {channels_}, Init::constant(1), /*decay=*/false);
    bias_ = &set.add(name + "bias", {channels_}, Init::constant(0), /*decay=*/false);
  }
  [[nodiscard]] LayerNeeds needs(const TensorSpec& input,
                                 ComputeContext& /*compute*/) const override {
    const auto all = static_cast<std::size_t>(input.shape[0] * groups_);
    return {.memory = {.until_weight = all * sizeof(Statistics)}};
  }

  void forward(LayerCall& call, const Tensor& y) override {
    for_groups(call, [&](const Group& group, Statistics& kept) {
      const float* const x = call.x.as<float>() + group.first;
      const auto count = static_cast<double>(group.count);
      const double mean = sum_of(group.count, [&](std::int64_t i) { return x[i]; }) / count;
      const double squares = sum_of(group.count, [&](std::int64_t i) {
        const double off = x[i] - mean;
        return off * off;
      });
      kept = {static_cast<float>(mean),
              static_cast<float>(1 / std::sqrt(squares / count + epsilon_))};
      for (std::int64_t c = 0; c < group.channels; ++c) {
        const float scale = weight_->value.at(group.channel + c) * kept.inverse;
        const float shift = bias_->value.at(group.channel + c) - kept.mean * scale;
        float* const to = y.as<float>() + group.first + c * group.size;
        for (std::int64_t i = 0; i < group.size; ++i) to[i] = x[c * group.size + i] * scale + shift;
      }
    });
  }
  void backward_input(LayerCall& call, const Tensor& dy, const Tensor& dx) override {
    for_groups(call, [&](const Group& group, const Statistics& kept) {
      double total = 0, dot = 0;  // of dy times weight, and of that times the normalised x
      for (std::int64_t c = 0; c < group.channels; ++c) {
        const Sums sums = sums_of(call, dy, group, kept, c);
        const auto weight = static_cast<double>(weight_->value.at(group.channel + c));
        total += weight * sums.total;
        dot += weight * sums.dot;
      }
      const auto count = static_cast<double>(group.count);
      const auto mean = static_cast<float>(total / count), slope = static_cast<float>(dot / count);
      for (std::int64_t c = 0; c < group.channels; ++c) {
        const std::int64_t first = group.first + c * group.size;
        const float weight = weight_->value.at(group.channel + c);
        for (std::int64_t i = first; i < first + group.size; ++i) {
          const float normal = (call.x.at(i) - kept.mean) * kept.inverse;
          dx.at(i) = kept.inverse * (dy.at(i) * weight - mean - normal * slope);
        }
      }
    });
  }
  // Samples in order, whatever the number of threads.
  void backward_weight(LayerCall& call, const Tensor& dy) override {
    const auto* const kept = reinterpret_cast<const Statistics*>(call.until_weight);
    const std::int64_t count = call.x.shape()[0] * groups_;
    if (next_write({weight_, bias_}, call.compute().stream()) == Write::kOverwrite) {
      for (const Parameter* each : {weight_, bias_}) {
        std::fill_n(each->grad.as<float>(), each->grad.elements(), 0.0F);
      }
    }
    for (std::int64_t i = 0; i < count; ++i) {
      const Group group = group_of(call, i);
      for (std::int64_t c = 0; c < group.channels; ++c) {
        const Sums sums = sums_of(call, dy, group, kept[i], c);
        weight_->grad.at(group.channel + c) += static_cast<float>(sums.dot);
        bias_->grad.at(group.channel + c) += static_cast<float>(sums.total);
      }
    }
  }

 private:
  struct Statistics {
    float mean = 0, inverse = 0;  // 1 / deviation
  };
  struct Group {
    std::int64_t first = 0, count = 0;       // its numbers
    std::int64_t channel = 0, channels = 0;  // its channels
    std::int64_t size = 0;                   // numbers of a channel
  };
  struct Sums {
    double total = 0, dot = 0;  // of dy, and of dy times the normalised x
  };

  [[nodiscard]] Group group_of(const LayerCall& call, std::int64_t number) const {
    const Shape& shape = call.x.shape();
    Group group;
    group.size = shape[2] * shape[3];
    group.channels = channels_ / groups_;
    group.channel = number % groups_ * group.channels;
    group.count = group.channels * group.size;
    group.first = number * group.count;
    return group;
  }
  template <typename Body>
  void for_groups(const LayerCall& call, const Body& body) const {
    auto* const kept = reinterpret_cast<Statistics*>(call.until_weight);
    parallel_range(call.compute(), call.x.shape()[0] * groups_, 1,
                   [&](std::int64_t begin, std::int64_t end) {
                     for (std::int64_t i = begin; i < end; ++i) body(group_of(call, i), kept[i]);
                   });
  }
  // Of the group's channel c.
  static Sums sums_of(const LayerCall& call, const Tensor& dy, const Group& group,
                      const Statistics& kept, std::int64_t c) {
    const float* const x = call.x.as<float>() + group.first + c * group.size;
    const float* const g = dy.as<float>() + group.first + c * group.size;
    return {sum_of(group.size, [&](std::int64_t i) { return g[i]; }),
            sum_of(group.size,
                   [&](std::int64_t i) { return g[i] * ((x[i] - kept.mean) * kept.inverse); })};
  }

  std::int64_t groups_, channels_;
  double epsilon_;
  Parameter *weight_ = nullptr, *bias_ = nullptr;
};

}  // namespace

LayerSpec group_norm(std::int64_t groups, std::int64_t channels, double epsilon) {
  return layer<GroupNormLayer>("group_norm", groups, channels, epsilon);
}

}  // namespace sluice::nn
