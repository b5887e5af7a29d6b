// What the instructions of stages/cuda_kernels/tensor_cores.cuh compute, against plain matmuls and
// tables of which lane holds which element: on a GPU the hardware, otherwise the emulation. The
// tables are the figures of the PTX ISA 9.0, "Matrix Fragments for mma.m16n8k16 with floating point
// type" (.bf16) and "Matrix Fragments for mma.m16n8k8" (.tf32), row by row.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "stages/cuda_kernels/tensor_cores.cuh"
#include "tests/stages/cuda/gpu_tools.hpp"

namespace sluice {
namespace {

// Lane and number of an element within the lane's fragment.
struct Held {
  int lane, element;
};

// clang-format off
constexpr Held kA16[16][16] = {
    {{0, 0}, {0, 1}, {1, 0}, {1, 1}, {2, 0}, {2, 1}, {3, 0}, {3, 1}, {0, 4}, {0, 5}, {1, 4}, {1, 5}, {2, 4}, {2, 5}, {3, 4}, {3, 5}},
    {{4, 0}, {4, 1}, {5, 0}, {5, 1}, {6, 0}, {6, 1}, {7, 0}, {7, 1}, {4, 4}, {4, 5}, {5, 4}, {5, 5}, {6, 4}, {6, 5}, {7, 4}, {7, 5}},
    {{8, 0}, {8, 1}, {9, 0}, {9, 1}, {10, 0}, {10, 1}, {11, 0}, {11, 1}, {8, 4}, {8, 5}, {9, 4}, {9, 5}, {10, 4}, {10, 5}, {11, 4}, {11, 5}},
    {{12, 0}, {12, 1}, {13, 0}, {13, 1}, {14, 0}, {14, 1}, {15, 0}, {15, 1}, {12, 4}, {12, 5}, {13, 4}, {13, 5}, {14, 4}, {14, 5}, {15, 4}, {15, 5}},
    {{16, 0}, {16, 1}, {17, 0}, {17, 1}, {18, 0}, {18, 1}, {19, 0}, {19, 1}, {16, 4}, {16, 5}, {17, 4}, {17, 5}, {18, 4}, {18, 5}, {19, 4}, {19, 5}},
    {{20, 0}, {20, 1}, {21, 0}, {21, 1}, {22, 0}, {22, 1}, {23, 0}, {23, 1}, {20, 4}, {20, 5}, {21, 4}, {21, 5}, {22, 4}, {22, 5}, {23, 4}, {23, 5}},
    {{24, 0}, {24, 1}, {25, 0}, {25, 1}, {26, 0}, {26, 1}, {27, 0}, {27, 1}, {24, 4}, {24, 5}, {25, 4}, {25, 5}, {26, 4}, {26, 5}, {27, 4}, {27, 5}},
    {{28, 0}, {28, 1}, {29, 0}, {29, 1}, {30, 0}, {30, 1}, {31, 0}, {31, 1}, {28, 4}, {28, 5}, {29, 4}, {29, 5}, {30, 4}, {30, 5}, {31, 4}, {31, 5}},
    {{0, 2}, {0, 3}, {1, 2}, {1, 3}, {2, 2}, {2, 3}, {3, 2}, {3, 3}, {0, 6}, {0, 7}, {1, 6}, {1, 7}, {2, 6}, {2, 7}, {3, 6}, {3, 7}},
    {{4, 2}, {4, 3}, {5, 2}, {5, 3}, {6, 2}, {6, 3}, {7, 2}, {7, 3}, {4, 6}, {4, 7}, {5, 6}, {5, 7}, {6, 6}, {6, 7}, {7, 6}, {7, 7}},
    {{8, 2}, {8, 3}, {9, 2}, {9, 3}, {10, 2}, {10, 3}, {11, 2}, {11, 3}, {8, 6}, {8, 7}, {9, 6}, {9, 7}, {10, 6}, {10, 7}, {11, 6}, {11, 7}},
    {{12, 2}, {12, 3}, {13, 2}, {13, 3}, {14, 2}, {14, 3}, {15, 2}, {15, 3}, {12, 6}, {12, 7}, {13, 6}, {13, 7}, {14, 6}, {14, 7}, {15, 6}, {15, 7}},
    {{16, 2}, {16, 3}, {17, 2}, {17, 3}, {18, 2}, {18, 3}, {19, 2}, {19, 3}, {16, 6}, {16, 7}, {17, 6}, {17, 7}, {18, 6}, {18, 7}, {19, 6}, {19, 7}},
    {{20, 2}, {20, 3}, {21, 2}, {21, 3}, {22, 2}, {22, 3}, {23, 2}, {23, 3}, {20, 6}, {20, 7}, {21, 6}, {21, 7}, {22, 6}, {22, 7}, {23, 6}, {23, 7}},
    {{24, 2}, {24, 3}, {25, 2}, {25, 3}, {26, 2}, {26, 3}, {27, 2}, {27, 3}, {24, 6}, {24, 7}, {25, 6}, {25, 7}, {26, 6}, {26, 7}, {27, 6}, {27, 7}},
    {{28, 2}, {28, 3}, {29, 2}, {29, 3}, {30, 2}, {30, 3}, {31, 2}, {31, 3}, {28, 6}, {28, 7}, {29, 6}, {29, 7}, {30, 6}, {30, 7}, {31, 6}, {31, 7}},
};
constexpr Held kB16[16][8] = {
    {{0, 0}, {4, 0}, {8, 0}, {12, 0}, {16, 0}, {20, 0}, {24, 0}, {28, 0}},
    {{0, 1}, {4, 1}, {8, 1}, {12, 1}, {16, 1}, {20, 1}, {24, 1}, {28, 1}},
    {{1, 0}, {5, 0}, {9, 0}, {13, 0}, {17, 0}, {21, 0}, {25, 0}, {29, 0}},
    {{1, 1}, {5, 1}, {9, 1}, {13, 1}, {17, 1}, {21, 1}, {25, 1}, {29, 1}},
    {{2, 0}, {6, 0}, {10, 0}, {14, 0}, {18, 0}, {22, 0}, {26, 0}, {30, 0}},
    {{2, 1}, {6, 1}, {10, 1}, {14, 1}, {18, 1}, {22, 1}, {26, 1}, {30, 1}},
    {{3, 0}, {7, 0}, {11, 0}, {15, 0}, {19, 0}, {23, 0}, {27, 0}, {31, 0}},
    {{3, 1}, {7, 1}, {11, 1}, {15, 1}, {19, 1}, {23, 1}, {27, 1}, {31, 1}},
    {{0, 2}, {4, 2}, {8, 2}, {12, 2}, {16, 2}, {20, 2}, {24, 2}, {28, 2}},
    {{0, 3}, {4, 3}, {8, 3}, {12, 3}, {16, 3}, {20, 3}, {24, 3}, {28, 3}},
    {{1, 2}, {5, 2}, {9, 2}, {13, 2}, {17, 2}, {21, 2}, {25, 2}, {29, 2}},
    {{1, 3}, {5, 3}, {9, 3}, {13, 3}, {17, 3}, {21, 3}, {25, 3}, {29, 3}},
    {{2, 2}, {6, 2}, {10, 2}, {14, 2}, {18, 2}, {22, 2}, {26, 2}, {30, 2}},
    {{2, 3}, {6, 3}, {10, 3}, {14, 3}, {18, 3}, {22, 3}, {26, 3}, {30, 3}},
    {{3, 2}, {7, 2}, {11, 2}, {15, 2}, {19, 2}, {23, 2}, {27, 2}, {31, 2}},
    {{3, 3}, {7, 3}, {11, 3}, {15, 3}, {19, 3}, {23, 3}, {27, 3}, {31, 3}},
};
constexpr Held kA8[16][8] = {
    {{0, 0}, {1, 0}, {2, 0}, {3, 0}, {0, 2}, {1, 2}, {2, 2}, {3, 2}},
    {{4, 0}, {5, 0}, {6, 0}, {7, 0}, {4, 2}, {5, 2}, {6, 2}, {7, 2}},
    {{8, 0}, {9, 0}, {10, 0}, {11, 0}, {8, 2}, {9, 2}, {10, 2}, {11, 2}},
    {{12, 0}, {13, 0}, {14, 0}, {15, 0}, {12, 2}, {13, 2}, {14, 2}, {15, 2}},
    {{16, 0}, {17, 0}, {18, 0}, {19, 0}, {16, 2}, {17, 2}, {18, 2}, {19, 2}},
    {{20, 0}, {21, 0}, {22, 0}, {23, 0}, {20, 2}, {21, 2}, {22, 2}, {23, 2}},
    {{24, 0}, {25, 0}, {26, 0}, {27, 0}, {24, 2}, {25, 2}, {26, 2}, {27, 2}},
    {{28, 0}, {29, 0}, {30, 0}, {31, 0}, {28, 2}, {29, 2}, {30, 2}, {31, 2}},
    {{0, 1}, {1, 1}, {2, 1}, {3, 1}, {0, 3}, {1, 3}, {2, 3}, {3, 3}},
    {{4, 1}, {5, 1}, {6, 1}, {7, 1}, {4, 3}, {5, 3}, {6, 3}, {7, 3}},
    {{8, 1}, {9, 1}, {10, 1}, {11, 1}, {8, 3}, {9, 3}, {10, 3}, {11, 3}},
    {{12, 1}, {13, 1}, {14, 1}, {15, 1}, {12, 3}, {13, 3}, {14, 3}, {15, 3}},
    {{16, 1}, {17, 1}, {18, 1}, {19, 1}, {16, 3}, {17, 3}, {18, 3}, {19, 3}},
    {{20, 1}, {21, 1}, {22, 1}, {23, 1}, {20, 3}, {21, 3}, {22, 3}, {23, 3}},
    {{24, 1}, {25, 1}, {26, 1}, {27, 1}, {24, 3}, {25, 3}, {26, 3}, {27, 3}},
    {{28, 1}, {29, 1}, {30, 1}, {31, 1}, {28, 3}, {29, 3}, {30, 3}, {31, 3}},
};
constexpr Held kB8[8][8] = {
    {{0, 0}, {4, 0}, {8, 0}, {12, 0}, {16, 0}, {20, 0}, {24, 0}, {28, 0}},
    {{1, 0}, {5, 0}, {9, 0}, {13, 0}, {17, 0}, {21, 0}, {25, 0}, {29, 0}},
    {{2, 0}, {6, 0}, {10, 0}, {14, 0}, {18, 0}, {22, 0}, {26, 0}, {30, 0}},
    {{3, 0}, {7, 0}, {11, 0}, {15, 0}, {19, 0}, {23, 0}, {27, 0}, {31, 0}},
    {{0, 1}, {4, 1}, {8, 1}, {12, 1}, {16, 1}, {20, 1}, {24, 1}, {28, 1}},
    {{1, 1}, {5, 1}, {9, 1}, {13, 1}, {17, 1}, {21, 1}, {25, 1}, {29, 1}},
    {{2, 1}, {6, 1}, {10, 1}, {14, 1}, {18, 1}, {22, 1}, {26, 1}, {30, 1}},
    {{3, 1}, {7, 1}, {11, 1}, {15, 1}, {19, 1}, {23, 1}, {27, 1}, {31, 1}},
};
constexpr Held kSums[16][8] = {
    {{0, 0}, {0, 1}, {1, 0}, {1, 1}, {2, 0}, {2, 1}, {3, 0}, {3, 1}},
    {{4, 0}, {4, 1}, {5, 0}, {5, 1}, {6, 0}, {6, 1}, {7, 0}, {7, 1}},
    {{8, 0}, {8, 1}, {9, 0}, {9, 1}, {10, 0}, {10, 1}, {11, 0}, {11, 1}},
    {{12, 0}, {12, 1}, {13, 0}, {13, 1}, {14, 0}, {14, 1}, {15, 0}, {15, 1}},
    {{16, 0}, {16, 1}, {17, 0}, {17, 1}, {18, 0}, {18, 1}, {19, 0}, {19, 1}},
    {{20, 0}, {20, 1}, {21, 0}, {21, 1}, {22, 0}, {22, 1}, {23, 0}, {23, 1}},
    {{24, 0}, {24, 1}, {25, 0}, {25, 1}, {26, 0}, {26, 1}, {27, 0}, {27, 1}},
    {{28, 0}, {28, 1}, {29, 0}, {29, 1}, {30, 0}, {30, 1}, {31, 0}, {31, 1}},
    {{0, 2}, {0, 3}, {1, 2}, {1, 3}, {2, 2}, {2, 3}, {3, 2}, {3, 3}},
    {{4, 2}, {4, 3}, {5, 2}, {5, 3}, {6, 2}, {6, 3}, {7, 2}, {7, 3}},
    {{8, 2}, {8, 3}, {9, 2}, {9, 3}, {10, 2}, {10, 3}, {11, 2}, {11, 3}},
    {{12, 2}, {12, 3}, {13, 2}, {13, 3}, {14, 2}, {14, 3}, {15, 2}, {15, 3}},
    {{16, 2}, {16, 3}, {17, 2}, {17, 3}, {18, 2}, {18, 3}, {19, 2}, {19, 3}},
    {{20, 2}, {20, 3}, {21, 2}, {21, 3}, {22, 2}, {22, 3}, {23, 2}, {23, 3}},
    {{24, 2}, {24, 3}, {25, 2}, {25, 3}, {26, 2}, {26, 3}, {27, 2}, {27, 3}},
    {{28, 2}, {28, 3}, {29, 2}, {29, 3}, {30, 2}, {30, 3}, {31, 2}, {31, 3}},
};
// clang-format on

// Words of all lanes, [lane][word].
using Words = std::vector<std::uint32_t>;

class TensorCoreTest : public GpuTest {
 protected:
  // Runs `kernel(input, result)` in one warp and returns `results` words.
  template <typename Kernel>
  Words run(Kernel kernel, const Words& input, std::size_t results) {
    const auto upload = [](const Words& words) {
      Operand operand(DType::kF32, {static_cast<std::int64_t>(words.size())});
      std::memcpy(operand.tensor.data, words.data(), words.size() * sizeof(std::uint32_t));
      return OnGpu(operand);
    };
    const OnGpu from = upload(input), to = upload(Words(results));
    cuda::launch("tensor cores", kernel, {1, 32, 4096}, cuda::native(gpu().stream()),
                 reinterpret_cast<const std::uint32_t*>(from.tensor().data),
                 reinterpret_cast<std::uint32_t*>(to.tensor().data));
    const Operand fetched = to.fetch(gpu());
    Words result(results);
    std::memcpy(result.data(), fetched.tensor.data, results * sizeof(std::uint32_t));
    return result;
  }
};

std::uint32_t bits_of(float value) {
  std::uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}
float value_of(std::uint32_t bits) {
  float value = 0;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Small whole numbers, exact in every type and sum, and no two rows or columns alike.
float number(int row, int column) { return static_cast<float>((row * 7 + column * 3) % 11 - 5); }
float start(int row, int column) { return static_cast<float>(100 * row + column); }

// input: a[4], b[2], sums[4] of each lane; result: sums[4].
template <bool kTf32>
__global__ void matmul_kernel(const std::uint32_t* input, std::uint32_t* result) {
  const std::uint32_t* mine = input + 10 * threadIdx.x;
  const std::uint32_t a[4] = {mine[0], mine[1], mine[2], mine[3]};
  float sums[4];
  for (int i = 0; i < 4; ++i) sums[i] = __uint_as_float(mine[6 + i]);
  if constexpr (kTf32) {
    cuda::multiply_tf32(sums, a, mine[4], mine[5]);
  } else {
    cuda::multiply_bf16(sums, a, mine[4], mine[5]);
  }
  for (unsigned i = 0; i < 4; ++i) result[4 * threadIdx.x + i] = __float_as_uint(sums[i]);
}

// The fragments of number() and its transpose, of `depth` columns and rows.
template <int kDepth>
Words fragments(const Held (&a)[16][kDepth], const Held (&b)[kDepth][8]) {
  Words input(32 * 10);
  const auto put = [&](const Held& at, int first, float value) {
    if (kDepth == 16) {  // two bf16 in a word
      input[static_cast<std::size_t>(10 * at.lane + first + at.element / 2)] |=
          bits_of(value) >> 16 << (at.element % 2 * 16);
    } else {
      input[static_cast<std::size_t>(10 * at.lane + first + at.element)] = bits_of(value);
    }
  };
  for (int k = 0; k < kDepth; ++k) {
    for (int row = 0; row < 16; ++row) put(a[row][k], 0, number(row, k));
    for (int column = 0; column < 8; ++column) put(b[k][column], 4, number(column, 2 * k));
  }
  for (int row = 0; row < 16; ++row) {
    for (int column = 0; column < 8; ++column) {
      const Held at = kSums[row][column];
      input[static_cast<std::size_t>(10 * at.lane + 6 + at.element)] = bits_of(start(row, column));
    }
  }
  return input;
}

void expect_matmul(const Words& result, int depth) {
  for (int row = 0; row < 16; ++row) {
    for (int column = 0; column < 8; ++column) {
      float sum = start(row, column);
      for (int k = 0; k < depth; ++k) sum += number(row, k) * number(column, 2 * k);
      const Held at = kSums[row][column];
      EXPECT_EQ(value_of(result[static_cast<std::size_t>(4 * at.lane + at.element)]), sum)
          << "row " << row << ", column " << column;
    }
  }
}

TEST_F(TensorCoreTest, MultipliesBf16) {
  expect_matmul(run(matmul_kernel<false>, fragments(kA16, kB16), 32 * 4), 16);
}

TEST_F(TensorCoreTest, MultipliesTf32) {
  expect_matmul(run(matmul_kernel<true>, fragments(kA8, kB8), 32 * 4), 8);
}

// input: four matrices of 8 x 8 elements of 2 bytes; result: a word of each for each lane. The
// rows lie in reverse order in shared memory, so that it is the lanes' addresses that count.
template <bool kTransposed>
__global__ void load_kernel(const std::uint32_t* input, std::uint32_t* result) {
  auto* rows = cuda::shared_memory<std::uint32_t>();
  for (int i = static_cast<int>(threadIdx.x); i < 128; i += 32) {
    rows[(31 - i / 4) * 4 + i % 4] = input[i];
  }
  __syncthreads();
  std::uint32_t words[4];
  if constexpr (kTransposed) {
    cuda::load_transposed(words, rows + (31 - threadIdx.x) * 4);
  } else {
    cuda::load_matrices(words, rows + (31 - threadIdx.x) * 4);
  }
  for (unsigned i = 0; i < 4; ++i) result[4 * threadIdx.x + i] = words[i];
}

// Element (row, column) of matrix m is 100 m + 10 row + column.
Words matrices() {
  Words input(128);
  for (std::uint32_t i = 0; i < 128; ++i) {
    const std::uint32_t first = 100 * (i / 32) + 10 * (i / 4 % 8) + 2 * (i % 4);
    input[i] = first | (first + 1) << 16;
  }
  return input;
}

// "Lane 0 holds elements 0 and 1 of row 0, lane 1 elements 2 and 3, ..., lane 4 those of row 1."
TEST_F(TensorCoreTest, LoadsMatrices) {
  const Words result = run(load_kernel<false>, matrices(), 128);
  for (std::uint32_t lane = 0; lane < 32; ++lane) {
    for (std::uint32_t matrix = 0; matrix < 4; ++matrix) {
      const std::uint32_t first = 100 * matrix + 10 * (lane / 4) + 2 * (lane % 4);
      EXPECT_EQ(result[4 * lane + matrix], first | (first + 1) << 16) << lane << ", " << matrix;
    }
  }
}

TEST_F(TensorCoreTest, LoadsTransposedMatrices) {
  const Words result = run(load_kernel<true>, matrices(), 128);
  for (std::uint32_t lane = 0; lane < 32; ++lane) {
    for (std::uint32_t matrix = 0; matrix < 4; ++matrix) {
      const std::uint32_t first = 100 * matrix + 20 * (lane % 4) + lane / 4;
      EXPECT_EQ(result[4 * lane + matrix], first | (first + 10) << 16) << lane << ", " << matrix;
    }
  }
}

__global__ void round_kernel(const std::uint32_t* input, std::uint32_t* result) {
  result[threadIdx.x] = cuda::round_to_tf32(input[threadIdx.x]);
}

TEST_F(TensorCoreTest, RoundsToTf32) {
  Words input(32);
  input[0] = bits_of(1.0F);
  input[1] = bits_of(1.0F + 0x1p-11F);  // between two numbers: away from zero
  input[2] = bits_of(-1.0F - 0x1p-11F);
  input[3] = bits_of(1.0F + 0x1p-11F - 0x1p-23F);
  input[4] = bits_of(INFINITY);
  const Words result = run(round_kernel, input, 32);
  EXPECT_EQ(value_of(result[0]), 1.0F);
  EXPECT_EQ(value_of(result[1]), 1.0F + 0x1p-10F);
  EXPECT_EQ(value_of(result[2]), -1.0F - 0x1p-10F);
  EXPECT_EQ(value_of(result[3]), 1.0F);
  EXPECT_EQ(value_of(result[4]), INFINITY);
}

// input: 128 words; result: the same by two copies of each lane, and zeros for what does not exist.
__global__ void copy_kernel(const std::uint32_t* input, std::uint32_t* result) {
  auto* words = cuda::shared_memory<std::uint32_t>();
  cuda::start_copy<16>(words + 4 * threadIdx.x, input + 4 * threadIdx.x, threadIdx.x % 3 != 0);
  cuda::start_copy<4>(words + 128 + threadIdx.x, input + threadIdx.x, threadIdx.x % 5 != 0);
  cuda::finish_copies();
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < 160; i += 32) result[i] = words[i];
}

TEST_F(TensorCoreTest, CopiesWhatExists) {
  Words input(128);
  for (std::uint32_t i = 0; i < 128; ++i) input[i] = i + 1;
  const Words result = run(copy_kernel, input, 160);
  for (std::uint32_t i = 0; i < 160; ++i) {
    const std::uint32_t copied =
        i < 128 ? (i / 4 % 3 != 0 ? i + 1 : 0) : ((i - 128) % 5 != 0 ? i - 128 + 1 : 0);
    EXPECT_EQ(result[i], copied) << i;
  }
}

#if SLUICE_EMULATED_CUDA
// In the emulation copies are late, so that a kernel that does not wait is seen.
__global__ void early_kernel(const std::uint32_t* input, std::uint32_t* result) {
  auto* words = cuda::shared_memory<std::uint32_t>();
  cuda::start_copy<16>(words + 4 * threadIdx.x, input + 4 * threadIdx.x, true);
  for (unsigned i = 0; i < 4; ++i) result[4 * threadIdx.x + i] = words[4 * threadIdx.x + i];
  cuda::finish_copies();
}

TEST_F(TensorCoreTest, ACopyIsNotThereBeforeItIsWaitedFor) {
  const Words result = run(early_kernel, Words(128, 7), 128);
  for (const std::uint32_t word : result) EXPECT_EQ(word, ~0U);
}
#endif

}  // namespace
}  // namespace sluice
