// Operators of models of shards on a GPU against the CPU's, and against themselves where several
// ranks have the shards.
#include <numeric>
#include <utility>

#include "comm/base/sum_tree.hpp"
#include "stages/compute/internal_operators.hpp"
#include "tests/stages/cuda/gpu_compare.hpp"

namespace sluice {
namespace {

using Sizes = std::vector<std::int64_t>;

class CudaShardsTest : public GpuCompareTest {
 protected:
  static Tensor from(const Tensor& all, std::int64_t element, const Shape& shape) {
    const auto size = static_cast<std::int64_t>(size_of(all.spec.dtype));
    return {all.as<std::byte>() + element * size, {all.spec.dtype, shape}};
  }
};

// Sums of products, of which some are empty, with all that is added at the end.
TEST_F(CudaShardsTest, SumsAreTheCpus) {
  for (const DType operands : kOperandTypes) {
    for (const DType result : kOperandTypes) {
      if (operands == DType::kF32 && result != operands) continue;
      for (const bool backward : {false, true}) {
        for (const Sizes& sizes : {Sizes{16}, Sizes{16, 32, 0, 5}, Sizes{0, 0, 16, 16, 16, 0, 9}}) {
          const std::int64_t rows = 7, width = 24;
          const std::int64_t all = std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0});
          SCOPED_TRACE(fmt::format("{} to {}, {} shards, {}", name_of(operands), name_of(result),
                                   sizes.size(), backward));
          const Operand x = random_operand(operands, {rows * all}, 1),
                        weight = random_operand(operands, {width * all}, 2),
                        bias = random_operand(DType::kF32, {width}, 3),
                        residual = random_operand(result, {rows, width}, 4),
                        y(result, {rows, width});
          compare({&x, &weight, &bias, &residual, &y}, gpu_tolerance(result),
                  [&](ComputeContext& ctx, const Tensors& at) {
                    sum_of_shards(ctx, at[0], at[1], sizes, backward, at[2], at[3], at[4]);
                  });
          compare({&x, &weight, &y}, gpu_tolerance(result),
                  [&](ComputeContext& ctx, const Tensors& at) {
                    sum_of_shards(ctx, at[0], at[1], sizes, backward, {}, {}, at[2]);
                  });
        }
      }
    }
  }
}

TEST_F(CudaShardsTest, SumsOfTwoRanksHaveTheBitsOfOne) {
  const std::int64_t rows = 9, width = 20;
  const Sizes sizes = {16, 48, 0, 16, 32, 16, 16, 3};
  const std::int64_t all = std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0});
  const Operand x = random_operand(DType::kBf16, {rows * all}, 1),
                weight = random_operand(DType::kBf16, {width * all}, 2),
                bias = random_operand(DType::kF32, {width}, 3),
                residual = random_operand(DType::kBf16, {rows, width}, 4);
  const OnGpu gx(x), gweight(weight), gbias(bias), gresidual(residual);
  const OnGpu one(Operand(DType::kBf16, {rows, width})), two(Operand(DType::kBf16, {rows, width}));
  sum_of_shards(gpu(), gx.tensor(), gweight.tensor(), sizes, false, gbias.tensor(),
                gresidual.tensor(), one.tensor());
  std::vector<OnGpu> sums;
  std::int64_t before = 0;
  for (const std::size_t rank : {std::size_t{0}, std::size_t{1}}) {
    const std::span<const std::int64_t> mine = std::span(sizes).subspan(4 * rank, 4);
    const std::int64_t size = std::accumulate(mine.begin(), mine.end(), std::int64_t{0});
    sums.emplace_back(Operand(DType::kF32, {rows, width}));
    sum_of_shards(gpu(), from(gx.tensor(), rows * before, {rows * size}),
                  from(gweight.tensor(), width * before, {width * size}), mine, false, {}, {},
                  sums.back().tensor());
    before += size;
  }
  add(gpu(), sums[1].tensor(), sums[0].tensor());
  finish_sum(gpu(), sums[0].tensor(), gbias.tensor(), gresidual.tensor(), two.tensor());
  EXPECT_TRUE(same_bits(one.fetch(gpu()), two.fetch(gpu())));
}

Values some_tokens(std::int64_t count, std::int64_t vocabulary) {
  Values tokens(index_of(count));
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    tokens[i] = static_cast<double>(i * i * i % index_of(vocabulary));
  }
  return tokens;
}

TEST_F(CudaShardsTest, PartsOfAnEmbeddingAreTheCpus) {
  const std::int64_t samples = 3, sequence = 41, vocabulary = 75;
  const Operand tokens(DType::kI32, {samples, sequence},
                       some_tokens(samples * sequence, vocabulary));
  for (const std::int64_t width : {12, 7}) {
    for (const auto& [first, rows] : {std::pair{0, 32}, {32, 43}, {0, 75}}) {
      SCOPED_TRACE(fmt::format("{} rows from {} on, width {}", rows, first, width));
      const Operand table = random_operand(DType::kF32, {rows, width}, 1),
                    values(DType::kF32, {samples * sequence, width});
      table.tensor.as<float>()[0] = -0.0F;
      compare({&tokens, &table, &values}, kExact, [&](ComputeContext& ctx, const Tensors& at) {
        embedding_part_forward(ctx, at[0], first, at[1], at[2]);
      });
      for (const DType stream : kOperandTypes) {
        for (const Write write : {Write::kAdd, Write::kOverwrite}) {
          const Operand dout = random_operand(stream, {samples * sequence, width}, 2),
                        dtable = random_operand(DType::kF32, {rows, width}, 3),
                        dpositions = random_operand(DType::kF32, {sequence + 2, width}, 4);
          compare({&tokens, &dout, &dtable, &dpositions}, 1e-5,
                  [&](ComputeContext& ctx, const Tensors& at) {
                    embedding_part_backward_weight(ctx, at[0], first, at[1], at[2], at[3], write);
                  });
        }
      }
    }
  }
}

// A row's sum has one order, whichever part of the table it is in.
TEST_F(CudaShardsTest, PartsOfAnEmbeddingsGradientHaveTheBitsOfTheWhole) {
  const std::int64_t places = 2300, vocabulary = 40, width = 8, split = 16;
  const Operand tokens(DType::kI32, {1, places}, some_tokens(places, vocabulary)),
      dout = random_operand(DType::kF32, {places, width}, 2);
  const OnGpu gtokens(tokens), gdout(dout);
  const OnGpu whole(Operand(DType::kF32, {vocabulary, width})),
      low(Operand(DType::kF32, {split, width})),
      high(Operand(DType::kF32, {vocabulary - split, width}));
  embedding_backward_weight(gpu(), gtokens.tensor(), gdout.tensor(), whole.tensor(), {},
                            Write::kOverwrite);
  embedding_part_backward_weight(gpu(), gtokens.tensor(), 0, gdout.tensor(), low.tensor(), {},
                                 Write::kOverwrite);
  embedding_part_backward_weight(gpu(), gtokens.tensor(), split, gdout.tensor(), high.tensor(), {},
                                 Write::kOverwrite);
  Values parts = low.values(gpu());
  const Values rest = high.values(gpu());
  parts.insert(parts.end(), rest.begin(), rest.end());
  EXPECT_EQ(whole.values(gpu()), parts);
}

// What the ranks of a vocabulary in shards compute of the losses of some rows, one after the other.
struct PanelLosses {
  static constexpr std::int64_t kRows = 5;
  std::vector<std::int64_t> starts;
  int local;

  [[nodiscard]] int ranks() const { return (static_cast<int>(starts.size()) - 1) / local; }
  // Of all ranks: logits, maxima, sums, what they found; each rank's copy of that.
  void run(ComputeContext& ctx, const Tensors& at, bool gradient, double* losses) const {
    const Tensor& targets = at[1];
    auto* const maxima = at[2].as<float>();
    auto* const sums = at[3].as<float>();
    auto* const found = at[4].as<float>();
    for (int rank = 0; rank < ranks(); ++rank) {
      panel_maxima(ctx, panels(at[0], rank), targets, maxima + rank * kRows);
    }
    for (int rank = 0; rank < ranks(); ++rank) {
      panel_sums(ctx, panels(at[0], rank), targets, gradient, maxima, sums + rank * local * kRows,
                 found + rank * 2 * kRows);
    }
    const std::int64_t all = ranks() * 2 * kRows;
    for (int rank = 0; rank < ranks(); ++rank) {
      float* const copy = at[5].as<float>() + rank * all;
      copy_async(copy, found, index_of(all) * sizeof(float), ctx.stream());
      panel_losses(ctx, panels(at[0], rank), targets, 0.25, gradient, maxima, copy, losses);
    }
  }

 private:
  [[nodiscard]] LogitPanels panels(const Tensor& logits, int rank) const {
    const auto shard = index_of(rank) * index_of(local);
    const std::int64_t begin = starts[shard], width = starts[shard + index_of(local)] - begin;
    const auto size = static_cast<std::int64_t>(size_of(logits.spec.dtype));
    return {{logits.as<std::byte>() + begin * kRows * size, {logits.spec.dtype, {kRows, width}}},
            starts,
            rank * local,
            local};
  }
};

// Targets of all ranks, and one that does not count.
TEST_F(CudaShardsTest, LossesAreTheCpusAndHaveTheSameBitsOnAnyRanks) {
  constexpr std::int64_t kRows = PanelLosses::kRows;
  const std::vector<std::int64_t> starts = {0, 16, 48, 1104, 1109};
  const auto zeros = [](std::int64_t count) {
    return Operand(DType::kF32, {count}, Values(index_of(count)));
  };
  for (const DType dtype : kOperandTypes) {
    for (const bool gradient : {false, true}) {
      std::vector<Values> gradients;
      std::vector<std::vector<double>> losses;
      for (const int local : {4, 2, 1}) {
        SCOPED_TRACE(fmt::format("{}, {} shards a rank, {}", name_of(dtype), local, gradient));
        const PanelLosses work{starts, local};
        const std::int64_t found = work.ranks() * 2 * kRows;
        const Operand logits = random_operand(dtype, {kRows * starts.back()}, 1, 3),
                      targets(DType::kI32, {kRows}, {3, -1, 20, 1108, 47}),
                      maxima = zeros(work.ranks() * kRows), sums = zeros(4 * kRows),
                      each = zeros(found), copies = zeros(work.ranks() * found);
        std::vector<double> expected(kRows);
        const Buffer lost(kGpu, expected.size() * sizeof(double));
        compare({&logits, &targets, &maxima, &sums, &each, &copies}, 4e-3,
                [&](ComputeContext& ctx, const Tensors& at) {
                  if (ctx.device() != kGpu) return work.run(ctx, at, gradient, expected.data());
                  work.run(ctx, at, gradient, reinterpret_cast<double*>(lost.data()));
                  ctx.stream().synchronize();
                  std::vector<double>& now = losses.emplace_back(expected.size());
                  copy_now(kGpu, now.data(), lost.data(), lost.size());
                  const Operand made(at[0].spec);
                  copy_now(kGpu, made.tensor.data, at[0].data, at[0].spec.bytes());
                  gradients.push_back(made.values());
                });
        for (std::size_t row = 0; row < expected.size(); ++row) {
          EXPECT_NEAR(losses.back()[row], expected[row], 1e-5) << row;
        }
        EXPECT_EQ(losses.back(), losses.front());
        EXPECT_EQ(gradients.back(), gradients.front());
      }
    }
  }
}

}  // namespace
}  // namespace sluice
