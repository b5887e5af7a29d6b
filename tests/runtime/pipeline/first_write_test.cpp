// The step's first micro-batch overwrites gradients: what an earlier step left there, here NaN,
// never shows. Stages that add to gradients find them zero.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include <sluice/data.hpp>
#include <sluice/layers.hpp>
#include <sluice/operators.hpp>
#include <sluice/pipeline.hpp>
#include <sluice/schedule.hpp>

#include "tests/runtime/engine/wrapped_stage.hpp"
#include "tests/runtime/pipeline/scale_layer.hpp"
#include "tests/runtime/pipeline/training_cases.hpp"

namespace sluice::testing {
namespace {

using namespace nn;

// Tied and untied, all kinds of parameters, logits in chunks, one micro-batch that is the first and
// the last. 48 tokens at most in a micro-batch: most rows of the embedding have none.
std::vector<TrainingCase> cases() {
  std::vector<TrainingCase> all = {named("tied"), named("untied, bf16"), named("llama"),
                                   named("chunks"), named("one micro-batch")};
  for (TrainingCase& each : all) {
    each.model.vocabulary = 300;
    each.micro_batches = 4;
  }
  all[1].model.tied = false;
  all[1].model.precision = DType::kBf16;
  TransformerConfig& llama = all[2].model;
  llama.kind = TransformerKind::kLlama;
  llama.recompute = Recompute::kBlock;
  llama.qkv_bias = llama.attention_output_bias = llama.mlp_bias = llama.qk_norm = true;
  all[3].model.context = 320;
  all[3].model.logit_chunks = 2;
  all[3].steps = 2;
  all[4].micro_batches = 1;
  return all;
}

int chunks_of(const std::string& schedule) {
  const ScheduleShape one{.ranks = 2, .micro_batches = 4, .chunks = 1};
  try {
    return stages_of(schedule, one) > 0 ? 1 : 2;
  } catch (const Error&) {
    return 2;
  }
}

class FirstWriteTest : public ::testing::TestWithParam<int> {};

TEST_P(FirstWriteTest, NothingOfAnEarlierStepIsLeft) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    for (TrainingCase what : cases()) {
      const TrainingOutcome expected = alone(comm, what);
      what.before_step = [](Pipeline& pipeline) {
        std::size_t parameters = 0;
        for (const Pipeline::Owned& owned : pipeline.parameters()) {
          parameters += owned.parameter->grad.elements() > 0 ? 1 : 0;
        }
        EXPECT_EQ(spoil_old_gradients(pipeline), parameters);
      };
      for (const std::string& schedule : schedule_names()) {
        if (schedule == "gpipe-lifo" || schedule == "forward-only") continue;  // other bits, none
        const Layout layout{
            .pipeline = GetParam(), .schedule = schedule, .chunks = chunks_of(schedule)};
        expect_same(comm, what.name + ", " + schedule, expected, train(comm, what, layout));
      }
    }
  });
}

TEST_P(FirstWriteTest, ReplicasSumWhatWasWritten) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    TrainingCase what = named("replicas");
    const Layout layout{.replicas = comm.size()};
    const TrainingOutcome expected = train(comm, what, layout);
    what.before_step = [](Pipeline& pipeline) { (void)spoil_old_gradients(pipeline); };
    expect_same(comm, what.name, expected, train(comm, what, layout));
  });
}

// Weight decay of a program's own, by a stage around another one: it adds before the first
// backward.
class Decaying : public WrappedStage {
 public:
  using WrappedStage::WrappedStage;
  void loss(StageContext& ctx, std::span<const Tensor> outputs, std::span<const Tensor> targets,
            double* sum) override {
    WrappedStage::loss(ctx, outputs, targets, sum);
    if (ctx.phase != Phase::kTrain || ctx.micro_batch > 0) return;
    for (Parameter* each : parameters()->all()) {
      for (std::int64_t i = 0; i < each->grad.elements(); ++i) {
        each->grad.at(i) += 0.1F * each->value.at(i);
      }
    }
  }
};

TEST_P(FirstWriteTest, AStageAroundAnotherFindsZeros) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    if (comm.size() > 1) return;
    const TransformerConfig model = small_model();
    const auto source = synthetic_tokens(model);
    PipelineOptions options;
    options.shape.micro_batches = 3;
    const auto norm_of = [&](bool decays) {
      const StageFactory factory = [&](int stage, int stages) -> std::unique_ptr<Stage> {
        auto inner = Transformer(model)(stage, stages);
        if (!decays) return inner;
        return std::make_unique<Decaying>(std::move(inner));
      };
      Pipeline pipeline(comm, factory, *source, options);
      if (decays) {
        EXPECT_EQ(spoil_old_gradients(pipeline), 0U);
      }
      (void)pipeline.train_step();
      if (decays) {
        EXPECT_EQ(spoil_old_gradients(pipeline), 0U);
      }
      return pipeline.train_step().grad_norm;
    };
    EXPECT_GT(norm_of(true), norm_of(false) + 0.1);
  });
}

// One of two tables, which takes turns with the micro-batches: in a step of one, the other has no
// gradient at all.
class TakesTurns : public Layer {
 public:
  [[nodiscard]] TensorSpec output(const TensorSpec& input) const override { return input; }
  [[nodiscard]] bool overwrites_gradients() const override { return true; }
  void add_parameters(ParameterSet& set, const std::string& name) override {
    for (int i = 0; i < 2; ++i) {
      shift_[i] = &set.add(name + std::to_string(i), {1}, Init::constant(0.25));
    }
  }
  void forward(LayerCall& call, const Tensor& y) override {
    for (std::int64_t i = 0; i < y.elements(); ++i) {
      y.at(i) = call.x.at(i) + shift(call).value.at(0);
    }
  }
  void backward_input(LayerCall& /*call*/, const Tensor& dy, const Tensor& dx) override {
    for (std::int64_t i = 0; i < dy.elements(); ++i) dx.at(i) = dy.at(i);
  }
  void backward_weight(LayerCall& call, const Tensor& dy) override {
    float sum = 0;
    for (std::int64_t i = 0; i < dy.elements(); ++i) sum += dy.at(i);
    float& to = shift(call).grad.at(0);
    const bool adds = next_write({&shift(call)}, call.compute().stream()) == Write::kAdd;
    to = adds ? to + sum : sum;
  }

 private:
  Parameter& shift(const LayerCall& call) {
    const auto turn = call.stage.micro_batches == 1 ? call.stage.step.value
                                                    : std::uint64_t(call.stage.micro_batch);
    return *shift_[turn % 2];
  }
  Parameter* shift_[2] = {};
};

struct Trained {
  std::vector<double> losses, norms;
  std::string digest;
  friend bool operator==(const Trained&, const Trained&) = default;
};

Trained train_layers(Communicator& comm, const std::string& schedule, int micro_batches,
                     bool spoil) {
  const std::int64_t samples = 4L * micro_batches;
  const Sequential model =
      Sequential({conv2d(2, 4, 3, {.padding = 1}), batch_norm2d(4), relu(),
                  residual({conv2d(4, 4, 1), group_norm(2, 4)}), global_avg_pool2d(),
                  layer<Scale>("scale", 0.5), group({linear(4, 6), layer<Scale>("scale", 0.5)}),
                  layer<TakesTurns>("turns"), rms_norm(6), linear(6, 3)},
                 mse_loss())
          .with_input({DType::kF32, {2, 5, 5}});
  PipelineOptions options;
  options.shape = {.pipeline = comm.size(), .micro_batches = micro_batches, .micro_batch_size = 4};
  options.order = {.schedule = schedule};
  options.training.learning_rate = {.peak = 1e-2};
  Pipeline pipeline(comm, model,
                    {.inputs = {{DType::kF32, {2, 5, 5}}}, .targets = {{DType::kF32, {3}}}},
                    options);
  std::vector<float> x(static_cast<std::size_t>(samples) * 50), y(x.size() / 50 * 3);
  for (std::vector<float>* each : {&x, &y}) {
    for (std::size_t i = 0; i < each->size(); ++i) {
      (*each)[i] = to_unit(philox({.seed = 2, .site = each->size()}, 0, i)[0]) - 0.5F;
    }
  }
  const Batch batch{.inputs = {view(x, {samples, 2, 5, 5})}, .targets = {view(y, {samples, 3})}};
  Trained result;
  std::size_t spoiled = 0;
  for (int step = 0; step < 4; ++step) {
    if (spoil) spoiled += spoil_old_gradients(pipeline);
    const StepReport report = pipeline.train_step(batch);
    result.losses.push_back(report.loss);
    result.norms.push_back(report.grad_norm);
  }
  if (spoil) {
    EXPECT_GT(spoiled, 0U);
  }
  result.digest = digest_of(pipeline);
  return result;
}

TEST_P(FirstWriteTest, LayersOverwriteOrFindZeros) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    if (comm.size() > 3) return;
    for (const int micro_batches : {1, 4}) {
      for (const char* schedule : {"gpipe", "1f1b", "zb-h1"}) {
        EXPECT_EQ(train_layers(comm, schedule, micro_batches, true),
                  train_layers(comm, schedule, micro_batches, false))
            << schedule << ", " << micro_batches;
      }
    }
  });
}

// The squared error, and 0.1 of the values of the parameters it is given as their gradient.
class Decay : public Loss {
 public:
  explicit Decay(const std::vector<Pipeline::Owned>* of) : of_(of) {}
  [[nodiscard]] TensorSpec targets(const TensorSpec& outputs) const override { return outputs; }
  [[nodiscard]] double weight(const TensorSpec& /*outputs*/, const Tensor& targets) const override {
    return static_cast<double>(targets.elements());
  }
  void compute(StageContext& ctx, const Tensor& outputs, const Tensor& targets,
               double* sum) override {
    const bool trains = ctx.phase == Phase::kTrain;
    mean_squared_error(ctx.compute, outputs, targets, ctx.loss_scale, trains, sum);
    if (!trains || ctx.micro_batch > 0) return;
    for (const Pipeline::Owned& owned : *of_) {
      const Parameter& each = *owned.parameter;
      for (std::int64_t i = 0; i < each.grad.elements(); ++i) {
        each.grad.at(i) += 0.1F * each.value.at(i);
      }
    }
  }

 private:
  const std::vector<Pipeline::Owned>* of_;
};

TEST_P(FirstWriteTest, ALossOfAProgramFindsZeros) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    if (comm.size() > 1) return;
    PipelineOptions options;
    options.shape = {.pipeline = 1, .micro_batches = 2, .micro_batch_size = 2};
    const BatchSpec spec{.inputs = {{DType::kF32, {3}}}, .targets = {{DType::kF32, {2}}}};
    const std::vector<float> x(4 * 3, 0.5F), y(4 * 2, 0.25F);
    const Batch batch{.inputs = {view(x, {4, 3})}, .targets = {view(y, {4, 2})}};
    std::vector<Pipeline::Owned> decaying;
    const auto layers = [] { return std::vector<LayerSpec>{linear(3, 5), gelu(), linear(5, 2)}; };
    Pipeline plain(comm, Sequential(layers(), mse_loss()), spec, options);
    Pipeline pipeline(comm, Sequential(layers(), loss<Decay>("decay", &decaying)), spec, options);
    decaying = pipeline.parameters();
    for (int step = 0; step < 2; ++step) {
      EXPECT_EQ(spoil_old_gradients(pipeline), 4U);
      (void)pipeline.forward_backward(batch);
      (void)plain.forward_backward(batch);
      const auto others = plain.parameters();
      for (std::size_t i = 0; i < others.size(); ++i) {
        const Parameter &mine = *decaying[i].parameter, &other = *others[i].parameter;
        for (std::int64_t k = 0; k < mine.grad.elements(); ++k) {
          EXPECT_NEAR(mine.grad.at(k), other.grad.at(k) + 0.1F * mine.value.at(k), 1e-6F);
        }
      }
      pipeline.drop_gradients();
      plain.drop_gradients();
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, FirstWriteTest, ::testing::Values(1, 2, 4));

}  // namespace
}  // namespace sluice::testing
