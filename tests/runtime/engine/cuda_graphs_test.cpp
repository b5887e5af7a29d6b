// Training with --cuda-graphs: the bits of the calls that are replayed, and how often stages are
// called.
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <sluice/data.hpp>
#include <sluice/error.hpp>

#include "tests/gpus/required_gpus.hpp"
#include "tests/loopback/loopback.hpp"
#include "tests/runtime/engine/wrapped_stage.hpp"
#include "tests/runtime/pipeline/training_cases.hpp"

namespace sluice::testing {
namespace {

class CudaGraphsTest : public ::testing::Test {
 protected:
  void SetUp() override { SLUICE_NEED_A_GPU(); }
  static TrainingCase case_of(const char* name) {
    TrainingCase what;
    what.name = name;
    what.model = small_model();
    what.micro_batch_size = 1;
    what.steps = 4;
    return what;
  }
  static std::vector<TrainingCase> cases() {
    std::vector<TrainingCase> all = {case_of("tied, dropout"),
                                     case_of("bf16, short last one"),
                                     case_of("llama bf16, recomputed, dropout"),
                                     case_of("bf16 stream"),
                                     case_of("bf16 stream, dropout"),
                                     case_of("logits in chunks")};
    all[0].model.dropout = 0.2F;
    all[1].model.precision = DType::kBf16;
    all[1].model.tied = false;
    all[1].micro_batch_size = 2;
    all[1].batch_size = 5;
    all[2].model.kind = TransformerKind::kLlama;
    all[2].model.kv_heads = 1;
    all[2].model.precision = DType::kBf16;
    all[2].model.dropout = 0.1F;
    all[2].model.recompute = Recompute::kBlock;
    for (TrainingCase* each : {&all[3], &all[4]}) {
      each->model.precision = each->model.stream_precision = DType::kBf16;
    }
    all[4].model.dropout = 0.2F;
    all[5] = in_chunks(all[5]);
    return all;
  }
  // 528 rows of a micro-batch: a part of 512 and one of 16. Forward writes the gradient of the
  // head's weights.
  static TrainingCase in_chunks(TrainingCase what) {
    what.model.width = 16;
    what.model.logit_chunks = 2;
    what.micro_batches = 2;
    what.micro_batch_size = 33;
    what.steps = 3;
    return what;
  }
};

TEST_F(CudaGraphsTest, ReplayedStepsHaveTheBitsOfCalls) {
  for (const TrainingCase& what : cases()) {
    for (const char* schedule : {"1f1b", "zb-h1", "zb-v"}) {
      if (std::string(schedule) == "zb-v" && what.name != cases().front().name) continue;
      Layout layout{.pipeline = 2,
                    .schedule = schedule,
                    .chunks = std::string(schedule) == "zb-v" ? 2 : 1,
                    .devices = "cuda:0"};
      if (std::string(schedule) == "1f1b") layout.pipeline = 1;
      TrainingOutcome called, replayed;
      run_loopback(layout.pipeline, [&](Communicator& comm) {
        const TrainingOutcome plain = train(comm, what, layout);
        Layout recorded = layout;
        recorded.cuda_graphs = true;
        TrainingCase spoiled = what;
        spoiled.before_step = [](Pipeline& pipeline) {
          EXPECT_EQ(spoil_old_gradients(pipeline), pipeline.parameters().size());
        };
        const TrainingOutcome outcome = train(comm, spoiled, recorded);
        if (comm.rank() == 0) called = plain, replayed = outcome;
      });
      EXPECT_EQ(called.losses, replayed.losses) << what.name << ", " << schedule;
      EXPECT_EQ(called.norms, replayed.norms) << what.name << ", " << schedule;
      EXPECT_EQ(called.validation, replayed.validation) << what.name << ", " << schedule;
      EXPECT_EQ(called.digest, replayed.digest) << what.name << ", " << schedule;
    }
  }
}

// Without which the case above would test what the others test.
TEST_F(CudaGraphsTest, ItsCaseOfChunksHasTwoPartsInAMicroBatch) {
  const TrainingCase what = cases().back();
  ASSERT_GT(what.model.logit_chunks, 1);
  PipelineOptions options;
  options.shape = {.micro_batches = what.micro_batches, .micro_batch_size = what.micro_batch_size};
  options.devices.choices = parse_devices("cuda:0");
  const auto source = synthetic_tokens(what.model);
  const StageFactory factory = Transformer(what.model);
  std::int64_t parts = 0;
  run_loopback(1, [&](Communicator& comm) {
    Pipeline pipeline(comm, factory, *source, options);
    pipeline.compute().profile_operators(true);
    (void)pipeline.train_step();
    for (const OperatorTime& each : pipeline.compute().operator_times()) {
      if (each.name == "row_cross_entropy") parts += each.calls;
    }
  });
  EXPECT_EQ(parts, 2 * what.micro_batches);
}

// How often a stage was called.
struct Calls {
  int forward = 0, backward = 0;
  int backward_in_first_step = 0;
  bool graph_capturable = true;
  std::function<void(StageContext&)> in_forward = [](StageContext&) {};
};

// A whole model that counts its calls.
class CountedStage : public WrappedStage {
 public:
  CountedStage(std::unique_ptr<Stage> model, Calls& calls)
      : WrappedStage(std::move(model)), calls_(calls) {}
  bool graph_capturable() const override { return calls_.graph_capturable; }
  bool overwrites_gradients() const override { return true; }
  void forward(StageContext& ctx, std::span<const Tensor> inputs,
               std::span<const Tensor> outputs) override {
    ++calls_.forward;
    calls_.in_forward(ctx);
    WrappedStage::forward(ctx, inputs, outputs);
  }
  void backward(StageContext& ctx, std::span<const Tensor> grad_outputs,
                std::span<const Tensor> grad_inputs) override {
    ++calls_.backward;
    WrappedStage::backward(ctx, grad_outputs, grad_inputs);
  }

 private:
  Calls& calls_;
};

// Trains for five steps of three micro-batches, with an evaluation of five samples after the
// second.
void train_counted(Calls& calls) {
  const TransformerConfig model = small_model();
  const auto source = synthetic_tokens(model);
  PipelineOptions options;
  options.shape.pipeline = 1;
  options.shape.micro_batches = 3;
  options.devices.choices = parse_devices("cuda:0");
  options.devices.cuda_graphs = true;
  options.expert.evaluations = {5};
  const StageFactory factory = [&](int stage, int stages) {
    return std::make_unique<CountedStage>(Transformer(model)(stage, stages), calls);
  };
  run_loopback(1, [&](Communicator& comm) {
    Pipeline pipeline(comm, factory, *source, options);
    for (int step = 0; step < 5; ++step) {
      (void)pipeline.train_step();
      if (step == 0) calls.backward_in_first_step = calls.backward;
      if (step == 1) (void)pipeline.evaluate(*source, 5);
    }
  });
}

// The second time without running: no message is open then, for which a kernel could wait.
TEST_F(CudaGraphsTest, AStageIsCalledTwiceInTheFirstStepAndThenReplayed) {
  Calls calls;
  train_counted(calls);
  EXPECT_EQ(calls.backward_in_first_step, 2 * 3);
  EXPECT_EQ(calls.forward, 2 * 3 + 5);  // and evaluations call
  EXPECT_EQ(calls.backward, 2 * 3);
}

TEST_F(CudaGraphsTest, AStageThatDoesNotAllowItIsCalledEveryTime) {
  Calls calls;
  calls.graph_capturable = false;
  train_counted(calls);
  EXPECT_EQ(calls.forward, 5 * 3 + 5);
  EXPECT_EQ(calls.backward, 5 * 3);
}

// A step's later batches add to gradients where its first one overwrites: each replays its own
// records.
TEST_F(CudaGraphsTest, BatchesOfOneStepAddUp) {
  const TransformerConfig model = small_model();
  const auto train = [&](Calls& calls, bool graphs) {
    PipelineOptions options;
    options.shape = {.pipeline = 1, .micro_batches = 3, .micro_batch_size = 1};
    options.devices.choices = parse_devices("cuda:0");
    options.devices.cuda_graphs = graphs;
    const StageFactory factory = [&](int stage, int stages) {
      return std::make_unique<CountedStage>(Transformer(model)(stage, stages), calls);
    };
    const TensorSpec tokens{DType::kI32, {model.context}};
    std::vector<std::int32_t> numbers(5 * static_cast<std::size_t>(model.context));
    for (std::size_t i = 0; i < numbers.size(); ++i) numbers[i] = static_cast<int>(i * i % 48);
    const auto part = [&](std::int64_t first, std::int64_t count) {
      const auto cut = std::span(numbers).subspan(static_cast<std::size_t>(first * model.context),
                                                  static_cast<std::size_t>(count * model.context));
      const Tensor all = view(cut, {count, model.context});
      return Batch{.inputs = {all}, .targets = {all}};
    };
    std::vector<double> norms;
    run_loopback(1, [&](Communicator& comm) {
      Pipeline pipeline(comm, factory, {.inputs = {tokens}, .targets = {tokens}}, options);
      for (int step = 0; step < 4; ++step) {
        EXPECT_GT(spoil_old_gradients(pipeline), 0U);
        (void)pipeline.accumulate(part(0, 3));
        norms.push_back(pipeline.train_step(part(3, 2)).grad_norm);
      }
    });
    return norms;
  };
  Calls called, replayed;
  const std::vector<double> expected = train(called, false);
  EXPECT_EQ(train(replayed, true), expected);
  EXPECT_EQ(called.backward, 4 * 5);
  EXPECT_EQ(replayed.backward, 2 * 5);
}

TEST_F(CudaGraphsTest, AStageThatWaitsForTheDeviceIsNamed) {
  Calls calls;
  calls.in_forward = [](StageContext& ctx) { ctx.compute.stream().synchronize(); };
  try {
    train_counted(calls);
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kDevice);
    const std::string said = error.what();
    EXPECT_NE(
        said.find(
            "stage 0, forward of micro-batch 0: cannot be recorded as a CUDA graph on cuda:0"),
        std::string::npos)
        << said;
    EXPECT_NE(said.find("without --cuda-graphs"), std::string::npos) << said;
  }
}

}  // namespace
}  // namespace sluice::testing
