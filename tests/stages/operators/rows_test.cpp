// Rows do not know their neighbours: what an operator computes of a row has the same bits at every
// place of a call, and in a call of any number of rows. CTest runs this once for each instruction
// set of the matrix library, as far as the processor has them.
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "stages/cpu/cpu_backend.hpp"
#include "tests/stages/operators/operator_tools.hpp"

namespace sluice {
namespace {

class RowsTest : public ::testing::TestWithParam<std::tuple<DType, int>> {
 protected:
  [[nodiscard]] DType dtype() const { return std::get<0>(GetParam()); }
  ComputeContext ctx_{Device{}, std::get<1>(GetParam())};

  void SetUp() override {
    if (!row_matmuls_of(ctx_).blocks(ctx_, dtype()).invariant) {
      GTEST_SKIP() << "no block of rows passes the check with this library and processor";
    }
  }

  // A call on rows: reads `in`, writes `out`.
  using Call = std::function<void(const Tensor& in, const Tensor& out)>;
  void expect_alike(const std::string& name, std::int64_t in, DType out_type, std::int64_t out,
                    const Call& call) {
    constexpr std::int64_t kRows = 300;
    const Operand x = random_operand(dtype(), {kRows, in}, 1);
    const Operand whole(out_type, {kRows, out});
    call(x.tensor, whole.tensor);
    for (const std::int64_t rows : {1, 12, 96, 257}) {
      for (const std::int64_t first : {std::int64_t{0}, std::int64_t{5}, kRows - rows}) {
        const Operand part(out_type, {rows, out});
        call(rows_from(x.tensor, first, rows), part.tensor);
        const Tensor expected = rows_from(whole.tensor, first, rows);
        EXPECT_EQ(std::memcmp(part.tensor.data, expected.data, expected.spec.bytes()), 0)
            << name << ": " << rows << " rows from row " << first << " on";
      }
    }
  }
};

// Narrow, odd, and wide enough for the library's other kernels.
constexpr std::pair<std::int64_t, std::int64_t> kShapes[] = {
    {64, 16}, {96, 384}, {257, 65}, {768, 64}, {320, 1280}};

TEST_P(RowsTest, LinearLayersTreatRowsAlike) {
  for (const auto& [in, out] : kShapes) {
    const std::string size = std::to_string(in) + " to " + std::to_string(out);
    const Operand weight = random_operand(dtype(), {out, in}, 2);
    const Operand bias = random_operand(DType::kF32, {out}, 3);
    expect_alike("forward, " + size, in, DType::kF32, out, [&](const Tensor& x, const Tensor& y) {
      linear_forward(ctx_, x, weight.tensor, bias.tensor, y);
    });
    expect_alike("input gradient, " + size, out, dtype(), in,
                 [&](const Tensor& dy, const Tensor& dx) {
                   linear_backward_input(ctx_, dy, weight.tensor, dx);
                 });
  }
}

TEST_P(RowsTest, MatmulsBesideActivationsTreatRowsAlike) {
  constexpr std::int64_t kIn = 96, kHidden = 200;
  for (const Activation activation : {Activation::kGelu, Activation::kSwiglu}) {
    const std::int64_t raised = activation == Activation::kGelu ? kHidden : 2 * kHidden;
    const Operand up = random_operand(dtype(), {raised, kIn}, 2);
    expect_alike("raised", kIn, dtype(), kHidden, [&](const Tensor& x, const Tensor& y) {
      const Operand before(dtype(), {x.shape()[0], raised});
      linear_activation_forward(ctx_, activation, x, up.tensor, {}, before.tensor, y);
    });
    const Operand down = random_operand(dtype(), {kIn, kHidden}, 3);
    expect_alike("gradient", kIn, dtype(), raised, [&](const Tensor& dy, const Tensor& dx) {
      const Operand before(dtype(), dx.shape(), Values(index_of(dx.elements()), 0.25));
      linear_activation_backward_input(ctx_, activation, dy, down.tensor, before.tensor, dx);
    });
  }
}

TEST_P(RowsTest, NormsTreatRowsAlike) {
  const Operand gamma = random_operand(DType::kF32, {96}, 2),
                beta = random_operand(DType::kF32, {96}, 3);
  const DType stream = dtype();
  expect_alike("layer norm", 96, stream, 96, [&](const Tensor& x, const Tensor& y) {
    const Operand stats(DType::kF32, {x.shape()[0], 2});
    layer_norm_forward(ctx_, x, gamma.tensor, beta.tensor, 1e-5F, y, stats.tensor);
  });
  expect_alike("RMS norm", 96, stream, 96, [&](const Tensor& x, const Tensor& y) {
    const Operand stats(DType::kF32, {x.shape()[0], 1});
    rms_norm_forward(ctx_, x, gamma.tensor, 1e-5F, y, stats.tensor);
  });
}

TEST_P(RowsTest, AttentionTreatsSamplesAlike) {
  const AttentionShape one = {
      .samples = 1, .sequence = 70, .heads = 4, .kv_heads = 2, .head_dim = 8};
  AttentionShape three = one;
  three.samples = 3;
  const Operand qkv = random_operand(dtype(), {three.rows(), three.packed_width()}, 1);
  const auto attend = [&](const AttentionShape& shape, const Tensor& x) {
    Operand out(dtype(), {shape.rows(), std::int64_t{shape.heads} * shape.head_dim});
    Buffer state(Device{}, attention_state_bytes(DeviceKind::kCpu, shape, dtype()));
    attention_forward(ctx_, shape, x, {}, out.tensor, state.data());
    return out;
  };
  const Operand whole = attend(three, qkv.tensor);
  for (std::int64_t sample = 0; sample < 3; ++sample) {
    const std::int64_t first = sample * one.rows();
    const Operand alone = attend(one, rows_from(qkv.tensor, first, one.rows()));
    const Tensor expected = rows_from(whole.tensor, first, one.rows());
    EXPECT_EQ(std::memcmp(alone.tensor.data, expected.data, expected.spec.bytes()), 0) << sample;
  }
}

INSTANTIATE_TEST_SUITE_P(, RowsTest,
                         ::testing::Combine(::testing::Values(DType::kF32, DType::kBf16),
                                            ::testing::Values(1, 2)));

}  // namespace
}  // namespace sluice
