#include "stages/cpu/matmul.hpp"

#include "tests/stages/operators/operator_tools.hpp"

namespace sluice {
namespace {

MatmulSpec square(std::int64_t n) {
  return {.m = n, .n = n, .k = n, .a = {.row = n}, .b = {.row = n}, .c = {.row = n}};
}

TEST(MatmulTest, MakesOnePrimitivePerSpecification) {
  MatmulCache cache{Device{}};
  const Operand a = random_operand(DType::kF32, {8, 8}, 1), c(DType::kF32, {8, 8});
  for (int i = 0; i < 3; ++i) {
    cache.run(square(8), a.tensor.data, a.tensor.data, nullptr, c.tensor.data);
  }
  EXPECT_EQ(cache.size(), 1U);
  MatmulSpec transposed = square(8);
  transposed.b = {.row = 1, .column = 8};
  cache.prepare(transposed);
  EXPECT_EQ(cache.size(), 2U);
}

TEST(MatmulTest, RunsBatchesAndStridesAndAccumulates) {
  for (const DType dtype : {DType::kF32, DType::kBf16}) {
    for (const bool widen : {false, true}) {
      MatmulCache cache{Device{}};
      cache.widen_bf16(widen);
      const Operand a = random_operand(dtype, {3, 5, 20}, 2),
                    b = random_operand(dtype, {3, 9, 11}, 3);
      const Operand c = random_operand(DType::kF32, {3, 5, 10}, 4);
      Values expected = c.values();
      const Values av = a.values(), bv = b.values();
      // a: columns 2..8 of 20; b: transposed, rows are columns; c: the first 9 columns of 10.
      for (std::size_t s = 0; s < 3; ++s) {
        for (std::size_t i = 0; i < 5; ++i) {
          for (std::size_t j = 0; j < 9; ++j) {
            for (std::size_t k = 0; k < 7; ++k) {
              expected[s * 50 + i * 10 + j] +=
                  av[s * 100 + i * 20 + 2 + k] * bv[s * 99 + j * 11 + k];
            }
          }
        }
      }
      const MatmulSpec spec = {.batches = 3,
                               .m = 5,
                               .n = 9,
                               .k = 7,
                               .a = {20, 1, 100},
                               .b = {1, 11, 99},
                               .c = {10, 1, 50},
                               .operands = dtype,
                               .accumulate = true};
      cache.run(spec, a.tensor.as<std::byte>() + 2 * size_of(dtype), b.tensor.data, nullptr,
                c.tensor.data);
      expect_close(c.values(), expected, 4e-6, to_string(spec));
    }
  }
}

TEST(MatmulTest, WidenedBf16AgreesWithTheLibrary) {
  const Operand a = random_operand(DType::kBf16, {33, 65}, 5),
                b = random_operand(DType::kBf16, {65, 17}, 6);
  const Operand bias = random_operand(DType::kF32, {17}, 7);
  const Operand real(DType::kBf16, {33, 17}), widened(DType::kBf16, {33, 17});
  const MatmulSpec spec = {.m = 33,
                           .n = 17,
                           .k = 65,
                           .a = {.row = 65},
                           .b = {.row = 17},
                           .c = {.row = 17},
                           .operands = DType::kBf16,
                           .result = DType::kBf16,
                           .bias = true};
  MatmulCache cache{Device{}};
  cache.widen_bf16(false);
  cache.run(spec, a.tensor.data, b.tensor.data, bias.tensor.data, real.tensor.data);
  cache.widen_bf16(true);
  cache.run(spec, a.tensor.data, b.tensor.data, bias.tensor.data, widened.tensor.data);
  expect_close(widened.values(), real.values(), 4e-3, "widened");
}

// Sizes above a block's in each direction, operands as they lie and transposed, inside of larger
// ones.
TEST(MatmulTest, WidenedBf16IsOneMatmulWhateverItsBlocks) {
  struct Size {
    std::int64_t batches, m, n, k;
  };
  const std::vector<Size> sizes = {{1, 1100, 5, 7},  {1, 6, 1100, 9},  {1, 3, 4, 1100},
                                   {1, 600, 9, 530}, {1, 9, 600, 530}, {1, 520, 515, 3},
                                   {70, 64, 33, 40}, {2, 600, 3, 530}};
  for (const Size& size : sizes) {
    for (const bool transposed : {false, true}) {
      for (const bool rounds : {false, true}) {
        const auto [batches, m, n, k] = size;
        MatmulSpec spec = {.batches = batches,
                           .m = m,
                           .n = n,
                           .k = k,
                           .a = {k + 3, 1, m * (k + 3)},
                           .b = {1, k + 2, n * (k + 2)},
                           .c = {n + 1, 1, m * (n + 1)},
                           .operands = DType::kBf16,
                           .result = rounds ? DType::kBf16 : DType::kF32,
                           .bias = rounds && batches == 1,
                           .accumulate = !rounds};
        if (transposed) {
          spec.a = {1, m + 3, k * (m + 3)};
          spec.b = {n + 2, 1, k * (n + 2)};
        }
        const Operand a = random_operand(DType::kBf16, {batches, (m + 3) * (k + 3)}, 15),
                      b = random_operand(DType::kBf16, {batches, (n + 2) * (k + 2)}, 16),
                      c = random_operand(spec.result, {batches, m, n + 1}, 17),
                      bias = random_operand(DType::kF32, {n}, 18);
        Values expected = c.values();
        const Values av = a.values(), bv = b.values(), biases = bias.values();
        const auto at = [](const MatmulLayout& l, std::int64_t s, std::int64_t i, std::int64_t j) {
          return static_cast<std::size_t>(s * l.batch + i * l.row + j * l.column);
        };
        for (std::int64_t s = 0; s < batches; ++s) {
          for (std::int64_t i = 0; i < m; ++i) {
            for (std::int64_t j = 0; j < n; ++j) {
              double sum = spec.bias ? biases[static_cast<std::size_t>(j)] : 0;
              for (std::int64_t l = 0; l < k; ++l) {
                sum += av[at(spec.a, s, i, l)] * bv[at(spec.b, s, l, j)];
              }
              double& value = expected[at(spec.c, s, i, j)];
              value = spec.accumulate ? value + sum : sum;
            }
          }
        }
        MatmulCache cache{Device{}};
        cache.widen_bf16(true);
        cache.prepare(spec);
        const std::size_t made = cache.size();
        cache.run(spec, a.tensor.data, b.tensor.data, spec.bias ? bias.tensor.data : nullptr,
                  c.tensor.data);
        EXPECT_EQ(cache.size(), made) << "it made primitives after it was prepared";
        expect_close(c.values(), expected, rounds ? 4e-3 : 4e-6, to_string(spec));
      }
    }
  }
}

TEST(MatmulTest, RecordsWhatItRunsAndReplaysIt) {
  MatmulCache cache{Device{}};
  const Operand a = random_operand(DType::kF32, {8, 8}, 8),
                b = random_operand(DType::kF32, {8, 8}, 9);
  const Operand c(DType::kF32, {8, 8}), d(DType::kF32, {8, 8});
  cache.run(square(8), a.tensor.data, b.tensor.data, nullptr, c.tensor.data);
  cache.record(true);
  cache.run(square(8), a.tensor.data, b.tensor.data, nullptr, c.tensor.data);
  cache.run(square(8), c.tensor.data, b.tensor.data, nullptr, d.tensor.data);
  cache.record(false);
  cache.run(square(8), a.tensor.data, b.tensor.data, nullptr, c.tensor.data);
  ASSERT_EQ(cache.recorded().size(), 2U);
  EXPECT_EQ(cache.recorded()[1].a, c.tensor.data);
  EXPECT_EQ(cache.recorded()[1].spec, square(8));
  EXPECT_GT(cache.recorded()[1].seconds, 0);
  const Values expected = d.values();
  std::memset(d.tensor.data, 0, d.tensor.spec.bytes());
  cache.replay(cache.recorded());
  EXPECT_EQ(d.values(), expected);
  cache.record(true);
  EXPECT_TRUE(cache.recorded().empty());
}

TEST(MatmulTest, RepeatsItsBitsWhateverRanBefore) {
  MatmulCache cache{Device{}}, busy{Device{}};
  const Operand a = random_operand(DType::kF32, {70, 200}, 10),
                b = random_operand(DType::kF32, {200, 90}, 11);
  const Operand c(DType::kF32, {70, 90}), d(DType::kF32, {70, 90});
  const MatmulSpec spec = {
      .m = 70, .n = 90, .k = 200, .a = {.row = 200}, .b = {.row = 90}, .c = {.row = 90}};
  cache.run(spec, a.tensor.data, b.tensor.data, nullptr, c.tensor.data);
  const Operand other = random_operand(DType::kF32, {64, 64}, 12), result(DType::kF32, {64, 64});
  busy.run(square(64), other.tensor.data, other.tensor.data, nullptr, result.tensor.data);
  busy.run(spec, a.tensor.data, b.tensor.data, nullptr, d.tensor.data);
  EXPECT_EQ(c.values(), d.values());
}

TEST(MatmulTest, NamesAMatmulThatCannotBe) {
  MatmulCache cache{Device{}};
  MatmulSpec spec = square(8);
  spec.m = -1;
  try {
    cache.prepare(spec);
    FAIL() << "a negative size was accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kDevice);
    EXPECT_NE(std::string(error.what()).find("[-1, 8]"), std::string::npos) << error.what();
  }
}

TEST(ComputeContextTest, RefusesBadThreadsAndKernelSets) {
  EXPECT_THROW(ComputeContext(Device{}, 0), Error);
  ::setenv("SLUICE_KERNELS", "mmx", 1);
  try {
    const ComputeContext context(Device{}, 1);
    FAIL() << "kernel set mmx was accepted";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("'mmx'"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("baseline"), std::string::npos) << error.what();
  }
  ::unsetenv("SLUICE_KERNELS");
}

TEST(ComputeContextTest, WorkspaceGrowsOnlyWhenItMust) {
  ComputeContext context(Device{}, 1);
  const std::byte* large = context.workspace(1 << 16);
  EXPECT_EQ(context.workspace(100), large);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(large) % kBufferAlignment, 0U);
}

}  // namespace
}  // namespace sluice
