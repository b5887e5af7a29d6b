// Mistakes in the program's own stages and optimizers: all ranks throw the same Error, which names
// the stage, and no parameter gets a number that is not finite.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <latch>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <sluice/checkpoint.hpp>
#include <sluice/data.hpp>
#include <sluice/error.hpp>
#include <sluice/pipeline.hpp>
#include <sluice/simulate.hpp>
#include <sluice/stage.hpp>

#include "tests/runtime/engine/arithmetic_stage.hpp"
#include "tests/runtime/engine/wrapped_stage.hpp"
#include "tests/runtime/expect_error.hpp"
#include "tests/runtime/pipeline/training_cases.hpp"

namespace sluice::testing {
namespace {

PipelineOptions options_of(int ranks) {
  PipelineOptions options;
  options.shape = {.pipeline = ranks, .micro_batches = 2, .micro_batch_size = 2};
  options.training.optimizer = OptimizerConfig::sgd();
  options.training.learning_rate = {.peak = 1e-3};
  return options;
}

// What the stage with this mistake does in place of the right thing.
struct Mistake {
  std::function<void(ParameterSet&, const StageSetup&)> prepare = {};
  std::function<void(ParameterSet&)> parameters = {};  // before they are returned
  std::function<double()> weight = {};
};

class MistakenStage : public WrappedStage {
 public:
  MistakenStage(int stage, Mistake mistake)
      : WrappedStage(std::make_unique<ArithmeticStage>(stage)), mistake_(std::move(mistake)) {}
  void prepare(const StageSetup& setup) override {
    if (mistake_.prepare) return mistake_.prepare(*WrappedStage::parameters(), setup);
    WrappedStage::prepare(setup);
  }
  ParameterSet* parameters() override {
    if (mistake_.parameters) mistake_.parameters(*WrappedStage::parameters());
    return WrappedStage::parameters();
  }
  double target_weight(std::span<const Tensor> targets) const override {
    return mistake_.weight ? mistake_.weight() : WrappedStage::target_weight(targets);
  }

 private:
  Mistake mistake_;
};

// The last stage makes the mistake.
StageFactory factory_of(const Mistake& mistake) {
  return [=](int stage, int stages) -> std::unique_ptr<Stage> {
    return std::make_unique<MistakenStage>(stage, stage + 1 == stages ? mistake : Mistake{});
  };
}

std::string last_stage(const Communicator& comm) {
  return "stage " + std::to_string(comm.size() - 1);
}

class StageMistakesTest : public ::testing::TestWithParam<int> {};

TEST_P(StageMistakesTest, AWeightThatIsNoneIsRefusedOnAllRanks) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    const auto source = counting_source(4);
    for (const auto& [weight, text] : std::vector<std::pair<double, std::string>>{
             {std::nan(""), "nan"}, {HUGE_VAL, "inf"}, {-1, "-1"}}) {
      const StageFactory make = factory_of({.weight = [weight = weight] { return weight; }});
      for (const bool evaluates : {false, true}) {
        Pipeline pipeline(comm, make, *source, options_of(comm.size()));
        const std::string before = digest_of(pipeline);
        expect_error(
            ErrorCode::kUsage,
            {last_stage(comm), ", target_weight() of samples 0 to 1 of the batch",
             "weight of the targets is " + text},
            [&] { evaluates ? (void)pipeline.evaluate(*source, 4) : (void)pipeline.train_step(); });
        EXPECT_TRUE(pipeline.usable());
        EXPECT_EQ(digest_of(pipeline), before);
      }
    }
  });
}

// Each is finite, but their sum is not.
TEST_P(StageMistakesTest, WeightsThatAddUpToInfinityChangeNothing) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    const auto source = counting_source(4);
    double weight = 1e308;
    const StageFactory make = factory_of({.weight = [&] { return weight; }});
    PipelineOptions options = options_of(comm.size());
    Pipeline refusing(comm, make, *source, options);
    options.training.skip_nonfinite = true;
    Pipeline skipping(comm, make, *source, options);
    const std::string before = digest_of(refusing);
    expect_error(ErrorCode::kNumeric, {"the mean loss of step 1 over inf targets is not finite"},
                 [&] { (void)refusing.train_step(); });
    EXPECT_EQ(digest_of(refusing), before);
    EXPECT_TRUE(skipping.train_step().skipped);
    EXPECT_EQ(digest_of(skipping), before);
    weight = 2;
    EXPECT_EQ(refusing.train_step().targets, 4);
    EXPECT_FALSE(skipping.train_step().skipped);
  });
}

TEST_P(StageMistakesTest, AStageThatPreparesOtherParametersIsNamed) {
  using Prepare = std::function<void(ParameterSet&, const StageSetup&)>;
  with_ranks(GetParam(), [&](Communicator& comm) {
    const auto source = counting_source(4);
    const std::vector<std::pair<Prepare, std::string>> wrong = {
        {[](ParameterSet& set, const StageSetup& setup) {
           set.allocate(setup.compute->memory(), setup.seed);
         },
         "legal: once, which a pipeline does before Stage::prepare()"},
        {[](ParameterSet& set, const StageSetup&) { set.add("late", {1}, Init::constant(0)); },
         "parameter late is added after allocate()"},
        {[](ParameterSet& set, const StageSetup&) {
           set.add_buffer("late", {1}, Init::constant(0));
         },
         "buffer late is added after allocate()"}};
    for (const auto& [prepare, text] : wrong) {
      expect_error(ErrorCode::kUsage, {last_stage(comm) + ", prepare(): ", text}, [&] {
        const Pipeline none(comm, factory_of({.prepare = prepare}), *source,
                            options_of(comm.size()));
      });
    }
  });
}

// What Stage::parameters() does in its call number `call`, from 1: in describe(), before prepare(),
// after it.
TEST_P(StageMistakesTest, AStageWithOtherParametersThanItDescribedIsNamed) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    const auto source = counting_source(4);
    const auto refused = [&](int call, const std::string& text, const auto& change) {
      int calls = 0;
      const StageFactory make = factory_of({.parameters = [&](ParameterSet& set) {
        if (++calls == call) change(set);
      }});
      expect_error(ErrorCode::kUsage, {last_stage(comm), text},
                   [&] { const Pipeline none(comm, make, *source, options_of(comm.size())); });
    };
    refused(2, "has other parameters after prepare() than when it was described: 1, then 2",
            [](ParameterSet& set) { set.add("late", {1}, Init::constant(0)); });
    refused(2, "has other buffers after prepare() than when it was described: 0, then 1",
            [](ParameterSet& set) { set.add_buffer("late", {1}, Init::constant(0)); });
    refused(2, "its parameters: parameter w is declared twice in one stage", [](ParameterSet& set) {
      for (int i = 0; i < 2; ++i) set.add("w", {1}, Init::constant(0));
    });
    refused(3, "parameters have no memory", [](ParameterSet& set) {
      const Parameter was = *set.all()[0];
      set = ParameterSet();
      set.add(was.name, was.shape, was.init);
    });
  });
}

TEST_P(StageMistakesTest, WhatAskingForParametersThrowsNamesTheStage) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    const auto source = counting_source(4);
    for (const int failing : {1, 2, 3, 4}) {
      int calls = 0;
      const StageFactory make = factory_of({.parameters = [&](ParameterSet&) {
        if (++calls == failing) throw std::runtime_error("not yet");
      }});
      const auto train = [&] {
        Pipeline pipeline(comm, make, *source, options_of(comm.size()));
        (void)pipeline.train_step();
        (void)pipeline.state();
        pipeline.close();
      };
      if (failing == 4) {
        train();
        EXPECT_EQ(calls, comm.rank() + 1 == comm.size() ? 3 : 0);
        continue;
      }
      expect_error(ErrorCode::kUser, {last_stage(comm) + ", parameters(): not yet"}, train);
    }
  });
}

TEST_P(StageMistakesTest, ReplicasWithOtherParametersAreTold) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    if (comm.size() == 1) return;
    const auto source = counting_source(4);
    PipelineOptions options = options_of(1);
    options.shape.replicas = comm.size();
    options.shape.micro_batch_size = 1;
    const std::string last = std::to_string(comm.size() - 1);
    expect_error(ErrorCode::kMismatch,
                 {"replica 0 has 'parameter 0 of stage 0: w0, 1 elements, unit 0', replica " +
                  last + " has 'parameter 0 of stage 0: w1, 1 elements, unit 0'"},
                 [&] {
                   const bool other = comm.rank() + 1 == comm.size();
                   const Pipeline none(
                       comm,
                       [&](int, int) { return std::make_unique<ArithmeticStage>(other ? 1 : 0); },
                       *source, options);
                 });
    const auto add_twice = [](ParameterSet& set, bool swapped) {
      for (const char* name : {swapped ? "b" : "a", swapped ? "a" : "b"}) {
        set.add_buffer(name, {1}, Init::constant(0));
      }
    };
    expect_error(ErrorCode::kMismatch,
                 {"'buffer 0 of stage 0: a, 1 elements', replica 1", "'buffer 0 of stage 0: b"},
                 [&] {
                   const Pipeline none(
                       comm,
                       [&](int, int) {
                         auto stage = std::make_unique<ArithmeticStage>(0);
                         add_twice(*stage->parameters(), comm.rank() == 1);
                         return stage;
                       },
                       *source, options);
                 });
  });
}

class FailingOptimizer final : public Optimizer {
 public:
  explicit FailingOptimizer(bool fails) : fails_(fails) {}
  void update(ComputeContext&, std::uint64_t step, float, float) override {
    if (fails_ && step == 2) throw std::runtime_error("no more scratch");
  }
  std::vector<OptimizerState> state() override { return {}; }

 private:
  bool fails_;
};

TEST_P(StageMistakesTest, AnOptimizerThatThrowsIsNamedOnAllRanksInTheNextCallAtTheLatest) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    const auto source = counting_source(4);
    const bool last = comm.rank() + 1 == comm.size();
    const std::string name = "the optimizer of " + last_stage(comm) +
                             " (1 parameter, the first 'w" + std::to_string(comm.size() - 1) + "')";
    PipelineOptions options = options_of(comm.size());
    options.training.make_optimizer = [&](std::span<Parameter* const>, const DeviceMemory&) {
      return std::make_unique<FailingOptimizer>(last);
    };
    Pipeline pipeline(comm, factory_of({}), *source, options);
    (void)pipeline.train_step();
    expect_error(ErrorCode::kUser, {name + ", update() of step 2: no more scratch"}, [&] {
      (void)pipeline.train_step();
      EXPECT_FALSE(last);
      pipeline.close();
    });
    EXPECT_FALSE(pipeline.usable());
    EXPECT_EQ(pipeline.failure()->rank(), comm.size() - 1);
    options.training.make_optimizer = [&](std::span<Parameter* const>,
                                          const DeviceMemory&) -> std::unique_ptr<Optimizer> {
      if (last) throw std::runtime_error("no more scratch");
      return std::make_unique<FailingOptimizer>(false);
    };
    expect_error(ErrorCode::kUser, {"making " + name + ": no more scratch"},
                 [&] { const Pipeline none(comm, factory_of({}), *source, options); });
  });
}

// Replicas wait for the values of the one whose optimizer throws.
TEST_P(StageMistakesTest, AnOptimizerOfAPartThatThrowsIsNamedOnAllReplicas) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    const auto source = counting_source(8);
    const bool fails = comm.rank() == 0;  // it has the only block
    PipelineOptions options = options_of(1);
    options.shape.replicas = comm.size();
    options.shape.shard = ShardLevel::kOptimizer;
    options.training.make_optimizer = [&](std::span<const ParameterSlice>, const DeviceMemory&) {
      return std::make_unique<FailingOptimizer>(fails);
    };
    Pipeline pipeline(comm, factory_of({}), *source, options);
    (void)pipeline.train_step();
    expect_error(ErrorCode::kUser, {"update() of step 2: no more scratch"}, [&] {
      (void)pipeline.train_step();
      pipeline.close();
    });
    EXPECT_EQ(pipeline.failure()->rank(), 0);
  });
}

// Each call that a callback may not make.
std::vector<std::function<void(Pipeline&)>> calls_of_callbacks() {
  static const float number = 1;
  const Batch batch{.inputs = {view(std::span(&number, 1), {1, 1})},
                    .targets = {view(std::span(&number, 1), {1, 1})}};
  const auto numbers =
      make_array_dataset({host_copy(batch.inputs[0])}, {host_copy(batch.targets[0])});
  const std::string directory = ::testing::TempDir() + "/called_back";
  return {[](Pipeline& p) { (void)p.train_step(); },
          [=](Pipeline& p) { (void)p.train_step(batch); },
          [=](Pipeline& p) { (void)p.accumulate(batch); },
          [=](Pipeline& p) { (void)p.forward_backward(batch); },
          [](Pipeline& p) { (void)p.optimizer_step(); },
          [](Pipeline& p) { p.drop_gradients(); },
          [](Pipeline& p) { p.set_learning_rate(0.5); },
          [=](Pipeline& p) { (void)p.evaluate(batch); },
          [](Pipeline& p) { (void)p.evaluate(*counting_source(4), 4); },
          [=](Pipeline& p) { (void)p.infer(batch); },
          [](Pipeline& p) { p.close(); },
          [](Pipeline& p) { p.set_step(77); },
          [](Pipeline& p) { p.values_changed(); },
          [](Pipeline& p) { (void)p.state(); },
          [](Pipeline& p) { p.set_state({}); },
          [=](Pipeline& p) { (void)p.loader(numbers, {}); },
          [](Pipeline& p) { (void)step_timeline(p); },
          [=](Pipeline& p) { save_checkpoint(p, {.directory = directory}); },
          [=](Pipeline& p) { (void)load_checkpoint(p, directory); },
          [=](Pipeline& p) { load_weights(p, directory); }};
}

constexpr const char* kCalledBack = "called from a callback of its own";

TEST_P(StageMistakesTest, NoCallbackMayCallItsPipeline) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    const auto source = counting_source(4);
    for (const auto& call : calls_of_callbacks()) {
      Pipeline* called = nullptr;
      const StageFactory make = factory_of({.weight = [&] {
        if (called == nullptr) return 1.0;
        EXPECT_TRUE(called->usable());
        EXPECT_EQ(called->parameters().size() + called->step(), 2U);
        call(*called);
        return 1.0;
      }});
      Pipeline pipeline(comm, make, *source, options_of(comm.size()));
      (void)pipeline.train_step();
      called = &pipeline;
      expect_error(
          ErrorCode::kUsage,
          {last_stage(comm) + ", target_weight() of samples 0 to 1 of the batch: ", kCalledBack},
          [&] { (void)pipeline.train_step(); });
      EXPECT_TRUE(pipeline.usable()) << "refused before the step";
    }
  });
}

// Asks the pipeline for something before it gives targets, or inputs.
class AskingSource final : public DataSource {
 public:
  explicit AskingSource(
      std::function<void()> ask, std::function<void()> ask_first = [] {})
      : ask_(std::move(ask)), ask_first_(std::move(ask_first)) {}
  std::vector<TensorSpec> input_specs(std::int64_t n) const override {
    return whole_->input_specs(n);
  }
  std::vector<TensorSpec> target_specs(std::int64_t n) const override {
    return whole_->target_specs(n);
  }
  void inputs(Phase phase, std::uint64_t step, SampleRange range,
              std::span<const Tensor> into) const override {
    ask_first_();
    whole_->inputs(phase, step, range, into);
  }
  void targets(Phase phase, std::uint64_t step, SampleRange range,
               std::span<const Tensor> into) const override {
    ask_();
    whole_->targets(phase, step, range, into);
  }

 private:
  std::function<void()> ask_, ask_first_;
  std::unique_ptr<DataSource> whole_ = counting_source(4);
};

class AskingOptimizer final : public Optimizer {
 public:
  explicit AskingOptimizer(std::function<void()> ask) : ask_(std::move(ask)) {}
  void update(ComputeContext&, std::uint64_t, float, float) override { ask_(); }
  std::vector<OptimizerState> state() override {
    ask_();
    return {};
  }

 private:
  std::function<void()> ask_;
};

TEST_P(StageMistakesTest, ACallFromAnyCallbackIsRefusedOnAllRanks) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    Pipeline* called = nullptr;
    const auto ask = [&] {
      if (called != nullptr) called->drop_gradients();
    };
    const AskingSource source(ask);
    PipelineOptions options = options_of(comm.size());
    options.training.make_optimizer = [&](std::span<Parameter* const>, const DeviceMemory&) {
      return std::make_unique<AskingOptimizer>(ask);
    };
    const float number = 1;
    const Tensor input = view(std::span(&number, 1), {1, 1});
    const std::vector<std::function<void(Pipeline&)>> callers = {
        [&](Pipeline& p) { (void)p.train_step(); },         // the source's own thread
        [&](Pipeline& p) { (void)p.evaluate(source, 4); },  // the source
        [&](Pipeline& p) { (void)p.optimizer_step(); },     // the optimizer
        [](Pipeline& p) { (void)p.optimizer_state(); },
        [&](Pipeline& p) {
          (void)p.infer({.inputs = {input}},
                        {.on_outputs = [&](SampleRange, std::span<const Tensor>) { ask(); }});
        }};
    for (const auto& caller : callers) {
      std::optional<Pipeline> pipeline;
      const Batch batch{.inputs = {input}, .targets = {input}};
      // An optimizer's error may come out in a later call of other ranks, the source's while they
      // are still in the constructor.
      expect_error(ErrorCode::kUsage, {kCalledBack}, [&] {
        pipeline.emplace(comm, factory_of({}), source, options);
        if (&caller == &callers[2]) (void)pipeline->forward_backward(batch);
        called = &*pipeline;
        caller(*pipeline);
        pipeline->close();
      });
      called = nullptr;
    }
  });
}

// Gives inputs, and leaves targets as they are.
class SilentSource final : public DataSource {
 public:
  std::vector<TensorSpec> input_specs(std::int64_t n) const override {
    return whole_->input_specs(n);
  }
  std::vector<TensorSpec> target_specs(std::int64_t n) const override {
    return whole_->target_specs(n);
  }
  void inputs(Phase phase, std::uint64_t step, SampleRange range,
              std::span<const Tensor> into) const override {
    whole_->inputs(phase, step, range, into);
  }
  void targets(Phase, std::uint64_t, SampleRange, std::span<const Tensor>) const override {}

 private:
  std::unique_ptr<DataSource> whole_ = counting_source(4);
};

TEST_P(StageMistakesTest, ASourceThatWritesNoTargetsIsRefused) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    const SilentSource silent;
    const auto source = counting_source(4);
    Pipeline pipeline(comm, factory_of({}), *source, options_of(comm.size()));
    for (int again = 0; again < 2; ++again) {
      expect_error(ErrorCode::kUsage, {"the source, targets() of an evaluation: leaves 2 of the 2"},
                   [&] { (void)pipeline.evaluate(silent, 4); });
    }
    (void)pipeline.train_step();
    // Ranks that are still in the constructor when the last one refuses its batch throw there.
    expect_error(ErrorCode::kUsage, {"the source, targets() of step 1: leaves 2 of the 2"}, [&] {
      Pipeline other(comm, factory_of({}), silent, options_of(comm.size()));
      (void)other.train_step();
    });
  });
}

TEST_P(StageMistakesTest, AnErrorOfAnotherRankEndsTheWaitForASource) {
  if (GetParam() == 1) return;
  with_ranks(GetParam(), [&](Communicator& comm) {
    std::latch more(1);
    const AskingSource source([] { throw Error(ErrorCode::kData, "boom"); }, [&] { more.wait(); });
    std::optional<Pipeline> pipeline;  // its end waits for the source
    expect_error(ErrorCode::kData, {"boom"}, [&] {
      pipeline.emplace(comm, factory_of({}), source, options_of(comm.size()));
      (void)pipeline->train_step();
    });
    more.count_down();
  });
}

class AskingDataset final : public Dataset {
 public:
  AskingDataset(std::function<void()> size, std::function<void()> spec)
      : ask_size_(std::move(size)), ask_spec_(std::move(spec)) {}
  std::int64_t size() const override {
    ask_size_();
    return 4;
  }
  BatchSpec spec() const override {
    ask_spec_();
    return {.inputs = {{DType::kF32, {1}}}, .targets = {{DType::kF32, {1}}}};
  }
  void get(const ItemRequest&, std::span<const Tensor>, std::span<const Tensor>) const override {}

 private:
  std::function<void()> ask_size_, ask_spec_;
};

TEST_P(StageMistakesTest, WhatAnyCallbackThrowsIsTheProgramsOwnErrorAndNamesTheCallback) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    bool armed = false;
    const auto fail = [&] {
      if (armed && comm.rank() + 1 == comm.size()) throw std::runtime_error("boom");
    };
    const auto nothing = [] {};
    const AskingSource source(fail);
    const float number = 1;
    const Tensor input = view(std::span(&number, 1), {1, 1});
    const std::vector<std::pair<std::string, std::function<void(Pipeline&)>>> callers = {
        {"the source, targets() of step 1: boom", [&](Pipeline& p) { (void)p.train_step(); }},
        {"the source, targets() of an evaluation: boom",
         [&](Pipeline& p) { (void)p.evaluate(source, 4); }},
        {"on_outputs: boom",
         [&](Pipeline& p) {
           (void)p.infer({.inputs = {input}},
                         {.on_outputs = [&](SampleRange, std::span<const Tensor>) { fail(); }});
         }},
        {"the data set, size(): boom",
         [&](Pipeline& p) { (void)p.loader(std::make_shared<AskingDataset>(fail, nothing), {}); }},
        {"the data set, spec(): boom",
         [&](Pipeline& p) { (void)p.loader(std::make_shared<AskingDataset>(nothing, fail), {}); }}};
    for (const auto& [text, caller] : callers) {
      // Ranks that are still in the constructor when the last one fails throw there.
      expect_error(ErrorCode::kUser, {text}, [&, &call = caller] {
        Pipeline pipeline(comm, factory_of({}), source, options_of(comm.size()));
        armed = true;
        call(pipeline);
      });
      armed = false;
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, StageMistakesTest, ::testing::Values(1, 2, 3));

}  // namespace
}  // namespace sluice::testing
