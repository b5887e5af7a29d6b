// What leaves a pipeline usable: steps whose loss or gradient is not finite, skipped or refused,
// and refused calls. Later steps have the bits of a run that never took that batch.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <mpi.h>

#include <cmath>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <sluice/data.hpp>
#include <sluice/error.hpp>
#include <sluice/pipeline.hpp>
#include <sluice/schedule.hpp>
#include <sluice/stage.hpp>

#include "runtime/pipeline/pipeline_access.hpp"
#include "tests/runtime/engine/wrapped_stage.hpp"
#include "tests/runtime/expect_error.hpp"
#include "tests/runtime/pipeline/training_cases.hpp"

namespace sluice::testing {
namespace {

using ::testing::HasSubstr;
using Tensors = std::span<const Tensor>;

constexpr std::uint64_t kBadStep = 2;
constexpr std::uint64_t kSteps = 4;
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// What becomes NaN in micro-batch 1 of step kBadStep.
enum class Bad { kNothing, kOutput, kLoss, kGradient };

// A transformer's stage, with that value in it.
class BadStage : public WrappedStage {
 public:
  BadStage(std::unique_ptr<Stage> stage, Bad bad) : WrappedStage(std::move(stage)), bad_(bad) {}

  void forward(StageContext& ctx, Tensors x, Tensors y) override {
    WrappedStage::forward(ctx, x, y);
    if (is_bad(ctx, Bad::kOutput)) y[0].at(1) = kNan;
  }
  void backward(StageContext& ctx, Tensors dy, Tensors dx) override {
    WrappedStage::backward(ctx, dy, dx);
    spoil_gradient(ctx);
  }
  void backward_weight(StageContext& ctx, Tensors dy) override {
    WrappedStage::backward_weight(ctx, dy);
    spoil_gradient(ctx);
  }
  void loss(StageContext& ctx, Tensors y, Tensors targets, double* sum) override {
    WrappedStage::loss(ctx, y, targets, sum);
    if (is_bad(ctx, Bad::kLoss)) *sum = std::numeric_limits<double>::infinity();
  }

 private:
  [[nodiscard]] bool is_bad(const StageContext& ctx, Bad what) const {
    return bad_ == what && ctx.phase == Phase::kTrain && ctx.step == kBadStep &&
           ctx.micro_batch == 1;
  }
  void spoil_gradient(const StageContext& ctx) {
    if (is_bad(ctx, Bad::kGradient)) parameters()->all().front()->grad.at(0) = kNan;
  }

  Bad bad_;
};

// How the run meets step kBadStep.
enum class Policy { kPassOver, kSkip, kRefuse };

struct Place {
  Bad bad = Bad::kNothing;
  bool last_stage = false;  // else stage 0
};

struct BadRun {
  Layout layout;
  Place place;
  Policy policy = Policy::kPassOver;
};

std::string describe(const BadRun& run) {
  return run.layout.schedule + ", p = " + std::to_string(run.layout.pipeline) +
         ", d = " + std::to_string(run.layout.replicas) +
         ", bad = " + std::to_string(static_cast<int>(run.place.bad)) +
         (run.place.last_stage ? " of the last stage" : " of stage 0") +
         ", policy = " + std::to_string(static_cast<int>(run.policy));
}

PipelineOptions options_of(const Layout& layout) {
  PipelineOptions options;
  options.shape.pipeline = layout.pipeline;
  options.shape.replicas = layout.replicas;
  options.shape.micro_batches = 3;
  options.order.schedule = layout.schedule;
  options.order.chunks = layout.chunks;
  options.training.learning_rate = {.peak = 1e-2, .steps = 10};
  options.training.clip = 0.5;
  options.expert.evaluations = {5};
  options.checks.replicas_every = 1;
  return options;
}

// Takes step kBadStep, which changes no parameter.
void expect_bad_step(Pipeline& pipeline, const BadRun& run) {
  const std::string before = digest_of(pipeline);
  if (run.policy == Policy::kSkip) {
    const StepReport report = pipeline.train_step();
    EXPECT_TRUE(report.skipped);
    EXPECT_EQ(report.step, kBadStep);
    EXPECT_FALSE(std::isfinite(report.loss) && std::isfinite(report.grad_norm));
  } else {
    for (int attempt = 0; attempt < 2; ++attempt) {
      try {
        pipeline.train_step();
        ADD_FAILURE() << "trained";
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::kNumeric);
        EXPECT_EQ(error.rank(), 0);
        EXPECT_THAT(error.what(), HasSubstr("of step 2 is not finite"));
        EXPECT_THAT(error.what(), HasSubstr(run.place.bad == Bad::kGradient
                                                ? "first in parameter '"
                                                : "first in micro-batch 1 of replica "));
      }
      EXPECT_EQ(pipeline.step(), kBadStep - 1);
    }
    pipeline.set_step(kBadStep);
  }
  EXPECT_EQ(pipeline.step(), kBadStep);
  EXPECT_EQ(digest_of(pipeline), before);
}

TrainingOutcome train(Communicator& comm, const BadRun& run) {
  SCOPED_TRACE(describe(run));
  TransformerConfig model = small_model();
  model.layers = 3;
  const auto source = synthetic_tokens(model);
  PipelineOptions options = options_of(run.layout);
  options.training.skip_nonfinite = run.policy == Policy::kSkip;
  // The last rank of the job is of the last replica, in either order of ranks.
  const int first_of_last = comm.size() - run.layout.pipeline;
  const StageFactory factory = [&](int stage, int stages) -> std::unique_ptr<Stage> {
    auto whole = Transformer(model)(stage, stages);
    const bool here =
        stage == (run.place.last_stage ? stages - 1 : 0) && comm.rank() >= first_of_last;
    return std::make_unique<BadStage>(std::move(whole), here ? run.place.bad : Bad::kNothing);
  };
  Pipeline pipeline(comm, factory, *source, options);
  TrainingOutcome outcome;
  for (std::uint64_t step = 1; step <= kSteps; ++step) {
    if (step == kBadStep) {
      run.policy == Policy::kPassOver ? pipeline.set_step(step) : expect_bad_step(pipeline, run);
      outcome.validation = pipeline.evaluate(*source, 5).loss;
      continue;
    }
    const StepReport report = pipeline.train_step();
    EXPECT_FALSE(report.skipped);
    outcome.losses.push_back(report.loss);
    outcome.norms.push_back(report.grad_norm);
  }
  pipeline.close();
  outcome.digest = digest_of(pipeline);
  return outcome;
}

bool is_legal(const Layout& layout) {
  try {
    return stages_of(layout.schedule, {layout.pipeline, 3, layout.chunks}) > 0;
  } catch (const Error&) {
    return false;
  }
}

std::vector<Layout> layouts_of(int ranks) {
  std::vector<Layout> all = {{.pipeline = ranks, .schedule = "1f1b"},
                             {.pipeline = ranks, .schedule = "zb-h1"},
                             {.pipeline = ranks, .schedule = "zb-v", .chunks = 2},
                             {.pipeline = ranks, .schedule = "dualpipe-v", .chunks = 2}};
  if (ranks % 2 == 0) {
    all.push_back({.pipeline = ranks / 2, .replicas = 2, .schedule = "1f1b"});
    all.push_back({.pipeline = ranks / 2, .replicas = 2, .schedule = "zb-h1"});
  }
  std::erase_if(all, [](const Layout& layout) { return !is_legal(layout); });
  return all;
}

StageFactory stages_of(const TransformerConfig& model) { return Transformer(model); }

class UsableTest : public ::testing::TestWithParam<int> {};

TEST_P(UsableTest, AStepThatIsNotFiniteChangesNothing) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    for (const Layout& layout : layouts_of(GetParam())) {
      const TrainingOutcome expected = train(comm, BadRun{layout, {}, Policy::kPassOver});
      for (const Place& place : {Place{Bad::kOutput}, Place{Bad::kLoss, true},
                                 Place{Bad::kGradient}, Place{Bad::kGradient, true}}) {
        for (const Policy policy : {Policy::kSkip, Policy::kRefuse}) {
          const BadRun run{layout, place, policy};
          expect_same(comm, describe(run), expected, train(comm, run));
        }
      }
    }
  });
}

// On every rank: `call` is refused, with `part` in the message.
template <typename Call>
void expect_refusal(const std::string& part, const Call& call) {
  try {
    call();
    ADD_FAILURE() << "not refused: " << part;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUsage);
    EXPECT_THAT(error.what(), HasSubstr(part));
  }
}

TEST_P(UsableTest, ARefusedEvaluationChangesNothing) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    const TransformerConfig model = small_model();
    const auto source = synthetic_tokens(model);
    const StageFactory factory = stages_of(model);
    Pipeline one(comm, factory, *source, options_of({.pipeline = GetParam()}));
    Pipeline two(comm, factory, *source, options_of({.pipeline = GetParam()}));
    for (int step = 0; step < 2; ++step) {
      EXPECT_EQ(one.train_step().loss, two.train_step().loss);
      EXPECT_EQ(one.evaluate(*source, 5).loss, two.evaluate(*source, 5).loss);
      expect_refusal("an evaluation of 0 samples", [&] { (void)one.evaluate(*source, 0); });
      if (comm.size() > 1) {
        const bool last = comm.rank() == comm.size() - 1;
        expect_refusal("rank 0 passes 5, rank", [&] { (void)one.evaluate(*source, last ? 6 : 5); });
      }
      expect_refusal("0 inputs are given, 1 are needed", [&] { (void)one.infer({}); });
    }
    EXPECT_EQ(digest_of(one), digest_of(two));
    one.close();
    expect_refusal("the pipeline is closed", [&] { one.train_step(); });
    EXPECT_EQ(digest_of(one), digest_of(two));
  });
}

TEST_P(UsableTest, ARefusedInferenceChangesNothing) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    const TransformerConfig model = small_model();
    const auto source = synthetic_tokens(model);
    const StageFactory factory = stages_of(model);
    PipelineOptions options = options_of({.pipeline = GetParam()});
    options.order.schedule = "forward-only";
    options.shape.micro_batches = 1;
    options.training.inference = true;
    options.expert.evaluations = {};
    Pipeline pipeline(comm, factory, *source, options);
    std::vector<std::int32_t> tokens(2 * 16, 3);
    const Tensor right{reinterpret_cast<std::byte*>(tokens.data()), source->input_specs(1)[0]};
    const Tensor wrong{right.data, {DType::kF32, source->input_specs(1)[0].shape}};
    const auto first_output = [&] {
      const Tensors outputs = pipeline.infer({.inputs = {right}});
      return outputs.empty() ? 0.0F : outputs[0].at(0);
    };
    const float expected = first_output();
    EXPECT_EQ(expected != 0, comm.rank() == comm.size() - 1);
    expect_refusal("input 0 is f32 [1, 16], but i32 [samples, 16] is needed",
                   [&] { (void)pipeline.infer({.inputs = {wrong}}); });
    expect_refusal("0 inputs are given, 1 are needed", [&] { (void)pipeline.infer({}); });
    expect_refusal("an inference pipeline does not train", [&] { pipeline.train_step(); });
    EXPECT_EQ(first_output(), expected);
    EXPECT_EQ(pipeline.step(), 0U);
  });
}

// A source whose shapes one rank cannot tell.
class NoShapes final : public DataSource {
 public:
  NoShapes(const DataSource& whole, bool broken) : whole_(whole), broken_(broken) {}
  std::vector<TensorSpec> input_specs(std::int64_t samples) const override {
    if (broken_) throw std::runtime_error("the file is gone");
    return whole_.input_specs(samples);
  }
  std::vector<TensorSpec> target_specs(std::int64_t samples) const override {
    return whole_.target_specs(samples);
  }
  void inputs(Phase phase, std::uint64_t step, SampleRange range, Tensors into) const override {
    whole_.inputs(phase, step, range, into);
  }
  void targets(Phase phase, std::uint64_t step, SampleRange range, Tensors into) const override {
    whole_.targets(phase, step, range, into);
  }

 private:
  const DataSource& whole_;
  bool broken_;
};

class NoAnswers : public WrappedStage {
 public:
  using WrappedStage::WrappedStage;
  std::string why_no_answers() const override { throw std::runtime_error("nobody knows"); }
};

TEST_P(UsableTest, WhatOneRankThrowsBeforeACallIsRefusedOnAll) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    const TransformerConfig model = small_model();
    const auto source = synthetic_tokens(model);
    const int last = comm.size() - 1;
    const StageFactory factory = [&](int stage, int stages) -> std::unique_ptr<Stage> {
      auto whole = Transformer(model)(stage, stages);
      if (stage + 1 < stages) return whole;
      return std::make_unique<NoAnswers>(std::move(whole));
    };
    Pipeline pipeline(comm, factory, *source, options_of({.pipeline = GetParam()}));
    std::vector<std::int32_t> tokens(16, 3);
    const Tensor inputs{tokens.data(), source->input_specs(1)[0]};
    for (int attempt = 0; attempt < 2; ++attempt) {
      const auto refused = [&](const std::string& text, const auto& call) {
        try {
          call();
          ADD_FAILURE() << "not refused: " << text;
        } catch (const Error& error) {
          EXPECT_EQ(error.rank(), last);
          EXPECT_EQ(error.what(), text);
        }
      };
      refused("stage " + std::to_string(last) + ", why_no_answers(): nobody knows",
              [&] { (void)pipeline.infer({.inputs = {inputs}}); });
      refused("the source, input_specs(): the file is gone",
              [&] { (void)pipeline.evaluate(NoShapes(*source, comm.rank() == last), 5); });
      EXPECT_EQ(pipeline.evaluate(NoShapes(*source, false), 5).loss,
                pipeline.evaluate(*source, 5).loss);
      (void)pipeline.train_step();
    }
  });
}

// Ranks that are threads have no such rule.
TEST_P(UsableTest, MpiOfOneThreadRefusesACallOfAnotherOnThatRankAlone) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    int level = MPI_THREAD_MULTIPLE;
    if (std::string(comm.name()) == "mpi") MPI_Query_thread(&level);
    if (level == MPI_THREAD_MULTIPLE) return;
    const TransformerConfig model = small_model();
    const auto source = synthetic_tokens(model);
    Pipeline pipeline(comm, stages_of(model), *source, options_of({.pipeline = GetParam()}));
    if (comm.rank() + 1 == comm.size()) {
      std::thread([&] {
        const std::string why = "only the thread that initialised it may make or call";
        expect_refusal(why, [&] { (void)pipeline.train_step(); });
        expect_refusal(why, [&] { (void)pipeline.state(); });
        expect_refusal(why, [&] { pipeline.close(); });
      }).join();
    }
    EXPECT_EQ(pipeline.train_step().step, 1U);
  });
}

TEST_P(UsableTest, ALearningRateCountsFromTheNextStepOn) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    const TransformerConfig model = small_model();
    const auto source = synthetic_tokens(model);
    const StageFactory factory = stages_of(model);
    PipelineOptions options = options_of({.pipeline = GetParam()});
    const LearningRate planned = options.training.learning_rate;
    Pipeline reference(comm, factory, *source, options);
    options.training.learning_rate = {.peak = 0.5};
    Pipeline pipeline(comm, factory, *source, options);
    for (std::uint64_t step = 1; step <= 3; ++step) {
      const StepReport expected = reference.train_step();
      if (step == 2) {
        pipeline.set_learning_rate(planned);
      } else {
        pipeline.set_learning_rate(planned.at(step));
      }
      for (const double wrong : {-1.0, std::nan(""), HUGE_VAL}) {
        expect_refusal("legal are numbers from 0", [&] { pipeline.set_learning_rate(wrong); });
      }
      expect_refusal("legal are at most 3.4", [&] { pipeline.set_learning_rate(1e39); });
      EXPECT_EQ(pipeline.train_step().learning_rate, expected.learning_rate);
    }
    EXPECT_EQ(digest_of(pipeline), digest_of(reference));
  });
}

TEST_P(UsableTest, ALearningRateThatGrowsTooFarIsRefusedBeforeItsStep) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    const TransformerConfig model = small_model();
    const auto source = synthetic_tokens(model);
    const StageFactory factory = stages_of(model);
    Pipeline pipeline(comm, factory, *source, options_of({.pipeline = GetParam()}));
    pipeline.set_learning_rate(
        {.peak = 1e-3, .decay = LearningRate::Decay::kStep, .factor = 1e300, .every = 1});
    (void)pipeline.train_step();
    const std::string before = digest_of(pipeline);
    expect_refusal("the learning rate of step 2 is 1e+297", [&] { (void)pipeline.train_step(); });
    EXPECT_EQ(digest_of(pipeline), before);
    pipeline.set_learning_rate(1e-3);
    EXPECT_EQ(pipeline.train_step().step, 2U);
  });
}

TEST_P(UsableTest, DifferentLearningRatesChangeNothing) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    if (comm.size() == 1) return;
    const TransformerConfig model = small_model();
    const auto source = synthetic_tokens(model);
    const StageFactory factory = stages_of(model);
    Pipeline reference(comm, factory, *source, options_of({.pipeline = GetParam()}));
    Pipeline pipeline(comm, factory, *source, options_of({.pipeline = GetParam()}));
    reference.set_learning_rate(0.25);
    pipeline.set_learning_rate(comm.rank() + 1 == comm.size() ? 0.5 : 0.25);
    const std::string before = digest_of(pipeline);
    for (int attempt = 0; attempt < 2; ++attempt) {
      try {
        pipeline.train_step();
        ADD_FAILURE() << "trained";
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::kMismatch);
        EXPECT_EQ(error.rank(), comm.size() - 1);
        EXPECT_THAT(error.what(), HasSubstr("rank 0 has 0.25, rank " +
                                            std::to_string(comm.size() - 1) + " has 0.5"));
      }
    }
    EXPECT_EQ(pipeline.step(), 0U);
    EXPECT_EQ(digest_of(pipeline), before);
    pipeline.set_learning_rate(0.25);
    EXPECT_EQ(pipeline.train_step().loss, reference.train_step().loss);
    EXPECT_EQ(digest_of(pipeline), digest_of(reference));
  });
}

TEST_P(UsableTest, DifferentNumbersOfStepsChangeNothing) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    const TransformerConfig model = small_model();
    const auto source = synthetic_tokens(model);
    const StageFactory factory = stages_of(model);
    std::vector<Layout> layouts = {{.pipeline = GetParam()}};
    if (GetParam() > 1) layouts.push_back({.pipeline = 1, .replicas = GetParam()});
    for (const Layout& layout : layouts) {
      Pipeline pipeline(comm, factory, *source, options_of(layout));
      expect_refusal("legal are 0 to 4503599627370496",
                     [&] { pipeline.set_step(std::numeric_limits<std::uint64_t>::max()); });
      EXPECT_EQ(pipeline.step(), 0U);
      if (comm.size() == 1) continue;
      const std::string before = digest_of(pipeline);
      const int last = comm.size() - 1;
      pipeline.set_step(comm.rank() == last ? 5 : 0);
      for (int attempt = 0; attempt < 2; ++attempt) {
        expect_error(ErrorCode::kMismatch,
                     {"rank 0 has 0, rank " + std::to_string(last) + " has 5", "set_step()"},
                     [&] { (void)pipeline.train_step(); });
      }
      EXPECT_EQ(digest_of(pipeline), before);
      (void)pipeline.evaluate(*source, 5);  // takes no number of steps
      pipeline.set_step(5);
      EXPECT_EQ(pipeline.train_step().step, 6U);
    }
  });
}

TEST_P(UsableTest, RanksExchangeFlagsInEachStep) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    const TransformerConfig model = small_model();
    const auto source = synthetic_tokens(model);
    const StageFactory factory = stages_of(model);
    Pipeline pipeline(comm, factory, *source, options_of({.pipeline = GetParam()}));
    EXPECT_EQ(PipelineAccess::step_flags(pipeline), 0U);
    pipeline.train_step();
    EXPECT_EQ(PipelineAccess::step_flags(pipeline), 0U);
    int calls = 0;
    PipelineAccess::set_step_flags(pipeline, [&]() -> std::uint32_t {
      ++calls;
      return (calls == 1 ? 1U << 31 : 0) | 1U << comm.rank();
    });
    pipeline.train_step();
    EXPECT_EQ(PipelineAccess::step_flags(pipeline), 1U << 31 | ((1U << comm.size()) - 1));
    (void)pipeline.evaluate(*source, 5);
    EXPECT_EQ(PipelineAccess::step_flags(pipeline), 1U << 31 | ((1U << comm.size()) - 1));
    pipeline.train_step();
    EXPECT_EQ(PipelineAccess::step_flags(pipeline), (1U << comm.size()) - 1);
    EXPECT_EQ(calls, 2);
    PipelineAccess::set_step_flags(pipeline, {});
    pipeline.train_step();
    EXPECT_EQ(PipelineAccess::step_flags(pipeline), 0U);
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, UsableTest, ::testing::Values(1, 2, 3, 4));

}  // namespace
}  // namespace sluice::testing
