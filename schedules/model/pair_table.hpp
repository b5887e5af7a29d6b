// One value per pair of stage and micro-batch, for walks that visit all ranks in turns and advance
// a little on each: the usual order of a pipeline, and the worst one for a cache.
//
// A long row (one stage) takes an odd number of cache lines: rows of a power of two, as m = 4096
// would give, put all stages' entries for one micro-batch into the same few sets of the cache. at()
// fetches the row's next line ahead, which is then there when the walk comes back to the stage.
#pragma once

#include <cstddef>
#include <vector>

namespace sluice {

inline constexpr std::size_t kCacheLine = 64;

template <class T>
class PairTable {
 public:
  PairTable() = default;
  PairTable(int stages, int micro_batches)
      : stride_(row_length(static_cast<std::size_t>(micro_batches))),
        values_(static_cast<std::size_t>(stages) * stride_) {}

  // Requires: both indices in range.
  T& at(int stage, int micro_batch) {
    T& value = values_[index(stage, micro_batch)];
    __builtin_prefetch(&value + kPerLine, 1);
    return value;
  }
  const T& at(int stage, int micro_batch) const { return values_[index(stage, micro_batch)]; }

 private:
  static_assert(sizeof(T) <= kCacheLine && kCacheLine % sizeof(T) == 0);
  static constexpr std::size_t kPerLine = kCacheLine / sizeof(T);

  static std::size_t row_length(std::size_t micro_batches) {
    constexpr std::size_t kShortRow = 8 * kPerLine;  // left as it is: many of them fit a cache
    if (micro_batches < kShortRow) return micro_batches;
    return ((micro_batches + kPerLine - 1) / kPerLine | 1U) * kPerLine;
  }

  [[nodiscard]] std::size_t index(int stage, int micro_batch) const {
    return static_cast<std::size_t>(stage) * stride_ + static_cast<std::size_t>(micro_batch);
  }

  std::size_t stride_ = 0;
  std::vector<T> values_;
};

}  // namespace sluice
