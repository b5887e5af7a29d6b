// The two ends of a transformer, whose vocabulary shards divide: what ranks that share the shards
// compute has the same bits as what one rank does, and is close to a model without shards.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include <sluice/error.hpp>
#include <sluice/operators.hpp>
#include <sluice/transformer.hpp>

#include "stages/layers/ends.hpp"
#include "stages/network/vocabulary.hpp"
#include "stages/tensor/slice_runs.hpp"
#include "tests/stages/prepared.hpp"
#include "tests/stages/state_slot.hpp"
#include "tests/stages/tensor_ranks.hpp"

namespace sluice {
namespace {

using ::testing::HasSubstr;
using testing::TensorRank;
using Values = std::vector<float>;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr std::int64_t kSamples = 3;

std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }

Values values_of(const Tensor& tensor) {
  Values values;
  for (std::int64_t i = 0; i < tensor.elements(); ++i) {
    values.push_back(tensor.spec.dtype == DType::kF32 ? tensor.as<float>()[i]
                                                      : to_float(tensor.as<Bf16>()[i]));
  }
  return values;
}

void set(const Tensor& tensor, std::int64_t i, float value) {
  if (tensor.spec.dtype == DType::kF32) {
    tensor.as<float>()[i] = value;
  } else {
    tensor.as<Bf16>()[i] = to_bf16(value);
  }
}

// What the ranks of a model have together: a result's bits are compared by name.
class Results {
 public:
  // The same on each rank.
  void add(const std::string& name, const Values& values) {
    const std::lock_guard lock(mutex_);
    const auto [place, added] = by_name.try_emplace(name, values);
    if (!added) expect_equal(place->second, values, name);
  }
  // Elements of something that ranks have in parts, visit(put(whole element, value)).
  template <typename Visit>
  void add_part(const std::string& name, std::int64_t whole, const Visit& visit) {
    const std::lock_guard lock(mutex_);
    Values& all = by_name.try_emplace(name, index(whole)).first->second;
    visit([&](std::int64_t element, float value) { all[index(element)] = value; });
  }
  static void expect_equal(const Values& found, const Values& expected, const std::string& name) {
    ASSERT_EQ(found.size(), expected.size()) << name;
    for (std::size_t i = 0; i < found.size(); ++i) {
      if (std::bit_cast<std::uint32_t>(found[i]) == std::bit_cast<std::uint32_t>(expected[i])) {
        continue;
      }
      FAIL() << name << " differs at " << i << " of " << found.size() << ": " << found[i] << " for "
             << expected[i];
    }
  }
  void expect_equal(const Results& expected) const {
    ASSERT_EQ(by_name.size(), expected.by_name.size());
    for (const auto& [name, values] : by_name) {
      expect_equal(values, expected.by_name.at(name), name);
    }
  }

  // What has this name, or the sum of what shards have.
  [[nodiscard]] Values all_shares(const std::string& name) const {
    const auto place = by_name.find(name);
    if (place != by_name.end()) return place->second;
    Values sum;
    for (const auto& [part, values] : by_name) {
      if (!part.starts_with(name + " by shard ")) continue;
      sum.resize(values.size());
      for (std::size_t i = 0; i < values.size(); ++i) sum[i] += values[i];
    }
    return sum;
  }

  std::map<std::string, Values> by_name;

 private:
  std::mutex mutex_;
};

// Panels of a rank's logits, or of their gradient, in their places of [rows, vocabulary].
void add_panels(Results& results, const std::string& name, const Tensor& panels,
                const nn::DividedClasses& classes) {
  const std::int64_t vocabulary = classes.starts().back(), rows = leading_rows(panels);
  const Values values = values_of(panels);
  results.add_part(name, rows * vocabulary, [&](const auto& put) {
    std::size_t i = 0;
    for (int shard = 0; shard < classes.shards().local; ++shard) {
      const auto at = static_cast<std::size_t>(classes.shards().first + shard);
      for (std::int64_t row = 0; row < rows; ++row) {
        for (std::int64_t c = classes.starts()[at]; c < classes.starts()[at + 1]; ++c) {
          put(row * vocabulary + c, values[i++]);
        }
      }
    }
  });
}

void add_gradient(Results& results, const Parameter& parameter, const Shards& shards) {
  const std::string name = "gradient of " + parameter.name;
  const std::int64_t elements = parameter.shape.elements();
  for (int share = 0; share < parameter.shares; ++share) {  // for the runtime to add up
    results.add(name + " by shard " + std::to_string(shards.first + share),
                values_of(parameter.share_grads[at(share)]));
  }
  if (parameter.shares > 0) return;
  const Values values = values_of(parameter.grad);
  if (parameter.slice.all()) return results.add(name, values);
  results.add_part(name, parameter.whole_shape().elements(), [&](const auto& put) {
    for (const PlacedPart& part : placed_parts(parameter.slice, parameter.parts, elements)) {
      for_runs(slice_shape(parameter.whole_shape(), part.slice), part.slice, 0, part.count,
               [&](std::int64_t here, std::int64_t in_whole, std::int64_t count) {
                 for (std::int64_t i = 0; i < count; ++i) {
                   put(in_whole + i, values[index(part.first + here + i)]);
                 }
               });
    }
  });
}

// Its bits, as those of floats.
void add_loss(Results& results, const std::string& of, double sum) {
  Values halves(2);
  std::memcpy(halves.data(), &sum, sizeof(sum));
  results.add("loss of " + of, halves);
}
double loss_of(const Results& results, int batch) {
  double sum = 0;
  std::memcpy(&sum, results.by_name.at("loss of " + std::to_string(batch)).data(), sizeof(sum));
  return sum;
}

// --- stages ---
struct OneStage {
  std::unique_ptr<Stage> stage;
  StageDescription description;
  std::unique_ptr<testing::StateSlot> slot;
  TensorSpec input;
  Buffer y, dy;  // of the output

  [[nodiscard]] Tensor output() const { return {y.data(), description.outputs[0]}; }
  [[nodiscard]] Tensor gradient() const { return {dy.data(), description.outputs[0]}; }
};

// Two micro-batches in training, and the second one in evaluation before it, on one rank of the
// ends of a model, without its blocks, or of all of it.
class Model {
 public:
  Model(const TransformerConfig& config, bool whole, const Shards& shards, TensorRank& tensor,
        Results& results)
      : compute_(Device{}, shards.local == shards.count ? 2 : 1),
        config_(config),
        shards_(shards),
        classes_(config.vocabulary, shards),
        tensor_(tensor),
        results_(results) {
    const int layers = config.layers + 2;
    const Partition partition =
        whole ? Partition{{0, layers}} : Partition{{0, 1, layers - 1, layers}};
    TensorSpec input{DType::kI32, Shape{kSamples, config.context}};
    for (int number = 0; number < partition.stages(); number += 2) {
      OneStage& one = stages_.emplace_back();
      one.stage = Transformer(config).stage_of(partition, number, shards);
      one.input = input;
      one.description = one.stage->describe({&input, 1}, compute_);
      one.slot = std::make_unique<testing::StateSlot>(Device{}, one.description);
      one.y = Buffer(Device{}, one.description.outputs[0].bytes());
      one.dy = Buffer(Device{}, one.description.outputs[0].bytes());
      testing::prepare(*one.stage, {.compute = &compute_,
                                    .state = one.slot->state(),
                                    .split_backward = false,
                                    .seed = 3,
                                    .input_sizes = {{input}}});
      // Tied uses have the same values, as the runtime sees to.
      input = one.description.outputs[0];
    }
    for (OneStage& one : stages_) {
      for (Parameter* parameter : one.stage->parameters()->all()) {
        if (parameter->name.find("norm") != std::string::npos) continue;
        for (std::int64_t i = 0; i < parameter->shape.elements(); ++i) {
          parameter->value.as<float>()[i] *= 8;  // logits that are not all near zero
        }
      }
      one.stage->parameters()->mark_values_changed();
    }
    const Parameter& table = *stages_[0].stage->parameters()->all()[0];
    if (classes_.first() == 0) table.value.as<float>()[0] = -0.0F;
  }

  void run() {
    tensor_.calls.clear();
    for (int batch = 0; batch < 2; ++batch) {
      if (batch == 1) step(batch, Phase::kEvaluate);
      step(batch, Phase::kTrain);
    }
    for (const OneStage& one : stages_) {
      for (const Parameter* parameter : one.stage->parameters()->all()) {
        if (!parameter->tied) add_gradient(results_, *parameter, shards_);
      }
    }
    Parameter* const table = stages_[0].stage->parameters()->all()[0];
    EXPECT_EQ(table->shape[0], classes_.count());
    if (!table->tied) return;
    // Uses of one table divide it alike.
    for (const OneStage& one : stages_) {
      for (Parameter* parameter : one.stage->parameters()->all()) {
        if (!parameter->tied) continue;
        EXPECT_EQ(parameter->parts, table->parts);
        Parameter use = *parameter;
        use.name += " of stage " + std::to_string(&one - stages_.data());
        if (parameter != table) use.name += " at the end";
        add_gradient(results_, use, shards_);
      }
    }
  }

 private:
  // Tokens, and the targets of each.
  [[nodiscard]] std::array<std::vector<std::int32_t>, 2> data_of(int batch) const {
    std::vector<std::int32_t> tokens, targets;
    for (std::int64_t i = 0; i < kSamples * config_.context; ++i) {
      const auto place = static_cast<std::int64_t>(batch) * 1000 + i;
      tokens.push_back(static_cast<std::int32_t>((place * place * 31 + 7) % config_.vocabulary));
      targets.push_back(
          place % 5 == 3 ? -1 : static_cast<std::int32_t>((place * 97 + 5) % config_.vocabulary));
    }
    tokens[0] = 0;
    tokens[1] = targets[1] = static_cast<std::int32_t>(config_.vocabulary - 1);
    return {tokens, targets};
  }
  void step(int batch, Phase phase) {
    const std::string name = std::string(phase == Phase::kTrain ? "trained " : "evaluated ") +
                             std::to_string(batch) + ": ";
    auto [tokens, targets] = data_of(batch);
    Tensor input{tokens.data(), stages_[0].input};
    const Tensor wanted{targets.data(), stages_[0].input};
    std::vector<Tensor> inputs;
    std::size_t calls = tensor_.calls.size();
    const auto require_planned = [&](const std::vector<PlannedCollective>& planned) {
      EXPECT_EQ(std::vector(tensor_.calls.begin() + static_cast<std::ptrdiff_t>(calls),
                            tensor_.calls.end()),
                planned);
      calls = tensor_.calls.size();
    };
    std::vector<StageContext> contexts;
    for (OneStage& one : stages_) {
      one.stage->begin_step(compute_);
      inputs.push_back(input);
      StageContext ctx{.compute = compute_, .state = one.slot->state(), .phase = phase};
      ctx.seed = 11;
      ctx.step = 2;
      ctx.first_sample = batch * kSamples;
      ctx.samples = kSamples;
      ctx.loss_scale = 1.0 / 64;
      ctx.tensor = &tensor_;
      contexts.push_back(ctx);
      run_forward(one, contexts.back(), inputs.back());
      require_planned(one.description.collectives.forward);
      input = one.output();
      if (&one == &stages_.back()) break;
      results_.add(name + "embedded", values_of(input));
    }
    OneStage& last = stages_.back();
    StageContext& ctx = contexts.back();
    ctx.inputs = {&inputs.back(), 1};
    add_panels(results_, name + "logits", last.output(), classes_);
    double sum = std::nan("");
    const Tensor outputs = last.output();
    dynamic_cast<LossStage&>(*last.stage).loss(ctx, {&outputs, 1}, {&wanted, 1}, &sum);
    require_planned(last.description.collectives.loss);
    // Evaluation has the same one, but for dropout.
    const bool drops = phase == Phase::kEvaluate && config_.dropout > 0;
    add_loss(results_, std::to_string(batch) + (drops ? " without dropout" : ""), sum);
    if (phase != Phase::kTrain) return;
    add_panels(results_, name + "gradient of logits", outputs, classes_);
    Tensor gradient = outputs;
    for (std::size_t i = stages_.size(); i-- > 0;) {
      contexts[i].inputs = {&inputs[i], 1};
      const Tensor none{};
      const Tensor dx = i == 0 ? none : stages_[i - 1].gradient();
      stages_[i].stage->backward(contexts[i], {&gradient, 1}, {&dx, i == 0 ? 0U : 1U});
      require_planned(stages_[i].description.collectives.backward_input);
      gradient = dx;
      if (i > 0) results_.add(name + "gradient of the stream", values_of(dx));
    }
  }

  static void run_forward(OneStage& one, StageContext& ctx, const Tensor& input) {
    ctx.inputs = {&input, 1};
    const Tensor output = one.output();
    std::memset(output.data, 0xFF, output.spec.bytes());
    one.stage->forward(ctx, ctx.inputs, {&output, 1});
  }

  ComputeContext compute_;
  TransformerConfig config_;
  Shards shards_;
  nn::DividedClasses classes_;
  TensorRank& tensor_;
  Results& results_;
  std::vector<OneStage> stages_;
};

std::unique_ptr<Results> run_model(const TransformerConfig& config, bool whole, int shards,
                                   int ranks) {
  auto results = std::make_unique<Results>();
  // Results of parts are compared position by position.
  testing::on_ranks(
      shards, ranks,
      [&](const Shards& mine, TensorRank& tensor) {
        Model(config, whole, mine, tensor, *results).run();
      },
      /*deals_positions=*/whole);
  return results;
}

void expect_close(const Results& found, const Results& expected, double share) {
  for (const int batch : {0, 1}) {
    const double loss = loss_of(expected, batch);
    EXPECT_NEAR(loss_of(found, batch), loss, (share < 1e-3 ? 1e-6 : 1e-3) * loss) << batch;
  }
  for (const auto& [name, values] : expected.by_name) {
    if (name.find("loss") != std::string::npos) continue;
    const Values mine = found.all_shares(name);
    double most = 0, difference = 0;
    ASSERT_EQ(mine.size(), values.size()) << name;
    for (std::size_t i = 0; i < values.size(); ++i) {
      const auto wanted = static_cast<double>(values[i]);
      most = std::max(most, std::abs(wanted));
      difference = std::max(difference, std::abs(wanted - static_cast<double>(mine[i])));
    }
    EXPECT_GT(most, 0) << name;
    EXPECT_LE(difference, share * most) << name;
  }
}

struct Kind {
  const char* name;
  TransformerKind kind;
  bool tied;
  DType precision, stream;
  float dropout = 0;
  bool whole = false;
  int context = 13;
};

void PrintTo(const Kind& kind, std::ostream* out) { *out << kind.name; }

class EndsTest : public ::testing::TestWithParam<Kind> {};

TEST_P(EndsTest, BitsDoNotDependOnRanksAndAreCloseToThoseWithoutShards) {
  const Kind& kind = GetParam();
  const TransformerConfig config{.kind = kind.kind,
                                 .layers = 1,
                                 .heads = 8,
                                 .width = 80,
                                 .context = kind.context,
                                 .vocabulary = 251,
                                 .dropout = kind.dropout,
                                 .tied = kind.tied,
                                 .precision = kind.precision,
                                 .stream_precision = kind.stream};
  const auto alone = run_model(config, kind.whole, 1, 1);
  for (const int shards : {4, 8}) {
    const auto one = run_model(config, kind.whole, shards, 1);
    for (const int ranks : {2, 4}) {
      SCOPED_TRACE(std::to_string(shards) + " shards on " + std::to_string(ranks) + " ranks");
      run_model(config, kind.whole, shards, ranks)->expect_equal(*one);
    }
    SCOPED_TRACE(std::to_string(shards) + " shards");
    expect_close(*one, *alone, kind.precision == DType::kF32 ? 1e-5 : 3e-2);
    // Rows of the table reach the stream unchanged, but for the sign of a zero.
    if (kind.whole) continue;
    EXPECT_EQ(one->by_name.at("trained 0: embedded"), alone->by_name.at("trained 0: embedded"));
  }
}

constexpr DType kF32 = DType::kF32, kBf16 = DType::kBf16;
constexpr TransformerKind kGpt2 = TransformerKind::kGpt2, kLlama = TransformerKind::kLlama;

INSTANTIATE_TEST_SUITE_P(All, EndsTest,
                         ::testing::Values(Kind{"gpt2", kGpt2, true, kF32, kF32},
                                           Kind{"untied", kGpt2, false, kF32, kF32},
                                           Kind{"llama", kLlama, false, kF32, kF32},
                                           Kind{"tied_llama", kLlama, true, kF32, kF32},
                                           Kind{"bf16", kGpt2, true, kBf16, kF32},
                                           Kind{"bf16_stream", kGpt2, true, kBf16, kBf16},
                                           Kind{"llama_bf16_stream", kLlama, false, kBf16, kBf16},
                                           Kind{"dropout", kGpt2, true, kF32, kF32, 0.25F},
                                           Kind{"dropout_bf16", kGpt2, true, kBf16, kBf16, 0.25F},
                                           Kind{"long", kGpt2, true, kBf16, kBf16, 0, false, 300},
                                           Kind{"whole_gpt2", kGpt2, true, kF32, kF32, 0.1F, true},
                                           Kind{"whole_llama_bf16", kLlama, false, kBf16, kBf16, 0,
                                                true}),
                         [](const auto& each) { return std::string(each.param.name); });

// --- the loss of given logits ---
constexpr std::int64_t kVocabulary = 251;

nn::HeadOptions options_of(DType precision) {
  return {.vocabulary = kVocabulary, .width = 8, .precision = precision, .stream = precision};
}

// Memory with bytes around it that nobody may change.
class Guarded {
 public:
  explicit Guarded(std::size_t bytes) : size_(bytes), memory_(Device{}, bytes + 2 * kGuard) {
    std::memset(memory_.data(), 0xFF, bytes + 2 * kGuard);
  }
  ~Guarded() {
    for (std::size_t i = 0; i < kGuard; ++i) {
      EXPECT_EQ(memory_.data()[i], std::byte{0xFF});
      EXPECT_EQ(memory_.data()[kGuard + size_ + i], std::byte{0xFF});
    }
  }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;
  [[nodiscard]] std::byte* data() const { return memory_.data() + kGuard; }

 private:
  static constexpr std::size_t kGuard = kBufferAlignment;
  std::size_t size_;
  Buffer memory_;
};

// Losses of single rows, in the order of rows, and all with the gradient.
std::unique_ptr<Results> run_loss(DType precision, const Values& logits,
                                  std::vector<std::int32_t> targets, int shards, int ranks) {
  auto results = std::make_unique<Results>();
  const auto rows = static_cast<std::int64_t>(targets.size());
  testing::on_ranks(shards, ranks, [&](const Shards& mine, TensorRank& tensor) {
    ComputeContext compute(Device{}, ranks == 1 ? 2 : 1);
    nn::TokenLoss loss(options_of(precision));
    if (shards > 1) {
      EXPECT_TRUE(loss.set_shards(mine));
    }
    const nn::DividedClasses classes(kVocabulary, mine);
    const TensorSpec spec{precision, Shape{1, rows, classes.count()}};
    const TensorSpec target_spec = loss.targets(spec);
    EXPECT_EQ(target_spec, (TensorSpec{DType::kI32, Shape{1, rows}}));
    const Tensor wanted{targets.data(), target_spec};
    for (const Phase phase : {Phase::kEvaluate, Phase::kTrain}) {
      const Guarded memory(spec.bytes());
      const Tensor panels{memory.data(), spec};
      std::int64_t i = 0;
      for (int shard = mine.first; shard < mine.first + mine.local; ++shard) {
        for (std::int64_t row = 0; row < rows; ++row) {
          for (std::int64_t c = classes.starts()[at(shard)]; c < classes.starts()[at(shard + 1)];
               ++c) {
            set(panels, i++, logits[index(row * kVocabulary + c)]);
          }
        }
      }
      const nn::LayerNeeds needs = loss.needs(spec, compute);
      const Guarded scratch(needs.memory.scratch);
      StageContext ctx{.compute = compute, .phase = phase};
      ctx.loss_scale = 0.125;
      ctx.tensor = &tensor;
      tensor.calls.clear();
      double sum = 0;
      loss.compute_in(scratch.data(), ctx, panels, wanted, &sum);
      EXPECT_EQ(tensor.calls, needs.collectives.forward);
      EXPECT_EQ(needs.collectives.forward.size(), ranks > 1 ? 2U : 0U);
      add_loss(*results, "0", sum);
      if (phase == Phase::kTrain) add_panels(*results, "gradient", panels, classes);
    }
  });
  return results;
}

struct Extreme {
  const char* name;
  void (*change)(Values& logits);  // of row 0
  bool finite = true;
};

void PrintTo(const Extreme& extreme, std::ostream* out) { *out << extreme.name; }

class LossTest : public ::testing::TestWithParam<std::tuple<Extreme, DType>> {};

TEST_P(LossTest, LossesAndGradientsDoNotDependOnRanks) {
  const auto& [extreme, precision] = GetParam();
  const std::vector<std::int32_t> targets = {17, 0, -1, 250, 127, 128, -100, 64, 63, 200, 5};
  Values logits;
  for (std::size_t i = 0; i < targets.size() * index(kVocabulary); ++i) {
    logits.push_back(static_cast<float>(static_cast<int>(i * i * 2654435761U % 4099) - 2049) /
                     256.0F);
  }
  extreme.change(logits);
  const auto alone = run_loss(precision, logits, targets, 1, 1);
  for (const int shards : {2, 3, 4, 8, 16}) {
    const auto one = run_loss(precision, logits, targets, shards, 1);
    for (int ranks = 2; ranks <= shards && shards % ranks == 0; ranks *= 2) {
      SCOPED_TRACE(std::to_string(shards) + " shards on " + std::to_string(ranks) + " ranks");
      run_loss(precision, logits, targets, shards, ranks)->expect_equal(*one);
    }
    SCOPED_TRACE(std::to_string(shards) + " shards");
    EXPECT_EQ(std::isfinite(loss_of(*alone, 0)), extreme.finite);
    if (!extreme.finite) {
      EXPECT_FALSE(std::isfinite(loss_of(*one, 0)));
      continue;
    }
    EXPECT_NEAR(loss_of(*one, 0), loss_of(*alone, 0), 1e-6 * loss_of(*alone, 0));
    const Values& found = one->by_name.at("gradient");
    const Values& expected = alone->by_name.at("gradient");
    for (std::size_t i = 0; i < found.size(); ++i) {
      const float share = precision == DType::kF32 ? 1e-6F : 0x1p-8F;
      ASSERT_NEAR(found[i], expected[i], share * std::abs(expected[i]) + 1e-9F) << i;
      if (targets[i / index(kVocabulary)] < 0) {
        ASSERT_EQ(found[i], 0) << i;
      }
    }
  }
}

template <int kClass>
void put(Values& logits, float value) {
  logits[kClass] = value;
}

INSTANTIATE_TEST_SUITE_P(
    All, LossTest,
    ::testing::Combine(
        ::testing::Values(
            Extreme{"usual", [](Values&) {}},
            Extreme{"huge", [](Values& of) { put<17>(of, -3e38F), put<200>(of, 3e38F); }},
            Extreme{"nan", [](Values& of) { put<100>(of, std::nanf("")); }, false},
            Extreme{"nan_target", [](Values& of) { put<17>(of, std::nanf("")); }, false},
            Extreme{"infinite", [](Values& of) { put<250>(of, kInfinity); }, false},
            Extreme{"infinite_target", [](Values& of) { put<17>(of, kInfinity); }, false},
            Extreme{"no_chance", [](Values& of) { put<1>(of, -kInfinity), put<240>(of, -kInfinity); }},
            Extreme{"no_chance_of_target", [](Values& of) { put<17>(of, -kInfinity); }, false},
            Extreme{"no_chance_of_a_shard",
                    [](Values& of) { std::fill_n(of.begin() + 64, 64, -kInfinity); }},
            Extreme{"zeros",
                    [](Values& of) {
                      for (std::size_t i = 0; i < index(kVocabulary); ++i) {
                        of[i] = i % 3 == 0 ? 0.0F : -0.0F;
                      }
                    }},
            // Of rows that do not count.
            Extreme{"unused", [](Values& of) { of[2 * kVocabulary + 9] = std::nanf(""); }}),
        ::testing::Values(kF32, kBf16)),
    [](const auto& each) {
      return std::string(std::get<0>(each.param).name) + "_" + name_of(std::get<1>(each.param));
    });

template <typename Call>
std::string message_of(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUsage);
    return error.what();
  }
  return "no error";
}

// The row sums between ranks are made once, in forward.
TEST(VocabularyShardsTest, AnEmbeddingMayStandInRecompute) {
  const Sequential model({nn::recompute(nn::embedding(100, 8, 5))});
  const auto run = [&](int shards, int ranks) {
    auto results = std::make_unique<Results>();
    testing::on_ranks(shards, ranks, [&](const Shards& mine, TensorRank& tensor) {
      ComputeContext compute(Device{}, 1);
      const std::unique_ptr<Stage> stage =
          model(StagePlace{.tensor = mine.first / mine.local, .tensors = ranks, .shards = shards});
      const TensorSpec input{DType::kI32, Shape{2, 5}};
      const StageDescription description = stage->describe({&input, 1}, compute);
      const testing::StateSlot slot(Device{}, description);
      testing::prepare(*stage, {.compute = &compute,
                                .state = slot.state(),
                                .split_backward = false,
                                .input_sizes = {{input}}});
      std::vector<std::int32_t> tokens = {0, 99, 31, 32, 33, 63, 64, 31, 5, 0};
      Values y(80), dy(80);
      for (std::size_t i = 0; i < dy.size(); ++i) dy[i] = static_cast<float>(i * i % 17) - 8;
      const Tensor x{tokens.data(), input}, none{};
      const Tensor out{y.data(), description.outputs[0]}, gradient{dy.data(), out.spec};
      StageContext ctx{.compute = compute, .state = slot.state()};
      ctx.samples = 2;
      ctx.inputs = {&x, 1};
      ctx.tensor = &tensor;
      stage->forward(ctx, {&x, 1}, {&out, 1});
      stage->backward(ctx, {&gradient, 1}, {&none, 1});
      EXPECT_EQ(tensor.calls, description.collectives.forward);
      EXPECT_TRUE(description.collectives.backward_input.empty());
      EXPECT_EQ(tensor.calls.size(), ranks > 1 ? 1U : 0U);
      results->add("embedded", y);
      for (const Parameter* parameter : stage->parameters()->all()) {
        add_gradient(*results, *parameter, mine);
      }
    });
    return results;
  };
  const auto alone = run(1, 1);
  for (const int ranks : {1, 2, 4}) {
    SCOPED_TRACE(ranks);
    run(4, ranks)->expect_equal(*alone);
  }
}

TEST(VocabularyShardsTest, DealsUnitsOf16) {
  const nn::DividedClasses classes(50257, {8, 2, 2});
  EXPECT_EQ(classes.starts().size(), 9U);
  EXPECT_EQ(classes.starts()[1], 3142 * 16 / 8 / 16 * 16);
  EXPECT_EQ(classes.starts()[8], 50257);
  EXPECT_EQ(classes.first(), classes.starts()[2]);
  EXPECT_EQ(classes.count(), classes.starts()[4] - classes.starts()[2]);
  for (std::size_t i = 0; i < 8; ++i) {
    EXPECT_EQ(classes.starts()[i] % 16, 0);
    EXPECT_LT(classes.starts()[i], classes.starts()[i + 1]);
  }
  EXPECT_EQ(classes.parts().size(), 2U);
}

TEST(VocabularyShardsTest, AnswersAreAllLogitsInTheVocabularysOrder) {
  constexpr std::int64_t kRows = 6;
  for (const auto& [shards, ranks] :
       std::vector<std::pair<int, int>>{{4, 1}, {4, 2}, {4, 4}, {3, 1}, {3, 3}, {16, 4}}) {
    SCOPED_TRACE(shards * 100 + ranks);
    testing::on_ranks(shards, ranks, [&](const Shards& mine, TensorRank& tensor) {
      ComputeContext compute({}, 1);
      nn::TokenLoss loss(options_of(kF32));
      ASSERT_TRUE(loss.set_shards(mine));
      const nn::DividedClasses classes(kVocabulary, mine);
      Values panels, logits(index(kRows * kVocabulary)), expected;
      for (int shard = mine.first; shard < mine.first + mine.local; ++shard) {
        for (std::int64_t row = 0; row < kRows; ++row) {
          for (std::int64_t c = classes.starts()[index(shard)];
               c < classes.starts()[index(shard) + 1]; ++c) {
            panels.push_back(static_cast<float>(row * kVocabulary + c));
          }
        }
      }
      for (std::size_t i = 0; i < logits.size(); ++i) expected.push_back(static_cast<float>(i));
      const Tensor outputs{panels.data(), {kF32, {2, kRows / 2, classes.count()}}};
      const TensorSpec spec = *loss.answer_spec(outputs.spec);
      EXPECT_EQ(spec, (TensorSpec{kF32, {2, kRows / 2, kVocabulary}}));
      StageContext ctx{.compute = compute};
      ctx.tensor = &tensor;
      loss.answer(ctx, outputs, {logits.data(), spec});
      Results::expect_equal(logits, expected, "logits");
      EXPECT_EQ(tensor.calls, loss.needs(outputs.spec, compute).collectives.answer);
    });
  }
}

TEST(VocabularyShardsTest, ErrorsSayWhatIsLegal) {
  TransformerConfig config{.layers = 1, .heads = 2, .width = 8, .context = 4, .vocabulary = 61};
  const auto make = [&](int stage) {
    return [&config, stage] {
      (void)Transformer(config).stage_of({{0, 1, 2, 3}}, stage, {8, 0, 8});
    };
  };
  const char* const units =
      "a vocabulary of 61 is divided by 8 shards in units of 16; legal: at most 4";
  EXPECT_THAT(message_of(make(0)), HasSubstr(units));
  EXPECT_THAT(message_of(make(2)), HasSubstr(units));
  config.vocabulary = 200;
  config.logit_chunks = 2;
  EXPECT_THAT(
      message_of(make(2)),
      HasSubstr("2 chunks of logits (TransformerConfig::logit_chunks); legal with 8 shards: 1"));
  nn::TokenLoss loss(options_of(kF32));
  EXPECT_EQ(loss.why_no_answers(), "");
  EXPECT_TRUE(loss.set_shards({4, 1, 1}));
  EXPECT_THAT(message_of([&] {
                (void)loss.targets({kF32, Shape{1, 2, kVocabulary}});
              }),
              HasSubstr("legal: f32 [samples, sequence, 64]"));
}

}  // namespace
}  // namespace sluice
