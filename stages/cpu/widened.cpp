#include "stages/cpu/widened.hpp"

#include <algorithm>

namespace sluice {

namespace {

// Of m, n and k; three copies of that size are 3 MiB.
constexpr std::int64_t kBlock = 512;

struct Part {
  std::int64_t first = 0, count = 0;
};

// visit(part) for [0, size) in parts of one size (the last may be smaller) of at most `most`.
template <typename Visit>
void for_each_part(std::int64_t size, std::int64_t most, const Visit& visit) {
  constexpr std::int64_t kGrain = 16;
  const std::int64_t parts = (size + most - 1) / most;
  if (parts == 0) return;
  const std::int64_t count =
      std::min(most, (size + parts * kGrain - 1) / (parts * kGrain) * kGrain);
  for (std::int64_t first = 0; first < size; first += count) {
    visit(Part{first, std::min(count, size - first)});
  }
}

// Distance of rows of `length` floats in a copy: whole cache lines, no multiple of a kilobyte,
// since such rows compete for the same places of a cache.
std::int64_t stride_of(std::int64_t length) {
  const std::int64_t stride = (length + 15) / 16 * 16;
  return stride % 256 == 0 ? stride + 16 : stride;
}

// Of a copy of [rows, columns] whose neighbours in memory are those of `from`.
MatmulLayout copy_layout(const MatmulLayout& from, std::int64_t rows, std::int64_t columns) {
  if (from.column == 1) return {stride_of(columns), 1, rows * stride_of(columns)};
  return {1, stride_of(rows), columns * stride_of(rows)};
}

std::int64_t place(const MatmulLayout& layout, std::int64_t batch, std::int64_t row,
                   std::int64_t column) {
  return batch * layout.batch + row * layout.row + column * layout.column;
}

// What a copy takes, in floats: the next one's alignment included.
std::size_t floats_of(const MatmulLayout& copy, std::int64_t batches) {
  constexpr std::int64_t kAligned = 64;
  return static_cast<std::size_t>((batches * copy.batch + kAligned - 1) / kAligned * kAligned);
}

}  // namespace

WidenedMatmul widen(const MatmulSpec& spec) {
  WidenedMatmul widened;
  std::size_t a = 0, b = 0, c = 0;  // of the largest copies, in floats
  const bool rounds = spec.result == DType::kBf16;
  const std::int64_t largest =
      std::max({spec.m * spec.k, spec.k * spec.n, spec.m * spec.n, std::int64_t{1}});
  const std::int64_t together = std::max<std::int64_t>(1, kBlock * kBlock / largest);
  for_each_part(spec.batches, together, [&](Part batch) {
    for_each_part(spec.m, kBlock, [&](Part m) {
      for_each_part(spec.n, kBlock, [&](Part n) {
        for_each_part(spec.k, kBlock, [&](Part k) {
          WidenedBlock& block = widened.blocks.emplace_back();
          block.matmul = {.batches = batch.count,
                          .m = m.count,
                          .n = n.count,
                          .k = k.count,
                          .a = copy_layout(spec.a, m.count, k.count),
                          .b = copy_layout(spec.b, k.count, n.count),
                          .c = rounds ? copy_layout({}, m.count, n.count) : spec.c,
                          .bias = spec.bias && k.first == 0,
                          .accumulate = spec.accumulate || k.first > 0};
          block.a = place(spec.a, batch.first, m.first, k.first);
          block.b = place(spec.b, batch.first, k.first, n.first);
          block.bias = n.first;
          block.c = place(spec.c, batch.first, m.first, n.first);
          block.whole = k.first + k.count == spec.k;
          a = std::max(a, floats_of(block.matmul.a, batch.count));
          b = std::max(b, floats_of(block.matmul.b, batch.count));
          if (rounds) c = std::max(c, floats_of(block.matmul.c, batch.count));
        });
      });
    });
  });
  widened.b_copy = a;
  widened.c_copy = a + b;
  widened.copies = a + b + c;
  return widened;
}

}  // namespace sluice
