// Models of layers: every cut and schedule has the bits of one rank, and what does not fit is
// named.
#include <fmt/core.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <omp.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include <sluice/data.hpp>
#include <sluice/error.hpp>
#include <sluice/layers.hpp>
#include <sluice/pipeline.hpp>

#include "tests/loopback/loopback.hpp"
#include "tests/runtime/expect_error.hpp"
#include "tests/runtime/pipeline/scale_layer.hpp"
#include "tests/runtime/pipeline/training_cases.hpp"

namespace sluice::testing {
namespace {

using namespace nn;

constexpr std::int64_t kWidth = 6;

std::vector<LayerSpec> parts() {
  return {linear(kWidth, 9),
          tanh(),
          layer_norm(9),
          dropout(0.2),
          linear(9, 12),
          silu(),
          layer<Scale>("scale", 0.5),
          linear(12, 4),
          gelu(),
          linear(4, 8, false),
          sigmoid(),
          linear(8, 2)};
}

std::vector<float> numbers(std::size_t count, std::uint64_t site) {
  std::vector<float> made(count);
  for (std::size_t i = 0; i < count; ++i) {
    made[i] = to_unit(philox({.seed = 2, .site = site}, 0, i)[0]) - 0.5F;
  }
  return made;
}

struct Numbers {
  std::vector<float> x = numbers(11 * kWidth, 1), y = numbers(11 * 2, 2);
  [[nodiscard]] Batch batch() const {
    return {.inputs = {view(x, {11, kWidth})}, .targets = {view(y, {11, 2})}};
  }
};

BatchSpec spec() { return {.inputs = {{DType::kF32, {kWidth}}}, .targets = {{DType::kF32, {2}}}}; }

PipelineOptions options_of(int pipeline, const std::string& schedule, int chunks) {
  PipelineOptions options;
  options.shape = {.pipeline = pipeline, .micro_batches = 4, .micro_batch_size = 3};
  options.order = {.schedule = schedule, .chunks = chunks};
  options.training.learning_rate = {.peak = 1e-2};
  return options;
}

struct Result {
  std::vector<double> losses;
  std::string digest;
  friend bool operator==(const Result&, const Result&) = default;
};

Result trained(Communicator& comm, const Sequential& model, const PipelineOptions& options) {
  Pipeline pipeline(comm, model, spec(), options);
  const Numbers data;
  Result result;
  for (int step = 0; step < 6; ++step) {
    result.losses.push_back(pipeline.train_step(data.batch()).loss);
  }
  result.losses.push_back(pipeline.evaluate(data.batch()).loss);
  result.digest = digest_of(pipeline);
  return result;
}

class LayersTest : public ::testing::TestWithParam<int> {};

TEST_P(LayersTest, EveryCutAndScheduleHasTheBitsOfOneRank) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    const Sequential model(parts(), mse_loss());
    const std::unique_ptr<Communicator> self = comm.split(comm.rank(), 0);
    const Result alone = trained(*self, model, options_of(1, "1f1b", 1));
    EXPECT_LT(alone.losses[5], alone.losses[0]);
    const Sequential by_cost = model.with_input({DType::kF32, {kWidth}});
    for (const char* schedule : {"gpipe", "1f1b", "zb-h1"}) {
      EXPECT_EQ(trained(comm, by_cost, options_of(comm.size(), schedule, 1)), alone) << schedule;
    }
    if (comm.size() > 1) {
      EXPECT_EQ(trained(comm, by_cost, options_of(comm.size(), "interleaved", 2)), alone);
      EXPECT_EQ(trained(comm, by_cost, options_of(comm.size(), "zb-v", 2)), alone);
    }
    if (comm.size() != 3) return;
    std::vector<LayerSpec> cut_by_hand = parts();
    cut_by_hand.insert(cut_by_hand.begin() + 10, cut());
    cut_by_hand.insert(cut_by_hand.begin() + 1, cut());
    const Sequential by_hand(cut_by_hand, mse_loss());
    EXPECT_EQ(trained(comm, by_hand, options_of(3, "zb-h1", 1)), alone);
    EXPECT_EQ(trained(*self, by_hand, options_of(1, "zb-h1", 1)), alone);
  });
}

// Images: batch statistics too, which each micro-batch has its own of.
TEST_P(LayersTest, PicturesHaveTheBitsOfOneRank) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    const TensorSpec image{DType::kF32, {1, 6, 11}};
    const Sequential model =
        Sequential({conv2d(1, 4, 3, {.padding = 1}), batch_norm2d(4), relu(),
                    residual({conv2d(4, 4, 3, {.padding = 1}), dropout(0.1), batch_norm2d(4)}),
                    max_pool2d(2), conv2d(4, 6, 2, {.groups = 2}), group_norm(2, 6), silu(),
                    avg_pool2d(2, {.stride = 1}), global_avg_pool2d(), linear(6, 3)},
                   cross_entropy_loss())
            .with_input(image);
    const std::vector<float> x = numbers(11 * 66, 3);
    const std::vector<std::int32_t> y = {0, 1, 2, 0, 1, 2, 0, 1, 2, 0, -1};
    const Batch batch{.inputs = {view(x, {11, 1, 6, 11})}, .targets = {view(y, {11})}};
    const BatchSpec batches{.inputs = {image}, .targets = {{DType::kI32, {}}}};
    const auto train = [&](Communicator& over, const std::string& schedule, int chunks) {
      Pipeline pipeline(over, model, batches, options_of(over.size(), schedule, chunks));
      Result result;
      for (int step = 0; step < 8; ++step) {
        (void)pipeline.accumulate(batch);
        result.losses.push_back(pipeline.train_step(batch).loss);
      }
      result.losses.push_back(pipeline.evaluate(batch).loss);
      result.digest = digest_of(pipeline);
      return result;
    };
    const std::unique_ptr<Communicator> self = comm.split(comm.rank(), 0);
    const Result alone = train(*self, "1f1b", 1);
    EXPECT_LT(alone.losses[7], alone.losses[0]);
    for (const char* schedule : {"gpipe", "1f1b", "zb-h1"}) {
      EXPECT_EQ(train(comm, schedule, 1), alone) << schedule;
    }
    if (comm.size() > 1) {
      EXPECT_EQ(train(comm, "zb-v", 2), alone);
    }
  });
}

TEST_P(LayersTest, AStageWithoutLayersPassesItsInputOn) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    if (comm.size() < 3) return;
    const Sequential model = Sequential({linear(kWidth, 3), linear(3, 2)}, mse_loss())
                                 .with_input({DType::kF32, {kWidth}});
    const std::unique_ptr<Communicator> self = comm.split(comm.rank(), 0);
    const Result alone = trained(*self, model, options_of(1, "1f1b", 1));
    EXPECT_EQ(trained(comm, model, options_of(comm.size(), "1f1b", 1)), alone);
    EXPECT_EQ(trained(comm, model, options_of(comm.size(), "zb-h1", 1)), alone);
  });
}

// OpenMP's team is the pipeline's while it computes, and the program's afterwards.
TEST_P(LayersTest, APipelineLeavesTheProgramItsTeam) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    const int had = omp_get_max_threads();
    omp_set_num_threads(3);
    PipelineOptions options = options_of(comm.size(), "1f1b", 1);
    options.devices.threads = 2;
    const Sequential model = Sequential(parts(), mse_loss()).with_input({DType::kF32, {kWidth}});
    Pipeline pipeline(comm, model, spec(), options);
    EXPECT_EQ(omp_get_max_threads(), 3);
    const Numbers data;
    (void)pipeline.train_step(data.batch());
    EXPECT_EQ(omp_get_max_threads(), 3);
    int inside = 2;
    (void)pipeline.infer(
        data.batch(), {.on_outputs = [&](SampleRange, auto) { inside = omp_get_max_threads(); }});
    EXPECT_EQ(inside, 2);
    EXPECT_EQ(omp_get_max_threads(), 3);
    omp_set_num_threads(had);
  });
}

// Classes in, classes out.
TEST_P(LayersTest, ClassesTrainAndWrongOnesAreNamed) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    const BatchSpec classes{.inputs = {{DType::kI32, {2}}}, .targets = {{DType::kI32, {}}}};
    const Sequential model =
        Sequential({embedding(5, 4), flatten(), linear(8, 16), relu(), linear(16, 3)},
                   cross_entropy_loss())
            .with_input({DType::kI32, {2}});
    const auto make = [&](Communicator& over) {
      return std::make_unique<Pipeline>(over, model, classes, options_of(over.size(), "zb-h1", 1));
    };
    const std::vector<std::int32_t> x = {0, 1, 2, 3, 4, 0, 1, 1, 3, 2}, y = {0, 1, 2, -1, 1};
    const Batch batch{.inputs = {view(x, {5, 2})}, .targets = {view(y, {5})}};
    const std::unique_ptr<Communicator> self = comm.split(comm.rank(), 0);
    const auto alone = make(*self), pipeline = make(comm);
    for (int step = 0; step < 40; ++step) {
      const StepReport report = pipeline->train_step(batch);
      EXPECT_EQ(report.targets, 4);
      EXPECT_EQ(report.loss, alone->train_step(batch).loss);
    }
    EXPECT_LT(pipeline->evaluate(batch).loss, 0.5);
    const std::vector<std::int32_t> bad_y = {0, 1, 2, 1, 3}, bad_x = {0, 1, 2, 3, 4, 0, 1, 1, 3, 5};
    const Batch bad_targets{.inputs = batch.inputs, .targets = {view(bad_y, {5})}};
    const Batch bad_inputs{.inputs = {view(bad_x, {5, 2})}, .targets = batch.targets};
    const auto refused = [&](const Batch& bad, const std::string& text, bool infers) {
      const auto each = [&](const auto& call) {
        expect_error(ErrorCode::kData, {text}, [&] { (void)call(bad); });
        EXPECT_TRUE(pipeline->usable());
      };
      each([&](const Batch& one) { return pipeline->train_step(one).loss; });
      each([&](const Batch& one) { return pipeline->evaluate(one).loss; });
      each([&](const Batch& one) { return pipeline->forward_backward(one).loss; });
      if (infers) each([&](const Batch& one) { return pipeline->infer(one).size(); });
      (void)pipeline->accumulate(batch);
      each([&](const Batch& one) { return pipeline->accumulate(one).loss; });
      pipeline->drop_gradients();
    };
    refused(bad_targets,
            "stage " + std::to_string(comm.size() - 1) +
                ", target_weight() of sample 4 of the batch: cross_entropy_loss: class 3; legal: 0 "
                "to 2, or negative for none",
            false);
    refused(bad_inputs,
            "stage 0, check_inputs() of sample 4 of the batch: layer 0 (embedding): token 5 is "
            "outside the vocabulary; legal: 0 to 4",
            true);
    EXPECT_EQ(pipeline->train_step(batch).loss, alone->train_step(batch).loss);
    EXPECT_EQ(digest_of(*pipeline), digest_of(*alone));
  });
}

// A sample's number counts over all replicas, and the rank that passes it is the error's.
TEST_P(LayersTest, AWrongClassOfOneReplicaIsRefusedOnAllRanks) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    const BatchSpec classes{.inputs = {{DType::kI32, {2}}}, .targets = {{DType::kI32, {}}}};
    const Sequential model({embedding(5, 4), flatten(), linear(8, 3)}, cross_entropy_loss());
    PipelineOptions options = options_of(1, "1f1b", 1);
    options.shape.replicas = comm.size();
    Pipeline pipeline(comm, model, classes, options);
    const std::vector<std::int32_t> x = {0, 1, 2, 3}, y = {0, 1}, bad_x = {0, 1, 2, -7};
    const Batch right{.inputs = {view(x, {2, 2})}, .targets = {view(y, {2})}};
    const Batch wrong{.inputs = {view(bad_x, {2, 2})}, .targets = right.targets};
    const int last = comm.size() - 1;
    const Batch& mine = comm.rank() == last ? wrong : right;
    const std::string sample = "sample " + std::to_string(2 * last + 1) + " of the batch";
    for (const bool trains : {true, false}) {
      try {
        trains ? (void)pipeline.train_step(mine) : (void)pipeline.infer(mine);
        ADD_FAILURE() << "not refused";
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::kData);
        EXPECT_EQ(error.rank(), last);
        EXPECT_THAT(error.what(), ::testing::HasSubstr(sample));
      }
    }
    EXPECT_EQ(pipeline.train_step(right).step, 1U);
  });
}

// What a source loads is checked too: an evaluation of several rounds is refused in its second.
class Classes final : public DataSource {
 public:
  explicit Classes(std::int64_t bad_sample) : bad_sample_(bad_sample) {}
  std::vector<TensorSpec> input_specs(std::int64_t samples) const override {
    return {{DType::kI32, {samples, 2}}};
  }
  std::vector<TensorSpec> target_specs(std::int64_t samples) const override {
    return {{DType::kI32, {samples}}};
  }
  void inputs(Phase, std::uint64_t, SampleRange samples,
              std::span<const Tensor> into) const override {
    for (std::int64_t i = 0; i < samples.count; ++i) {
      into[0].as<std::int32_t>()[2 * i] = samples.first + i == bad_sample_ ? 5 : 4;
      into[0].as<std::int32_t>()[2 * i + 1] = 0;
    }
  }
  void targets(Phase, std::uint64_t, SampleRange samples,
               std::span<const Tensor> into) const override {
    for (std::int64_t i = 0; i < samples.count; ++i) into[0].as<std::int32_t>()[i] = 1;
  }

 private:
  std::int64_t bad_sample_;
};

TEST_P(LayersTest, AWrongClassOfASourceIsRefusedInTheRoundThatLoadsIt) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    const Sequential model =
        Sequential({embedding(5, 4), flatten(), linear(8, 3)}, cross_entropy_loss())
            .with_input({DType::kI32, {2}});
    const Classes right(-1);
    PipelineOptions options = options_of(1, "1f1b", 1);
    options.shape.replicas = comm.size();
    Pipeline pipeline(comm, model, right, options);
    // A round has 64 micro-batches of 3 samples; replicas have different numbers of rounds.
    const std::int64_t samples = 192 * comm.size() + 1;
    const double loss = pipeline.evaluate(right, samples).loss;
    for (const std::int64_t bad : {std::int64_t{192}, samples - 1}) {
      expect_error(
          ErrorCode::kData,
          {"sample " + std::to_string(bad) + " of the batch: layer 0 (embedding): token 5"},
          [&] { (void)pipeline.evaluate(Classes(bad), samples); });
    }
    EXPECT_EQ(pipeline.evaluate(right, samples).loss, loss);
    EXPECT_EQ(pipeline.train_step().step, 1U);
  });
}

// No loss: a pipeline that only answers.
TEST_P(LayersTest, WithoutALossAPipelineOnlyInfers) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    const Sequential model = Sequential({linear(kWidth, 5), tanh(), linear(5, 4), softmax()})
                                 .with_input({DType::kF32, {kWidth}});
    PipelineOptions options = options_of(comm.size(), "1f1b", 1);
    options.training.inference = true;
    Pipeline pipeline(comm, model, {.inputs = {{DType::kF32, {kWidth}}}}, options);
    const Numbers data;
    const auto outputs = pipeline.infer(data.batch(), {.to = InferOptions::kEveryRank});
    ASSERT_EQ(outputs[0].shape(), (Shape{11, 4}));
    double sum = 0;
    for (const float value : outputs[0].floats()) sum += value;
    EXPECT_NEAR(sum, 11, 1e-5);
    expect_error(ErrorCode::kUsage, {"evaluate() needs a loss"},
                 [&] { (void)pipeline.evaluate({.inputs = data.batch().inputs, .targets = {}}); });
    EXPECT_TRUE(pipeline.usable());
  });
}

// The classes of pixels are in dimension 1, in 64 bits, and some do not count.
TEST_P(LayersTest, PixelsHaveClassesAndWrongOnesAreNamed) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    const TensorSpec image{DType::kF32, {1, 4, 6}};
    const Sequential model =
        Sequential(
            {conv2d(1, 4, 3, {.padding = 1}), relu(), conv2d(4, 3, 1)},
            cross_entropy_loss({.axis = 1, .targets = DType::kI64, .ignored = 2, .smoothing = 0.1}))
            .with_input(image);
    const std::vector<float> x = numbers(8 * 24, 3);
    std::vector<std::int64_t> y(8 * 24);
    for (std::size_t i = 0; i < y.size(); ++i) y[i] = static_cast<std::int64_t>(i % 3);
    const BatchSpec batches{.inputs = {image}, .targets = {{DType::kI64, {4, 6}}}};
    const Batch batch{.inputs = {view(x, {8, 1, 4, 6})}, .targets = {view(y, {8, 4, 6})}};
    const auto train = [&](Communicator& over) {
      Pipeline pipeline(over, model, batches, options_of(over.size(), "zb-h1", 1));
      Result result;
      for (int step = 0; step < 4; ++step) {
        const StepReport report = pipeline.train_step(batch);
        EXPECT_EQ(report.targets, 128);
        result.losses.push_back(report.loss);
      }
      result.digest = digest_of(pipeline);
      std::vector<std::int64_t> wrong = y;
      wrong[30] = 3;
      expect_error(ErrorCode::kData,
                   {"target_weight() of sample 1 of the batch: cross_entropy_loss: class 3;"}, [&] {
                     (void)pipeline.train_step(
                         {.inputs = batch.inputs, .targets = {view(wrong, {8, 4, 6})}});
                   });
      return result;
    };
    const std::unique_ptr<Communicator> self = comm.split(comm.rank(), 0);
    const Result alone = train(*self);
    EXPECT_LT(alone.losses[3], alone.losses[0]);
    EXPECT_EQ(train(comm), alone);
  });
}

TEST_P(LayersTest, WhatDoesNotFitNamesTheLayerOnAllRanks) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    const auto refused = [&](const Sequential& model, const BatchSpec& batches,
                             const std::string& part) {
      expect_error(ErrorCode::kUsage, {part}, [&] {
        const Pipeline pipeline(comm, model, batches, options_of(comm.size(), "1f1b", 1));
      });
    };
    if (comm.size() == 2) {
      refused(Sequential({linear(kWidth, 5), cut(), relu(), linear(4, 2)}, mse_loss()), spec(),
              "stage 1, describe() of f32 [3, 5]: layer 2 (linear): the input is f32 [3, 5]; "
              "legal: f32 [samples, ..., 4]");
      refused(Sequential({linear(kWidth, 5), linear(5, 2)}, mse_loss()), spec(),
              "a Sequential over 2 stages needs cut()");
      refused(Sequential({linear(kWidth, 5), cut(), relu(), cut(), relu()}, mse_loss()), spec(),
              "2 cut()s make 3 stages of a Sequential; the pipeline has 2 (legal: 1 or 3)");
    }
    if (comm.size() != 1) return;
    refused(Sequential({linear(5, 2)}, mse_loss()), spec(),
            "layer 0 (linear): the input is f32 [3, 6]");
    refused(Sequential({linear(kWidth, 2)}), spec(),
            "stage 0 is the last one, but is not a LossStage");
    refused(Sequential({relu()}, mse_loss()),
            {.inputs = {{DType::kI32, {2}}}, .targets = {{DType::kF32, {2}}}},
            "layer 0 (relu): the input is i32 [3, 2]; legal: f32 or bf16 [samples, ...]");
    refused(Sequential({relu()}, mse_loss()),
            {.inputs = {{DType::kF32, {2}}, {DType::kF32, {2}}}, .targets = {{DType::kF32, {2}}}},
            "these layers take 1 tensors, got 2");
    // Targets in another shape: a mean over broadcast values would train on the wrong numbers.
    refused(
        Sequential({linear(kWidth, 2)}, mse_loss()),
        {.inputs = {{DType::kF32, {kWidth}}}, .targets = {{DType::kF32, {}}}},
        "the data has targets f32 [3]; legal with the outputs of stage 0, f32 [3, 2]: f32 [3, 2]");
    refused(Sequential({linear(kWidth, 2)}, cross_entropy_loss()),
            {.inputs = {{DType::kF32, {kWidth}}}, .targets = {{DType::kI64, {}}}},
            "the data has targets i64 [3]; legal with the outputs of stage 0, f32 [3, 2]: i32 [3]");
    refused(Sequential({linear(kWidth, 2)}, mse_loss()), {.inputs = {{DType::kF32, {kWidth}}}},
            "the data has targets none; legal with the outputs of stage 0, f32 [3, 2]: f32 [3, 2]");
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, LayersTest, ::testing::Values(1, 2, 3, 4));

// Needs whose sum or multiple is more than a std::size_t holds.
class Greedy : public Layer {
 public:
  explicit Greedy(std::size_t bytes) : bytes_(bytes) {}
  [[nodiscard]] TensorSpec output(const TensorSpec& input) const override { return input; }
  [[nodiscard]] LayerNeeds needs(const TensorSpec&, ComputeContext&) const override {
    return {.memory = {.until_input = bytes_}};
  }
  void forward(LayerCall&, const Tensor&) override {}
  void backward_input(LayerCall&, const Tensor&, const Tensor&) override {}

 private:
  std::size_t bytes_;
};

TEST(SequentialTest, NeedsThatCannotBeCountedAreRefused) {
  constexpr std::size_t kMost = std::numeric_limits<std::size_t>::max();
  const auto refused = [](std::vector<LayerSpec> layers, const std::string& part,
                          ErrorCode code = ErrorCode::kUsage) {
    run_loopback(1, [&](Communicator& comm) {
      expect_error(code, {part}, [&] {
        const Pipeline pipeline(comm, Sequential(std::move(layers), mse_loss()),
                                {.inputs = {{DType::kF32, {3}}}, .targets = {{DType::kF32, {3}}}});
      });
    });
  };
  const LayerSpec half = layer<Greedy>("mine", kMost / 2 + 1);
  refused({half, half}, "but the plan needs", ErrorCode::kDevice);
}

TEST(SequentialTest, NumbersThatCannotWorkAreRefusedWhenTheModelIsMade) {
  const auto refused = [](std::vector<LayerSpec> layers, const std::string& part) {
    expect_error(ErrorCode::kUsage, {part}, [&] { const Sequential model(std::move(layers)); });
  };
  refused({}, "a Sequential needs at least one layer");
  for (const auto& [loss, text] : std::vector<std::pair<LossSpec, std::string>>{
           {{.kind = "own", .make = {}}, "own: a LossSpec without `make`"},
           {{.kind = "own", .make = [] { return std::unique_ptr<Loss>(); }},
            "own: LossSpec::make returned null"}}) {
    expect_error(ErrorCode::kUsage, {text}, [&] { const Sequential model({relu()}, loss); });
  }
  refused({relu(), linear(0, 5)}, "layer 1 (linear): in is 0; legal: at least 1");
  refused({linear(4, -1)}, "layer 0 (linear): out is -1");
  refused({dropout(1)}, "layer 0 (dropout): the probability is 1; legal: at least 0 and below 1");
  refused({dropout(std::nan(""))}, "the probability is nan");
  refused({layer_norm(4, 0)}, "layer 0 (layer_norm): epsilon is 0");
  refused({embedding(0, 4)}, "layer 0 (embedding): classes is 0");
  refused({conv2d(0, 1, 3)}, "layer 0 (conv2d): in is 0");
  refused({conv2d(4, 6, 3, {.groups = 3})},
          "3 groups of 4 and 6 channels; legal: divisors of both numbers, at most 2");
  refused({conv2d(4, 6, {3, 0})}, "layer 0 (conv2d): the kernel is 0; legal: at least 1");
  refused({conv2d(4, 6, 3, {.stride = 0})}, "the stride is 0");
  refused({conv2d(4, 6, 3, {.padding = -1})}, "the padding is -1");
  refused({max_pool2d(2, {.padding = 2})}, "the padding is 2; legal with a kernel");
  refused({batch_norm2d(3, {.momentum = 2})}, "momentum is 2; legal: 0 to 1");
  refused({residual({})}, "layer 0 (residual): residual() needs at least one layer");
  refused({residual({relu(), cut(), relu()})}, "layer 0 (residual): cut() within another layer");
  refused({residual({relu(), linear(0, 1)})}, "layer 0 (residual): layer 1 (linear): in is 0");
  refused({rms_norm(4, -1)}, "layer 0 (rms_norm): epsilon is -1");
  for (const double epsilon : {1e-60, 1e300, std::numeric_limits<double>::infinity()}) {
    const std::string part = fmt::format("): epsilon is {}; legal: from 1.1754944e-38 to", epsilon);
    refused({layer_norm(4, epsilon)}, "layer 0 (layer_norm" + part);
    refused({rms_norm(4, epsilon)}, "layer 0 (rms_norm" + part);
    refused({group_norm(2, 4, epsilon)}, "layer 0 (group_norm" + part);
    refused({batch_norm2d(4, {.epsilon = epsilon})}, "layer 0 (batch_norm2d" + part);
  }
  refused({group_norm(3, 4)}, "layer 0 (group_norm): 4 channels in 3 groups; legal");
  refused({group_norm(0, 4)}, "layer 0 (group_norm): groups is 0");
  refused({group({})}, "layer 0 (group): group() needs at least one layer");
  refused({group({relu(), group({linear(0, 1)})})}, "layer 0.1.0 (linear): in is 0");
  refused({cut(), relu()}, "cut() before layer 0 leaves a stage without layers");
  refused({relu(), cut(), cut(), relu()}, "cut() before layer 1 leaves a stage without layers");
  refused({relu(), cut()}, "cut() after the last layer");
  refused({relu(), LayerSpec{"mine", [](int) { return nullptr; }}}, "layer 1 (mine): made nothing");
  expect_error(ErrorCode::kUsage, {"layer 1 (linear): the input is f32 [1, 3]"}, [] {
    (void)Sequential({linear(2, 3), linear(4, 5)}).with_input({DType::kF32, {2}});
  });
  const auto unfit = [](const LayerSpec& spec, const TensorSpec& input, const std::string& part) {
    expect_error(ErrorCode::kUsage, {part}, [&] { (void)Sequential({spec}).with_input(input); });
  };
  unfit(conv2d(4, 6, 3), {DType::kF32, {3, 9, 9}},
        "the input is f32 [1, 3, 9, 9]; legal: f32 [samples, 4, height, width]");
  unfit(conv2d(4, 6, 3), {DType::kF32, {4, 2, 9}},
        "a kernel of 3 x 3 does not fit the input f32 [1, 4, 2, 9] with a padding of 0 x 0");
  unfit(max_pool2d(2), {DType::kF32, {4, 2}}, "legal: f32 [samples, channels, height, width]");
  unfit(unflatten({2, 3}), {DType::kF32, {7}}, "legal: 6 numbers a sample, for [2, 3]");
  unfit(residual({linear(3, 4)}), {DType::kF32, {3}},
        "the layers make f32 [1, 4] of f32 [1, 3], the shortcut f32 [1, 3]");
  expect_error(ErrorCode::kUsage, {"cross_entropy_loss: the outputs are f32 [1]"}, [] {
    (void)Sequential({relu()}, cross_entropy_loss()).with_input({DType::kF32, {}});
  });
  const auto unfit_loss = [](const LossSpec& loss, const TensorSpec& outputs,
                             const std::string& part) {
    expect_error(ErrorCode::kUsage, {part},
                 [&] { (void)Sequential({relu()}, loss).with_input(outputs); });
  };
  unfit_loss(cross_entropy_loss({.axis = 2}), {DType::kF32, {4}},
             "legal: f32 [samples, ...] with the classes in dimension 2");
  unfit_loss(cross_entropy_loss({.axis = 0}), {DType::kF32, {4}}, "axis is 0; legal: -1");
  unfit_loss(cross_entropy_loss({.targets = DType::kF32}), {DType::kF32, {4}},
             "targets are f32; legal: i32 or i64");
  unfit_loss(cross_entropy_loss({.smoothing = 1}), {DType::kF32, {4}}, "smoothing is 1");
  unfit_loss(elementwise_loss("mine", nullptr), {DType::kF32, {4}}, "mine: elementwise_loss()");
  const Sequential model({relu(), relu()});
  expect_error(ErrorCode::kUsage, {"over 0 stages"}, [&] { (void)model.partition(0); });
}

TEST(SequentialTest, ParametersHaveTheNamesThatTorchGives) {
  const Sequential model({linear(2, 3), relu(), cut(), layer_norm(3), linear(3, 1, false)});
  const auto names = [&](int stage, int stages) {
    std::vector<std::string> all;
    const std::unique_ptr<Stage> made = model(stage, stages);
    for (const Parameter* each : made->parameters()->all()) all.push_back(each->name);
    return all;
  };
  using ::testing::ElementsAre;
  EXPECT_THAT(names(0, 1), ElementsAre("0.weight", "0.bias", "2.weight", "2.bias", "3.weight"));
  EXPECT_THAT(names(0, 2), ElementsAre("0.weight", "0.bias"));
  EXPECT_THAT(names(1, 2), ElementsAre("2.weight", "2.bias", "3.weight"));
  EXPECT_EQ(model.partition(2).first, (std::vector<int>{0, 2, 4}));
}

}  // namespace
}  // namespace sluice::testing
