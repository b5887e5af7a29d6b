#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <array>
#include <cmath>
#include <fstream>
#include <limits>
#include <set>

#include <sluice/checkpoint.hpp>
#include <sluice/data.hpp>
#include <sluice/error.hpp>
#include <sluice/operators.hpp>
#include <sluice/pipeline.hpp>

#include "runtime/engine/engine.hpp"
#include "runtime/layout/job_layout.hpp"
#include "runtime/pipeline/pipeline_access.hpp"
#include "tests/allocation_counter.hpp"
#include "tests/loopback/loopback.hpp"
#include "tests/runtime/engine/arithmetic_stage.hpp"
#include "tests/runtime/pipeline/training_cases.hpp"
#include "tests/runtime/temporary_directory.hpp"

namespace sluice::testing {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::StartsWith;

PipelineOptions sgd_options(int micro_batches) {
  PipelineOptions options;
  options.shape.micro_batches = micro_batches;
  options.training.optimizer.kind = OptimizerConfig::Kind::kSgd;
  options.training.learning_rate = {.peak = 0.001};
  return options;
}

StageFactory arithmetic(int failing_stage = -1, const PlannedFailure& failure = {}) {
  return [=](int stage, int) -> std::unique_ptr<Stage> {
    return std::make_unique<ArithmeticStage>(stage,
                                             stage == failing_stage ? failure : PlannedFailure{});
  };
}

// Every rank's error of a body that must fail on all of them.
std::vector<Error> errors_of(int ranks, const std::function<void(Communicator&)>& body) {
  std::vector<std::optional<Error>> caught(static_cast<std::size_t>(ranks));
  run_loopback(ranks, [&](Communicator& comm) {
    try {
      body(comm);
    } catch (const Error& error) {
      caught[static_cast<std::size_t>(comm.rank())].emplace(error);
    }
  });
  std::vector<Error> errors;
  for (const auto& error : caught) {
    EXPECT_TRUE(error.has_value()) << "a rank ended without an error";
    if (error) errors.push_back(*error);
  }
  return errors;
}

TEST(PipelineTest, AnExceptionOnOneRankIsThrownOnAllWithItsOrigin) {
  const auto source = counting_source(4);
  const PlannedFailure failure{
      .step = 2, .micro_batch = 1, .act = [] { throw std::runtime_error("the stage broke"); }};
  const auto errors = errors_of(3, [&](Communicator& comm) {
    Pipeline pipeline(comm, arithmetic(1, failure), *source, sgd_options(4));
    pipeline.train_step();
    pipeline.train_step();
  });
  for (const Error& error : errors) {
    EXPECT_STREQ(error.what(), "stage 1, forward of micro-batch 1: the stage broke");
    EXPECT_EQ(error.rank(), 1);
  }
}

// The errors of a training whose stage 1 fails in micro-batch 1 of its second step.
std::vector<Error> errors_of_a_failing_stage(const std::function<void()>& act) {
  const auto source = counting_source(4);
  return errors_of(2, [&](Communicator& comm) {
    Pipeline pipeline(comm, arithmetic(1, {.step = 2, .micro_batch = 1, .act = act}), *source,
                      sgd_options(4));
    pipeline.train_step();
    pipeline.train_step();
  });
}

TEST(PipelineTest, AnErrorOfAStageKeepsItsCodeAndNamesTheAction) {
  for (const Error& error :
       errors_of_a_failing_stage([] { throw Error(ErrorCode::kData, "an odd value"); })) {
    EXPECT_EQ(error.code(), ErrorCode::kData);
    EXPECT_STREQ(error.what(), "stage 1, forward of micro-batch 1: an odd value");
    EXPECT_EQ(error.rank(), 1);
  }
  for (const Error& error : errors_of_a_failing_stage([] { throw std::bad_alloc(); })) {
    EXPECT_EQ(error.code(), ErrorCode::kDevice);
    // With the step and the host, whose memory it is.
    EXPECT_THAT(error.what(), StartsWith("stage 1, forward of micro-batch 1 of step 2 on "));
    EXPECT_THAT(error.what(), EndsWith(": out of host memory"));
  }
}

// y = x weightᵀ, of `out` columns, but described as of `described` columns.
class LinearStage : public ArithmeticStage {
 public:
  LinearStage(int stage, std::int64_t in, std::int64_t out, std::int64_t described)
      : ArithmeticStage(stage),
        described_(described),
        weight_(&parameters()->add("weight" + std::to_string(stage), Shape{out, in},
                                   Init::normal(0.1))) {}
  StageDescription describe(std::span<const TensorSpec> inputs, ComputeContext&) const override {
    return {{{DType::kF32, Shape{inputs[0].shape[0], described_}}}};
  }
  void forward(StageContext& ctx, std::span<const Tensor> x, std::span<const Tensor> y) override {
    linear_forward(ctx.compute, x[0], weight_->value, {}, y[0]);
  }
  void backward(StageContext& ctx, std::span<const Tensor> dy,
                std::span<const Tensor> dx) override {
    if (!dx.empty()) linear_backward_input(ctx.compute, dy[0], weight_->value, dx[0]);
    linear_backward_weight(ctx.compute, ctx.inputs[0], dy[0], weight_->grad, {});
  }

 private:
  std::int64_t described_;
  Parameter* weight_;
};

TEST(PipelineTest, AStageThatWritesMoreThanItDescribedIsRefused) {
  const auto source =
      make_array_source(std::vector<float>(80, 1), 10, std::vector<float>(8, 1), 1, 4);
  const auto described = [](std::int64_t columns) {
    return [=](int stage, int) -> std::unique_ptr<Stage> {
      if (stage == 0) return std::make_unique<LinearStage>(0, 10, 16, columns);
      return std::make_unique<LinearStage>(1, 16, 1, 1);
    };
  };
  for (const Error& error : errors_of(2, [&](Communicator& comm) {
         Pipeline(comm, described(7), *source, sgd_options(2)).train_step();
       })) {
    EXPECT_EQ(error.code(), ErrorCode::kUsage);
    EXPECT_EQ(error.rank(), 0);
    EXPECT_STREQ(error.what(),
                 "stage 0, forward of micro-batch 0: linear_forward: y is f32 [1, 7]; legal with x "
                 "f32 [1, 10] and "
                 "weight f32 [16, 10]: f32 [1, 16]");
  }
  run_loopback(2, [&](Communicator& comm) {
    Pipeline(comm, described(16), *source, sgd_options(2)).train_step();
  });
}

// Fails before the first action of a step.
class UnreadyStage : public ArithmeticStage {
 public:
  using ArithmeticStage::ArithmeticStage;
  void begin_step(ComputeContext&) override { throw std::runtime_error("not ready"); }
};

TEST(PipelineTest, AnErrorBeforeTheFirstActionNamesTheStage) {
  const auto source = counting_source(4);
  const StageFactory factory = [](int stage, int) -> std::unique_ptr<Stage> {
    if (stage == 1) return std::make_unique<UnreadyStage>(stage);
    return std::make_unique<ArithmeticStage>(stage);
  };
  for (const Error& error : errors_of(2, [&](Communicator& comm) {
         Pipeline(comm, factory, *source, sgd_options(4)).train_step();
       })) {
    EXPECT_STREQ(error.what(), "stage 1, before its first action: not ready");
  }
}

TEST(PipelineTest, AnotherRanksErrorThatEndsAStagesCallIsNotTheStages) {
  for (const Error& error :
       errors_of_a_failing_stage([] { throw Error(ErrorCode::kPeer, "rank 0 is gone", 0); })) {
    EXPECT_EQ(error.code(), ErrorCode::kPeer);
    EXPECT_STREQ(error.what(), "rank 0 is gone");
    EXPECT_EQ(error.rank(), 0);
  }
}

TEST(PipelineTest, OutOfMemoryInAStepNamesTheActionWhatWasAskedAndThePlansTable) {
  for (const Error& error : errors_of_a_failing_stage([] { throw OutOfMemory("no 64 bytes"); })) {
    EXPECT_EQ(error.code(), ErrorCode::kDevice);
    EXPECT_THAT(error.what(), HasSubstr("step 2 on cpu of "));
    EXPECT_THAT(error.what(), HasSubstr(": stage 1, forward of micro-batch 1: no 64 bytes; the "
                                        "plan of this rank: parameters "));
  }
}

TEST(PipelineTest, RefusesAStepWithNanOnAllRanksBeforeAnythingMoved) {
  const auto source =
      make_array_source({1, std::numeric_limits<float>::quiet_NaN()}, 1, {1, 1}, 1, 2);
  std::vector<float> weights(2);
  const auto errors = errors_of(2, [&](Communicator& comm) {
    Pipeline pipeline(comm, arithmetic(), *source, sgd_options(2));
    try {
      pipeline.train_step();
    } catch (const Error&) {
      weights[static_cast<std::size_t>(comm.rank())] =
          pipeline.parameters()[0].parameter->value.at(0);
      throw;
    }
  });
  for (const Error& error : errors) {
    EXPECT_EQ(error.code(), ErrorCode::kNumeric);
    EXPECT_THAT(error.what(), HasSubstr("micro-batch 1"));
  }
  EXPECT_EQ(weights, (std::vector<float>{1, 2}));
}

TEST(PipelineTest, RanksWithOtherOptionsAreToldBothValues) {
  const auto source = counting_source(4);
  const auto errors = errors_of(2, [&](Communicator& comm) {
    PipelineOptions options = sgd_options(2);
    if (comm.rank() == 1) options.training.seed = 7;
    Pipeline pipeline(comm, arithmetic(), *source, options);
  });
  for (const Error& error : errors) {
    EXPECT_EQ(error.code(), ErrorCode::kMismatch);
    EXPECT_THAT(error.what(), HasSubstr("'seed'"));
    EXPECT_THAT(error.what(), HasSubstr("'1'"));
    EXPECT_THAT(error.what(), HasSubstr("'7'"));
  }
}

TEST(PipelineTest, OptionsThatCannotWorkAreRefusedOnAllRanks) {
  const auto source = counting_source(4);
  const std::vector<std::pair<std::string, std::function<void(PipelineOptions&)>>> wrong = {
      {"a learning rate of -1", [](auto& o) { o.training.learning_rate.peak = -1; }},
      {"a learning rate of nan", [](auto& o) { o.training.learning_rate.peak = std::nan(""); }},
      {"clip is nan", [](auto& o) { o.training.clip = std::nan(""); }},
      {"momentum is nan", [](auto& o) { o.training.optimizer.momentum = std::nanf(""); }},
      {"pipeline is -1", [](auto& o) { o.shape.pipeline = -1; }}};
  for (const auto& [text, change] : wrong) {
    PipelineOptions options = sgd_options(2);
    change(options);
    for (const Error& error : errors_of(2, [&](Communicator& comm) {
           Pipeline pipeline(comm, arithmetic(), *source, options);
         })) {
      EXPECT_EQ(error.code(), ErrorCode::kUsage);
      EXPECT_THAT(error.what(), HasSubstr(text));
    }
  }
}

// Before memory for them is taken.
TEST(PipelineTest, TooManyMicroBatchesAreRefused) {
  std::size_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  rlimit before{};
  getrlimit(RLIMIT_AS, &before);
  const rlimit now{pages * 4096 + (std::size_t{1} << 30), before.rlim_max};
  setrlimit(RLIMIT_AS, &now);
  PipelineOptions options = sgd_options(1);
  options.shape.micro_batches = 500'000'000;
  const auto source = counting_source(4);
  const auto errors = errors_of(
      1, [&](Communicator& comm) { Pipeline pipeline(comm, arithmetic(), *source, options); });
  setrlimit(RLIMIT_AS, &before);
  ASSERT_EQ(errors.size(), 1U);
  EXPECT_EQ(errors[0].code(), ErrorCode::kUsage);
  EXPECT_THAT(errors[0].what(), HasSubstr("nearest legal: --micro-batches 2000000"));
}

TEST(PipelineTest, RefusesAParameterOwnedTwice) {
  const auto source = counting_source(4);
  const StageFactory twice = [](int, int) { return std::make_unique<ArithmeticStage>(0); };
  const auto errors = errors_of(
      2, [&](Communicator& comm) { Pipeline pipeline(comm, twice, *source, sgd_options(2)); });
  for (const Error& error : errors) {
    EXPECT_THAT(error.what(), HasSubstr("'w0' is owned by stage 0 and by stage 1"));
  }
}

TEST(PipelineTest, RefusesAParameterWhoseNameNoFileHolds) {
  const auto source = counting_source(4);
  for (const std::string name : {"w\n", "__metadata__"}) {
    const StageFactory factory = [&](int stage, int) -> std::unique_ptr<Stage> {
      return std::make_unique<ArithmeticStage>(stage, PlannedFailure{}, stage == 1 ? name : "");
    };
    for (const Error& error : errors_of(2, [&](Communicator& comm) {
           Pipeline pipeline(comm, factory, *source, sgd_options(4));
         })) {
      EXPECT_EQ(error.code(), ErrorCode::kUsage);
      EXPECT_THAT(error.what(), HasSubstr("stage 1 has a parameter named \""));
      EXPECT_THAT(error.what(), HasSubstr("legal: at least one character"));
    }
  }
}

TEST(PipelineTest, RefusesAFactoryThatIsNull) {
  const auto source = counting_source(4);
  using Made = std::unique_ptr<Stage>;
  using ByNumbers = std::function<Made(int, int)>;
  for (const StageFactory& null : {StageFactory{}, StageFactory(nullptr), StageFactory(ByNumbers{}),
                                   StageFactory(static_cast<Made (*)(int, int)>(nullptr))}) {
    EXPECT_FALSE(null);
    for (const Error& error : errors_of(2, [&](Communicator& comm) {
           Pipeline pipeline(comm, null, *source, sgd_options(4));
         })) {
      EXPECT_EQ(error.code(), ErrorCode::kUsage);
      EXPECT_THAT(error.what(), HasSubstr("the StageFactory is null"));
    }
  }
}

TEST(PipelineTest, AFactoryTakesAPlaceOrTwoNumbers) {
  std::vector<int> seen;
  const StageFactory by_place = [&](const StagePlace& place) -> std::unique_ptr<Stage> {
    seen.insert(seen.end(), {place.stage, place.stages});
    return nullptr;
  };
  const StageFactory by_numbers = [&](int stage, int stages) -> std::unique_ptr<Stage> {
    seen.insert(seen.end(), {stage, stages});
    return nullptr;
  };
  const StageFactory of_any = [&](auto... numbers) {
    seen.insert(seen.end(), {numbers...});
    return std::make_unique<ArithmeticStage>(0);
  };
  const StageFactory counting = [made = 0, &seen](int, int) mutable {
    seen.push_back(++made);
    return std::unique_ptr<Stage>();
  };
  EXPECT_EQ(by_place({1, 4}), nullptr);
  EXPECT_EQ(by_numbers({2, 3}), nullptr);
  EXPECT_NE(of_any({5, 6}), nullptr);
  EXPECT_EQ(counting({}), nullptr);
  EXPECT_EQ(counting({}), nullptr);
  EXPECT_EQ(seen, (std::vector{1, 4, 2, 3, 5, 6, 1, 2}));
  const auto move_only = [owned = std::make_unique<int>(0)](int, int) {
    return std::unique_ptr<Stage>();
  };
  static_assert(!std::is_constructible_v<StageFactory, decltype(move_only)>);
  static_assert(!std::is_constructible_v<StageFactory, int (*)(int, int)>);
}

TEST(PipelineTest, RefusesAParameterWhoseNameIsNotUtf8) {
  const auto source = counting_source(4);
  const StageFactory factory = [](int stage, int) -> std::unique_ptr<Stage> {
    return std::make_unique<ArithmeticStage>(stage, PlannedFailure{}, stage == 1 ? "w\xff" : "");
  };
  for (const Error& error : errors_of(2, [&](Communicator& comm) {
         Pipeline pipeline(comm, factory, *source, sgd_options(4));
       })) {
    EXPECT_EQ(error.code(), ErrorCode::kUsage);
    EXPECT_STREQ(error.what(), "stage 1 has a parameter whose name \"w\uFFFD\" is not UTF-8");
  }
}

// Describes what `change` leaves, and declares other parameters.
class DeclaringStage : public ArithmeticStage {
 public:
  using Change = std::function<void(StageDescription&, ParameterSet&)>;
  DeclaringStage(int stage, const Change& change) : ArithmeticStage(stage), change_(change) {
    StageDescription unused;
    change(unused, declared_);
  }
  StageDescription describe(std::span<const TensorSpec> inputs,
                            ComputeContext& compute) const override {
    StageDescription description = ArithmeticStage::describe(inputs, compute);
    ParameterSet unused;
    change_(description, unused);
    return description;
  }
  ParameterSet* parameters() override { return &declared_; }

 private:
  Change change_;
  ParameterSet declared_;
};

using Declare = std::function<void(int, StageDescription&, ParameterSet&)>;

// What a pipeline of two such stages, changed by their number, says on both ranks.
void expect_both_refuse(const std::string& part, const Declare& declare,
                        ErrorCode code = ErrorCode::kUsage) {
  SCOPED_TRACE(part);
  const auto source = counting_source(4);
  const StageFactory factory = [&](int stage, int) {
    return std::make_unique<DeclaringStage>(
        stage, [&declare, stage](StageDescription& description, ParameterSet& set) {
          declare(stage, description, set);
        });
  };
  for (const Error& error : errors_of(2, [&](Communicator& comm) {
         Pipeline pipeline(comm, factory, *source, sgd_options(2));
       })) {
    EXPECT_STREQ(name_of(error.code()), name_of(code));
    EXPECT_THAT(error.what(), HasSubstr(part));
  }
}

TEST(PipelineTest, RefusesUsesOfATiedParameterThatDiffer) {
  expect_both_refuse(
      "tied parameter 'w' is [3, 2], initially constant 1 on stage 0 and [2, 3],",
      [](int stage, StageDescription&, ParameterSet& set) {
        set.add("w", stage == 0 ? Shape{3, 2} : Shape{2, 3}, Init::constant(1), true, true);
      });
  expect_both_refuse("initially normal 0.5 on stage 0 and [2], initially normal 0.25 on stage 1",
                     [](int stage, StageDescription&, ParameterSet& set) {
                       set.add("w", {2}, Init::normal(stage == 0 ? 0.5 : 0.25), true, true);
                     });
}

TEST(PipelineTest, RefusesSizesThatNoSumHolds) {
  constexpr std::size_t kMost = std::numeric_limits<std::size_t>::max();
  const auto on_stage_1 = [](const std::function<void(StageDescription&)>& change) {
    return [change](int stage, StageDescription& description, ParameterSet&) {
      if (stage == 1) change(description);
    };
  };
  expect_both_refuse("but the plan needs", on_stage_1([](StageDescription& description) {
                       description.state_bytes_until_input = kMost / 2;
                       description.state_bytes_until_weight = kMost / 2 + 5;
                     }),
                     ErrorCode::kDevice);
  // Each of these is a number that a sum or a multiple of no longer is.
  for (std::size_t StageDescription::*size :
       {&StageDescription::state_bytes_until_input, &StageDescription::shared_gradient_bytes,
        &StageDescription::workspace_bytes, &StageDescription::operator_bytes,
        &StageDescription::table_bytes, &StageDescription::copy_bytes}) {
    expect_both_refuse("but the plan needs",
                       on_stage_1([size](StageDescription& d) { d.*size = kMost - 100; }),
                       ErrorCode::kDevice);
  }
}

// What a stage throws outside of forward and backward names the stage and the call.
enum class Place { kFactory, kDescribe, kPrepare, kCount };

class BrokenStage : public ArithmeticStage {
 public:
  BrokenStage(int stage, Place place) : ArithmeticStage(stage, PlannedFailure{}), place_(place) {}
  StageDescription describe(std::span<const TensorSpec> inputs,
                            ComputeContext& compute) const override {
    if (place_ == Place::kDescribe) throw std::invalid_argument("an odd width");
    return ArithmeticStage::describe(inputs, compute);
  }
  void prepare(const StageSetup& /*setup*/) override {
    if (place_ == Place::kPrepare) throw std::invalid_argument("an odd width");
  }
  double target_weight(std::span<const Tensor> targets) const override {
    if (place_ == Place::kCount) throw std::invalid_argument("an odd width");
    return ArithmeticStage::target_weight(targets);
  }

 private:
  Place place_;
};

TEST(PipelineTest, WhatAStageThrowsInAnyCallNamesTheStageAndTheCall) {
  const auto source = counting_source(4);
  for (const auto& [place, where] : std::vector<std::pair<Place, std::string>>{
           {Place::kFactory, "making stage 1: an odd width"},
           {Place::kDescribe, "stage 1, describe() of f32 ["},
           {Place::kPrepare, "stage 1, prepare(): an odd width"},
           {Place::kCount, "stage 1, target_weight() of sample 0 of the batch: an odd width"}}) {
    const StageFactory factory = [place = place](int stage, int) -> std::unique_ptr<Stage> {
      if (stage != 1) return std::make_unique<ArithmeticStage>(stage, PlannedFailure{});
      if (place == Place::kFactory) throw std::invalid_argument("an odd width");
      return std::make_unique<BrokenStage>(stage, place);
    };
    for (const Error& error : errors_of(2, [&](Communicator& comm) {
           Pipeline pipeline(comm, factory, *source, sgd_options(4));
           (void)pipeline.train_step();
         })) {
      EXPECT_EQ(error.rank(), 1);
      EXPECT_THAT(error.what(), ::testing::StartsWith(where));
      EXPECT_THAT(error.what(), HasSubstr("an odd width"));
    }
  }
}

// An output of one row for a whole micro-batch is legal in training; infer() could not join it.
class SummaryStage : public ArithmeticStage {
 public:
  SummaryStage() : ArithmeticStage(0, PlannedFailure{}) {}
  StageDescription describe(std::span<const TensorSpec> inputs,
                            ComputeContext& compute) const override {
    StageDescription description = ArithmeticStage::describe(inputs, compute);
    description.outputs = {{DType::kF32, {1}}};
    return description;
  }
};

TEST(PipelineTest, InferRefusesOutputsThatHaveNoRowForEachSample) {
  const StageFactory factory = [](int, int) { return std::make_unique<SummaryStage>(); };
  for (const Error& error : errors_of(1, [&](Communicator& comm) {
         PipelineOptions options = sgd_options(2);
         options.shape.micro_batch_size = 2;
         const BatchSpec spec{.inputs = {{DType::kF32, {}}}, .targets = {{DType::kF32, {}}}};
         Pipeline pipeline(comm, factory, spec, options);
         std::vector<float> values(4);
         const Batch batch{.inputs = {view(std::span<float>(values), {4})}};
         (void)pipeline.infer(batch);
       })) {
    EXPECT_EQ(error.code(), ErrorCode::kUsage);
    EXPECT_THAT(error.what(), HasSubstr("is f32 [1] for a micro-batch of 2 samples"));
  }
}

TEST(PipelineTest, RanksThatAreNotPipelineTimesReplicasAreRefused) {
  const auto source = counting_source(4);
  const auto errors = errors_of(3, [&](Communicator& comm) {
    PipelineOptions options = sgd_options(2);
    options.shape.pipeline = 2;
    Pipeline pipeline(comm, arithmetic(), *source, options);
  });
  for (const Error& error : errors) EXPECT_EQ(error.code(), ErrorCode::kUsage);
}

TEST(PipelineTest, ReplicasThatDriftApartAreNamed) {
  const auto source = counting_source(4);
  const auto errors = errors_of(2, [&](Communicator& comm) {
    PipelineOptions options = sgd_options(2);
    options.shape.replicas = 2;
    options.checks.replicas_every = 1;
    Pipeline pipeline(comm, arithmetic(), *source, options);
    pipeline.train_step();
    if (comm.rank() == 1) pipeline.parameters()[0].parameter->value.at(0) += 1;
    pipeline.train_step();
  });
  for (const Error& error : errors) {
    EXPECT_EQ(error.code(), ErrorCode::kMismatch);
    EXPECT_THAT(error.what(), HasSubstr("'w0'"));
  }
}

TEST(PipelineTest, EveryRankKnowsHowManyTargetsAllReplicasHave) {
  class ScaledStage : public ArithmeticStage {
   public:
    ScaledStage(int stage, double& scale) : ArithmeticStage(stage), scale_(scale) {}
    void forward(StageContext& ctx, std::span<const Tensor> x, std::span<const Tensor> y) override {
      scale_ = static_cast<double>(ctx.loss_scale);
      ArithmeticStage::forward(ctx, x, y);
    }

   private:
    double& scale_;
  };
  const auto source = counting_source(11);
  PipelineOptions options = sgd_options(2);
  options.shape.pipeline = 2;
  options.shape.replicas = 3;
  options.shape.micro_batch_size = 2;
  options.shape.batch_size = 11;  // 4, 4 and 3
  std::array<double, 6> scales{};
  run_loopback(6, [&](Communicator& comm) {
    Pipeline pipeline(
        comm,
        [&](int stage, int) {
          return std::make_unique<ScaledStage>(stage,
                                               scales[static_cast<std::size_t>(comm.rank())]);
        },
        *source, options);
    EXPECT_EQ(pipeline.train_step().targets, 11);
  });
  for (const double scale : scales) EXPECT_EQ(scale, 1 / 11.0);
}

// The whole step: loading, stages, messages, tied sums, replicas, norm, optimizer. The stages are
// hand-written: the matmul library allocates inside its matmuls.
TEST(PipelineTest, AStepInSteadyStateAllocatesNothing) {
  const auto source = counting_source(8);
  const StageFactory tied = [](int stage, int) {
    return std::make_unique<ArithmeticStage>(stage, PlannedFailure{}, "shared");
  };
  run_loopback(4, [&](Communicator& comm) {
    PipelineOptions options = sgd_options(4);
    options.shape.replicas = 2;
    options.training.clip = 1;
    Pipeline pipeline(comm, tied, *source, options);
    for (int step = 0; step < 3; ++step) pipeline.train_step();
    const std::size_t before = allocations_of_this_thread();
    const StepReport report = pipeline.train_step();
    // Rank 0's report carries two vectors.
    EXPECT_LE(allocations_of_this_thread() - before, comm.rank() == 0 ? 2U : 0U);
    EXPECT_EQ(report.step, 4U);
  });
}

// The table of a dry run: what the stages describe, each slot and each stage's workspace counted.
TEST(PipelineTest, PlansTheMemoryThatItsStagesDescribe) {
  const TransformerConfig model = small_model();
  const auto source = synthetic_tokens(model);
  const Partition partition{{0, 1, 2, 3, 4}};
  const StageFactory factory = [&](int stage, int) {
    return Transformer(model).stage_of(partition, stage);
  };
  PipelineOptions options;
  options.order.schedule = "interleaved";
  options.order.chunks = 2;
  options.shape.micro_batches = 4;
  run_loopback(2, [&](Communicator& comm) {
    const JobLayout layout = PipelineAccess::plan_layout(comm, options, factory, *source);
    const std::vector<int> peaks = peak_in_flight(layout.plans.order);
    TensorSpec input = source->input_specs(1).front();
    std::vector<StageDescription> described;
    ComputeContext compute({}, 1);
    for (int stage = 0; stage < 4; ++stage) {
      described.push_back(factory({stage, 4})->describe({&input, 1}, compute));
      input = described.back().outputs.front();
    }
    for (std::size_t rank = 0; rank < 2; ++rank) {
      const StageDescription &low = described[rank], &high = described[rank + 2];
      const auto workspace = [](const StageDescription& each) {
        return each.workspace_bytes + each.shared_gradient_bytes;
      };
      EXPECT_EQ(layout.memory.ranks[rank].workspace, workspace(low) + workspace(high));
      EXPECT_GT(layout.memory.ranks[rank].operators, 0U);
      EXPECT_GE(layout.memory.ranks[rank].operators,
                std::max(low.operator_bytes, high.operator_bytes));
      const auto state = [](const StageDescription& each) {
        return each.state_bytes_until_input + each.state_bytes_until_weight;
      };
      EXPECT_GE(layout.memory.ranks[rank].activations, state(low) + state(high));
      EXPECT_LE(layout.memory.ranks[rank].activations,
                static_cast<std::size_t>(peaks[rank]) * (state(low) + state(high)));
    }
  });
}

TEST(PipelineTest, PlansTheOptimizersMemoryOfTheReplicaWithTheLargestParts) {
  TransformerConfig model = small_model();
  model.width = 64 * model.heads;
  const auto source = synthetic_tokens(model);
  PipelineOptions options;
  options.shape = {.pipeline = 2, .replicas = 3};
  const auto planned = [&] {
    JobLayout layout;
    run_loopback(1, [&](Communicator& comm) {
      layout = PipelineAccess::plan_layout(comm, options, Transformer(model), *source);
    });
    return layout;
  };
  const JobLayout whole = planned();
  options.shape.shard = ShardLevel::kOptimizer;
  const JobLayout cut = planned();
  for (int rank = 0; rank < 2; ++rank) {
    std::int64_t all = 0, largest = 0;  // bytes
    for (int replica = 0; replica < 3; ++replica) {
      std::int64_t parts = 0;
      all = 0;
      const auto& entries = cut.parameters.stages[static_cast<std::size_t>(rank)].parameters;
      for (std::size_t i = 0; i < entries.size(); ++i) {
        if (!cut.parameters.is_owner(rank, static_cast<int>(i))) continue;
        const auto two_vectors = [](std::int64_t elements) {
          return 2 * ((elements + 63) / 64 * 256);
        };
        parts += two_vectors(entries[i].part(replica).count);
        all += two_vectors(entries[i].elements);
      }
      largest = std::max(largest, parts);
    }
    const auto at = static_cast<std::size_t>(rank);
    EXPECT_EQ(cut.memory.ranks[at].optimizer, static_cast<std::size_t>(largest));
    EXPECT_EQ(whole.memory.ranks[at].optimizer, static_cast<std::size_t>(all));
    EXPECT_LT(largest, all / 2) << "of three replicas";
  }
}

TEST(PipelineTest, SeveralPipelinesLiveInOneProcess) {
  const auto source = counting_source(4);
  run_loopback(2, [&](Communicator& comm) {
    Pipeline one(comm, arithmetic(), *source, sgd_options(4));
    Pipeline two(comm, arithmetic(), *source, sgd_options(4));
    for (int step = 0; step < 3; ++step) {
      EXPECT_EQ(one.train_step().loss, two.train_step().loss);
    }
  });
}

TEST(PipelineTest, MeansDoNotDependOnMicroBatchesOrReplicas) {
  const auto source = counting_source(8);
  const auto loss = [&](int ranks, int replicas, int micro_batches) {
    double value = 0;
    run_loopback(ranks, [&](Communicator& comm) {
      PipelineOptions options = sgd_options(micro_batches);
      options.shape.replicas = replicas;
      options.shape.micro_batch_size = 8 / replicas / micro_batches;
      Pipeline pipeline(comm, arithmetic(), *source, options);
      const StepReport report = pipeline.train_step();
      if (comm.rank() == 0) value = report.loss;
    });
    return value;
  };
  EXPECT_EQ(loss(1, 1, 1), 4.5);
  EXPECT_EQ(loss(1, 1, 8), 4.5);
  EXPECT_EQ(loss(2, 2, 4), 4.5);
}

// Saved under one layout and continued under another: the bits of a run that was not stopped.
TEST(CheckpointTest, ContinuesUnderAnotherDepthWithTheSameBits) {
  TemporaryDirectory directory;
  TrainingCase what;
  what.model = small_model();
  const auto source = synthetic_tokens(what.model);
  const StageFactory factory = Transformer(what.model);
  PipelineOptions options;
  options.shape.micro_batches = 3;
  options.training.learning_rate = {.peak = 1e-2, .steps = 10};
  std::string whole, resumed;
  run_loopback(2, [&](Communicator& comm) {
    Pipeline pipeline(comm, factory, *source, options);
    for (int step = 0; step < 2; ++step) pipeline.train_step();
    save_checkpoint(pipeline, {.directory = directory.path()});
    for (int step = 0; step < 2; ++step) pipeline.train_step();
    const std::string digest = digest_of(pipeline);
    if (comm.rank() == 0) whole = digest;
  });
  for (const int ranks : {1, 2, 3}) {
    run_loopback(ranks, [&](Communicator& comm) {
      Pipeline pipeline(comm, factory, *source, options);
      load_checkpoint(pipeline, directory.path());
      EXPECT_EQ(pipeline.step(), 2U);
      for (int step = 0; step < 2; ++step) pipeline.train_step();
      const std::string digest = digest_of(pipeline);
      if (comm.rank() == 0) resumed = digest;
    });
    EXPECT_EQ(whole, resumed) << ranks << " ranks";
  }
}

TEST(CheckpointTest, RefusesWeightsOfAnotherModelByName) {
  TemporaryDirectory directory;
  TransformerConfig model = small_model();
  const auto run = [&](const TransformerConfig& config, bool save) {
    const auto source = synthetic_tokens(config);
    const StageFactory factory = Transformer(config);
    run_loopback(1, [&](Communicator& comm) {
      Pipeline pipeline(comm, factory, *source);
      save ? save_checkpoint(pipeline, {.directory = directory.path()})
           : load_weights(pipeline, directory.path());
    });
  };
  run(model, true);
  TransformerConfig wider = model;
  wider.width = 64;
  TransformerConfig deeper = model;
  deeper.layers = 3;
  TransformerConfig shallower = model;
  shallower.layers = 1;
  for (const TransformerConfig& other : {wider, deeper, shallower}) {
    try {
      run(other, false);
      ADD_FAILURE() << "loaded";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kWeights) << error.what();
    }
  }
}

}  // namespace
}  // namespace sluice::testing
