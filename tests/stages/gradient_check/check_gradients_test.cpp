// check_gradients(): every layer and loss of Sluice passes, and each fault of a layer is named.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <sluice/error.hpp>
#include <sluice/layers.hpp>
#include <sluice/operators.hpp>
#include <sluice/transformer.hpp>

#include "tests/runtime/expect_error.hpp"

namespace sluice::nn {
namespace {

TEST(CheckGradientsTest, EveryLayerOfRowsPasses) {
  const TensorSpec rows{DType::kF32, {3, 2, 6}};
  for (const LayerSpec& layer :
       {linear(6, 4), linear(6, 5, false), relu(), gelu(), gelu_tanh(), silu(), tanh(), sigmoid(),
        softmax(), dropout(0), dropout(0.3), flatten(), unflatten({3, 4}), layer_norm(6),
        rms_norm(6), group({linear(6, 4), tanh(), linear(4, 3)}), residual({linear(6, 6), relu()}),
        residual({linear(6, 4), silu()}, {linear(6, 4, false)})}) {
    SCOPED_TRACE(layer.kind);
    EXPECT_NO_THROW(check_gradients(layer, rows));
  }
}

TEST(CheckGradientsTest, EveryLayerOfTransformersPasses) {
  const TensorSpec sequences{DType::kF32, {2, 5, 8}};
  TransformerConfig gpt{.layers = 1, .heads = 2, .width = 8}, llama = gpt;
  gpt.dropout = 0.2F;
  llama.kind = TransformerKind::kLlama;
  llama.kv_heads = 1;
  TransformerConfig recomputed = llama;
  recomputed.recompute = Recompute::kBlock;
  TransformerConfig qwen = llama;
  qwen.norm_epsilon = 0.1F;
  qwen.head_dim = 6;
  qwen.rotary_scaling = {.kind = RotaryScaling::Kind::kLinear, .factor = 2};
  qwen.qkv_bias = qwen.attention_output_bias = qwen.mlp_bias = qwen.qk_norm = true;
  qwen.window = 2;
  for (const LayerSpec& layer :
       {attention(8, 2), attention(8, 4, {.kv_heads = 2, .rotary_base = 1e4F, .bias = false}),
        attention(8, 2, {.dropout = 0.3}), transformer_block(gpt), transformer_block(llama),
        transformer_block(recomputed), transformer_block(qwen),
        residual({layer_norm(8), attention(8, 2)})}) {
    SCOPED_TRACE(layer.kind);
    EXPECT_NO_THROW(check_gradients(layer, sequences));
  }
}

TEST(CheckGradientsTest, AnEmbeddingPassesWithClassesOfItsOwn) {
  check_gradients(embedding(2, 4), {DType::kI32, {3}});
  check_gradients(embedding(2, 4, 3), {DType::kI32, {4, 3}});
  check_gradients(embedding(7, 3), {DType::kI32, {3, 2}},
                  {.input = [](int micro_batch, const Tensor& x) {
                    for (int i = 0; i < x.elements(); ++i)
                      x.as<std::int32_t>()[i] = (i * 3 + micro_batch) % 7;
                  }});
}

TEST(CheckGradientsTest, EveryLayerOfPicturesPasses) {
  const TensorSpec images{DType::kF32, {3, 4, 6, 5}};
  for (const LayerSpec& layer :
       {conv2d(4, 6, 3), conv2d(4, 6, 3, {.stride = 2, .padding = 1, .groups = 2}),
        conv2d(4, 4, {3, 2}, {.groups = 4, .bias = false}), max_pool2d(2),
        max_pool2d(3, {.stride = 2, .padding = 1}), avg_pool2d({3, 2}),
        avg_pool2d(3, {.stride = HeightWidth(1, 2), .padding = 1}), global_avg_pool2d(),
        batch_norm2d(4), batch_norm2d(4, {.statistics = BatchStatistics::kReplicas}),
        group_norm(2, 4), residual({conv2d(4, 4, 3, {.padding = 1}), batch_norm2d(4), relu()})}) {
    SCOPED_TRACE(layer.kind);
    EXPECT_NO_THROW(check_gradients(layer, images));
  }
}

TEST(CheckGradientsTest, EveryLossPasses) {
  check_gradients(mse_loss(), {DType::kF32, {4, 3}});
  for (const DType targets : {DType::kI32, DType::kI64}) {
    check_gradients(cross_entropy_loss({.targets = targets}), {DType::kF32, {5, 4}});
    check_gradients(cross_entropy_loss({.axis = 1, .targets = targets, .ignored = 1}),
                    {DType::kF32, {2, 3, 4}});
    check_gradients(cross_entropy_loss({.targets = targets, .smoothing = 0.2}),
                    {DType::kF32, {5, 4}}, {.targets = [](int, const Tensor& to) {
                      for (int i = 0; i < 5; ++i) {
                        if (to.spec.dtype == DType::kI32) to.as<std::int32_t>()[i] = i % 4;
                        if (to.spec.dtype == DType::kI64) to.as<std::int64_t>()[i] = 3 - i % 4;
                      }
                    }});
  }
  const auto cubic = [](float y, float target) -> LossTerm {
    const double off = double{y} - double{target};
    return {std::abs(off * off * off), 3 * off * std::abs(off)};
  };
  check_gradients(elementwise_loss("cubic", cubic), {DType::kF32, {4, 3}});
}

// y = x^2 gain: right, with its faults one at a time.
struct Faults {
  bool y_left = false, y_added = false, dx_left = false, dx_added = false, dx_wrong = false;
  bool weight_forgotten = false, weight_set = false, weight_wrong = false;
  bool overwrites = false, weight_kept = false, old_forgotten = false;
  bool member_x = false, member_dy = false, x_written = false, dy_written = false;
  bool value_written = false, padding_written = false, remembers_calls = false;
  bool reads_freed = false, reads_scratch = false, weight_needs_input = false;
  bool left_in_evaluation = false, grows = false, dx_cleared = false;
  LayerPromises promises = {};
  bool counts_again = false, keeps_too_little = false, moves_buffer = false, sums_again = false;
  std::size_t until_input = 0, until_weight = 0, scratch = 0, gradients = 0;  // bytes too few
};

class Square : public Layer {
 public:
  explicit Square(const Faults& faults) : faults_(faults) {}
  [[nodiscard]] TensorSpec output(const TensorSpec& input) const override { return input; }
  void add_parameters(ParameterSet& set, const std::string& name) override {
    gain_ = &set.add(name + "gain", {1}, Init::constant(1));
    seen_ = &set.add_buffer(name + "seen", {1}, Init::constant(0));
  }
  [[nodiscard]] LayerPromises promises() const override { return faults_.promises; }
  void keep_again(LayerCall& call, const Tensor& y) override {
    if (!faults_.keeps_too_little) forward(call, y);
  }
  [[nodiscard]] bool overwrites_gradients() const override { return faults_.overwrites; }
  [[nodiscard]] LayerNeeds needs(const TensorSpec& input, ComputeContext&) const override {
    const std::size_t bytes = input.bytes();
    return {.memory = {.until_input = bytes - faults_.until_input,
                       .until_weight = bytes - faults_.until_weight,
                       .gradients = bytes - faults_.gradients,
                       .scratch = faults_.grows ? 4000 - bytes : bytes - faults_.scratch}};
  }
  void forward(LayerCall& call, const Tensor& y) override {
    const std::int64_t count = y.elements();
    auto* const twice = floats(call.until_input);
    auto* const square = floats(call.until_weight);
    auto* const scratch = floats(call.scratch);
    const bool left = faults_.left_in_evaluation && call.stage.phase == Phase::kEvaluate;
    const bool read = faults_.reads_scratch && std::isnan(scratch[0]);
    for (std::int64_t i = 0; i < count; ++i) {
      const float x = call.x.at(i);
      twice[i] = 2 * x;
      scratch[i] = square[i] = x * x;
      if ((faults_.y_left || left) && i + 2 >= count) continue;
      const float value = square[i] * gain_->value.at(0) + (read ? scratch[count - 1] : 0.0F);
      y.at(i) = faults_.y_added ? y.at(i) + value : value;
    }
    if (!call.again || faults_.moves_buffer) seen_->value.at(0) += 1;
    if (call.again && faults_.counts_again) y.at(2) += 1;
    if (call.again && faults_.sums_again) {
      double one = 1;
      call.stage.collective->sum({&one, 1});
    }
    if (faults_.remembers_calls) y.at(3) += static_cast<float>(++calls_);
    if (faults_.x_written) call.x.at(4) = 0;
    if (faults_.value_written) gain_->value.at(0) = 3;
    last_x_ = call.x.at(0);
  }
  void backward_input(LayerCall& call, const Tensor& dy, const Tensor& dx) override {
    auto* const kept = floats(call.gradients);
    for (std::int64_t i = 0; i < dy.elements(); ++i) kept[i] = dy.at(i);
    last_dy_ = dy.at(0);
    if (faults_.dy_written) dy.at(1) = 0;
    if (dx.data == nullptr) return;
    if (faults_.dx_cleared) std::fill(dx.floats().begin(), dx.floats().end(), 0.0F);
    for (std::int64_t i = 0; i < dx.elements(); ++i) {
      if (faults_.dx_left && i % 6 == 1) continue;
      const float twice = faults_.member_x && i == 0 ? 2 * last_x_ : floats(call.until_input)[i];
      const float value = twice * dy.at(i) * (faults_.dx_wrong ? 1.0F : gain_->value.at(0));
      dx.at(i) = faults_.dx_added ? dx.at(i) + value : value;
    }
    if (faults_.weight_needs_input) kept[0] = 0;
  }
  void backward_weight(LayerCall& call, const Tensor& dy) override {
    if (faults_.weight_forgotten) return;
    const auto* const square = floats(call.until_weight);
    float sum = 0;
    for (std::int64_t i = 0; i < dy.elements(); ++i) {
      const float g = faults_.member_dy && i == 0 ? last_dy_ : floats(call.gradients)[i];
      sum += g * (faults_.reads_freed ? floats(call.until_input)[i] : square[i]);
    }
    if (faults_.weight_wrong) sum *= 2;
    bool sets = faults_.weight_set;
    if (faults_.overwrites && !faults_.old_forgotten) {
      sets = next_write({gain_}, call.compute().stream()) == Write::kOverwrite;
    }
    gain_->grad.at(0) = sum + (sets && !faults_.weight_kept ? 0.0F : gain_->grad.at(0));
    if (faults_.padding_written) gain_->grad.at(5) = 1;
  }

 private:
  static float* floats(std::byte* memory) { return reinterpret_cast<float*>(memory); }

  Faults faults_;
  Parameter* gain_ = nullptr;
  Parameter* seen_ = nullptr;
  float last_x_ = 0, last_dy_ = 0;
  int calls_ = 0;
};

const TensorSpec kRows{DType::kF32, {4, 6}};

void expect_fault(const Faults& faults, std::initializer_list<std::string> parts) {
  expect_error(ErrorCode::kUsage, parts,
               [&] { check_gradients(layer<Square>("square", faults), kRows); });
}

TEST(CheckGradientsTest, ALayerOfOnesOwnPasses) {
  check_gradients(layer<Square>("square", Faults{}), kRows);
}

TEST(CheckGradientsTest, UnwrittenNumbersAreCountedAndPlaced) {
  expect_fault({.y_left = true}, {"square: forward: leaves 2 of the 24 numbers of y, f32 [4, 6], "
                                  "unwritten, the first at [3, 4]"});
  expect_fault({.y_added = true}, {"square: forward: leaves 24 of the 24 numbers of y"});
  expect_fault({.left_in_evaluation = true}, {"square: forward: leaves 2 of the 24 numbers of y"});
  expect_fault({.dx_left = true}, {"square: backward_input: leaves 4 of the 24 numbers of dx, f32 "
                                   "[4, 6], unwritten, the first at [0, 1]"});
  expect_fault({.dx_added = true}, {"square: backward_input: leaves 24 of the 24 numbers of dx"});
}

TEST(CheckGradientsTest, WrongGradientsAreFoundByDifferences) {
  expect_fault({.dx_wrong = true},
               {"square: backward_input: dx is ", "; finite differences give "});
  expect_fault({.weight_wrong = true},
               {"square: backward_weight: the gradient of 'gain' is ", " at [0]; finite"});
  expect_fault({.weight_forgotten = true},
               {"square: backward_weight: the gradient of 'gain' is 0 everywhere; finite "
                "differences give "});
}

TEST(CheckGradientsTest, GradientsThatAreSetInsteadOfAddedAreFound) {
  check_gradients(layer<Square>("square", Faults{.overwrites = true}), kRows);
  expect_fault({.overwrites = true, .weight_kept = true},
               {"square: where gradients are stale, the gradient of 'gain' is ",
                "the first write overwrites, as next_write() says"});
  expect_fault(
      {.overwrites = true, .old_forgotten = true},
      {"square: where gradients are stale, the gradient of 'gain' is 0 at [0], otherwise "});
  expect_fault({.weight_set = true}, {"square: backward_weight makes ",
                                      " of the gradient 1 of 'gain' at [0], to which it has "});
}

TEST(CheckGradientsTest, StateOutsideOfTheMemoryIsFound) {
  expect_fault({.member_x = true},
               {"square: with two micro-batches in flight, of micro-batch 0, dx "
                "is ",
                " at [0, 0], otherwise "});
  expect_fault({.member_dy = true}, {"with two micro-batches in flight, of micro-batch 0, the "
                                     "gradient of 'gain' is "});
  expect_fault({.remembers_calls = true},
               {"square: of the same x again y of forward is ", " at [0, 3], otherwise "});
}

TEST(CheckGradientsTest, WhatIsOnlyReadStaysAsItIs) {
  expect_fault({.x_written = true}, {"square: forward changes x at [0, 4] from ", " to 0"});
  expect_fault({.dy_written = true}, {"square: backward_input changes dy at [0, 1] from "});
  expect_fault({.value_written = true}, {"square: forward changes values of parameters"});
  expect_fault({.padding_written = true}, {"writes beyond the gradients of its parameters"});
}

TEST(CheckGradientsTest, NeedsThatAreTooSmallAreNamed) {
  expect_fault({.until_input = 4}, {"square: forward writes beyond the end of "
                                    "LayerMemory::until_input, of 92 bytes"});
  expect_fault({.until_weight = 8}, {"forward writes beyond the end of LayerMemory::until_weight"});
  expect_fault({.scratch = 1}, {"forward writes beyond the end of LayerMemory::scratch"});
  expect_fault({.gradients = 4},
               {"backward_input writes beyond the end of LayerMemory::gradients"});
  expect_fault({.grows = true}, {"needs() says 3928 bytes of scratch for f32 [3, 6], 3904 for f32 "
                                 "[4, 6]; legal: not more for fewer samples"});
}

TEST(CheckGradientsTest, PromisesThatDoNotHoldAreFound) {
  constexpr LayerPromises kAgain{.recomputes = true};
  const auto passes = [](const Faults& faults) {
    check_gradients(layer<Square>("square", faults), kRows);
  };
  passes({.promises = kAgain});
  expect_fault({.promises = kAgain, .counts_again = true},
               {"square: where LayerCall::again is set, as `recomputes` promises, y is ",
                " at [0, 2], otherwise "});
  expect_fault({.promises = kAgain, .keeps_too_little = true},
               {"square: after keep_again: backward_input makes dx NaN at [0, 0]"});
  expect_fault({.promises = kAgain, .moves_buffer = true},
               {"forward moves a buffer where LayerCall::again is set"});
  expect_fault({.promises = kAgain, .sums_again = true},
               {"makes a collective where LayerCall::again is set"});
  passes({.counts_again = true, .keeps_too_little = true, .moves_buffer = true});
  passes({.promises = {.in_place = true}});
  expect_fault({.dx_cleared = true, .promises = {.in_place = true}},
               {"square: where dx is dy's memory, as in_place promises, dx is "});
}

// y = 2 x, of either type; or of floats, whatever it says; or with the gradient of 4 x in bf16.
class Twice final : public Layer {
 public:
  enum class Fault { kNone, kFloats, kGradient };
  explicit Twice(Fault fault) : fault_(fault) {}

  Edges set_precision(const Precision& precision) override {
    narrow_ = precision.stream == DType::kBf16;
    return Edges::kStream;
  }
  [[nodiscard]] TensorSpec output(const TensorSpec& input) const override { return input; }
  void forward(LayerCall& call, const Tensor& y) override { scale(call, call.x, 2, y); }
  void backward_input(LayerCall& call, const Tensor& dy, const Tensor& dx) override {
    scale(call, dy, narrow_ && fault_ == Fault::kGradient ? 4 : 2, dx);
  }

 private:
  void scale(LayerCall& call, const Tensor& from, float factor, const Tensor& to) const {
    if (from.spec.dtype == DType::kF32 || fault_ == Fault::kFloats) {
      for (std::int64_t i = 0; i < to.elements(); ++i) to.at(i) = factor * from.at(i);
      return;
    }
    std::vector<float> wide(static_cast<std::size_t>(from.elements()));
    const Tensor copy{wide.data(), {DType::kF32, from.shape()}};
    convert(call.compute(), from, copy);
    for (float& value : wide) value *= factor;
    convert(call.compute(), copy, to);
  }

  Fault fault_;
  bool narrow_ = false;
};

TEST(CheckGradientsTest, WhatALayerSaysOfBf16IsChecked) {
  const auto twice = [](Twice::Fault fault) { return layer<Twice>("twice", fault); };
  check_gradients(twice(Twice::Fault::kNone), kRows);
  const auto expect_refusal = [&](Twice::Fault fault, const char* part) {
    expect_error(ErrorCode::kUsage, {"twice: in a model with a precision: ", part},
                 [&] { check_gradients(twice(fault), kRows); });
  };
  expect_refusal(Twice::Fault::kFloats, "forward writes beyond the end of y");
  expect_refusal(Twice::Fault::kGradient, "dx is ");
}

// Keeps its input alone, with the help of scratch.
class Keeps final : public Layer {
 public:
  Edges set_precision(const Precision& /*precision*/) override { return Edges::kOperands; }
  [[nodiscard]] TensorSpec output(const TensorSpec& input) const override { return input; }
  [[nodiscard]] LayerNeeds needs(const TensorSpec& input,
                                 ComputeContext& /*compute*/) const override {
    return {.memory = {.until_weight = input.bytes(), .scratch = kBufferAlignment}};
  }
  [[nodiscard]] LayerPromises promises() const override {
    return {.recomputes = true, .keeps_alone = true};
  }
  void keep_again(LayerCall& call, const Tensor& /*y*/) override {
    std::fill_n(call.scratch, kBufferAlignment, std::byte{1});
    std::memcpy(call.until_weight, call.x.data, call.x.spec.bytes());
  }
  void forward(LayerCall& call, const Tensor& y) override {
    keep_again(call, y);
    std::memcpy(y.data, call.x.data, y.spec.bytes());
  }
  void backward_input(LayerCall& /*call*/, const Tensor& dy, const Tensor& dx) override {
    std::memcpy(dx.data, dy.data, dx.spec.bytes());
  }
};

TEST(CheckGradientsTest, ALayerIsRecomputedInBf16WithinItsScratch) {
  EXPECT_NO_THROW(check_gradients(recompute({layer<Keeps>("keeps")}), {DType::kF32, {4, 8}}));
}

// A logarithm has no value at the check's own numbers.
class Logarithm final : public Layer {
 public:
  Edges set_precision(const Precision& /*precision*/) override { return Edges::kF32; }
  [[nodiscard]] TensorSpec output(const TensorSpec& input) const override { return input; }
  void forward(LayerCall& call, const Tensor& y) override {
    for (std::int64_t i = 0; i < y.elements(); ++i) y.at(i) = std::log(call.x.at(i));
  }
  void backward_input(LayerCall& call, const Tensor& dy, const Tensor& dx) override {
    for (std::int64_t i = 0; i < dy.elements(); ++i) dx.at(i) = dy.at(i) / call.x.at(i);
  }
};

TEST(CheckGradientsTest, Bf16IsCheckedWithTheInputOfTheCaller) {
  const GradientCheck options{.input = [](int micro_batch, const Tensor& x) {
    for (std::int64_t i = 0; i < x.elements(); ++i) {
      x.at(i) = 1 + static_cast<float>(i + micro_batch) / 4;
    }
  }};
  EXPECT_NO_THROW(check_gradients(layer<Logarithm>("log"), kRows, options));
  EXPECT_NO_THROW(check_gradients(group({layer<Logarithm>("log"), tanh()}), kRows, options));
}

TEST(CheckGradientsTest, BlocksPassWhereBf16RoundsToTheOtherSideOfAKink) {
  const TensorSpec input{DType::kF32, {2, 4, 8}};
  for (std::uint64_t seed = 1; seed <= 8; ++seed) {
    EXPECT_NO_THROW(check_gradients(residual({layer_norm(8), linear(8, 32), relu(), linear(32, 8)}),
                                    input, {.seed = seed}));
  }
}

TEST(CheckGradientsTest, MemoryThatIsReadBeforeItIsWrittenIsFound) {
  expect_fault({.reads_freed = true}, {"backward_weight makes the gradient of 'gain' NaN at [0]"});
  expect_fault({.reads_scratch = true}, {"forward makes y NaN at [0, 0] from finite numbers"});
  expect_fault({.weight_needs_input = true}, {"where nobody needs dx, the gradient of 'gain' is "});
}

// What operators take of the compute context.
struct HiddenScratch : Layer {
  [[nodiscard]] TensorSpec output(const TensorSpec& input) const override { return input; }
  void forward(LayerCall& call, const Tensor& y) override {
    (void)call.compute().workspace(64);
    for (std::int64_t i = 0; i < y.elements(); ++i) y.at(i) = call.x.at(i);
  }
  void backward_input(LayerCall&, const Tensor& dy, const Tensor& dx) override {
    for (std::int64_t i = 0; i < dy.elements(); ++i) dx.at(i) = dy.at(i);
  }
};

struct OtherSamples : HiddenScratch {
  [[nodiscard]] TensorSpec output(const TensorSpec&) const override {
    return {DType::kF32, {3, 6}};
  }
};

TEST(CheckGradientsTest, OtherFaultsAreNamed) {
  expect_error(ErrorCode::kUsage, {"mine: operators take 64 bytes", "needs() says 0"},
               [] { check_gradients(layer<HiddenScratch>("mine"), kRows); });
  expect_error(ErrorCode::kUsage, {"mine: output() makes f32 [3, 6] of f32 [4, 6]"},
               [] { check_gradients(layer<OtherSamples>("mine"), kRows); });
  expect_error(ErrorCode::kUsage, {"cut() is no layer"}, [] { check_gradients(cut(), kRows); });
  expect_error(ErrorCode::kUsage, {"relu: GradientCheck::input writes beyond the end of x"}, [] {
    check_gradients(relu(), kRows, {.input = [](int, const Tensor& x) {
                      for (int i = 0; i < 25; ++i) x.at(i) = 1;
                    }});
  });
  expect_error(ErrorCode::kUsage, {"linear: the input is f32 [4, 6]; legal: f32 [samples, ..., 5]"},
               [] { check_gradients(linear(5, 2), kRows); });
  expect_error(ErrorCode::kUsage, {"mine: made nothing"}, [] {
    check_gradients(LayerSpec{"mine", [](int) { return nullptr; }}, kRows);
  });
}

struct LossFaults {
  bool wrong = false, left = false, targets_written = false, no_sum = false, remembers = false;
  bool other_sum = false, unscaled = false, weight = false, beyond = false;
};

class Halves : public Loss {
 public:
  explicit Halves(const LossFaults& faults) : faults_(faults) {}
  [[nodiscard]] TensorSpec targets(const TensorSpec& outputs) const override { return outputs; }
  [[nodiscard]] double weight(const TensorSpec&, const Tensor& targets) const override {
    return faults_.weight ? std::nan("") : static_cast<double>(targets.elements());
  }
  void compute(StageContext& ctx, const Tensor& outputs, const Tensor& targets,
               double* sum) override {
    double total = faults_.remembers ? ++calls_ : 0;
    const bool trains = ctx.phase == Phase::kTrain;
    const auto scale = faults_.unscaled ? 0.5F : static_cast<float>(ctx.loss_scale);
    for (std::int64_t i = 0; i < outputs.elements(); ++i) {
      const float off = outputs.at(i) - targets.at(i);
      total += 0.5 * static_cast<double>(off) * static_cast<double>(off);
      if (trains && !(faults_.left && i == 7)) {
        outputs.at(i) = off * scale * (faults_.wrong ? 2.0F : 1.0F);
      }
    }
    if (faults_.targets_written) targets.at(2) = 9;
    if (faults_.beyond) outputs.as<float>()[outputs.elements()] = 1;
    if (!faults_.no_sum) *sum = faults_.other_sum && trains ? 2 * total : total;
  }

 private:
  LossFaults faults_;
  int calls_ = 0;
};

TEST(CheckGradientsTest, FaultsOfALossAreNamed) {
  const auto fault = [](const LossFaults& faults, std::initializer_list<std::string> parts) {
    expect_error(ErrorCode::kUsage, parts,
                 [&] { check_gradients(loss<Halves>("halves", faults), kRows); });
  };
  check_gradients(loss<Halves>("halves", LossFaults{}), kRows);
  fault({.wrong = true}, {"halves: compute: the gradient of the outputs is ", "; finite diff"});
  fault({.left = true}, {"halves: compute: with twice the loss_scale, the gradient is ", "[1, 1]"});
  fault({.targets_written = true}, {"halves: compute changes the targets at [0, 2] from "});
  fault({.no_sum = true}, {"halves: compute makes the sum nan, or does not write it"});
  fault({.remembers = true}, {"halves: compute makes the sum "});
  fault({.other_sum = true}, {" in training and ", " in evaluation; legal: one"});
  fault({.unscaled = true}, {"with twice the loss_scale, the gradient is "});
  fault({.weight = true}, {"halves: weight() is nan"});
  fault({.beyond = true}, {"compute writes beyond the end of the outputs, of 96 bytes"});
}

}  // namespace
}  // namespace sluice::nn
