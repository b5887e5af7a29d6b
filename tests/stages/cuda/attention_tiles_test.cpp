// Attention on tensor cores: against the CPU's attention at odd and real shapes, with the CPU's
// dropout masks, the same bits for every micro-batch.
#include <algorithm>

#include "stages/cuda_kernels/flash_attention.hpp"
#include "tests/stages/cuda/gpu_compare.hpp"

namespace sluice {
namespace {

constexpr Dropout kDropout = {0.1F, {3, random_site(1, 2), 5}, 4320};

// f32 runs in TF32: its matmuls round operands to 10 bits, bf16's to 7.
double tiles_tolerance(DType dtype) { return dtype == DType::kBf16 ? 1e-2 : 2e-3; }

class AttentionTilesTest : public GpuCompareTest {
 protected:
  void SetUp() override {
    GpuCompareTest::SetUp();
    if (!IsSkipped()) gpu().set_tf32(true);
  }

  struct Packed {
    Packed(const AttentionShape& shape, DType dtype, double deviation = 1.5)
        : width{shape.rows(), std::int64_t{shape.heads} * shape.head_dim},
          qkv(random_operand(dtype, {shape.rows(), shape.packed_width()}, 1, deviation)),
          dout(random_operand(dtype, width, 2)),
          out(dtype, width),
          dqkv(dtype, qkv.tensor.spec.shape) {}
    Shape width;
    Operand qkv, dout, out, dqkv;
  };

  static Operand state(DeviceKind device, const AttentionShape& shape, DType dtype) {
    const std::size_t bytes = attention_state_bytes(device, shape, dtype);
    return Operand(DType::kU8, {static_cast<std::int64_t>(bytes)});
  }
  static void run(ComputeContext& ctx, const AttentionShape& shape, const Dropout& dropout,
                  const Tensors& at, std::byte* state) {
    if (ctx.device() == kGpu) {
      ASSERT_TRUE(cuda::attention_on_tensor_cores(ctx, shape, at[0].spec.dtype));
      cuda::flash_attention_forward(ctx, shape, at[0], dropout, at[2], state);
      cuda::flash_attention_backward(ctx, shape, at[0], at[2], at[1], dropout, state, at[3]);
      return;
    }
    attention_forward(ctx, shape, at[0], dropout, at[2], state);
    attention_backward(ctx, shape, at[0], at[2], at[1], dropout, state, at[3]);
  }

  void check(const AttentionShape& shape, DType dtype, const Dropout& dropout = {},
             double deviation = 1.5, double tolerance = 0) {
    if (tolerance == 0) tolerance = tiles_tolerance(dtype);
    SCOPED_TRACE(fmt::format(
        "{} samples, sequence {}, heads {} and {}, head_dim {}, window {}, {}, dropout {}",
        shape.samples, shape.sequence, shape.heads, shape.kv_heads, shape.head_dim, shape.window,
        name_of(dtype), dropout.probability));
    const Packed at(shape, dtype, deviation);
    const Operand kept = state(DeviceKind::kCpu, shape, dtype);
    const OnGpu gpu_kept(state(DeviceKind::kCuda, shape, dtype));
    compare({&at.qkv, &at.dout, &at.out, &at.dqkv}, tolerance,
            [&](ComputeContext& ctx, const Tensors& tensors) {
              run(ctx, shape, dropout, tensors,
                  ctx.device() == kGpu ? static_cast<std::byte*>(gpu_kept.data())
                                       : kept.tensor.as<std::byte>());
            });
    EXPECT_TRUE(gpu_kept.fetch(gpu()).end_untouched());
  }
  void check_both(const AttentionShape& shape, const Dropout& dropout = {}) {
    for (const DType dtype : kOperandTypes) check(shape, dtype, dropout);
  }

  // Outputs and gradients of the samples of `at` from `first` on, `count` of them.
  std::vector<Operand> run_samples(const AttentionShape& all, const Packed& at, int first,
                                   int count) {
    AttentionShape shape = all;
    shape.samples = count;
    Dropout dropout = kDropout;
    dropout.first_element += static_cast<std::uint64_t>(first * all.heads * all.sequence) *
                             static_cast<std::uint64_t>(all.sequence);
    const Packed part(shape, at.qkv.tensor.spec.dtype);
    const auto cut = [&](const Operand& from, const Operand& to) {
      const std::size_t bytes = to.tensor.spec.bytes() / static_cast<std::size_t>(count);
      std::memcpy(to.tensor.data,
                  from.tensor.as<std::byte>() + static_cast<std::size_t>(first) * bytes,
                  to.tensor.spec.bytes());
    };
    cut(at.qkv, part.qkv);
    cut(at.dout, part.dout);
    const OnGpu qkv(part.qkv), dout(part.dout), out(part.out), dqkv(part.dqkv);
    const OnGpu kept(state(DeviceKind::kCuda, shape, at.qkv.tensor.spec.dtype));
    run(gpu(), shape, dropout, {qkv.tensor(), dout.tensor(), out.tensor(), dqkv.tensor()},
        static_cast<std::byte*>(kept.data()));
    std::vector<Operand> results;
    results.push_back(out.fetch(gpu()));
    results.push_back(dqkv.fetch(gpu()));
    return results;
  }
};

TEST_F(AttentionTilesTest, IsTheCpusForAnyContext) {
  for (const std::int64_t sequence : {1, 7, 64, 65, 200}) {
    check_both({.samples = 1, .sequence = sequence, .heads = 1, .kv_heads = 1, .head_dim = 64});
  }
}

TEST_F(AttentionTilesTest, IsTheCpusForAnyHead) {
  for (const int head_dim : {8, 32, 40, 80, 96, 128}) {
    check_both({.samples = 1, .sequence = 70, .heads = 1, .kv_heads = 1, .head_dim = head_dim});
  }
  check({.samples = 1, .sequence = 70, .heads = 1, .kv_heads = 1, .head_dim = 136}, DType::kBf16);
  check({.samples = 1, .sequence = 70, .heads = 1, .kv_heads = 1, .head_dim = 256}, DType::kBf16);
  check({.samples = 1, .sequence = 33, .heads = 1, .kv_heads = 1, .head_dim = 12}, DType::kF32);
}

TEST_F(AttentionTilesTest, SharesKeysBetweenGroupsOfQueries) {
  check_both({.samples = 2, .sequence = 45, .heads = 4, .kv_heads = 2, .head_dim = 16}, kDropout);
  check_both({.samples = 1, .sequence = 66, .heads = 3, .kv_heads = 1, .head_dim = 72});
}

// Largest scores far above those before, and a softmax of almost one number. Gradients of scores
// are differences there, of numbers that outputs rounded to bf16 give: f32 arithmetic is off by
// 1.2e-2 as well.
TEST_F(AttentionTilesTest, IsTheCpusForLargeScores) {
  for (const double deviation : {4.0, 10.0}) {
    check({.samples = 1, .sequence = 200, .heads = 1, .kv_heads = 1, .head_dim = 64}, DType::kBf16,
          {}, deviation, 2e-2);
  }
}

// Of both ways to lay a warp's rows out, and in both kinds of alignment of a query's first element.
TEST_F(AttentionTilesTest, DropsAsTheCpu) {
  for (const float probability : {0.1F, 0.5F}) {
    Dropout dropout = kDropout;
    dropout.probability = probability;
    for (const int head_dim : {64, 128}) {
      for (const std::int64_t sequence : {76, 77}) {
        check_both(
            {.samples = 1, .sequence = sequence, .heads = 2, .kv_heads = 1, .head_dim = head_dim},
            dropout);
      }
    }
  }
  check({.samples = 1, .sequence = 50, .heads = 1, .kv_heads = 1, .head_dim = 256}, DType::kBf16,
        kDropout);
}

// Windows of one position, within a matmul, of whole tiles, over several, and one less than all.
TEST_F(AttentionTilesTest, SeesTheCpusWindow) {
  for (const int window : {1, 2, 5, 32, 33, 100, 149}) {
    check({.samples = 1,
           .sequence = 150,
           .heads = 1,
           .kv_heads = 1,
           .head_dim = 32,
           .window = window},
          DType::kBf16);
  }
  check_both(
      {.samples = 1, .sequence = 150, .heads = 2, .kv_heads = 1, .head_dim = 128, .window = 40},
      kDropout);
}

// Values and output gradients that pick single probabilities out: whole masks are seen, bit by bit.
TEST_F(AttentionTilesTest, DropsTheCpusElements) {
  for (const DType dtype : kOperandTypes) {
    for (const int size : {63, 64, 128}) {
      for (const unsigned first : {0U, 1U, 6U}) {
        SCOPED_TRACE(fmt::format("{}, sequence {}, from {}", name_of(dtype), size, first));
        const int head_dim = size <= 64 ? 64 : 128;
        const AttentionShape shape = {
            .samples = 1, .sequence = size, .heads = 1, .kv_heads = 1, .head_dim = head_dim};
        Packed at(shape, dtype);
        Values qkv = at.qkv.values(), dout(at.dout.values().size());
        for (std::int64_t row = 0; row < size; ++row) {
          for (std::int64_t d = 0; d < head_dim; ++d) {
            qkv[static_cast<std::size_t>((3 * row + 2) * head_dim + d)] = row == d ? 1 : 0;
            dout[static_cast<std::size_t>(row * head_dim + d)] = row == d ? 1 : 0;
          }
        }
        at.qkv = Operand(dtype, at.qkv.tensor.spec.shape, qkv);
        at.dout = Operand(dtype, at.dout.tensor.spec.shape, dout);
        const Dropout dropout = {0.5F, kDropout.key, first};
        const OnGpu gpu_qkv(at.qkv), gpu_dout(at.dout), out(at.out), dqkv(at.dqkv);
        const OnGpu gpu_kept(state(DeviceKind::kCuda, shape, dtype));
        run(gpu(), shape, dropout,
            {gpu_qkv.tensor(), gpu_dout.tensor(), out.tensor(), dqkv.tensor()},
            static_cast<std::byte*>(gpu_kept.data()));
        const Operand kept = state(DeviceKind::kCpu, shape, dtype);
        run(cpu(), shape, dropout, {at.qkv.tensor, at.dout.tensor, at.out.tensor, at.dqkv.tensor},
            kept.tensor.as<std::byte>());
        const auto pattern = [](const Operand& operand, std::int64_t from, std::int64_t step,
                                std::int64_t count) {
          const Values values = operand.values();
          std::string zeros;
          for (std::size_t i = static_cast<std::size_t>(from); i < values.size();
               i += static_cast<std::size_t>(step)) {
            for (std::size_t k = 0; k < static_cast<std::size_t>(count); ++k) {
              zeros += values[i + k] == 0 ? '.' : 'x';
            }
          }
          return zeros;
        };
        EXPECT_EQ(pattern(out.fetch(gpu()), 0, head_dim, head_dim),
                  pattern(at.out, 0, head_dim, head_dim));
        EXPECT_EQ(pattern(dqkv.fetch(gpu()), 2 * head_dim, 3 * head_dim, head_dim),
                  pattern(at.dqkv, 2 * head_dim, 3 * head_dim, head_dim));
      }
    }
  }
}

TEST_F(AttentionTilesTest, GivesASampleTheSameBitsInEveryBatch) {
  for (const DType dtype : kOperandTypes) {
    for (const int head_dim : {64, 128}) {
      const AttentionShape shape = {
          .samples = 3, .sequence = 67, .heads = 2, .kv_heads = 1, .head_dim = head_dim};
      const Packed at(shape, dtype);
      const std::vector<Operand> all = run_samples(shape, at, 0, 3);
      for (int sample = 0; sample < 3; ++sample) {
        const std::vector<Operand> alone = run_samples(shape, at, sample, 1);
        for (std::size_t i = 0; i < all.size(); ++i) {
          const std::size_t bytes = alone[i].tensor.spec.bytes();
          EXPECT_EQ(
              std::memcmp(all[i].tensor.as<std::byte>() + static_cast<std::size_t>(sample) * bytes,
                          alone[i].tensor.data, bytes),
              0)
              << name_of(dtype) << ", sample " << sample << ", result " << i;
        }
      }
    }
  }
}

// A NaN reaches the loss, which refuses the step.
TEST_F(AttentionTilesTest, LetsANanThrough) {
  const AttentionShape shape = {
      .samples = 1, .sequence = 40, .heads = 1, .kv_heads = 1, .head_dim = 32};
  Packed at(shape, DType::kBf16);
  Values qkv = at.qkv.values();
  qkv[static_cast<std::size_t>(20 * shape.packed_width())] = std::nan("");  // query 20
  at.qkv = Operand(DType::kBf16, at.qkv.tensor.spec.shape, qkv);
  const OnGpu gpu_qkv(at.qkv), out(at.out);
  const OnGpu kept(state(DeviceKind::kCuda, shape, DType::kBf16));
  cuda::flash_attention_forward(gpu(), shape, gpu_qkv.tensor(), {}, out.tensor(),
                                static_cast<std::byte*>(kept.data()));
  const Values values = out.values(gpu());
  for (std::size_t row = 0; row < 40; ++row) {
    EXPECT_EQ(std::isnan(values[32 * row + 3]), row == 20) << row;
  }
}

TEST_F(AttentionTilesTest, LeavesOtherCallsToF32Arithmetic) {
  AttentionShape shape = {.samples = 1, .sequence = 8, .heads = 1, .kv_heads = 1, .head_dim = 64};
  EXPECT_TRUE(cuda::attention_on_tensor_cores(gpu(), shape, DType::kF32));
  shape.head_dim = 129;
  EXPECT_FALSE(cuda::attention_on_tensor_cores(gpu(), shape, DType::kBf16));
  shape.head_dim = 256;
  EXPECT_FALSE(cuda::attention_on_tensor_cores(gpu(), shape, DType::kF32));
  EXPECT_TRUE(cuda::attention_on_tensor_cores(gpu(), shape, DType::kBf16));
  shape.head_dim = 257;
  EXPECT_FALSE(cuda::attention_on_tensor_cores(gpu(), shape, DType::kBf16));
  gpu().set_tf32(false);
  shape.head_dim = 64;
  EXPECT_FALSE(cuda::attention_on_tensor_cores(gpu(), shape, DType::kF32));
}

}  // namespace
}  // namespace sluice
