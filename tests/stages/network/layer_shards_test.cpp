// Layers of a Sequential computed by shards: as many ranks as threads, each with its own stage.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <ostream>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <sluice/error.hpp>
#include <sluice/transformer.hpp>

#include "comm/base/index.hpp"
#include "comm/base/sum_tree.hpp"
#include "tests/stages/prepared.hpp"
#include "tests/stages/state_slot.hpp"
#include "tests/stages/tensor_ranks.hpp"

namespace sluice {
namespace {

using nn::LinearOptions;
using nn::Split;
using testing::append;
using testing::expect_close;
using testing::expect_same_bits;
using testing::for_elements;
using testing::number_at;
using testing::Values;

constexpr LinearOptions kByColumns{.split = Split::kColumns}, kByRows{.split = Split::kRows};
constexpr std::int64_t kSamples = 3;

void fill(const Tensor& to, std::uint64_t stream) {
  for (std::int64_t i = 0; i < to.elements(); ++i) {
    const float value = number_at(stream * 1'000'003U + static_cast<std::uint64_t>(i));
    if (to.spec.dtype == DType::kI32) {
      to.as<std::int32_t>()[i] = static_cast<std::int32_t>((value + 1) * 4);  // below 8
    } else if (to.spec.dtype == DType::kF32) {
      to.as<float>()[i] = value;
    } else {
      to.as<Bf16>()[i] = to_bf16(value);
    }
  }
}

struct Setting {
  const char* name;
  std::function<Sequential(const ModelOptions&)> model;
  TensorSpec input;       // of all samples
  bool has_loss = false;  // then the outputs are the loss alone: logits may be divided
  ModelOptions options = {};
  double tolerance = 2e-5;
  int shards = 4;
};

void PrintTo(const Setting& setting, std::ostream* os) { *os << setting.name; }

// Gradients by name: what a rank has of those that are divided, else 0; shares by shard.
struct Result {
  Values outputs, input_gradients;
  std::map<std::string, Values> gradients;
  std::map<std::string, std::vector<Values>> shares;
};

void take_gradients(ParameterSet& set, Result& result) {
  for (Parameter* parameter : set.all()) {
    for (const Tensor& share : parameter->share_grads) {
      append(share, result.shares[parameter->name].emplace_back());
    }
    if (parameter->shares > 0) continue;
    Values& to = result.gradients[parameter->name];
    to.assign(static_cast<std::size_t>(parameter->whole_shape().elements()), std::nanf(""));
    for_elements(*parameter, [&](std::int64_t here, std::int64_t whole) {
      to[static_cast<std::size_t>(whole)] = parameter->grad.at(here);
    });
  }
}

std::vector<PlannedCollective> planned(const StageDescription& described, int batches) {
  std::vector<PlannedCollective> all;
  for (int batch = 0; batch < batches; ++batch) {
    for (const auto* list :
         {&described.collectives.forward, &described.collectives.loss,
          &described.collectives.backward_input, &described.collectives.backward_weight}) {
      all.insert(all.end(), list->begin(), list->end());
    }
  }
  return all;
}

float loss_of(Stage& stage, const TensorSpec& spec, StageContext& context, const Tensor& outputs) {
  const Buffer memory({}, spec.bytes());
  const Tensor targets{const_cast<std::byte*>(memory.data()), spec};
  fill(targets, 2000U + static_cast<unsigned>(context.micro_batch));
  double sum = 0;
  dynamic_cast<LossStage&>(stage).loss(context, {&outputs, 1}, {&targets, 1}, &sum);
  return static_cast<float>(sum);
}

Result run(const Setting& setting, const Shards& shards, testing::TensorRank& ranks) {
  Result result;
  const Sequential model = setting.model(setting.options);
  const StagePlace place{.tensor = shards.first / shards.local,
                         .tensors = shards.count / shards.local,
                         .shards = shards.count};
  const std::unique_ptr<Stage> stage = model(place);
  ComputeContext compute({}, 1);
  const StageDescription described = stage->describe({&setting.input, 1}, compute);
  const TensorSpec out = described.outputs[0];
  const testing::StateSlot slot(Device{}, described);
  testing::prepare(
      *stage,
      {.compute = &compute, .state = slot.state(), .seed = 5, .input_sizes = {{setting.input}}});
  const std::byte* const scratch = compute.workspace(described.operator_bytes);
  ParameterSet& set = *stage->parameters();
  testing::disturb(set);
  ranks.calls.clear();
  const bool wants_gradient = is_float(setting.input.dtype);
  Buffer x({}, setting.input.bytes()), dx({}, setting.input.bytes()), y({}, out.bytes());
  const Tensor x_tensor{x.data(), setting.input}, dx_tensor{dx.data(), setting.input},
      y_tensor{y.data(), out};
  stage->begin_step(compute);
  // In the last one nobody needs the input's gradient.
  for (int batch = 0; batch < 4; ++batch) {
    fill(x_tensor, 1000U + static_cast<unsigned>(batch));
    StageContext context{.compute = compute,
                         .micro_batch = batch,
                         .micro_batches = 4,
                         .state = slot.state(),
                         .seed = 7,
                         .first_sample = batch * kSamples,
                         .samples = kSamples,
                         .inputs = {&x_tensor, 1},
                         .tensor = &ranks};
    stage->forward(context, {&x_tensor, 1}, {&y_tensor, 1});
    if (setting.has_loss) {
      result.outputs.push_back(loss_of(*stage, described.targets[0], context, y_tensor));
    } else {
      append(y_tensor, result.outputs);
      fill(y_tensor, 2000U + static_cast<unsigned>(batch));
    }
    const std::span<const Tensor> wanted =
        wants_gradient && batch < 2 ? std::span(&dx_tensor, 1) : std::span<const Tensor>{};
    if (batch % 2 == 0) {
      stage->backward(context, {&y_tensor, 1}, wanted);
    } else {
      auto& split = dynamic_cast<SplitBackward&>(*stage);
      split.backward_input(context, {&y_tensor, 1}, wanted);
      split.backward_weight(context, {&y_tensor, 1});
    }
    if (!wanted.empty()) append(dx_tensor, result.input_gradients);
  }
  EXPECT_EQ(compute.workspace(described.operator_bytes), scratch) << "more than described";
  EXPECT_EQ(ranks.calls, planned(described, 4));
  take_gradients(set, result);
  return result;
}

Result result_of(const Setting& setting, int shards, int ranks) {
  std::vector<Result> all(at(ranks));
  testing::on_ranks(shards, ranks, [&](const Shards& mine, testing::TensorRank& rank) {
    all[at(mine.first / mine.local)] = run(setting, mine, rank);
  });
  Result joined = all[0];
  for (const Result& mine : all) {
    EXPECT_EQ(mine.outputs, joined.outputs);
    EXPECT_EQ(mine.input_gradients, joined.input_gradients);
    for (auto& [name, values] : joined.gradients) {
      const Values& others = mine.gradients.at(name);
      for (std::size_t i = 0; i < values.size(); ++i) {
        if (std::isnan(others[i])) continue;
        if (std::isnan(values[i])) values[i] = others[i];
        EXPECT_EQ(values[i], others[i]) << name;
      }
    }
  }
  for (const auto& [name, first] : all[0].shares) {
    std::vector<Values> leaves;
    for (const Result& mine : all) {
      leaves.insert(leaves.end(), mine.shares.at(name).begin(), mine.shares.at(name).end());
    }
    add_leaves(leaves.size(), [&](std::size_t into, std::size_t from) {
      for (std::size_t i = 0; i < leaves[into].size(); ++i) leaves[into][i] += leaves[from][i];
    });
    joined.gradients[name] = leaves[0];
  }
  return joined;
}

class LayerShardsTest : public ::testing::TestWithParam<Setting> {};

TEST_P(LayerShardsTest, BitsDoNotDependOnTheRanksAndAreThoseOfOneShardWithinRounding) {
  const Setting& setting = GetParam();
  const Result alone = result_of(setting, setting.shards, 1);
  for (int ranks = 2; ranks <= setting.shards; ranks *= 2) {
    const Result shared = result_of(setting, setting.shards, ranks);
    expect_same_bits(shared.outputs, alone.outputs, "outputs");
    expect_same_bits(shared.input_gradients, alone.input_gradients, "input gradients");
    for (const auto& [name, values] : alone.gradients) {
      expect_same_bits(shared.gradients.at(name), values, name);
    }
  }
  const Result whole = result_of(setting, 1, 1);
  expect_close(alone.outputs, whole.outputs, setting.tolerance, "outputs");
  if (!whole.input_gradients.empty()) {
    expect_close(alone.input_gradients, whole.input_gradients, setting.tolerance, "dx");
  }
  for (const auto& [name, values] : whole.gradients) {
    expect_close(alone.gradients.at(name), values, setting.tolerance, name);
  }
}

Sequential mlp_of(std::int64_t hidden, const ModelOptions& options) {
  return Sequential({nn::linear(24, hidden, kByColumns), nn::gelu(),
                     nn::linear(hidden, 20, kByRows), nn::relu(), nn::linear(20, 12)},
                    {}, options);
}
Sequential mlp(const ModelOptions& options) { return mlp_of(115, options); }
Sequential short_mlp(const ModelOptions& options) { return mlp_of(40, options); }
Sequential blocks(const ModelOptions& options) {
  const std::vector<nn::LayerSpec> inner = {nn::layer_norm(24), nn::linear(24, 80, kByColumns),
                                            nn::silu(), nn::linear(80, 24, kByRows),
                                            nn::dropout(0.2)};
  return Sequential({nn::residual(inner), nn::recompute(nn::residual(inner)),
                     nn::recompute({nn::linear(24, 64, {.bias = false, .split = Split::kColumns}),
                                    nn::gelu_tanh()}),
                     nn::linear(64, 24, {.bias = false, .split = Split::kRows})},
                    {}, options);
}
Sequential attention(const ModelOptions& options) {
  return Sequential({nn::attention(24, 6, {.kv_heads = 3, .rotary_base = 1e4F, .dropout = 0.1}),
                     nn::rms_norm(24), nn::attention(24, 2, {.bias = false})},
                    {}, options);
}
// Two patches of two rows each.
Sequential vision(const ModelOptions& options) {
  const TransformerConfig block{.layers = 2, .heads = 4, .width = 32};
  return Sequential({nn::conv2d(1, 2, 3, {.padding = 1, .bias = false}), nn::batch_norm2d(2),
                     nn::group_norm(1, 2), nn::max_pool2d(2), nn::unflatten({8, 4}),
                     nn::linear(4, 32), nn::transformer_block(block), nn::layer_norm(32),
                     nn::transformer_block(block), nn::flatten(), nn::linear(256, 10)},
                    nn::cross_entropy_loss(), options);
}
TransformerConfig language() {
  return {.layers = 2, .heads = 4, .width = 32, .context = 8, .vocabulary = 70};
}
// Ranks would deal positions, but for the layer that takes the place of an MLP.
Sequential replaced(const ModelOptions& options) {
  TransformerConfig config = language();
  config.precision = options.precision;
  config.stream_precision = options.stream_precision;
  std::vector<nn::LayerSpec> layers = nn::transformer_layers(config);
  layers[1].parts[1] = nn::residual(
      {nn::rms_norm(32), nn::linear(32, 48, kByColumns), nn::silu(), nn::linear(48, 32, kByRows)});
  return Sequential(std::move(layers), nn::transformer_loss(config), options);
}
// A transformer put together of a model's layers, whose logits each rank has some of.
Sequential words(const ModelOptions& options) {
  const TransformerConfig config = language();
  return Sequential({nn::embedding(70, 32, 8), nn::transformer_block(config), nn::layer_norm(32),
                     nn::linear(32, 70, {.bias = false, .split = Split::kColumns})},
                    nn::transformer_loss(config), options);
}

// A layer of the program's own that divides itself: y = x weightᵀ of a weight [kMade, 24] whose
// columns shards have.
class OwnRows : public nn::Layer {
 public:
  static constexpr std::int64_t kTaken = 24, kMade = 5;
  bool set_shards(const Shards& shards) override {
    shards_ = shards;
    return true;
  }
  [[nodiscard]] TensorSpec output(const TensorSpec& input) const override {
    return {input.dtype, {input.shape[0], kMade}};
  }
  void add_parameters(ParameterSet& set, const std::string& name) override {
    const Shape shape{kMade, kTaken};
    std::vector<SlicePart> parts;
    for (int shard = shards_.first; shard < shards_.first + shards_.local; ++shard) {
      parts.push_back({{1, begin(shard), begin(shard + 1) - begin(shard), kTaken}, shard});
    }
    weight_ = shards_.count == 1
                  ? &set.add(name + "weight", shape, Init::uniform(1))
                  : &set.add_parts(name + "weight", shape, Init::uniform(1), true, false, parts);
  }
  [[nodiscard]] nn::LayerNeeds needs(const TensorSpec& input,
                                     ComputeContext& /*compute*/) const override {
    nn::LayerNeeds needs;
    if (shards_.local == shards_.count) return needs;
    needs.memory.gradients = 1;  // backward_input() makes a collective
    needs.memory.scratch = input.bytes();
    needs.collectives.forward = {
        {.axis = CollectiveAxis::kTensor, .bytes = output(input).bytes(), .type = DType::kF32}};
    needs.collectives.backward_input = {
        {.axis = CollectiveAxis::kTensor, .bytes = input.bytes(), .type = DType::kF32}};
    return needs;
  }
  void forward(nn::LayerCall& call, const Tensor& y) override {
    std::vector<Values> sums(at(shards_.local), Values(static_cast<std::size_t>(y.elements())));
    for_products([&](std::size_t shard, std::int64_t weight, std::int64_t out, std::int64_t in) {
      for (std::int64_t row = 0; row < y.shape()[0]; ++row) {
        sums[shard][static_cast<std::size_t>(row * kMade + out)] +=
            weight_->value.at(weight) * call.x.at(row * kTaken + in);
      }
    });
    add_leaves(sums.size(), [&](std::size_t into, std::size_t from) {
      for (std::size_t i = 0; i < sums[into].size(); ++i) sums[into][i] += sums[from][i];
    });
    std::copy(sums[0].begin(), sums[0].end(), y.as<float>());
    if (shards_.local < shards_.count) call.stage.tensor->sum(floats(y));
  }
  void backward_input(nn::LayerCall& call, const Tensor& dy, const Tensor& dx) override {
    const Tensor to{dx.data != nullptr ? dx.data : call.scratch, call.x.spec};
    std::memset(to.data, 0, to.spec.bytes());
    for_products([&](std::size_t, std::int64_t weight, std::int64_t out, std::int64_t in) {
      for (std::int64_t row = 0; row < dy.shape()[0]; ++row) {
        to.at(row * kTaken + in) += weight_->value.at(weight) * dy.at(row * kMade + out);
      }
    });
    if (shards_.local < shards_.count) call.stage.tensor->sum(floats(to));
  }
  void backward_weight(nn::LayerCall& call, const Tensor& dy) override {
    for_products([&](std::size_t, std::int64_t weight, std::int64_t out, std::int64_t in) {
      for (std::int64_t row = 0; row < dy.shape()[0]; ++row) {
        weight_->grad.at(weight) += dy.at(row * kMade + out) * call.x.at(row * kTaken + in);
      }
    });
  }

 private:
  [[nodiscard]] std::int64_t begin(int shard) const { return shards_.begin(shard, kTaken); }
  static std::span<float> floats(const Tensor& of) {
    return {of.as<float>(), static_cast<std::size_t>(of.elements())};
  }
  // work(shard of this rank, element of the weight here, its row, its column of the whole)
  template <typename Work>
  void for_products(const Work& work) const {
    std::int64_t element = 0;
    for (int shard = 0; shard < shards_.local; ++shard) {
      const std::int64_t first = begin(shards_.first + shard),
                         end = begin(shards_.first + shard + 1);
      for (std::int64_t out = 0; out < kMade; ++out) {
        for (std::int64_t in = first; in < end; ++in) work(at(shard), element++, out, in);
      }
    }
  }

  Shards shards_;
  Parameter* weight_ = nullptr;
};
Sequential own(const ModelOptions& options) {
  return Sequential({nn::layer<OwnRows>("own_rows"), nn::linear(OwnRows::kMade, 3)}, {}, options);
}

constexpr ModelOptions kBf16{.precision = DType::kBf16};
constexpr ModelOptions kBf16Stream{.precision = DType::kBf16, .stream_precision = DType::kBf16};
const TensorSpec kRows{DType::kF32, {kSamples, 24}}, kStream{DType::kF32, {kSamples, 8, 24}},
    kLong{DType::kF32, {kSamples, 300, 24}}, kImage{DType::kF32, {kSamples, 1, 8, 8}},
    kTokens{DType::kI32, {kSamples, 8}}, kRowsBf16{DType::kBf16, {kSamples, 24}},
    kStreamBf16{DType::kBf16, {kSamples, 8, 24}};

INSTANTIATE_TEST_SUITE_P(
    Settings, LayerShardsTest,
    ::testing::Values(Setting{"Mlp", mlp, kRows}, Setting{"MlpOfPlaces", mlp, kStream},
                      Setting{"MlpBySample", mlp, kLong},
                      Setting{"MlpByEight", mlp, kRows, false, {}, 2e-5, 8},
                      Setting{"MlpBf16", mlp, kRows, false, kBf16, 0.04},
                      Setting{"MlpBf16Stream", mlp, kRowsBf16, false, kBf16Stream, 0.04},
                      Setting{"EmptyShards", short_mlp, kRows},
                      Setting{"EmptyShardsBf16", short_mlp, kRows, false, kBf16, 0.04},
                      Setting{"Blocks", blocks, kStream},
                      Setting{"BlocksBf16Stream", blocks, kStreamBf16, false, kBf16Stream, 0.04},
                      Setting{"Attention", attention, kStream},
                      Setting{"AttentionBf16", attention, kStream, false, kBf16, 0.04},
                      Setting{"Vision", vision, kImage, true},
                      Setting{"VisionBf16", vision, kImage, true, kBf16, 0.1},
                      Setting{"ReplacedLayer", replaced, kTokens, true},
                      Setting{"ReplacedLayerBf16Stream", replaced, kTokens, true, kBf16Stream, 0.1},
                      Setting{"Words", words, kTokens, true}, Setting{"Own", own, kRows},
                      Setting{"OwnByEight", own, kRows, false, {}, 2e-5, 8}),
    [](const auto& instance) { return instance.param.name; });

// --- what is refused ---
class Doubled : public nn::Layer {
 public:
  [[nodiscard]] TensorSpec output(const TensorSpec& input) const override { return input; }
  void forward(nn::LayerCall& call, const Tensor& y) override {
    for (std::int64_t i = 0; i < y.elements(); ++i) y.at(i) = 2 * call.x.at(i);
  }
  void backward_input(nn::LayerCall& /*call*/, const Tensor& dy, const Tensor& dx) override {
    for (std::int64_t i = 0; i < dx.elements(); ++i) dx.at(i) = 2 * dy.at(i);
  }
};

TEST(ReplicatedTest, EachRankComputesAllOfALayerThatKnowsNoShards) {
  const auto model = [](const ModelOptions& options) {
    const nn::LayerSpec both =
        nn::group({nn::layer<Doubled>("doubled"), nn::linear(24, 24, kByColumns)});
    return Sequential(
        {nn::recompute(nn::replicated(nn::layer<Doubled>("doubled"))), nn::replicated(both),
         nn::replicated(nn::recompute(both)), nn::layer_norm(24)},
        {}, options);
  };
  const Setting setting{"Replicated", model, kRows};
  const Result whole = result_of(setting, 1, 1), shared = result_of(setting, 4, 2);
  expect_same_bits(shared.outputs, whole.outputs, "outputs");
  expect_same_bits(shared.gradients.at("1.1.weight"), whole.gradients.at("1.1.weight"), "weight");
  expect_same_bits(shared.gradients.at("3.bias"), whole.gradients.at("3.bias"), "bias");
  EXPECT_THROW((void)nn::replicated(nn::cut()), Error);
}

void expect_refused(std::vector<nn::LayerSpec> layers, const char* message,
                    const nn::LossSpec& loss = {}) {
  const Sequential model(std::move(layers), loss);
  try {
    (void)model(StagePlace{.tensor = 0, .tensors = 1, .shards = 4});
    ADD_FAILURE() << "not refused: " << message;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUsage);
    EXPECT_THAT(error.what(), ::testing::HasSubstr(message));
  }
}

TEST(LayerShardsErrors, NameTheLayerAndWhatIsLegal) {
  const nn::LayerSpec columns = nn::linear(24, 64, kByColumns), rows = nn::linear(64, 24, kByRows);
  expect_refused(
      {nn::layer<Doubled>("doubled")},
      "layer 0 (doubled) does not say how 4 shards divide it (Layer::set_shards); legal: "
      "1 shard, of 1 rank, and nn::replicated() of it");
  expect_refused({nn::recompute(nn::layer<Doubled>("doubled"))}, "(doubled) does not say");
  const char* const whole = "needs its whole input, and gets the columns that a rank's shards have";
  expect_refused({columns, nn::layer_norm(64), rows}, "layer 1 (layer_norm): it needs its whole");
  expect_refused({columns, nn::gelu(), nn::linear(64, 24)}, whole);
  expect_refused({columns, nn::dropout(0.1), rows},
                 "layer 1 (dropout): it needs its whole input, and gets the columns that a rank's "
                 "shards have; legal: linear() with Split::kColumns, layers that go element by "
                 "element, but for dropout, and linear() with Split::kRows, on one stage");
  expect_refused({nn::group({columns, columns})}, "layer 0.1 (linear): it needs its whole input");
  expect_refused({nn::recompute({nn::linear(24, 64), rows})},
                 "layer 0 (recompute): its layers do not fit each other");
  expect_refused({nn::recompute(rows)}, "layer 0 (recompute): it needs the columns that a rank's");
  expect_refused({nn::relu(), rows}, "layer 1 (linear): it needs the columns");
  expect_refused({nn::residual({columns}, {nn::linear(24, 64)})}, "layer 0 (residual)");
  expect_refused({columns, nn::gelu(), nn::relu(), rows, nn::skip(0, 2)},
                 "skip(0, 2) takes what layer 0 makes, the columns that a rank's shards have");
  expect_refused({columns}, "mse_loss: it needs whole outputs", nn::mse_loss());
  expect_refused({columns}, "the model's output: it needs whole outputs");
  expect_refused({nn::embedding(70, 32), nn::linear(32, 70)},
                 "cross_entropy_loss: it needs the columns", nn::transformer_loss(language()));
  const Sequential cut({columns, nn::cut(), nn::gelu(), rows});
  EXPECT_THROW((void)cut(StagePlace{.stage = 0, .stages = 2, .shards = 4}), Error);
  EXPECT_NO_THROW((void)cut(StagePlace{.shards = 4}));
  EXPECT_NO_THROW((void)cut(StagePlace{.stage = 0, .stages = 2}));
  // A cut by cost leaves together what a rank has columns of.
  const nn::LayerSpec square = nn::linear(24, 24);
  const Sequential by_cost =
      Sequential({square, columns, nn::gelu(), rows, square}).with_input({DType::kF32, {24}});
  EXPECT_EQ(by_cost.partition(2), (Partition{{0, 4, 5}}));
  EXPECT_EQ(by_cost.partition(3), (Partition{{0, 1, 4, 5}}));
  for (int stage = 0; stage < 3; ++stage) {
    EXPECT_NO_THROW((void)by_cost(StagePlace{.stage = stage, .stages = 3, .shards = 4}));
  }
  // The width that a rank has follows the whole one.
  const std::unique_ptr<Stage> other = Sequential({columns, nn::linear(72, 24, kByRows)})(
      StagePlace{.tensor = 1, .tensors = 2, .shards = 4});
  ComputeContext compute({}, 1);
  EXPECT_THROW((void)other->describe({&kRows, 1}, compute), Error);
}

}  // namespace
}  // namespace sluice
