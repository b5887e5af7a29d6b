// Matmuls of bf16 operands as f32 matmuls of copies, for processors whose instructions for bf16
// are not the faster way. Internal to the matmul cache.
//
// A matmul is cut into blocks whose copies stay in a core's second-level cache. The blocks along k
// are added up in f32, in ascending order, and a bf16 result is rounded once, from the whole sum.
// The cut, and with it the bits, depends only on the specification.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "stages/compute/matmul_spec.hpp"

namespace sluice {

// One of the f32 matmuls.
struct WidenedBlock {
  MatmulSpec matmul;  // of copies of a and b; of a copy of c where c is bf16, else of c itself
  // Where it begins in the operands, in elements. Of two blocks that begin at one place of an
  // operand the copies of it are the same.
  std::int64_t a = 0, b = 0, bias = 0, c = 0;
  bool whole = false;  // with it, this block of c has its whole sum
};

struct WidenedMatmul {
  std::vector<WidenedBlock> blocks;  // in the order they have to run
  // Scratch for one block's copies, in floats: that of a is at 0.
  std::size_t b_copy = 0, c_copy = 0, copies = 0;
};
[[nodiscard]] WidenedMatmul widen(const MatmulSpec& spec);

}  // namespace sluice
