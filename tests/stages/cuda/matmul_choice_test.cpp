// Which of the library's algorithms a matmul takes, which only the emulation tells.
#include <gtest/gtest.h>

#include "stages/cuda/cuda_backend.hpp"
#include "stages/cuda/matmul.hpp"
#include "tests/emulated_cuda/control.hpp"
#include "tests/stages/cuda/gpu_tools.hpp"

namespace sluice {
namespace {

class MatmulChoiceTest : public GpuTest {
 protected:
  // `b`: as it is multiplied. A result of operands' type, but where it accumulates.
  int choice(const MatmulLayout& b, DType operands, bool accumulate = false,
             cuda::Epilogue epilogue = cuda::Epilogue::kNone) {
    const OnGpu zeros(Operand(DType::kF32, {64, 64})), c(Operand(DType::kF32, {64, 64}));
    MatmulSpec matmul;
    matmul.m = matmul.n = matmul.k = 64;
    matmul.a.row = matmul.c.row = 64;
    matmul.b = b;
    matmul.operands = operands;
    matmul.result = accumulate ? DType::kF32 : operands;
    matmul.accumulate = accumulate;
    cuda::backend_of(gpu()).matmuls().run({matmul, epilogue}, {.a = zeros.tensor().data,
                                                               .b = zeros.tensor().data,
                                                               .c = c.tensor().data,
                                                               .aux = zeros.tensor().data});
    gpu().stream().synchronize();
    return emulated::last_matmul_candidate();
  }
  static constexpr MatmulLayout kTransposed = {.row = 1, .column = 64}, kPlain = {.row = 64};
};

TEST_F(MatmulChoiceTest, ForwardMatmulsTakeSmallTilesButNoSplitSums) {
  EXPECT_EQ(choice(kTransposed, DType::kBf16), 2);
}

TEST_F(MatmulChoiceTest, SoDoThoseWithAnActivation) {
  EXPECT_EQ(choice(kPlain, DType::kBf16, false, cuda::Epilogue::kGeluGradient), 2);
}

TEST_F(MatmulChoiceTest, GradientsTakeTheLibrarysFirst) {
  EXPECT_EQ(choice(kPlain, DType::kBf16), 0);
  EXPECT_EQ(choice(kPlain, DType::kBf16, /*accumulate=*/true), 0);
}

TEST_F(MatmulChoiceTest, SoDoesF32) { EXPECT_EQ(choice(kTransposed, DType::kF32), 0); }

}  // namespace
}  // namespace sluice
