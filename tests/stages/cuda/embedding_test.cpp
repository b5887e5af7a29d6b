// Embedding and its gradient on a GPU against the CPU's.
#include <random>

#include "tests/stages/cuda/gpu_compare.hpp"

namespace sluice {
namespace {

class CudaEmbeddingTest : public GpuCompareTest {
 protected:
  void check(const Values& tokens, std::int64_t samples, std::int64_t vocabulary,
             std::int64_t width) {
    for (const DType stream : kOperandTypes) check(tokens, samples, vocabulary, width, stream);
  }

 private:
  void check(const Values& tokens, std::int64_t samples, std::int64_t vocabulary,
             std::int64_t width, DType stream) {
    const auto sequence = static_cast<std::int64_t>(tokens.size()) / samples;
    SCOPED_TRACE(fmt::format("{} places, vocabulary {}, width {}, {}", tokens.size(), vocabulary,
                             width, name_of(stream)));
    const Operand places(DType::kI32, {samples, sequence}, tokens);
    const Operand table = random_operand(DType::kF32, {vocabulary, width}, 24);
    const Operand positions = random_operand(DType::kF32, {sequence + 2, width}, 25);
    const Operand out(stream, {samples * sequence, width});
    compare_shifted({&places, &table, &positions, &out}, kExact,
                    [](ComputeContext& ctx, const Tensors& at) {
                      embedding_forward(ctx, at[0], at[1], at[2], at[3]);
                    });
    compare({&places, &table, &out}, kExact, [](ComputeContext& ctx, const Tensors& at) {
      embedding_forward(ctx, at[0], at[1], {}, at[2]);
    });
    const Operand dout = random_operand(stream, {samples * sequence, width}, 26);
    const Operand dtable = random_operand(DType::kF32, {vocabulary, width}, 27);
    const Operand dpositions = random_operand(DType::kF32, {sequence + 2, width}, 28);
    compare_shifted({&places, &dout, &dtable, &dpositions}, 1e-5,
                    [](ComputeContext& ctx, const Tensors& at) {
                      embedding_backward_weight(ctx, at[0], at[1], at[2], at[3]);
                    });
    compare({&places, &dout, &dtable}, 1e-5, [](ComputeContext& ctx, const Tensors& at) {
      embedding_backward_weight(ctx, at[0], at[1], at[2], {});
    });
    const Operand over(DType::kF32, {vocabulary, width}),
        over_positions(DType::kF32, {sequence + 2, width});
    compare_shifted({&places, &dout, &over, &over_positions}, 1e-5,
                    [](ComputeContext& ctx, const Tensors& at) {
                      embedding_backward_weight(ctx, at[0], at[1], at[2], at[3], Write::kOverwrite);
                    });
  }
};

TEST_F(CudaEmbeddingTest, OfFewPlacesIsTheCpus) {
  check({0, 1, 2, 3, 4, 5, 6, 6, 6, 6, 1, 3, 3, 0, 2}, 3, 7, 131);
  check({1}, 1, 2, 1);
}

// Chunks with separate token counts, runs within a tile, across tiles and over many of them.
TEST_F(CudaEmbeddingTest, OfManyPlacesIsTheCpus) {
  std::mt19937 generator(5);
  std::geometric_distribution<int> frequent_first(0.08);
  std::uniform_int_distribution<int> any(0, 999);
  Values frequent, even, equal;
  for (int i = 0; i < 2200; ++i) {
    frequent.push_back(std::min(frequent_first(generator), 299));
    even.push_back(any(generator));
    equal.push_back(3);
  }
  check(frequent, 4, 300, 12);
  check(even, 5, 1000, 264);  // several slices of columns, and samples that are no multiple of 4
  check(even, 2, 1000, 5);
  check(equal, 1, 4, 8);
}

}  // namespace
}  // namespace sluice
