// What the public operators refuse, what they say then, and that they have written nothing.
#include <gmock/gmock.h>

#include <functional>
#include <string>
#include <vector>

#include "stages/compute/internal_operators.hpp"
#include "tests/stages/operators/operand_tools.hpp"

namespace sluice {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

using Call = std::function<void(ComputeContext&, const Tensors&)>;

// One operand replaced by another, and what the message says of the two operands and of the legal.
struct Wrong {
  std::size_t operand;
  TensorSpec spec;
  const char* message;
};

// A call of an operator with operands that fit each other.
struct OperatorForm {
  const char* name;
  std::vector<TensorSpec> specs;
  Call call;
  std::vector<Wrong> wrongs;
};

std::ostream& operator<<(std::ostream& out, const OperatorForm& form) { return out << form.name; }

class OperandsTest : public ::testing::TestWithParam<OperatorForm> {
 protected:
  ComputeContext ctx_{Device{}, 1};
};

TEST_P(OperandsTest, ThatFitAreTaken) {
  const Operands operands(GetParam().specs);
  EXPECT_NO_THROW(GetParam().call(ctx_, operands.tensors()));
  EXPECT_TRUE(operands.canaries_untouched());
}

TEST_P(OperandsTest, ThatDoNotFitAreRefusedBeforeAnythingIsWritten) {
  for (const auto& [index, spec, message] : GetParam().wrongs) {
    SCOPED_TRACE(::testing::Message() << "operand " << index << " " << to_string(spec));
    // Another operand's description over the memory of the right one.
    const Operands operands(GetParam().specs);
    const Tensor other = {operands.tensors()[index].data, spec};
    expect_usage(AllOf(StartsWith(std::string(GetParam().name) + ": "), HasSubstr(message),
                       HasSubstr(to_string(spec))),
                 [&, i = index] { GetParam().call(ctx_, operands.with(i, other)); });
    EXPECT_TRUE(operands.untouched());
  }
}

TEST_P(OperandsTest, WithoutDataAreRefused) {
  for (const Wrong& wrong : GetParam().wrongs) {
    const Operands operands(GetParam().specs);
    const TensorSpec spec = GetParam().specs[wrong.operand];
    const std::string message = wrong.message, operand = message.substr(0, message.find(' '));
    if (!message.starts_with(operand + " is " + to_string(wrong.spec)))
      continue;  // another's fault
    const std::string name = GetParam().name;
    const bool of_norm = name.ends_with("norm_backward");
    const bool optional = operand == "bias" || operand == "dbias" || operand == "positions" ||
                          operand == "dpositions" ||
                          (of_norm && (operand == "residual" || operand == "rounded")) ||
                          (name == "rms_norm_backward" && operand == "dgamma");
    if (optional) {
      EXPECT_NO_THROW(GetParam().call(ctx_, operands.with(wrong.operand, {})));
      EXPECT_TRUE(operands.canaries_untouched());
      continue;
    }
    expect_usage(HasSubstr(operand + " is " + to_string(spec) + " without data; legal"), [&] {
      GetParam().call(ctx_, operands.with(wrong.operand, {nullptr, spec}));
    });
    EXPECT_TRUE(operands.untouched());
  }
}

template <typename Operator>
Call unary(Operator* call) {
  return [call](ComputeContext& ctx, const Tensors& at) { call(ctx, at[0], at[1]); };
}
template <typename Operator>
Call binary(Operator* call) {
  return [call](ComputeContext& ctx, const Tensors& at) { call(ctx, at[0], at[1], at[2]); };
}
// After the tensors an operator may take how it writes: Write::kAdd.
template <typename... Writes>
Call of_four(void (*call)(ComputeContext&, const Tensor&, const Tensor&, const Tensor&,
                          const Tensor&, Writes...)) {
  return [call](ComputeContext& ctx, const Tensors& at) {
    call(ctx, at[0], at[1], at[2], at[3], Writes{}...);
  };
}
template <typename... Writes>
Call of_five(void (*call)(ComputeContext&, const Tensor&, const Tensor&, const Tensor&,
                          const Tensor&, const Tensor&, Writes...)) {
  return [call](ComputeContext& ctx, const Tensors& at) {
    call(ctx, at[0], at[1], at[2], at[3], at[4], Writes{}...);
  };
}

std::vector<OperatorForm> linear_forms() {
  return {
      {"linear_forward",
       {{kF32, {2, 10}}, {kF32, {16, 10}}, {kF32, {16}}, {kF32, {2, 16}}},
       of_four(linear_forward),
       {{0, {kI32, {2, 10}}, "x is i32 [2, 10]; legal: f32 or bf16 [any"},
        {1, {kBf16, {16, 10}}, "weight is bf16 [16, 10]; legal with x f32 [2, 10]: f32 [any, 10]"},
        {1, {kF32, {10, 16}}, "weight is f32 [10, 16]; legal with x f32 [2, 10]: f32 [any, 10]"},
        {2, {kF32, {10}}, "bias is f32 [10]; legal with weight f32 [16, 10]: f32 [16]"},
        {2, {kBf16, {16}}, "bias is bf16 [16]; legal with weight f32 [16, 10]: f32 [16]"},
        {3,
         {kF32, {2, 7}},
         "y is f32 [2, 7]; legal with x f32 [2, 10] and weight f32 [16, 10]: "
         "f32 [2, 16]"},
        {3, {kF32, {16, 2}}, "y is f32 [16, 2]; legal with x f32 [2, 10] and weight f32 [16, 10]"},
        {3, {kBf16, {2, 16}}, "y is bf16 [2, 16]; legal with x f32 [2, 10] and weight f32"}}},
      // Rows in two dimensions, and a result for the residual stream.
      {"linear_forward",
       {{kBf16, {2, 3, 10}}, {kBf16, {16, 10}}, {kF32, {16}}, {kF32, {6, 16}}},
       of_four(linear_forward),
       {{3,
         {kI32, {6, 16}},
         "y is i32 [6, 16]; legal with x bf16 [2, 3, 10] and weight bf16 "
         "[16, 10]: f32 or bf16 [6, 16]"},
        {3, {kF32, {2, 16}}, "y is f32 [2, 16]; legal with x bf16 [2, 3, 10] and weight bf16"}}},
      {"linear_residual_forward",
       {{kBf16, {2, 3, 10}}, {kBf16, {16, 10}}, {kF32, {16}}, {kF32, {2, 3, 16}}, {kF32, {6, 16}}},
       of_five(linear_residual_forward),
       {{0, {kF32, {6, 10}}, "weight is bf16 [16, 10]; legal with x f32 [6, 10]: f32 [any, 10]"},
        {2, {kF32, {10}}, "bias is f32 [10]; legal with weight bf16 [16, 10]: f32 [16]"},
        {3,
         {kBf16, {6, 16}},
         "y is f32 [6, 16]; legal with x bf16 [2, 3, 10] and weight bf16 [16, 10] and residual "
         "bf16"},
        {4, {kF32, {2, 16}}, "y is f32 [2, 16]; legal with x bf16 [2, 3, 10] and weight bf16"}}},
      {"linear_backward_input",
       {{kBf16, {2, 16}}, {kBf16, {16, 10}}, {kBf16, {2, 10}}},
       binary(linear_backward_input),
       {{0, {kBf16, {2, 10}}, "weight is bf16 [16, 10]; legal with dy bf16 [2, 10]: bf16 [10, any"},
        {1, {kF32, {16, 10}}, "weight is f32 [16, 10]; legal with dy bf16 [2, 16]: bf16 [16, any]"},
        {2,
         {kF32, {2, 10}},
         "dx is f32 [2, 10]; legal with dy bf16 [2, 16] and weight bf16 "
         "[16, 10]: bf16 [2, 10]"},
        {2, {kBf16, {2, 7}}, "dx is bf16 [2, 7]; legal with dy bf16 [2, 16] and weight bf16"}}},
      {"linear_backward_weight",
       {{kBf16, {2, 10}}, {kBf16, {2, 16}}, {kF32, {16, 10}}, {kF32, {16}}},
       of_four(linear_backward_weight),
       {{1, {kF32, {2, 16}}, "dy is f32 [2, 16]; legal with x bf16 [2, 10]: bf16 [2, any]"},
        {1, {kBf16, {1, 16}}, "dy is bf16 [1, 16]; legal with x bf16 [2, 10]: bf16 [2, any]"},
        {2,
         {kBf16, {16, 10}},
         "dweight is bf16 [16, 10]; legal with x bf16 [2, 10] and dy bf16 "
         "[2, 16]: f32 [16, 10]"},
        {2, {kF32, {7, 10}}, "dweight is f32 [7, 10]; legal with x bf16 [2, 10] and dy bf16"},
        {3, {kF32, {7}}, "dbias is f32 [7]; legal with dy bf16 [2, 16]: f32 [16]"}}},
  };
}

Call activated(Activation activation) {
  return [activation](ComputeContext& ctx, const Tensors& at) {
    linear_activation_forward(ctx, activation, at[0], at[1], at[2], at[3], at[4]);
  };
}
Call activated_backward(Activation activation) {
  return [activation](ComputeContext& ctx, const Tensors& at) {
    linear_activation_backward_input(ctx, activation, at[0], at[1], at[2], at[3]);
  };
}

std::vector<OperatorForm> linear_activation_forms() {
  return {
      {"linear_activation_forward",
       {{kBf16, {2, 10}}, {kBf16, {16, 10}}, {kF32, {16}}, {kBf16, {2, 16}}, {kBf16, {2, 16}}},
       activated(Activation::kGelu),
       {{3, {kF32, {2, 16}}, "raised is f32 [2, 16]; legal with x bf16 [2, 10] and y bf16"},
        {3, {kBf16, {2, 7}}, "raised is bf16 [2, 7]; legal with x bf16 [2, 10] and y bf16"},
        {4, {kF32, {2, 16}}, "y is f32 [2, 16]; legal with x bf16 [2, 10]: bf16 [2, any]"},
        {4,
         {kBf16, {2, 8}},
         "weight is bf16 [16, 10]; legal with x bf16 [2, 10] and y bf16 [2, 8]: bf16 [8, 10]"}}},
      {"linear_activation_forward",
       {{kF32, {2, 10}}, {kF32, {16, 10}}, {kF32, {16}}, {kF32, {2, 16}}, {kF32, {2, 8}}},
       activated(Activation::kSwiglu),
       {{4,
         {kF32, {2, 7}},
         "weight is f32 [16, 10]; legal with x f32 [2, 10] and y f32 [2, 7]: f32 [14, 10]"},
        {2, {kF32, {8}}, "bias is f32 [8]; legal with y f32 [2, 8]: f32 [16]"}}},
      {"linear_activation_backward_input",
       {{kBf16, {2, 16}}, {kBf16, {16, 10}}, {kBf16, {2, 10}}, {kBf16, {2, 10}}},
       activated_backward(Activation::kGelu),
       {{2, {kF32, {2, 10}}, "raised is f32 [2, 10]; legal with dy bf16 [2, 16] and weight bf16"},
        {3, {kBf16, {2, 7}}, "draised is bf16 [2, 7]; legal with dy bf16 [2, 16] and weight"}}},
      {"linear_activation_backward_input",
       {{kF32, {2, 16}}, {kF32, {16, 10}}, {kF32, {2, 20}}, {kF32, {2, 20}}},
       activated_backward(Activation::kSwiglu),
       {{2,
         {kF32, {2, 10}},
         "raised is f32 [2, 10]; legal with dy f32 [2, 16] and weight f32 [16, "
         "10]: f32 [2, 20]"},
        {3, {kBf16, {2, 20}}, "draised is bf16 [2, 20]; legal with dy f32 [2, 16] and weight"}}},
  };
}

std::vector<OperatorForm> embedding_forms() {
  const char* out_message =
      "out is f32 [6, 7]; legal with tokens i32 [2, 3] and table f32 [5, 4]: f32 or bf16 [6, 4]";
  return {
      {"embedding_forward",
       {{kI32, {2, 3}}, {kF32, {5, 4}}, {kF32, {3, 4}}, {kF32, {6, 4}}},
       of_four(embedding_forward),
       {{0, {kF32, {2, 3}}, "tokens is f32 [2, 3]; legal: i32 [any, any]"},
        {0, {kI32, {6}}, "tokens is i32 [6]; legal: i32 [any, any]"},
        {1, {kBf16, {5, 4}}, "table is bf16 [5, 4]; legal: f32 [any, any]"},
        {2,
         {kF32, {2, 4}},
         "positions is f32 [2, 4]; legal with tokens i32 [2, 3] and table f32 "
         "[5, 4]: f32 [at least 3, 4]"},
        {3, {kF32, {6, 7}}, out_message},
        {3, {kI32, {6, 4}}, "out is i32 [6, 4]; legal with tokens i32 [2, 3] and table f32"}}},
      {"embedding_forward",
       {{kI32, {2, 3}}, {kF32, {5, 4}}, {kF32, {9, 4}}, {kF32, {2, 3, 4}}},
       of_four(embedding_forward),
       {{3, {kF32, {2, 2, 4}}, "out is f32 [2, 2, 4]; legal with tokens i32 [2, 3] and table"}}},
      {"embedding_backward_weight",
       {{kI32, {2, 3}}, {kF32, {6, 4}}, {kF32, {5, 4}}, {kF32, {3, 4}}},
       of_four(embedding_backward_weight),
       {{1,
         {kI32, {6, 4}},
         "dout is i32 [6, 4]; legal with tokens i32 [2, 3]: f32 or bf16 [6, any]"},
        {2, {kF32, {5, 7}}, "dtable is f32 [5, 7]; legal with dout f32 [6, 4]: f32 [any, 4]"},
        {3, {kF32, {3, 7}}, "dpositions is f32 [3, 7]; legal with tokens i32 [2, 3] and dout"}}},
      {"embedding_part_forward",
       {{kI32, {2, 3}}, {kF32, {5, 4}}, {kF32, {6, 4}}},
       [](ComputeContext& ctx, const Tensors& at) {
         embedding_part_forward(ctx, at[0], 2, at[1], at[2]);
       },
       {{1, {kBf16, {5, 4}}, "table is bf16 [5, 4]; legal: f32 [any, any]"},
        {2,
         {kBf16, {6, 4}},
         "values is bf16 [6, 4]; legal with tokens i32 [2, 3] and table f32 [5, 4]: f32 [6, 4]"}}},
      {"embedding_part_backward_weight",
       {{kI32, {2, 3}}, {kF32, {6, 4}}, {kF32, {5, 4}}, {kF32, {3, 4}}},
       [](ComputeContext& ctx, const Tensors& at) {
         embedding_part_backward_weight(ctx, at[0], 2, at[1], at[2], at[3], Write::kAdd);
       },
       {{2, {kF32, {5, 7}}, "dtable is f32 [5, 7]; legal with dout f32 [6, 4]: f32 [any, 4]"},
        {3, {kF32, {3, 7}}, "dpositions is f32 [3, 7]; legal with tokens i32 [2, 3] and dout"}}},
  };
}

// `terms`: 2 for LayerNorm, 1 for RMSNorm.
OperatorForm norm_backward_form(std::int64_t terms) {
  const bool centred = terms == 2;
  OperatorForm form = {
      centred ? "layer_norm_backward" : "rms_norm_backward",
      {{kBf16, {2, 4}},
       {kF32, {2, 4}},
       {kF32, {4}},
       {kF32, {2, terms}},
       {kF32, {2, 4}},
       {kF32, {2, 4}},
       {kBf16, {2, 4}},
       {kF32, {4}},
       {kF32, {4}}},
      [centred](ComputeContext& ctx, const Tensors& at) {
        const NormGradients wanted = {.dx = at[4],
                                      .residual = at[5],
                                      .rounded = at[6],
                                      .dgamma = at[7],
                                      .dbeta = centred ? at[8] : Tensor{}};
        (centred ? layer_norm_backward : rms_norm_backward)(ctx, at[0], at[1], at[2], at[3],
                                                            wanted);
      },
      {{0, {kBf16, {3, 4}}, "dy is bf16 [3, 4]; legal with x f32 [2, 4]: f32 or bf16 [2, 4]"},
       {1, {kI32, {2, 4}}, "x is i32 [2, 4]; legal: f32 or bf16 [any, any]"},
       {2, {kF32, {1, 4}}, "gamma is f32 [1, 4]; legal with x f32 [2, 4]: f32 [4]"},
       {3, {kF32, {2, 3}}, "stats is f32 [2, 3]; legal with x f32 [2, 4]: f32 [2, "},
       {4, {kBf16, {2, 4}}, "dx is bf16 [2, 4]; legal with x f32 [2, 4]: f32 [2, 4]"},
       {5, {kBf16, {2, 4}}, "residual is bf16 [2, 4]; legal with x f32 [2, 4]: f32 [2, 4]"},
       {6, {kF32, {2, 4}}, "rounded is f32 [2, 4]; legal with x f32 [2, 4]: bf16 [2, 4]"},
       {7, {kBf16, {4}}, "dgamma is bf16 [4]; legal with x f32 [2, 4]: f32 [4]"}}};
  if (centred) {
    form.wrongs.push_back({8, {kF32, {2}}, "dbeta is f32 [2]; legal with gamma f32 [4]: f32 [4]"});
  }
  return form;
}

std::vector<OperatorForm> norm_forms() {
  std::vector<OperatorForm> forms = {
      {"layer_norm_forward",
       {{kF32, {2, 4}}, {kF32, {4}}, {kF32, {4}}, {kBf16, {2, 4}}, {kF32, {2, 2}}},
       [](ComputeContext& ctx, const Tensors& at) {
         layer_norm_forward(ctx, at[0], at[1], at[2], 1e-5F, at[3], at[4]);
       },
       {{0, {kI32, {2, 4}}, "x is i32 [2, 4]; legal: f32 or bf16 [any, any]"},
        {1, {kF32, {7}}, "gamma is f32 [7]; legal with x f32 [2, 4]: f32 [4]"},
        {2, {kBf16, {4}}, "beta is bf16 [4]; legal with x f32 [2, 4]: f32 [4]"},
        {3, {kF32, {1, 4}}, "y is f32 [1, 4]; legal with x f32 [2, 4]: f32 or bf16 [2, 4]"},
        {4, {kF32, {2, 1}}, "stats is f32 [2, 1]; legal with x f32 [2, 4]: f32 [2, 2]"}}},
      {"rms_norm_forward",
       {{kF32, {1, 2, 4}}, {kF32, {4}}, {kF32, {2, 4}}, {kF32, {2, 1}}},
       [](ComputeContext& ctx, const Tensors& at) {
         rms_norm_forward(ctx, at[0], at[1], 1e-5F, at[2], at[3]);
       },
       {{0, {kBf16, {1, 2, 4}}, "y is f32 [2, 4]; legal with x bf16 [1, 2, 4]: bf16 [2, 4]"},
        {3, {kF32, {2, 2}}, "stats is f32 [2, 2]; legal with x f32 [1, 2, 4]: f32 [2, 1]"}}},
  };
  // A stream of bf16 has no f32 results.
  forms.push_back(
      {"layer_norm_forward",
       {{kBf16, {2, 4}}, {kF32, {4}}, {kF32, {4}}, {kBf16, {2, 4}}, {kF32, {2, 2}}},
       forms[0].call,
       {{3, {kF32, {2, 4}}, "y is f32 [2, 4]; legal with x bf16 [2, 4]: bf16 [2, 4]"}}});
  forms.push_back(norm_backward_form(2));
  forms.push_back(norm_backward_form(1));
  return forms;
}

// A bf16 stream needs no rounded copy; RMSNorm has no beta.
TEST(NormOperandsTest, ResultsWithoutMeaningAreRefused) {
  ComputeContext ctx(Device{}, 1);
  const Operands operands({{kBf16, {2, 4}}, {kF32, {4}}, {kF32, {2, 1}}, {kBf16, {2, 4}}});
  const Tensor &x = operands.tensors()[0], &gamma = operands.tensors()[1],
               &stats = operands.tensors()[2], &dx = operands.tensors()[3];
  expect_usage(
      HasSubstr("rms_norm_backward: dx is bf16 [2, 4]; legal with rounded bf16 [2, 4]: f32"),
      [&] { rms_norm_backward(ctx, x, x, gamma, stats, {.dx = dx, .rounded = dx}); });
  expect_usage(HasSubstr("rms_norm_backward: dbeta f32 [4]; legal: no data"), [&] {
    rms_norm_backward(ctx, x, x, gamma, stats, {.dgamma = gamma, .dbeta = gamma});
  });
  EXPECT_TRUE(operands.untouched());
}

TEST(DropoutOperandsTest, AnotherTypeInPlaceIsRefused) {
  ComputeContext ctx(Device{}, 1);
  const Operands operands({{kF32, {2, 4}}, {kBf16, {2, 4}}});
  const Tensor &wide = operands.tensors()[0], &narrow = operands.tensors()[1];
  const Tensor wide_as_narrow{wide.data, narrow.spec}, narrow_as_wide{narrow.data, wide.spec};
  expect_usage(
      HasSubstr("dropout: x f32 [2, 4] and y bf16 [2, 4] share memory; legal: equal types"),
      [&] { dropout(ctx, wide, {}, wide_as_narrow); });
  expect_usage(HasSubstr("dropout_residual: x bf16 [2, 4] and y f32 [2, 4] share memory"),
               [&] { dropout_residual(ctx, narrow, {}, wide, narrow_as_wide); });
  EXPECT_TRUE(operands.untouched());
}

TEST(LinearOperandsTest, ASumInPlaceIsRefused) {
  ComputeContext ctx(Device{}, 1);
  const Operands operands({{kF32, {2, 4}}, {kF32, {4, 4}}, {kF32, {2, 4}}});
  const Tensor &x = operands.tensors()[0], &weight = operands.tensors()[1],
               &y = operands.tensors()[2];
  expect_usage(HasSubstr("linear_residual_forward: residual f32 [2, 4] and y f32 [2, 4] share "
                         "memory; legal: y in"),
               [&] { linear_residual_forward(ctx, x, weight, {}, y, y); });
  EXPECT_TRUE(operands.untouched());
}

std::vector<OperatorForm> attention_forms() {
  const TensorSpec state = {
      DType::kU8,
      {static_cast<std::int64_t>(attention_state_bytes(DeviceKind::kCpu, kAttention, kF32))}};
  return {
      {"attention_forward",
       {{kF32, {6, 40}}, {kF32, {2, 3, 20}}, state},
       [](ComputeContext& ctx, const Tensors& at) {
         attention_forward(ctx, kAttention, at[0], {}, at[1], at[2].as<std::byte>());
       },
       {{0,
         {kF32, {6, 20}},
         "qkv is f32 [6, 20]; legal with shape of 2 samples, 3 positions, 4 "
         "heads over 2 of 5 each: f32 or bf16 [6, 40]"},
        {1, {kBf16, {6, 20}}, "out is bf16 [6, 20]; legal with qkv f32 [6, 40] and shape of 2"},
        {1, {kF32, {2, 20}}, "out is f32 [2, 20]; legal with qkv f32 [6, 40] and shape of 2"}}},
      {"attention_backward",
       {{kF32, {6, 40}}, {kF32, {6, 20}}, {kF32, {6, 20}}, state, {kF32, {6, 40}}},
       [](ComputeContext& ctx, const Tensors& at) {
         attention_backward(ctx, kAttention, at[0], at[1], at[2], {}, at[3].as<std::byte>(), at[4]);
       },
       {{1, {kF32, {6, 40}}, "out is f32 [6, 40]; legal with qkv f32 [6, 40] and shape of 2"},
        {2, {kBf16, {6, 20}}, "dout is bf16 [6, 20]; legal with qkv f32 [6, 40] and shape of 2"},
        {4, {kF32, {6, 20}}, "dqkv is f32 [6, 20]; legal with qkv f32 [6, 40] and shape of 2"}}},
      {"rotary",
       {{kBf16, {6, 40}}},
       [](ComputeContext& ctx, const Tensors& at) { rotary(ctx, kAttention, {100}, at[0], false); },
       {{0, {kI32, {6, 40}}, "qkv is i32 [6, 40]; legal with shape of 2 samples, 3 positions"},
        {0, {kBf16, {3, 40}}, "qkv is bf16 [3, 40]; legal with shape of 2 samples, 3"}}},
      {"query_key_norm_forward",
       {{kBf16, {6, 40}}, {kF32, {5}}, {kF32, {5}}, {kBf16, {6, 30}}, {kF32, {6, 6}}},
       [](ComputeContext& ctx, const Tensors& at) {
         query_key_norm_forward(ctx, kAttention, at[0], at[1], at[2], 1e-5F, at[3], at[4]);
       },
       {{0, {kBf16, {6, 30}}, "qkv is bf16 [6, 30]; legal with shape of 2 samples, 3 positions"},
        {1, {kF32, {20}}, "query_gain is f32 [20]; legal with shape of 2"},
        {2, {kBf16, {5}}, "key_gain is bf16 [5]; legal with shape of 2"},
        {3, {kF32, {6, 30}}, "raw is f32 [6, 30]; legal with qkv bf16 [6, 40] and shape of 2"},
        {3, {kBf16, {6, 40}}, "raw is bf16 [6, 40]; legal with qkv bf16 [6, 40] and shape of 2"},
        {4, {kF32, {6, 4}}, "stats is f32 [6, 4]; legal with shape of 2"}}},
      {"query_key_norm_backward",
       {{kF32, {6, 30}}, {kF32, {5}}, {kF32, {5}}, {kF32, {6, 6}}, {kF32, {6, 40}}, {kF32, {2, 5}}},
       [](ComputeContext& ctx, const Tensors& at) {
         query_key_norm_backward(ctx, kAttention, at[0], at[1], at[2], at[3], at[4], at[5]);
       },
       {{0, {kBf16, {6, 30}}, "dqkv is f32 [6, 40]; legal with raw bf16 [6, 30] and shape of 2"},
        {1, {kF32, {5, 1}}, "query_gain is f32 [5, 1]; legal with shape of 2"},
        {2, {kF32, {4}}, "key_gain is f32 [4]; legal with shape of 2"},
        {3, {kF32, {5, 6}}, "stats is f32 [5, 6]; legal with shape of 2"},
        {4, {kF32, {6, 30}}, "dqkv is f32 [6, 30]; legal with raw f32 [6, 30] and shape of 2"},
        {5, {kF32, {5, 2}}, "dgains is f32 [5, 2]; legal with shape of 2"}}},
  };
}

// Of x and y, with y of x's type.
std::vector<Wrong> of_another_type_and_shape(const char* type, const char* shape) {
  return {{1, {kBf16, {2, 4}}, type}, {1, {kF32, {4, 2}}, shape}};
}

std::vector<OperatorForm> dropout_forms() {
  std::vector<OperatorForm> forms;
  for (const float probability : {0.0F, 0.5F}) {
    const auto drop = [probability](ComputeContext& ctx, const Tensors& at) {
      dropout(ctx, at[0], {.probability = probability, .key = {}}, at[1]);
    };
    forms.push_back(
        {"dropout",
         {{kF32, {2, 4}}, {kF32, {1, 2, 4}}},
         drop,
         {{1, {kF32, {4, 2}}, "y is f32 [4, 2]; legal with x f32 [2, 4]: f32 or bf16 [2, 4]"}}});
    forms.push_back(
        {"dropout",
         {{kBf16, {2, 4}}, {kBf16, {2, 4}}},
         drop,
         {{1, {kF32, {2, 4}}, "y is f32 [2, 4]; legal with x bf16 [2, 4]: bf16 [2, 4]"}}});
  }
  forms.push_back(
      {"dropout_residual",
       {{kBf16, {2, 4}}, {kF32, {2, 4}}, {kF32, {2, 4}}},
       [](ComputeContext& ctx, const Tensors& at) {
         dropout_residual(ctx, at[0], {.probability = 0.5F, .key = {}}, at[1], at[2]);
       },
       {{0, {kI32, {2, 4}}, "x is i32 [2, 4]; legal: f32 or bf16 [any, any]"},
        {1,
         {kBf16, {2, 4}},
         "y is f32 [2, 4]; legal with x bf16 [2, 4] and residual bf16 [2, 4]: bf16 [2, 4]"},
        {2,
         {kF32, {2, 3}},
         "y is f32 [2, 3]; legal with x bf16 [2, 4] and residual f32 [2, 4]: f32 [2, 4]"}}});
  return forms;
}

std::vector<OperatorForm> element_forms() {
  std::vector<OperatorForm> forms;
  const std::vector<TensorSpec> two = {{kF32, {2, 4}}, {kF32, {1, 2, 4}}};
  const std::vector<Wrong> wrong_y =
      of_another_type_and_shape("y is bf16 [2, 4]; legal with x f32 [2, 4]: f32 [2, 4]",
                                "y is f32 [4, 2]; legal with x f32 [2, 4]: f32 [2, 4]");
  forms.push_back({"pointwise_forward", two,
                   [](ComputeContext& ctx, const Tensors& at) {
                     pointwise_forward(ctx, Pointwise::kTanh, at[0], at[1]);
                   },
                   wrong_y});
  forms.push_back({"add", two, unary(add), wrong_y});
  const std::vector<TensorSpec> three = {{kBf16, {2, 4}}, {kBf16, {2, 4}}, {kBf16, {2, 4}}};
  const std::vector<Wrong> wrong_gradient = {
      {0, {kI32, {2, 4}}, "x is i32 [2, 4]; legal: f32 or bf16 [any, any]"},
      {1, {kF32, {2, 4}}, "dy is f32 [2, 4]; legal with x bf16 [2, 4]: bf16 [2, 4]"},
      {2, {kBf16, {8}}, "dx is bf16 [8]; legal with x bf16 [2, 4]: bf16 [2, 4]"}};
  forms.push_back({"pointwise_backward", three,
                   [](ComputeContext& ctx, const Tensors& at) {
                     pointwise_backward(ctx, Pointwise::kRelu, at[0], at[1], at[2]);
                   },
                   wrong_gradient});
  forms.push_back(
      {"swiglu_forward",
       {{kF32, {2, 8}}, {kF32, {2, 4}}},
       unary(swiglu_forward),
       {{0, {kF32, {2, 7}}, "gate_up is f32 [2, 7]; legal with y f32 [2, 4]: f32 [2, 8]"},
        {1, {kBf16, {2, 4}}, "gate_up is f32 [2, 8]; legal with y bf16 [2, 4]: bf16 [2, 8]"}}});
  forms.push_back(
      {"swiglu_backward",
       {{kF32, {2, 8}}, {kF32, {2, 4}}, {kF32, {2, 8}}},
       binary(swiglu_backward),
       {{0, {kF32, {2, 4}}, "gate_up is f32 [2, 4]; legal with dy f32 [2, 4]: f32 [2, 8]"},
        {2, {kBf16, {2, 8}}, "dgate_up is bf16 [2, 8]; legal with dy f32 [2, 4]: f32 [2, 8]"}}});
  forms.push_back(
      {"convert",
       {{kF32, {2, 4}}, {kBf16, {2, 4}}},
       unary(convert),
       {{0, {kI32, {2, 4}}, "from is i32 [2, 4]; legal: f32 or bf16 [any"},
        {1, {kBf16, {2, 3}}, "to is bf16 [2, 3]; legal with from f32 [2, 4]: f32 or bf16 [2, 4]"},
        {1, {kF32, {4, 4}}, "to is f32 [4, 4]; legal with from f32 [2, 4]: f32 or bf16 [2, 4]"}}});
  forms.push_back({"convert_all",
                   {{kF32, {3}}, {kBf16, {3}}, {kF32, {2, 4}}, {kBf16, {2, 4}}},
                   [](ComputeContext& ctx, const Tensors& at) {
                     const Conversion both[] = {{at[0], at[1]}, {at[2], at[3]}};
                     convert_all(ctx, both);
                   },
                   {{2, {kBf16, {2, 4}}, "from is bf16 [2, 4]; legal: f32 [an"},
                    {3, {kBf16, {2, 3}}, "to is bf16 [2, 3]; legal with from f32 [2, 4]: bf16"},
                    {3, {kF32, {2, 4}}, "to is f32 [2, 4]; legal with from f32 [2, 4]: bf16"}}});
  return forms;
}

// Of the second of two shards, on two ranks.
template <typename Step>
OperatorForm panel_form(const char* name, const Step& step) {
  const auto call = [step](ComputeContext& ctx, const Tensors& at) {
    constexpr std::int64_t kStarts[] = {0, 16, 20};
    step(ctx, LogitPanels{at[0], kStarts, 1, 1}, at[1]);
  };
  return {name,
          {{kBf16, {6, 4}}, {kI32, {2, 3}}},
          call,
          {{0, {kBf16, {6, 3}}, "logits is bf16 [6, 3]; legal: f32 or bf16 [any, 4]"},
           {1,
            {kI32, {5}},
            "targets is i32 [5]; legal with logits bf16 [6, 4]: i32 of any shape with 6 "
            "elements"}}};
}

std::vector<OperatorForm> loss_forms() {
  using Panels = const LogitPanels&;
  return {
      panel_form("panel_maxima",
                 [](ComputeContext& ctx, Panels panels, const Tensor& targets) {
                   float maxima[6];
                   panel_maxima(ctx, panels, targets, maxima);
                 }),
      panel_form("panel_sums",
                 [](ComputeContext& ctx, Panels panels, const Tensor& targets) {
                   float maxima[12] = {}, sums[6], found[12];
                   panel_sums(ctx, panels, targets, true, maxima, sums, found);
                 }),
      panel_form("panel_losses",
                 [](ComputeContext& ctx, Panels panels, const Tensor& targets) {
                   float shifts[6] = {}, found[24] = {};
                   double losses[6];
                   panel_losses(ctx, panels, targets, 1.0, true, shifts, found, losses);
                 }),
      {"softmax_cross_entropy",
       {{kBf16, {6, 4}}, {kI32, {2, 3}}},
       [](ComputeContext& ctx, const Tensors& at) {
         double sum = 0;
         softmax_cross_entropy(ctx, at[0], at[1], 1.0, true, &sum);
       },
       {{0, {kI32, {6, 4}}, "logits is i32 [6, 4]; legal: f32 or bf16"},
        {1,
         {kI32, {5}},
         "targets is i32 [5]; legal with logits bf16 [6, 4]: i32 of any shape with 6 elements"},
        {1,
         {kF32, {6}},
         "targets is f32 [6]; legal with logits bf16 [6, 4]: i32 of any shape with 6 elements"}}},
      {"row_cross_entropy",
       {{kBf16, {6, 4}}, {kI32, {2, 3}}},
       [](ComputeContext& ctx, const Tensors& at) {
         double losses[6];
         row_cross_entropy(ctx, at[0], at[1], 1.0, true, losses);
       },
       {{0, {kI32, {6, 4}}, "logits is i32 [6, 4]; legal: f32 or bf16"},
        {1,
         {kI32, {5}},
         "targets is i32 [5]; legal with logits bf16 [6, 4]: i32 of any shape with 6 elements"}}},
      {"mean_squared_error",
       {{kF32, {2, 4}}, {kF32, {2, 4}}},
       [](ComputeContext& ctx, const Tensors& at) {
         double sum = 0;
         mean_squared_error(ctx, at[0], at[1], 1.0, true, &sum);
       },
       {{0, {kBf16, {2, 4}}, "outputs is bf16 [2, 4]; legal: f32 [any"},
        {1,
         {kF32, {2, 1}},
         "targets is f32 [2, 1]; legal with outputs f32 [2, 4]: f32 of any shape with 8 elements"},
        {1, {kI32, {2, 4}}, "targets is i32 [2, 4]; legal with outputs f32 [2, 4]: f32"}}},
  };
}

std::string form_name(const ::testing::TestParamInfo<OperatorForm>& info) {
  return std::to_string(info.index) + "_" + info.param.name;
}
INSTANTIATE_TEST_SUITE_P(Linear, OperandsTest, ::testing::ValuesIn(linear_forms()), form_name);
INSTANTIATE_TEST_SUITE_P(LinearActivation, OperandsTest,
                         ::testing::ValuesIn(linear_activation_forms()), form_name);
INSTANTIATE_TEST_SUITE_P(Embedding, OperandsTest, ::testing::ValuesIn(embedding_forms()),
                         form_name);
INSTANTIATE_TEST_SUITE_P(Norm, OperandsTest, ::testing::ValuesIn(norm_forms()), form_name);
INSTANTIATE_TEST_SUITE_P(Attention, OperandsTest, ::testing::ValuesIn(attention_forms()),
                         form_name);
INSTANTIATE_TEST_SUITE_P(Elements, OperandsTest, ::testing::ValuesIn(element_forms()), form_name);
INSTANTIATE_TEST_SUITE_P(Dropout, OperandsTest, ::testing::ValuesIn(dropout_forms()), form_name);
INSTANTIATE_TEST_SUITE_P(Loss, OperandsTest, ::testing::ValuesIn(loss_forms()), form_name);

}  // namespace
}  // namespace sluice
