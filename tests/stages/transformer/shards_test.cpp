// Blocks of a transformer computed by shards: as many ranks as threads, each with its own stage.
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <memory>
#include <ostream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <sluice/transformer.hpp>

#include "comm/base/index.hpp"
#include "comm/base/sum_tree.hpp"
#include "stages/network/network_stage.hpp"
#include "stages/network/parts.hpp"
#include "tests/stages/prepared.hpp"
#include "tests/stages/state_slot.hpp"
#include "tests/stages/tensor_ranks.hpp"
#include "tests/stages/transformer/small_models.hpp"

namespace sluice {
namespace {

using testing::append;
using testing::expect_close;
using testing::expect_same_bits;
using testing::for_elements;
using testing::number_at;
using testing::Values;

using Group = testing::TensorGroup;

Values tree_of(std::vector<Values> leaves) {
  add_leaves(leaves.size(), [&](std::size_t into, std::size_t from) {
    for (std::size_t i = 0; i < leaves[into].size(); ++i) leaves[into][i] += leaves[from][i];
  });
  return leaves[0];
}

struct Result {
  Values outputs, input_gradients;
  std::map<std::string, Values> gradients;
};

struct Setting {
  const char* name;
  TransformerConfig config;
  int shards = 4;
  int most_ranks = 4;
  bool recomputes_together = false;  // both blocks, of a Sequential
};

void PrintTo(const Setting& setting, std::ostream* os) { *os << setting.name; }

constexpr std::int64_t kSamples = 2;

// What a rank makes of two micro-batches. Gradients by name: the whole of what it has of those that
// are divided, else NaN; its shares of others, one after the other.
class Rank {
 public:
  Rank(const Setting& setting, const Shards& shards, Group& group)
      : setting_(setting), shards_(shards), sum_(group, shards.first / shards.local) {}

  void run() {
    const TransformerConfig& config = setting_.config;
    const std::unique_ptr<Stage> stage = make_stage();
    const TensorSpec edge = nn::dealt_stream(
        {config.stream_precision, {kSamples, config.context, config.width}}, shards_);
    dealt_ = edge.shape.rank() == 4;
    ComputeContext compute({}, 1);
    const StageDescription described = stage->describe({&edge, 1}, compute);
    const testing::StateSlot slot(Device{}, described);
    testing::prepare(
        *stage, {.compute = &compute, .state = slot.state(), .seed = 5, .input_sizes = {{edge}}});
    EXPECT_EQ(dynamic_cast<nn::NetworkStage&>(*stage).prepared_bytes(), described.workspace_bytes);
    const std::byte* const scratch = compute.workspace(described.operator_bytes);
    testing::disturb(*stage->parameters());
    sum_.calls.clear();
    Buffer x({}, edge.bytes()), dy({}, edge.bytes()), y({}, edge.bytes()), dx({}, edge.bytes());
    const Tensor x_tensor{x.data(), edge}, dy_tensor{dy.data(), edge}, y_tensor{y.data(), edge},
        dx_tensor{dx.data(), edge};
    stage->begin_step(compute);
    for (int batch = 0; batch < 2; ++batch) {
      fill(x_tensor, 1000 + batch);
      fill(dy_tensor, 2000 + batch);
      StageContext context{.compute = compute,
                           .stage = 1,
                           .micro_batch = batch,
                           .micro_batches = 2,
                           .state = slot.state(),
                           .seed = 7,
                           .first_sample = batch * kSamples,
                           .samples = kSamples,
                           .inputs = {&x_tensor, 1},
                           .tensor = &sum_};
      stage->forward(context, {&x_tensor, 1}, {&y_tensor, 1});
      append_stream(y_tensor, result.outputs);
      if (batch == 0) {
        stage->backward(context, {&dy_tensor, 1}, {&dx_tensor, 1});
      } else {
        auto& split = dynamic_cast<SplitBackward&>(*stage);
        split.backward_input(context, {&dy_tensor, 1}, {&dx_tensor, 1});
        split.backward_weight(context, {&dy_tensor, 1});
      }
      append_stream(dx_tensor, result.input_gradients);
    }
    EXPECT_EQ(compute.workspace(described.operator_bytes), scratch) << "more than described";
    std::vector<PlannedCollective> planned;
    for (int batch = 0; batch < 2; ++batch) {
      for (const auto* list : {&described.collectives.forward, &described.collectives.recompute,
                               &described.collectives.backward_input}) {
        planned.insert(planned.end(), list->begin(), list->end());
      }
    }
    EXPECT_EQ(sum_.calls, planned);
    take_gradients(*stage->parameters());
  }

  Result result;
  std::map<std::string, std::size_t> shares;  // of gradients

 private:
  [[nodiscard]] std::unique_ptr<Stage> make_stage() const {
    const TransformerConfig& config = setting_.config;
    if (setting_.recomputes_together) {
      const nn::LayerSpec block = nn::transformer_block(config);
      return Sequential({nn::recompute({block, block})}).stage_of({{0, 1}}, 0, shards_);
    }
    return Transformer(config).stage_of({{0, 1, 1 + config.layers, 2 + config.layers}}, 1, shards_);
  }
  // Where an element of the stream lies in that of all positions.
  [[nodiscard]] std::int64_t place_of(std::int64_t element) const {
    if (!dealt_) return element;
    const std::int64_t whole = std::int64_t{setting_.config.context} * setting_.config.width;
    const std::int64_t mine = whole / shards_.count * shards_.local;
    return element / mine * whole + whole / shards_.count * shards_.first + element % mine;
  }
  void fill(const Tensor& to, int stream) const {
    for (std::int64_t i = 0; i < to.elements(); ++i) {
      const float value = number_at(static_cast<std::uint64_t>(stream) * 1'000'003U +
                                    static_cast<std::uint64_t>(place_of(i)));
      if (to.spec.dtype == DType::kF32) {
        to.as<float>()[i] = value;
      } else {
        to.as<Bf16>()[i] = to_bf16(value);
      }
    }
  }
  // NaN at positions of other ranks.
  void append_stream(const Tensor& from, Values& to) const {
    Values mine;
    append(from, mine);
    const std::size_t begin = to.size();
    to.resize(begin + mine.size() * at(dealt_ ? shards_.count / shards_.local : 1), std::nanf(""));
    for (std::size_t i = 0; i < mine.size(); ++i) {
      to[begin + static_cast<std::size_t>(place_of(static_cast<std::int64_t>(i)))] = mine[i];
    }
  }
  void take_gradients(ParameterSet& set) {
    for (Parameter* parameter : set.all()) {
      Values& to = result.gradients[parameter->name];
      EXPECT_EQ(parameter->shares,
                parameter->parts.empty() && shards_.count > 1 ? shards_.local : 0)
          << parameter->name;
      shares[parameter->name] = parameter->share_grads.size();
      for (const Tensor& share : parameter->share_grads) append(share, to);
      if (parameter->shares > 0) continue;
      to.assign(static_cast<std::size_t>(parameter->whole_shape().elements()), std::nanf(""));
      for_elements(*parameter, [&](std::int64_t here, std::int64_t whole) {
        to[static_cast<std::size_t>(whole)] = parameter->grad.at(here);
      });
    }
  }

  const Setting& setting_;
  Shards shards_;
  bool dealt_ = false;
  testing::TensorRank sum_;
};

// `all` gets what `mine` has, and both had alike.
void join(const Values& mine, Values& all) {
  ASSERT_EQ(mine.size(), all.size());
  for (std::size_t i = 0; i < mine.size(); ++i) {
    if (std::isnan(mine[i])) continue;
    if (std::isnan(all[i])) all[i] = mine[i];
    ASSERT_EQ(mine[i], all[i]) << i;
  }
}

Result result_of(const Setting& setting, int shards, int ranks) {
  Group group(ranks);
  std::vector<std::unique_ptr<Rank>> all;
  for (int rank = 0; rank < ranks; ++rank) {
    const int local = shards / ranks;
    all.push_back(std::make_unique<Rank>(setting, Shards{shards, rank * local, local}, group));
  }
  std::vector<std::thread> threads;
  for (const auto& rank : all) threads.emplace_back([&rank] { rank->run(); });
  for (std::thread& thread : threads) thread.join();
  Result joined = all[0]->result;
  for (auto& [name, values] : joined.gradients) {
    std::vector<Values> shares;
    for (const auto& rank : all) {
      const Values& mine = rank->result.gradients[name];
      if (rank->shares[name] == 0) {
        join(mine, values);
        continue;
      }
      const std::size_t each = mine.size() / rank->shares[name];
      for (auto share = mine.begin(); share != mine.end();) {
        const auto end = share + static_cast<std::ptrdiff_t>(each);
        shares.emplace_back(std::exchange(share, end), end);
      }
    }
    if (!shares.empty()) values = tree_of(std::move(shares));
  }
  for (const auto& rank : all) {
    join(rank->result.outputs, joined.outputs);
    join(rank->result.input_gradients, joined.input_gradients);
  }
  return joined;
}

class ShardsTest : public ::testing::TestWithParam<Setting> {};

TEST_P(ShardsTest, BitsDoNotDependOnTheRanksAndAreThoseOfOneShardWithinRounding) {
  const Setting& setting = GetParam();
  const Result alone = result_of(setting, setting.shards, 1);
  for (int ranks = 2; ranks <= setting.most_ranks; ranks *= 2) {
    const Result shared = result_of(setting, setting.shards, ranks);
    expect_same_bits(shared.outputs, alone.outputs, "outputs");
    expect_same_bits(shared.input_gradients, alone.input_gradients, "input gradients");
    for (const auto& [name, values] : alone.gradients) {
      expect_same_bits(shared.gradients.at(name), values, name);
    }
  }
  const Result whole = result_of(setting, 1, 1);
  const double tolerance = setting.config.precision == DType::kF32 ? 2e-5 : 0.04;
  expect_close(alone.outputs, whole.outputs, tolerance, "outputs");
  expect_close(alone.input_gradients, whole.input_gradients, tolerance, "input gradients");
  for (const auto& [name, values] : whole.gradients) {
    expect_close(alone.gradients.at(name), values, tolerance, name);
  }
}

TransformerConfig gpt2() {
  return {.layers = 2, .heads = 4, .width = 64, .context = 37, .vocabulary = 61};
}
// 12 heads over 4, and a hidden width of 7 units and a short one.
TransformerConfig llama() {
  return {.kind = TransformerKind::kLlama,
          .layers = 2,
          .heads = 12,
          .width = 48,
          .context = 37,
          .vocabulary = 61,
          .kv_heads = 4,
          .mlp_width = 115};
}
TransformerConfig all_of_llama() {
  TransformerConfig config = llama();
  testing::set_options_of_llama(config);
  config.kv_heads = 4;
  return config;
}
template <typename Change>
TransformerConfig with(TransformerConfig config, const Change& change) {
  change(config);
  return config;
}
void bf16(TransformerConfig& config) { config.precision = DType::kBf16; }
void bf16_stream(TransformerConfig& config) {
  config.precision = config.stream_precision = DType::kBf16;
}
void dropping(TransformerConfig& config) { config.dropout = 0.2F; }
void recomputing(TransformerConfig& config) { config.recompute = Recompute::kBlock; }
void dealing(TransformerConfig& config) { config.context = 40; }

INSTANTIATE_TEST_SUITE_P(
    Settings, ShardsTest,
    ::testing::Values(
        Setting{"Gpt2", gpt2()}, Setting{"Gpt2ByEight", gpt2(), 8}, Setting{"Llama", llama()},
        Setting{"LlamaByEight", llama(), 8, 8}, Setting{"LlamaBySixteen", llama(), 16},
        Setting{"LlamaByThree", llama(), 3, 1}, Setting{"AllOfLlama", all_of_llama(), 8},
        Setting{"Gpt2Dealt", with(with(gpt2(), dealing), dropping)},
        Setting{"LlamaDealt", with(with(all_of_llama(), dealing), recomputing), 8, 8},
        Setting{"DealtBySample",
                with(with(llama(), dealing), [](auto& c) { c.batch_invariant = true; })},
        Setting{"Bf16Dealt", with(with(with(gpt2(), dealing), bf16), dropping)},
        Setting{"Bf16StreamDealt",
                with(with(with(with(all_of_llama(), dealing), bf16_stream), dropping), recomputing),
                8},
        Setting{"Bf16StreamDealtKeeping", with(with(gpt2(), dealing), bf16_stream), 8},
        Setting{"Long", with(gpt2(), [](auto& c) { c.context = 300; })},
        Setting{"LongBf16Stream",
                with(with(gpt2(), bf16_stream), [](auto& c) { c.context = 300; })},
        Setting{"Dropping", with(gpt2(), dropping)},
        Setting{"AllOfLlamaDropping", with(all_of_llama(), dropping)},
        Setting{"BySample", with(all_of_llama(), [](auto& c) { c.batch_invariant = true; })},
        Setting{"RecomputingAttention", with(with(all_of_llama(), dropping),
                                             [](auto& c) { c.recompute = Recompute::kAttention; })},
        Setting{"RecomputingBlocks", with(with(all_of_llama(), dropping), recomputing), 8},
        Setting{"RecomputingTogether", with(llama(), dropping), 8, 4, true},
        Setting{"RecomputingTogetherDealt", with(with(llama(), dealing), dropping), 8, 4, true},
        Setting{"Bf16", with(gpt2(), bf16)},
        Setting{"Bf16Dropping", with(with(gpt2(), bf16), dropping)},
        Setting{"LlamaBf16", with(all_of_llama(), bf16), 8},
        Setting{"Bf16Stream", with(gpt2(), bf16_stream)},
        Setting{"LlamaBf16Stream", with(all_of_llama(), bf16_stream), 8},
        Setting{"LlamaBf16StreamDropping",
                with(with(with(all_of_llama(), bf16_stream), dropping), recomputing)}),
    [](const auto& instance) { return instance.param.name; });

}  // namespace
}  // namespace sluice
