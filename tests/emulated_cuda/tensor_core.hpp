// What tensor cores compute, for kernels compiled by kernel_shim.hpp: the warp meets, and the last
// lane to arrive computes for all, from the layouts that the PTX ISA (version 9.0) gives, "Matrix
// Fragments for mma.m16n8k16 with floating point type", "mma.m16n8k8", "ldmatrix". Each sum of
// a matmul is rounded once; the hardware's rounding is not specified.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <source_location>

#include "tests/emulated_cuda/block.hpp"

namespace sluice::emulated {

struct MatrixPlace {
  int row, column;
};

// The ISA's formulas for element i of a lane's fragment.
struct M16n8k16 {  // .bf16
  static constexpr int kDepth = 16, kOfA = 8, kOfB = 4;
  static constexpr MatrixPlace a(int lane, int i) {
    const int group = lane >> 2, thread = lane % 4;
    return {(0 <= i && i < 2) || (4 <= i && i < 6) ? group : group + 8,
            i < 4 ? thread * 2 + (i & 1) : thread * 2 + (i & 1) + 8};
  }
  static constexpr MatrixPlace b(int lane, int i) {
    const int group = lane >> 2, thread = lane % 4;
    return {i < 2 ? thread * 2 + (i & 1) : thread * 2 + (i & 1) + 8, group};
  }
  static float value(const std::uint32_t* words, int i) {
    return std::bit_cast<float>(i % 2 == 0 ? words[i / 2] << 16 : words[i / 2] & 0xFFFF0000U);
  }
};
struct M16n8k8 {  // .tf32
  static constexpr int kDepth = 8, kOfA = 4, kOfB = 2;
  static constexpr MatrixPlace a(int lane, int i) {
    const int group = lane >> 2, thread = lane % 4;
    return {i == 0 || i == 2 ? group : group + 8, i == 0 || i == 1 ? thread : thread + 4};
  }
  static constexpr MatrixPlace b(int lane, int i) {
    const int group = lane >> 2, thread = lane % 4;
    return {i == 0 ? thread : thread + 4, group};
  }
  static float value(const std::uint32_t* words, int i) {
    return std::bit_cast<float>(words[i] & 0xFFFFE000U);
  }
};
constexpr MatrixPlace place_in_sums(int lane, int i) {
  const int group = lane >> 2, thread = lane % 4;
  return {i < 2 ? group : group + 8, thread * 2 + (i & 1)};
}

// A lane's registers.
struct MmaOperands {
  float* sums;
  const std::uint32_t *a, *b;
};

template <typename Fragments>
void multiply_fragments(std::uint64_t* lanes) {
  float a[16][Fragments::kDepth], b[Fragments::kDepth][8];
  const auto operands = [&](int lane) {
    return reinterpret_cast<const MmaOperands*>(static_cast<std::uintptr_t>(lanes[lane]));
  };
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < Fragments::kOfA; ++i) {
      const MatrixPlace at = Fragments::a(lane, i);
      a[at.row][at.column] = Fragments::value(operands(lane)->a, i);
    }
    for (int i = 0; i < Fragments::kOfB; ++i) {
      const MatrixPlace at = Fragments::b(lane, i);
      b[at.row][at.column] = Fragments::value(operands(lane)->b, i);
    }
  }
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 4; ++i) {
      const MatrixPlace at = place_in_sums(lane, i);
      double sum = operands(lane)->sums[i];
      for (int k = 0; k < Fragments::kDepth; ++k) sum += double{a[at.row][k]} * b[k][at.column];
      operands(lane)->sums[i] = static_cast<float>(sum);
    }
  }
}

template <typename Fragments>
void multiply_in_warp(const MmaOperands& mine, std::source_location where) {
  warp_reduction(reinterpret_cast<std::uintptr_t>(&mine), multiply_fragments<Fragments>, where);
}
inline void mma_m16n8k16_bf16(float (&sums)[4], const std::uint32_t (&a)[4],
                              const std::array<std::uint32_t, 2>& b,
                              std::source_location where = std::source_location::current()) {
  multiply_in_warp<M16n8k16>({sums, a, b.data()}, where);
}
inline void mma_m16n8k8_tf32(float (&sums)[4], const std::uint32_t (&a)[4],
                             const std::array<std::uint32_t, 2>& b,
                             std::source_location where = std::source_location::current()) {
  multiply_in_warp<M16n8k8>({sums, a, b.data()}, where);
}

// cvt.rna: to nearest, ties away from zero.
inline std::uint32_t round_to_tf32(std::uint32_t bits) {
  const float value = std::bit_cast<float>(bits);
  return value - value == 0 ? (bits + 0x1000U) & 0xFFFFE000U : bits;
}

struct MatrixLoad {
  std::uint32_t* words;
  const unsigned char* row;
};

// Lane l's address is that of row l % 8 of matrix l / 8; its word of a matrix holds elements 2 (l %
// 4) and 2 (l % 4) + 1 of row l / 4, or, with .trans, of column l / 4.
template <bool kTransposed>
void load_fragments(std::uint64_t* lanes) {
  const auto load = [&](int lane) {
    return reinterpret_cast<const MatrixLoad*>(static_cast<std::uintptr_t>(lanes[lane]));
  };
  for (int matrix = 0; matrix < 4; ++matrix) {
    std::uint16_t elements[8][8];
    for (int row = 0; row < 8; ++row) {
      const unsigned char* from = load(8 * matrix + row)->row;
      if (reinterpret_cast<std::uintptr_t>(from) % 16 != 0) __builtin_trap();  // as the GPU's
      std::memcpy(elements[row], from, sizeof elements[row]);
    }
    for (int lane = 0; lane < 32; ++lane) {
      const int line = lane / 4, first = lane % 4 * 2;
      const std::uint32_t low = kTransposed ? elements[first][line] : elements[line][first];
      const std::uint32_t high =
          kTransposed ? elements[first + 1][line] : elements[line][first + 1];
      load(lane)->words[matrix] = low | high << 16;
    }
  }
}
inline void ldmatrix_x4(std::uint32_t (&words)[4], const void* row, bool transposed,
                        std::source_location where = std::source_location::current()) {
  const MatrixLoad mine = {words, static_cast<const unsigned char*>(row)};
  warp_reduction(reinterpret_cast<std::uintptr_t>(&mine),
                 transposed ? load_fragments<true> : load_fragments<false>, where);
}

}  // namespace sluice::emulated
