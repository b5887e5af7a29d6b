// Models of shards on a GPU: ranks that share stages have the bits of one rank, and the CPU's
// numbers to rounding. Ranks are threads.
#include <fmt/core.h>
#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <map>
#include <string>
#include <vector>

#include <sluice/pipeline.hpp>
#include <sluice/transformer.hpp>

#include "tests/gpus/required_gpus.hpp"
#include "tests/loopback/loopback.hpp"
#include "tests/runtime/expect_error.hpp"
#include "tests/runtime/pipeline/training_cases.hpp"
#ifdef SLUICE_EMULATED
#include "tests/emulated_cuda/control.hpp"
#endif

namespace sluice::testing {
namespace {

struct ShardGrid {
  int tensor = 1, pipeline = 1, replicas = 1;
  std::string schedule = "1f1b";
  bool deals_positions = true, cuda_graphs = false;
  std::string device = "cuda:0";
  TransportChoice transport = TransportChoice::kAuto;
};

struct ShardOutcome {
  std::vector<double> losses, norms;
  double validation = 0;
  std::vector<std::byte> logits;
  std::map<std::string, std::vector<std::byte>> values;  // of whole parameters, and of their state
  bool operator==(const ShardOutcome&) const = default;
};

ShardOutcome outcome_with(const TransformerConfig& model, int shards, const ShardGrid& grid) {
  PipelineOptions options;
  options.shape = {.pipeline = grid.pipeline,
                   .replicas = grid.replicas,
                   .virtual_replicas = 2,
                   .tensor = grid.tensor,
                   .tensor_shards = shards,
                   .sequence_parallel = grid.deals_positions,
                   .micro_batches = 2,
                   .micro_batch_size = 2};
  options.order.schedule = grid.schedule;
  options.devices.choices = parse_devices(grid.device);
  options.devices.transport = grid.transport;
  options.devices.cuda_graphs = grid.cuda_graphs;
  options.training.learning_rate = {.peak = 1e-2};
  options.training.clip = 0.5;
  options.expert.evaluations = {3};
  options.checks.replicas_every = 1;
  ShardOutcome result;
  run_loopback(grid.tensor * grid.pipeline * grid.replicas, [&](Communicator& comm) {
    const auto source = synthetic_tokens(model);
    Pipeline pipeline(comm, Transformer(model), *source, options);
    ShardOutcome mine;
    for (int step = 0; step < 2; ++step) {
      const StepReport report = pipeline.train_step();
      mine.losses.push_back(report.loss);
      mine.norms.push_back(report.grad_norm);
    }
    mine.validation = pipeline.evaluate(*source, 3).loss;
    for (const auto& [name, tensor] : pipeline.state()) {
      mine.values[name] = {tensor.bytes.begin(), tensor.bytes.end()};
    }
    std::vector<std::int32_t> tokens(static_cast<std::size_t>(4 * model.context));
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      tokens[i] = static_cast<std::int32_t>(i * 37) % model.vocabulary;
    }
    const BatchShare share = pipeline.share();  // each virtual replica has two texts
    const Tensor texts{tokens.data() + 2 * share.replica * model.context,
                       {DType::kI32, {2 * share.count, model.context}}};
    const Batch batch = share.inputs ? Batch{.inputs = {texts}} : Batch{};
    for (const Tensor& logits : pipeline.infer(batch, {.to = 0})) {
      const auto* const bytes = logits.as<const std::byte>();
      mine.logits.assign(bytes, bytes + logits.spec.bytes());
    }
    if (comm.rank() == 0) result = mine;
  });
  return result;
}

void expect_same_outcome(const ShardOutcome& one, const ShardOutcome& other,
                         const std::string& where) {
  EXPECT_EQ(one.losses, other.losses) << where;
  EXPECT_EQ(one.norms, other.norms) << where;
  EXPECT_EQ(one.validation, other.validation) << where;
  EXPECT_FALSE(one.logits.empty());
  EXPECT_TRUE(one.logits == other.logits) << where;
  ASSERT_EQ(one.values.size(), other.values.size()) << where;
  for (const auto& [name, bytes] : one.values) {
    EXPECT_TRUE(bytes == other.values.at(name)) << where << ": " << name;
  }
}

struct ShardCase {
  std::string name;
  TransformerConfig model;
  int shards = 2;
};

// Shards of unequal parts of the vocabulary, and some without heads; positions that shards divide,
// and 15 that they do not; dropout everywhere.
std::vector<ShardCase> shard_cases() {
  ShardCase gpt2{"gpt2, fp32", small_model()};
  gpt2.model.dropout = 0.1F;
  ShardCase llama{"llama, bf16", small_model(), 4};
  llama.model.kind = TransformerKind::kLlama;
  llama.model.heads = 4;
  llama.model.kv_heads = 2;
  llama.model.vocabulary = 75;
  llama.model.tied = false;
  llama.model.qk_norm = true;
  llama.model.dropout = 0.1F;
  llama.model.precision = DType::kBf16;
  ShardCase odd{"gpt2, bf16, odd context", small_model()};
  odd.model.context = 15;
  odd.model.precision = odd.model.stream_precision = DType::kBf16;
  odd.model.recompute = Recompute::kBlock;
  return {gpt2, llama, odd};
}

TEST(DeviceTensorTest, RanksThatShareStagesHaveTheBitsOfOne) {
  SLUICE_NEED_A_GPU();
  for (const ShardCase& each : shard_cases()) {
    const ShardOutcome alone = outcome_with(each.model, each.shards, {});
    const ShardOutcome cpu = outcome_with(each.model, each.shards, {.device = "cpu"});
    const double close = each.model.precision == DType::kF32 ? 1e-4 : 2e-2;
    for (std::size_t step = 0; step < alone.losses.size(); ++step) {
      EXPECT_NEAR(alone.losses[step], cpu.losses[step], close) << each.name << " " << step;
      EXPECT_NEAR(alone.norms[step], cpu.norms[step], 10 * close) << each.name << " " << step;
    }
    for (const ShardGrid& grid : {ShardGrid{.cuda_graphs = true}, ShardGrid{.tensor = 2},
                                  ShardGrid{.tensor = 2, .cuda_graphs = true},
                                  ShardGrid{.tensor = 2, .deals_positions = false},
                                  ShardGrid{.tensor = 2, .pipeline = 2, .schedule = "zb-h1"},
                                  ShardGrid{.tensor = each.shards, .replicas = 2}}) {
      expect_same_outcome(
          alone, outcome_with(each.model, each.shards, grid),
          fmt::format("{}: tensor {}, pipeline {}, replicas {}{}{}", each.name, grid.tensor,
                      grid.pipeline, grid.replicas, grid.deals_positions ? "" : ", all positions",
                      grid.cuda_graphs ? ", graphs" : ""));
    }
  }
}

// Each rank has a GPU of its own; what NCCL cannot carry is refused.
TEST(DeviceTensorTest, RanksThatNcclJoinsHaveTheBitsOfOne) {
  const int gpus = device_count(DeviceKind::kCuda);
  SLUICE_NEED_GPUS(2, gpus);
  std::vector<ShardCase> cases = shard_cases();
  cases.pop_back();  // whose sizes change nothing here
  for (const ShardCase& each : cases) {
    const ShardOutcome alone = outcome_with(each.model, each.shards, {});
    for (ShardGrid grid : {ShardGrid{.tensor = each.shards},
                           ShardGrid{.tensor = each.shards, .deals_positions = false},
                           ShardGrid{.tensor = 2, .pipeline = 2, .schedule = "zb-h1"},
                           ShardGrid{.tensor = 2, .replicas = 2, .cuda_graphs = true}}) {
      if (grid.tensor * grid.pipeline * grid.replicas > gpus) continue;
      grid.device = "cuda";
      grid.transport = TransportChoice::kNccl;
      expect_same_outcome(alone, outcome_with(each.model, each.shards, grid),
                          fmt::format("{}: tensor {}, pipeline {}, replicas {}", each.name,
                                      grid.tensor, grid.pipeline, grid.replicas));
    }
  }
}

#ifdef SLUICE_EMULATED

// Bytes that rank 0's GPU, of the first of two stages, copies to the host: [evaluation, step].
std::array<std::size_t, 2> copied_to_host(TransportChoice transport) {
  const TransformerConfig model = small_model();
  PipelineOptions options;
  options.shape = {.pipeline = 2, .tensor = 2, .tensor_shards = 2, .micro_batches = 2};
  options.devices.choices = parse_devices("cuda");
  options.devices.transport = transport;
  options.expert.evaluations = {2};
  std::array<std::size_t, 2> copied = {};
  run_loopback(4, [&](Communicator& comm) {
    const auto source = synthetic_tokens(model);
    Pipeline pipeline(comm, Transformer(model), *source, options);
    const std::size_t before = emulated::copied_to_host(comm.rank());
    (void)pipeline.evaluate(*source, 2);
    const std::size_t between = emulated::copied_to_host(comm.rank());
    (void)pipeline.train_step();
    if (comm.rank() == 0) copied = {between - before, emulated::copied_to_host(0) - between};
  });
  return copied;
}

// But the shares of gradients, which are joined on the host once in a step.
TEST(DeviceTensorTest, OverNcclNoCollectivePassesTheHost) {
  const auto [evaluation, step] = copied_to_host(TransportChoice::kNccl);
  const auto [staged_evaluation, staged_step] = copied_to_host(TransportChoice::kMpi);
  const TransformerConfig model = small_model();
  const auto stream = static_cast<std::size_t>(model.context * model.width) * sizeof(float);
  EXPECT_EQ(evaluation, 0U);
  EXPECT_GT(staged_evaluation, 2 * stream);
  EXPECT_GT(staged_step, step + 4 * stream);
}

#endif

TEST(DeviceTensorTest, HeadsThatDoNotAlignAreRefused) {
  SLUICE_NEED_A_GPU();
  TransformerConfig model = small_model();
  model.width = 12;
  model.precision = DType::kBf16;
  expect_error(ErrorCode::kUsage,
               {"heads of 6 in bf16 with 2 shards on cuda:0", "a multiple of 8, or 1 shard"},
               [&] { (void)outcome_with(model, 2, {}); });
}

}  // namespace
}  // namespace sluice::testing
