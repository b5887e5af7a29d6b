// Matmuls in which the bits of a row do not depend on the rows beside it: forward and input
// gradient of a linear layer. The library takes another kernel for some numbers of rows, and for
// the last rows of a matmul. So rows are taken in blocks whose sizes suit it, and the last block is
// filled up with zeros. Which sizes do comes from a table by instruction set; a check of the
// library as it runs here chooses among them, never a time.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include <sluice/compute.hpp>

#include "stages/cpu/matmul.hpp"

namespace sluice {

struct RowBlocks {
  std::int64_t most = 240;  // rows of a matmul, a multiple of `step`
  std::int64_t step = 12;   // every matmul has a multiple of as many
  bool invariant = true;    // the check has passed
  // Rows of each block but the last of `rows`: as few blocks as there can be, of equal size.
  [[nodiscard]] std::int64_t block(std::int64_t rows) const;
  friend bool operator==(const RowBlocks&, const RowBlocks&) = default;
};

// The first row of the table that passes the check with this many threads; where none does,
// blocks that the caches like. Takes up to 0.2 s at the first call of a process with these
// arguments; the result is kept. Requires a CPU.
[[nodiscard]] RowBlocks row_blocks(const ComputeContext& ctx, DType operands);

// Runs matmuls of a cache over padded rows. Used from one thread.
class RowMatmuls {
 public:
  explicit RowMatmuls(MatmulCache& matmuls) : matmuls_(matmuls) {}

  // row_blocks(), found once.
  [[nodiscard]] const RowBlocks& blocks(const ComputeContext& ctx, DType operands);
  // Which blocks matmuls have taken so far, such as "f32 rows in blocks of 240 by 12"; empty:
  // none.
  [[nodiscard]] std::string describe() const;
  // As MatmulCache::run() of one matmul of adjacent rows, after blocks() of its operands. Requires
  // spec.m <= most.
  void run(MatmulSpec spec, const void* a, const void* b, const void* bias, void* c);

 private:
  MatmulCache& matmuls_;
  std::map<DType, RowBlocks> known_;  // by the type of operands
  Buffer padded_;                     // rows of a, then of c
};

}  // namespace sluice
