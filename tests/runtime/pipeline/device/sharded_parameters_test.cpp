// GPUs that have parts of the parameters alone at rest: the bits of those that have all, over NCCL
// and through host memory, also of what is saved and loaded; and those that add gradients over
// replicas after each micro-batch. Ranks are threads.
#include <fmt/core.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstddef>
#include <filesystem>
#include <initializer_list>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <sluice/checkpoint.hpp>
#include <sluice/pipeline.hpp>
#include <sluice/transformer.hpp>

#include "tests/gpus/required_gpus.hpp"
#include "tests/loopback/loopback.hpp"
#include "tests/runtime/engine/wrapped_stage.hpp"
#include "tests/runtime/expect_error.hpp"
#include "tests/runtime/pipeline/training_cases.hpp"

namespace sluice::testing {
namespace {

struct Shards {
  ShardLevel level = ShardLevel::kParameters;
  ShardGather gather = ShardGather::kUse;
  int pipeline = 1, replicas = 2, group = 0;
  std::string schedule = "1f1b", device = "cuda:0";
  TransportChoice transport = TransportChoice::kMpi;
  bool loads = false, cuda_graphs = false;
  GradientOrder order = GradientOrder::kStep;
  int micro_batches = 2;
};

struct Outcome {
  std::vector<double> losses, norms;
  std::map<std::string, std::vector<std::byte>> values;
};

// Units: the embedding, attention, the MLP of 2.1 million parameters, the head. The first and the
// third share memory, as much of the other replica's part as fills a GPU's units of 2 MiB. On two
// ranks one of both follows the other from micro-batch to micro-batch.
TransformerConfig model_in(DType precision) {
  TransformerConfig model = small_model();
  model.layers = 1;
  model.width = 512;
  model.vocabulary = 4100;
  model.context = 4;
  model.tied = false;
  model.precision = precision;
  return model;
}

// Some steps, an evaluation after each. The last one may be of a pipeline that has loaded what the
// first one saved.
Outcome outcome_with(const TransformerConfig& model, const Shards& shards) {
  PipelineOptions options;
  options.shape.pipeline = shards.pipeline;
  options.shape.replicas = shards.replicas;
  options.shape.shard_group = shards.group;
  options.shape.micro_batches = shards.micro_batches;
  options.shape.shard = shards.level;
  if (shards.level == ShardLevel::kParameters) options.shape.shard_gather = shards.gather;
  options.order.schedule = shards.schedule;
  options.devices.choices = parse_devices(shards.device);
  options.devices.transport = shards.transport;
  options.devices.cuda_graphs = shards.cuda_graphs;
  options.training.learning_rate = {.peak = 1e-2};
  options.training.clip = 0.5;
  options.training.gradient_order = shards.order;
  options.expert.evaluations = {3};
  options.checks.replicas_every = 1;
  const std::filesystem::path directory =
      std::filesystem::path(::testing::TempDir()) / fmt::format("sluice_sharded_{}", getpid());
  Outcome result;
  run_loopback(shards.pipeline * shards.replicas, [&](Communicator& comm) {
    const auto source = synthetic_tokens(model);
    Outcome mine;
    auto pipeline = std::make_unique<Pipeline>(comm, Transformer(model), *source, options);
    const int steps = shards.cuda_graphs ? 4 : 2;
    for (int step = 0; step < steps; ++step) {
      if (shards.loads && step == 1) {
        save_checkpoint(*pipeline, {.directory = directory});
        pipeline.reset();
        pipeline = std::make_unique<Pipeline>(comm, Transformer(model), *source, options);
        load_checkpoint(*pipeline, directory);
      }
      const StepReport report = pipeline->train_step();
      mine.losses.push_back(report.loss);
      mine.norms.push_back(report.grad_norm);
      mine.losses.push_back(pipeline->evaluate(*source, 3).loss);
    }
    for (const auto& [name, tensor] : pipeline->state()) {
      mine.values[name] = {tensor.bytes.begin(), tensor.bytes.end()};
    }
    if (comm.rank() == 0) result = std::move(mine);
  });
  std::filesystem::remove_all(directory);
  return result;
}

void expect_same(const Outcome& one, const Outcome& other, const std::string& where) {
  EXPECT_EQ(one.losses, other.losses) << where;
  EXPECT_EQ(one.norms, other.norms) << where;
  ASSERT_EQ(one.values.size(), other.values.size()) << where;
  ASSERT_FALSE(one.values.empty());
  for (const auto& [name, bytes] : one.values) {
    EXPECT_TRUE(bytes == other.values.at(name)) << where << ": " << name;
  }
}

void check_shards(DType precision, std::initializer_list<Shards> all) {
  const TransformerConfig model = model_in(precision);
  const Outcome whole = outcome_with(model, {.level = ShardLevel::kNone});
  for (const Shards& each : all) {
    expect_same(whole, outcome_with(model, each),
                fmt::format("{}, pipeline {}, {}, {}", each.schedule, each.pipeline,
                            each.transport == TransportChoice::kNccl ? "NCCL" : "host",
                            each.gather == ShardGather::kUse ? "use" : "step"));
  }
}

constexpr auto kStep = ShardGather::kStep;

TEST(ShardedParametersTest, OfGpusGiveTheBitsOfWholeOnes) {
  SLUICE_NEED_A_GPU();
  check_shards(DType::kF32,
               {{.loads = true}, {.gather = kStep, .pipeline = 2, .schedule = "zb-h1"}});
}

TEST(ShardedParametersTest, InBf16GiveTheBitsOfWholeOnes) {
  SLUICE_NEED_A_GPU();
  check_shards(DType::kBf16, {{.pipeline = 2}, {.gather = kStep, .loads = true}});
}

TEST(ShardedParametersTest, OverNcclGiveTheBitsOfWholeOnes) {
  SLUICE_NEED_GPUS(4, device_count(DeviceKind::kCuda));
  const auto nccl = [](Shards shards) {
    shards.device = "cuda";
    shards.transport = TransportChoice::kNccl;
    return shards;
  };
  check_shards(DType::kF32, {nccl({}), nccl({.pipeline = 2, .schedule = "gpipe"})});
  check_shards(DType::kBf16, {nccl({.loads = true}), nccl({.gather = kStep, .pipeline = 2})});
}

// The first and the third unit share memory for their gradients, too.
void check_micro_batch_order(DType precision, std::initializer_list<Shards> all) {
  const TransformerConfig model = model_in(precision);
  const Outcome whole = outcome_with(model, {.level = ShardLevel::kNone, .micro_batches = 3});
  std::optional<Outcome> first;
  for (Shards each : all) {
    each.order = GradientOrder::kMicroBatch;
    const std::string name = fmt::format("{}, pipeline {}, {}, {}", each.schedule, each.pipeline,
                                         each.transport == TransportChoice::kNccl ? "NCCL" : "host",
                                         name_of(each.level));
    if (!first) {  // of one micro-batch both orders are one
      each.micro_batches = 1;
      expect_same(outcome_with(model, {.level = ShardLevel::kNone, .micro_batches = 1}),
                  outcome_with(model, each), name);
    }
    each.micro_batches = 3;
    const Outcome here = outcome_with(model, each);
    if (first) {
      expect_same(*first, here, name);
      continue;
    }
    for (std::size_t i = 0; i < here.norms.size(); ++i) {
      EXPECT_NEAR(here.norms[i], whole.norms[i], 1e-3 * whole.norms[i]) << name;
      EXPECT_NEAR(here.losses[i], whole.losses[i], 1e-3 * whole.losses[i]) << name;
    }
    first = here;
  }
  EXPECT_NE(first->values, whole.values);
}

TEST(MicroBatchOrderTest, OfGpusHasOneFunction) {
  SLUICE_NEED_A_GPU();
  check_micro_batch_order(DType::kF32, {{.level = ShardLevel::kGradients},
                                        {.pipeline = 2, .schedule = "zb-h1", .loads = true}});
}

TEST(MicroBatchOrderTest, OverNcclHasOneFunction) {
  SLUICE_NEED_GPUS(4, device_count(DeviceKind::kCuda));
  const auto nccl = [](Shards shards) {
    shards.device = "cuda";
    shards.transport = TransportChoice::kNccl;
    return shards;
  };
  check_micro_batch_order(
      DType::kBf16,
      {nccl({.level = ShardLevel::kGradients}), {}, nccl({.pipeline = 2, .schedule = "zb-h1"})});
}

// Says that it uses units, and tells of no gradients.
class SilentStage : public WrappedStage {
 public:
  using WrappedStage::WrappedStage;
  [[nodiscard]] bool overwrites_gradients() const override { return true; }
  void backward(StageContext& ctx, std::span<const Tensor> grad_outputs,
                std::span<const Tensor> grad_inputs) override {
    ctx.final_gradients = nullptr;
    WrappedStage::backward(ctx, grad_outputs, grad_inputs);
  }
};

TEST(MicroBatchOrderTest, AGpuRefusesAStageThatDoesNotTellOfEachUnit) {
  SLUICE_NEED_A_GPU();
  const TransformerConfig model = small_model();
  PipelineOptions options;
  options.shape.replicas = options.shape.micro_batches = 2;
  options.shape.shard = ShardLevel::kGradients;
  options.training.gradient_order = GradientOrder::kMicroBatch;
  options.devices.choices = parse_devices("cuda:0");
  run_loopback(2, [&](Communicator& comm) {
    const auto source = synthetic_tokens(model);
    const StageFactory factory = [&](int stage, int stages) -> std::unique_ptr<Stage> {
      return std::make_unique<SilentStage>(Transformer(model)(stage, stages));
    };
    Pipeline pipeline(comm, factory, *source, options);
    expect_error(ErrorCode::kUsage,
                 {"stage 0", "tells of the gradients of two of its units at once",
                  "StageDescription::uses_units"},
                 [&] { (void)pipeline.train_step(); });
  });
}

// Two groups, of which each has a copy.
TEST(ShardedParametersTest, OfGroupsGiveTheBitsOfWholeOnes) {
  SLUICE_NEED_GPUS(4, device_count(DeviceKind::kCuda));
  TransformerConfig model = model_in(DType::kBf16);
  model.width = 128;
  const Outcome whole = outcome_with(model, {.level = ShardLevel::kNone, .replicas = 4});
  Shards groups{.replicas = 4, .group = 2, .loads = true};
  expect_same(whole, outcome_with(model, groups), "through the host");
  groups.device = "cuda";
  groups.transport = TransportChoice::kNccl;
  expect_same(whole, outcome_with(model, groups), "over NCCL");
  groups.gather = kStep;
  expect_same(whole, outcome_with(model, groups), "over NCCL, once a step");
}

TEST(ShardedParametersGraphsTest, RecordedCallsLeaveUnitsOut) {
  SLUICE_NEED_A_GPU();
  const TransformerConfig model = small_model();
  expect_same(outcome_with(model, {.level = ShardLevel::kNone, .cuda_graphs = true}),
              outcome_with(model, {.cuda_graphs = true}), "graphs");
}

}  // namespace
}  // namespace sluice::testing
