// recompute(): the bits of the model without it, less memory, and no forward that counts twice.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <sluice/data.hpp>
#include <sluice/layers.hpp>
#include <sluice/pipeline.hpp>
#include <sluice/transformer.hpp>

#include "tests/loopback/loopback.hpp"
#include "tests/runtime/pipeline/training_cases.hpp"

namespace sluice::testing {
namespace {

using namespace nn;

constexpr std::int64_t kSamples = 12;
const TensorSpec kImage{DType::kF32, {2, 6, 7}}, kRows{DType::kF32, {6, 14}};  // of 84

std::vector<float> numbers(std::size_t count, std::uint64_t site) {
  std::vector<float> made(count);
  for (std::size_t i = 0; i < count; ++i) {
    made[i] = to_unit(philox({.seed = 7, .site = site}, 0, i)[0]) - 0.5F;
  }
  return made;
}

// Adds its buffer, which each forward of training moves, to what passes. Its next backward sees
// whether another forward came between.
class Drift : public Layer {
 public:
  TensorSpec output(const TensorSpec& input) const override { return input; }
  void add_parameters(ParameterSet& set, const std::string& name) override {
    drift_ = &set.add_buffer(name + "drift", {1}, Init::constant(0));
  }
  LayerNeeds needs(const TensorSpec& input, ComputeContext& /*compute*/) const override {
    return {.memory = {.until_weight = input.bytes()}};
  }
  void forward(LayerCall& call, const Tensor& y) override {
    if (call.stage.phase == Phase::kTrain) drift_->value.at(0) += 0.125F;
    auto* const kept = reinterpret_cast<float*>(call.until_weight);
    for (std::int64_t i = 0; i < y.elements(); ++i) {
      kept[i] = drift_->value.at(0);
      y.at(i) = call.x.at(i) * (1 + kept[i]);
    }
  }
  void backward_input(LayerCall& call, const Tensor& dy, const Tensor& dx) override {
    const auto* const kept = reinterpret_cast<const float*>(call.until_weight);
    for (std::int64_t i = 0; i < dy.elements(); ++i) dx.at(i) = dy.at(i) * (1 + kept[i]);
  }

 private:
  Parameter* drift_ = nullptr;
};

using Wrap = std::function<LayerSpec(LayerSpec)>;
const Wrap kPlain = [](LayerSpec layer) { return layer; };
const Wrap kRecomputed = [](LayerSpec layer) { return recompute(std::move(layer)); };

Sequential network(const Wrap& wrap, BatchStatistics statistics, bool drifts = false) {
  const auto norm = [&](std::int64_t channels) {
    return batch_norm2d(channels, {.statistics = statistics});
  };
  std::vector<LayerSpec> middle = {conv2d(4, 4, 3, {.padding = 1}), norm(4), silu(), dropout(0.1)};
  if (drifts) middle.insert(middle.begin() + 2, layer<Drift>("drift"));
  const auto end = [&](std::vector<LayerSpec> layers) { return wrap(group(std::move(layers))); };
  return Sequential(
             {conv2d(2, 4, 3, {.padding = 1}), wrap(norm(4)), relu(),
              wrap(residual(middle, {conv2d(4, 4, 1), norm(4)})), wrap(max_pool2d(2)),
              end({conv2d(4, 6, 2), group({group_norm(2, 6), gelu()}), softmax()}), flatten(),
              wrap(linear(6 * 2 * 2, 8)), wrap(residual({layer_norm(8), linear(8, 8), tanh()})),
              wrap(rms_norm(8)), linear(8, 3)},
             cross_entropy_loss())
      .with_input(kImage);
}

struct Result {
  std::vector<double> losses;
  std::string digest;
  friend bool operator==(const Result&, const Result&) = default;
};

struct Layout {
  int replicas = 1;
  const char* schedule = "1f1b";
  int chunks = 1;
};

Result trained(Communicator& comm, const Sequential& model, const Layout& layout,
               const TensorSpec& input = kImage) {
  const int pipeline = comm.size() / layout.replicas;
  PipelineOptions options;
  options.shape = {.pipeline = pipeline,
                   .replicas = layout.replicas,
                   .micro_batches = static_cast<int>(kSamples) / 3 / layout.replicas,
                   .micro_batch_size = 3};
  options.order = {.schedule = layout.schedule, .chunks = layout.chunks};
  options.training.learning_rate = {.peak = 1e-2};
  const std::vector<float> x = numbers(kSamples * 84, 1);
  std::vector<std::int32_t> y(kSamples);
  for (std::size_t i = 0; i < y.size(); ++i) y[i] = static_cast<std::int32_t>(i % 3);
  const BatchSpec spec{.inputs = {input}, .targets = {{DType::kI32, {}}}, .feed = Feed::kRank0};
  Pipeline made(comm, model, spec, options);
  Batch batch;
  if (comm.rank() == 0) {
    const Shape shape = input.shape.rank() == 3 ? Shape{kSamples, 2, 6, 7} : Shape{kSamples, 6, 14};
    batch = {.inputs = {view(x, shape)}, .targets = {view(y, {kSamples})}};
  }
  Result result;
  for (int step = 0; step < 5; ++step) {
    result.losses.push_back(made.train_step(batch).loss);
  }
  result.losses.push_back(made.evaluate(batch).loss);
  result.digest = digest_of(made);
  return result;
}

class RecomputeLayersTest : public ::testing::TestWithParam<int> {};

TEST_P(RecomputeLayersTest, HasTheBitsOfTheModelThatKeepsAll) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    const std::unique_ptr<Communicator> self = comm.split(comm.rank(), 0);
    for (const bool drifts : {false, true}) {
      const auto model = [&](const Wrap& wrap) {
        return network(wrap, BatchStatistics::kMicroBatch, drifts);
      };
      const Result kept = trained(*self, model(kPlain), {});
      EXPECT_LT(kept.losses[4], kept.losses[0]);
      EXPECT_EQ(trained(*self, model(kRecomputed), {}), kept);
      EXPECT_EQ(trained(comm, model(kRecomputed), {}), kept);
      EXPECT_EQ(trained(comm, model(kRecomputed), {.schedule = "zb-h1"}), kept);
      if (comm.size() == 1) continue;
      EXPECT_EQ(trained(comm, model(kRecomputed), {.schedule = "zb-v", .chunks = 2}), kept);
    }
  });
}

// The second forward makes no sum over replicas: the others would wait for none, or take it for
// another one.
TEST_P(RecomputeLayersTest, SynchronisedStatisticsAreExchangedOnce) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    if (comm.size() == 3) return;  // 4 micro-batches of 3 samples
    const auto result = [&](const Wrap& wrap, const char* schedule) {
      return trained(comm, network(wrap, BatchStatistics::kReplicas),
                     {.replicas = comm.size(), .schedule = schedule});
    };
    const Result kept = result(kPlain, "1f1b");
    EXPECT_EQ(result(kRecomputed, "1f1b"), kept);
    EXPECT_EQ(result(kRecomputed, "zb-h1"), kept);
  });
}

TEST_P(RecomputeLayersTest, ConnectionsPassRecomputedLayersAndStages) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    const std::unique_ptr<Communicator> self = comm.split(comm.rank(), 0);
    const auto model = [](const Wrap& wrap) {
      const auto block = [&] {
        return wrap(group({conv2d(2, 2, 3, {.padding = 1}), batch_norm2d(2), relu()}));
      };
      return Sequential({block(), block(), block(), block(), skip(0, 3), skip(1, 4), skip(0, 4),
                         flatten(), linear(84, 3)},
                        cross_entropy_loss())
          .with_input(kImage);
    };
    const Result kept = trained(*self, model(kPlain), {});
    EXPECT_EQ(trained(comm, model(kPlain), {}), kept);
    EXPECT_EQ(trained(comm, model(kRecomputed), {}), kept);
    EXPECT_EQ(trained(comm, model(kRecomputed), {.schedule = "zb-h1"}), kept);
  });
}

// A block whose matmuls read a copy in bf16 of the gradient that comes to it: from the next layer,
// from a message, from residual(), or from recompute().
TEST_P(RecomputeLayersTest, BlocksInBf16TakeTheirGradientsFromAnyNeighbour) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    const std::unique_ptr<Communicator> self = comm.split(comm.rank(), 0);
    const auto block = [] {
      return transformer_block({.layers = 2, .heads = 2, .width = 16, .precision = DType::kBf16});
    };
    const auto model = [&](const Wrap& wrap) {
      return Sequential({linear(14, 16), wrap(block()), wrap(block()), wrap(block()),
                         residual({wrap(block())}), block(), layer_norm(16),
                         wrap(residual({block(), linear(16, 16)}, {block()})), flatten(),
                         linear(6 * 16, 3)},
                        cross_entropy_loss())
          .with_input(kRows);
    };
    const Result kept = trained(*self, model(kPlain), {}, kRows);
    EXPECT_EQ(trained(comm, model(kPlain), {}, kRows), kept);
    EXPECT_EQ(trained(comm, model(kRecomputed), {}, kRows), kept);
    EXPECT_EQ(trained(comm, model(kRecomputed), {.schedule = "zb-h1"}, kRows), kept);
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, RecomputeLayersTest, ::testing::Values(1, 2, 3, 4));

StageDescription described(const std::vector<LayerSpec>& layers, const TensorSpec& input) {
  ComputeContext compute({}, 1);
  return Sequential(layers)(0, 1)->describe({&input, 1}, compute);
}

TEST(RecomputeLayersMemoryTest, KeepsTheInputAndWhatABatchNormMeasured) {
  const TensorSpec input{DType::kF32, {3, 4, 8, 8}};
  const auto block = [] {
    return group({conv2d(4, 4, 3, {.padding = 1}), batch_norm2d(4), relu(), max_pool2d(2)});
  };
  const StageDescription kept = described({block()}, input);
  const StageDescription again = described({recompute(block())}, input);
  EXPECT_EQ(again.state_bytes_until_input, 0U);
  EXPECT_EQ(again.state_bytes_until_weight, kBufferAlignment);  // means and deviations
  EXPECT_GT(kept.state_bytes_until_weight, 3 * input.bytes());
  EXPECT_EQ(again.outputs, kept.outputs);
}

TEST(RecomputeLayersMemoryTest, ALayerThatPromisesNothingKeepsWhatItKeepsAndTheReportSaysSo) {
  const TensorSpec input{DType::kF32, {3, 64}};
  const StageDescription again =
      described({recompute({linear(64, 64), layer<Drift>("drift"), linear(64, 64)})}, input);
  EXPECT_EQ(again.state_bytes_until_weight, 2 * input.bytes());  // its own, and its output
  EXPECT_THAT(again.note, ::testing::HasSubstr("drift is not recomputed"));
  EXPECT_EQ(described({recompute({linear(64, 64), tanh()})}, input).note, "");
}

TEST(RecomputeLayersMemoryTest, NamesOfParametersStay) {
  const auto names = [](const LayerSpec& spec) {
    std::vector<std::string> all;
    const auto stage = Sequential({relu(), spec})(0, 1);
    for (const Parameter* each : stage->parameters()->all()) all.push_back(each->name);
    return all;
  };
  for (const LayerSpec& spec : {linear(4, 4), group({linear(4, 4), group({tanh(), rms_norm(4)})}),
                                residual({linear(4, 4)}, {linear(4, 4)})}) {
    EXPECT_EQ(names(recompute(spec)), names(spec));
  }
}

}  // namespace
}  // namespace sluice::testing
