// Models of layers on a GPU: layers that run there, and the names of those that do not.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include <sluice/data.hpp>
#include <sluice/device.hpp>
#include <sluice/error.hpp>
#include <sluice/layers.hpp>
#include <sluice/pipeline.hpp>
#include <sluice/transformer.hpp>

#include "tests/gpus/required_gpus.hpp"
#include "tests/runtime/expect_error.hpp"
#include "tests/runtime/pipeline/training_cases.hpp"

namespace sluice::testing {
namespace {

using namespace nn;

PipelineOptions options_of(int pipeline, const std::string& schedule, const std::string& devices) {
  PipelineOptions options;
  options.shape = {.pipeline = pipeline, .micro_batches = 3, .micro_batch_size = 2};
  options.order = {.schedule = schedule};
  options.training.learning_rate = {.peak = 1e-2};
  options.devices.choices = parse_devices(devices);
  return options;
}

class DeviceLayersTest : public ::testing::TestWithParam<int> {
 protected:
  void SetUp() override { SLUICE_NEED_A_GPU(); }
};

TEST_P(DeviceLayersTest, EveryDepthHasTheBitsOfOneRankAndTheCpusToRounding) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    const TransformerConfig block{.layers = 1, .heads = 2, .width = 16};
    const auto make = [&](bool recomputes) {
      const auto wrap = [&](const LayerSpec& layer) {
        return recomputes ? recompute(layer) : layer;
      };
      return Sequential({embedding(7, 16, 6), wrap(transformer_block(block)), layer_norm(16),
                         wrap(attention(16, 4, {.kv_heads = 2, .rotary_base = 1e4F})), gelu(),
                         wrap(residual({rms_norm(16), linear(16, 16), silu(), dropout(0.1)})),
                         linear(16, 7), skip(0, 3), skip(0, 5)},
                        cross_entropy_loss())
          .with_input({DType::kI32, {6}});
    };
    const Sequential model = make(false);
    const TensorSpec tokens{DType::kI32, {6}};
    std::vector<std::int32_t> x(6 * 6), y(6 * 6);
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<std::int32_t>(i * i % 7);
    for (std::size_t i = 0; i < y.size(); ++i) y[i] = static_cast<std::int32_t>(i % 7);
    const Batch batch{.inputs = {view(x, {6, 6})}, .targets = {view(y, {6, 6})}};
    const auto train = [&](Communicator& over, const std::string& schedule,
                           const std::string& devices, bool graphs = false,
                           bool recomputes = false) {
      PipelineOptions options = options_of(over.size(), schedule, devices);
      options.devices.cuda_graphs = graphs;
      Pipeline pipeline(over, recomputes ? make(true) : model,
                        {.inputs = {tokens}, .targets = {tokens}}, options);
      std::vector<double> losses;
      for (int step = 0; step < 4; ++step) losses.push_back(pipeline.train_step(batch).loss);
      return losses;
    };
    const std::unique_ptr<Communicator> self = comm.split(comm.rank(), 0);
    const std::vector<double> alone = train(*self, "1f1b", "cuda:0");
    EXPECT_LT(alone[2], alone[0]);
    const std::vector<double> cpu = train(*self, "1f1b", "cpu");
    for (int step = 0; step < 3; ++step) {
      const auto at = static_cast<std::size_t>(step);
      EXPECT_NEAR(alone[at], cpu[at], 1e-4) << step;
    }
    for (const char* schedule : {"gpipe", "1f1b", "zb-h1"}) {
      EXPECT_EQ(train(comm, schedule, "cuda:0"), alone) << schedule;
    }
    EXPECT_EQ(train(comm, "1f1b", "cuda:0", /*graphs=*/true), alone);
    EXPECT_EQ(train(comm, "zb-h1", "cuda:0", true, /*recomputes=*/true), alone);
  });
}

// Numbers that become bf16 at the model's entry, and a loss that takes f32.
TEST_P(DeviceLayersTest, AModelInBf16HasTheBitsOfOneRankAndTheCpusToRounding) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    const std::unique_ptr<Communicator> self = comm.split(comm.rank(), 0);
    std::vector<float> x(6 * 6 * 16), y(6 * 3);
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i * i % 11) / 8 - 0.5F;
    for (std::size_t i = 0; i < y.size(); ++i) y[i] = static_cast<float>(i % 3);
    const Batch batch{.inputs = {view(x, {6, 6, 16})}, .targets = {view(y, {6, 3})}};
    for (const DType stream : {DType::kF32, DType::kBf16}) {
      const auto train = [&](Communicator& over, const std::string& schedule,
                             const std::string& devices, bool graphs = false,
                             bool recomputes = false) {
        const Sequential model =
            Sequential({residual({layer_norm(16), attention(16, 4)}), skip(-1, 1),
                        transformer_block({.layers = 1, .heads = 2, .width = 16}),
                        group({rms_norm(16), linear(16, 24), gelu(), linear(24, 16)}), dropout(0.1),
                        flatten(), linear(96, 3)},
                       mse_loss(), {DType::kBf16, stream, recomputes})
                .with_input({DType::kF32, {6, 16}});
        PipelineOptions options = options_of(over.size(), schedule, devices);
        options.devices.cuda_graphs = graphs;
        Pipeline pipeline(over, model,
                          {.inputs = {{DType::kF32, {6, 16}}}, .targets = {{DType::kF32, {3}}}},
                          options);
        std::vector<double> losses;
        for (int step = 0; step < 4; ++step) losses.push_back(pipeline.train_step(batch).loss);
        return losses;
      };
      const std::vector<double> alone = train(*self, "1f1b", "cuda:0");
      const std::vector<double> cpu = train(*self, "1f1b", "cpu");
      EXPECT_LT(alone[3], alone[0]);
      for (std::size_t step = 0; step < 3; ++step) {
        EXPECT_NEAR(alone[step], cpu[step], 2e-2 * cpu[0]) << step;
      }
      for (const char* schedule : {"1f1b", "zb-h1"}) {
        EXPECT_EQ(train(comm, schedule, "cuda:0"), alone) << schedule;
      }
      EXPECT_EQ(train(comm, "1f1b", "cuda:0", /*graphs=*/true), alone);
      EXPECT_EQ(train(comm, "zb-h1", "cuda:0", true, /*recomputes=*/true), alone);
    }
  });
}

TEST_P(DeviceLayersTest, LayersWithoutOperatorsThereAreNamed) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    if (comm.size() > 1) return;
    const auto refused = [&](std::vector<LayerSpec> layers, const TensorSpec& in,
                             const TensorSpec& out, const std::string& who) {
      expect_error(ErrorCode::kUsage, {who + " runs on CPUs alone"}, [&] {
        const Pipeline pipeline(comm, Sequential(std::move(layers), mse_loss()),
                                {.inputs = {in}, .targets = {out}},
                                options_of(1, "1f1b", "cuda:0"));
      });
    };
    const TensorSpec image{DType::kF32, {2, 4, 4}}, row{DType::kF32, {4}};
    refused({conv2d(2, 2, 1)}, image, image, "layer 0 (conv2d)");
    refused({relu(), batch_norm2d(2)}, image, image, "layer 1 (batch_norm2d)");
    refused({linear(4, 2), relu(), linear(2, 2), skip(0, 3, Join::kConcatenate)}, row, row,
            "skip() that concatenates");
  });
}

// The first run of a size that was not known leaves the gradients of the step's earlier batch.
TEST_P(DeviceLayersTest, ASizeThatFollowsABatchOfTheStepLeavesItsGradients) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    const Sequential model =
        Sequential({linear(4, 8), layer_norm(8), linear(8, 8), gelu(), linear(8, 3)}, mse_loss())
            .with_input({DType::kF32, {4}});
    std::vector<float> x(8 * 4), y(8 * 3);
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i % 5) - 2;
    for (std::size_t i = 0; i < y.size(); ++i) y[i] = static_cast<float>(i % 3);
    const auto part = [&](std::int64_t first, std::int64_t count) {
      const auto cut = [&](const std::vector<float>& all, std::int64_t width) {
        return view(std::span(all).subspan(static_cast<std::size_t>(first * width),
                                           static_cast<std::size_t>(count * width)),
                    {count, width});
      };
      return Batch{.inputs = {cut(x, 4)}, .targets = {cut(y, 3)}};
    };
    const BatchSpec spec{.inputs = {{DType::kF32, {4}}}, .targets = {{DType::kF32, {3}}}};
    Pipeline whole(comm, model, spec, options_of(comm.size(), "1f1b", "cuda:0"));
    Pipeline parts(comm, model, spec, options_of(comm.size(), "1f1b", "cuda:0"));
    for (int step = 0; step < 2; ++step) {
      const double expected = whole.forward_backward(part(0, 5)).grad_norm;
      (void)parts.accumulate(part(0, 4));
      EXPECT_NEAR(parts.forward_backward(part(4, 1)).grad_norm, expected, 1e-4 * expected) << step;
      whole.drop_gradients();
      parts.drop_gradients();
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, DeviceLayersTest, ::testing::Values(1, 2, 3));

}  // namespace
}  // namespace sluice::testing
