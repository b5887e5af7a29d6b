// batch_norm2d: Ioffe and Szegedy, "Batch Normalization", ICML 2015. Running statistics once per
// step: Kim et al., "torchgpipe", 2020, section 2.4.4 (DeferredBatchNorm).
//
// Synchronised over replicas, a forward exchanges the sums that make mean and variance, and an
// input gradient the two sums over dy that it needs; the gradients of weight and bias are those of
// this replica, which the step adds up. A forward that runs again takes the mean and deviation of
// the first one.
#include <cmath>
#include <vector>

#include <sluice/error.hpp>
#include <sluice/layers.hpp>

#include "stages/cpu/parallel.hpp"
#include "stages/network/image.hpp"
#include "stages/tensor/bump_allocator.hpp"

namespace sluice::nn {
namespace {

// The numbers of one channel: `size` in each sample.
struct Channel {
  std::int64_t samples = 0, channels = 0, size = 0, number = 0;

  [[nodiscard]] std::int64_t count() const { return samples * size; }
  // body(the first index of the channel in a sample)
  template <typename Body>
  void for_samples(const Body& body) const {
    for (std::int64_t s = 0; s < samples; ++s) body((s * channels + number) * size);
  }
};

class BatchNormLayer final : public OwnLayer<kOnCpus> {
 public:
  BatchNormLayer(std::int64_t channels, const BatchNormOptions& options)
      : channels_(channels), options_(options) {
    require_positive(channels, "channels");
    require_epsilon(options.epsilon);
    if (!(options.momentum >= 0 && options.momentum <= 1)) {
      throw_usage("momentum is {}; legal: 0 to 1", options.momentum);
    }
  }

  [[nodiscard]] TensorSpec output(const TensorSpec& input) const override {
    require_image(input, channels_);
    return input;
  }
  void add_parameters(ParameterSet& set, const std::string& name) override {
    weight_ = &set.add(name + "weight", {channels_}, Init::constant(1), /*decay=*/false);
    bias_ = &set.add(name + "bias", {channels_}, Init::constant(0), /*decay=*/false);
    const ReplicaRule across =
        synchronised() ? ReplicaRule::kFirst : ReplicaRule::kMean;  // all have the same
    mean_ = &set.add_buffer(name + "running_mean", {channels_}, Init::constant(0), across);
    variance_ = &set.add_buffer(name + "running_var", {channels_}, Init::constant(1), across);
  }
  [[nodiscard]] LayerNeeds needs(const TensorSpec& /*input*/,
                                 ComputeContext& /*compute*/) const override {
    const std::size_t pairs = static_cast<std::size_t>(channels_) * sizeof(Pair);
    LayerNeeds needs{.memory = {.lasting = pairs + sizeof(double), .gradients = pairs}};
    if (!synchronised()) return needs;
    const PlannedCollective sum{.axis = CollectiveAxis::kReplica,
                                .kind = CollectiveKind::kSum,
                                .bytes = exchanged_count() * sizeof(double),
                                .type = DType::kF64};
    needs.collectives = {.forward = {sum}, .backward_input = {sum}};
    return needs;
  }

  void forward(LayerCall& call, const Tensor& y) override {
    const bool trains = call.stage.phase == Phase::kTrain;
    if (trains && !call.again) measure_all(call);
    const auto* const kept = reinterpret_cast<const Pair*>(call.lasting);
    for_channels(call, [&](const Channel& channel) {
      const Pair used = trains ? kept[channel.number] : running(channel.number);
      const float scale = weight_->value.at(channel.number) * used.second;
      const float shift = bias_->value.at(channel.number) - used.first * scale;
      channel.for_samples([&](std::int64_t first) {
        const float* const x = call.x.as<float>() + first;
        float* const to = y.as<float>() + first;
        for (std::int64_t i = 0; i < channel.size; ++i) to[i] = x[i] * scale + shift;
      });
    });
    if (!trains || call.again || ++seen_ < call.stage.micro_batches) return;
    seen_ = 0;
    if (call.stage.last_batch) move_running();
  }

  // Always called before backward_weight, for which it keeps its sums.
  void backward_input(LayerCall& call, const Tensor& dy, const Tensor& dx) override {
    const auto* const kept = reinterpret_cast<const Pair*>(call.lasting);
    auto* const sums = reinterpret_cast<Pair*>(call.gradients);
    for_channels(call, [&](const Channel& channel) {
      const Pair used = kept[channel.number];
      double total = 0, dot = 0;  // of dy, and of dy times the normalised x
      channel.for_samples([&](std::int64_t first) {
        const float* const x = call.x.as<float>() + first;
        const float* const g = dy.as<float>() + first;
        total += sum_of(channel.size, [&](std::int64_t i) { return g[i]; });
        dot += sum_of(channel.size,
                      [&](std::int64_t i) { return g[i] * ((x[i] - used.first) * used.second); });
      });
      sums[channel.number] = {static_cast<float>(dot), static_cast<float>(total)};
      exchanged_[first_of(channel.number)] = total;
      exchanged_[first_of(channel.number) + 1] = dot;
    });
    exchange(call);
    if (dx.data == nullptr) return;
    const double count = *count_of(call);
    for_channels(call, [&](const Channel& channel) {
      const Pair used = kept[channel.number];
      const auto mean = static_cast<float>(exchanged_[first_of(channel.number)] / count);
      const auto slope = static_cast<float>(exchanged_[first_of(channel.number) + 1] / count);
      const float scale = weight_->value.at(channel.number) * used.second;
      channel.for_samples([&](std::int64_t first) {
        const float* const x = call.x.as<float>() + first;
        const float* const g = dy.as<float>() + first;
        float* const to = dx.as<float>() + first;
        for (std::int64_t i = 0; i < channel.size; ++i) {
          const float normal = (x[i] - used.first) * used.second;
          to[i] = scale * (g[i] - mean - normal * slope);
        }
      });
    });
  }
  void backward_weight(LayerCall& call, const Tensor& /*dy*/) override {
    const auto* const sums = reinterpret_cast<const Pair*>(call.gradients);
    const bool adds = next_write({weight_, bias_}, call.compute().stream()) == Write::kAdd;
    for (std::int64_t c = 0; c < channels_; ++c) {
      weight_->grad.at(c) = (adds ? weight_->grad.at(c) : 0.0F) + sums[c].first;
      bias_->grad.at(c) = (adds ? bias_->grad.at(c) : 0.0F) + sums[c].second;
    }
  }

 private:
  struct Pair {
    float first = 0, second = 0;  // mean and 1 / deviation; or two sums
  };
  // Of a channel over the micro-batches of a step so far: their number of numbers, the sum, and the
  // sum of squared distances to the micro-batch's mean plus its mean's squares.
  struct Sums {
    double count = 0, sum = 0, squares = 0;
  };

  [[nodiscard]] Channel channel_of(const LayerCall& call, std::int64_t number) const {
    const Shape& shape = call.x.shape();
    return {
        .samples = shape[0], .channels = channels_, .size = shape[2] * shape[3], .number = number};
  }
  template <typename Body>
  void for_channels(const LayerCall& call, const Body& body) const {
    parallel_range(call.compute(), channels_, 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t c = begin; c < end; ++c) body(channel_of(call, c));
    });
  }

  [[nodiscard]] bool synchronised() const {
    return options_.statistics == BatchStatistics::kReplicas;
  }
  // Of a channel, among the numbers that are exchanged.
  [[nodiscard]] static std::size_t first_of(std::int64_t channel) {
    return 2 * static_cast<std::size_t>(channel);
  }
  // Two numbers of each channel, and how many there are.
  [[nodiscard]] std::size_t exchanged_count() const { return first_of(channels_) + 1; }
  // How many numbers a channel has, over all replicas where they are synchronised; behind the
  // pairs.
  [[nodiscard]] double* count_of(const LayerCall& call) const {
    return reinterpret_cast<double*>(call.lasting +
                                     static_cast<std::size_t>(channels_) * sizeof(Pair));
  }
  void exchange(const LayerCall& call) {
    if (synchronised() && call.stage.collective != nullptr) call.stage.collective->sum(exchanged_);
  }

  // Writes each channel's mean and 1 / deviation, and adds to its sums. The first call allocates:
  // the plan has refused more channels than there is memory for.
  void measure_all(const LayerCall& call) {
    if (seen_ == 0 && call.stage.first_batch)
      sums_.assign(static_cast<std::size_t>(channels_), Sums{});
    exchanged_.resize(exchanged_count());
    for_channels(call, [&](const Channel& channel) {
      measure(call.x.as<float>(), channel, &exchanged_[first_of(channel.number)]);
    });
    exchanged_.back() = static_cast<double>(channel_of(call, 0).count());
    exchange(call);
    const double count = exchanged_.back();
    if (count < 2) {
      throw Error(ErrorCode::kData,
                  "a micro-batch with one number a channel has no variance; legal in training: "
                  "more samples or larger images");
    }
    *count_of(call) = count;
    auto* const kept = reinterpret_cast<Pair*>(call.lasting);
    for (std::int64_t c = 0; c < channels_; ++c) {
      const double first = exchanged_[first_of(c)], second = exchanged_[first_of(c) + 1];
      double mean = first, squares = second;
      if (synchronised()) {
        mean = first / count;
        squares = second - count * mean * mean;
        mean += shift_of(c);
      }
      kept[c] = {static_cast<float>(mean),
                 static_cast<float>(1 / std::sqrt(squares / count + options_.epsilon))};
      Sums& sums = sums_[static_cast<std::size_t>(c)];
      sums.count += count;
      sums.sum += mean * count;
      sums.squares += squares + count * mean * mean;
    }
  }
  // All replicas have the same number; near the mean, it keeps digits of the squares.
  [[nodiscard]] double shift_of(std::int64_t channel) const {
    return static_cast<double>(mean_->value.at(channel));
  }
  // A channel's mean here, and its sum of squared distances to it. Synchronised: the sum of the
  // numbers less the shift, and that of their squares, which add up over replicas (Chan, Golub and
  // LeVeque 1983).
  void measure(const float* x, const Channel& channel, double* result) const {
    const auto count = static_cast<double>(channel.count());
    double sum = 0, squares = 0;
    channel.for_samples([&](std::int64_t first) {
      sum += sum_of(channel.size, [&](std::int64_t i) { return x[first + i]; });
    });
    const double mean = sum / count;
    channel.for_samples([&](std::int64_t first) {
      squares += sum_of(channel.size, [&](std::int64_t i) {
        const double off = x[first + i] - mean;
        return off * off;
      });
    });
    if (!synchronised()) {
      result[0] = mean;
      result[1] = squares;
      return;
    }
    const double off = mean - shift_of(channel.number);
    result[0] = count * off;
    result[1] = squares + count * off * off;
  }
  [[nodiscard]] Pair running(std::int64_t channel) const {
    const auto variance = static_cast<double>(variance_->value.at(channel));
    return {mean_->value.at(channel),
            static_cast<float>(1 / std::sqrt(variance + options_.epsilon))};
  }
  // The step's last forward.
  void move_running() {
    for (std::int64_t c = 0; c < channels_; ++c) {
      const Sums& all = sums_[static_cast<std::size_t>(c)];
      const double mean = all.sum / all.count;
      const double variance = (all.squares - all.count * mean * mean) / (all.count - 1);
      const auto move = [&](float& running, double to) {
        running = static_cast<float>((1 - options_.momentum) * static_cast<double>(running) +
                                     options_.momentum * to);
      };
      move(mean_->value.at(c), mean);
      move(variance_->value.at(c), variance);
    }
  }

  std::int64_t channels_;
  BatchNormOptions options_;
  Parameter *weight_ = nullptr, *bias_ = nullptr, *mean_ = nullptr, *variance_ = nullptr;
  std::vector<Sums> sums_;         // [channel]
  std::vector<double> exchanged_;  // two numbers of each channel, then how many numbers there are
  int seen_ = 0;                   // micro-batches of this batch of the step
};

}  // namespace

LayerSpec batch_norm2d(std::int64_t channels, const BatchNormOptions& options) {
  LayerSpec spec = layer<BatchNormLayer>("batch_norm2d", channels, options);
  spec.settings = settings_of(channels, options.epsilon, options.momentum,
                              static_cast<int>(options.statistics));
  return spec;
}

}  // namespace sluice::nn
