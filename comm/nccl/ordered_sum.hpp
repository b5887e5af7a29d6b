// The kernel of NcclSums: sums shards of several ranks in the order of comm/base/sum_tree.hpp. Only
// NcclQueue launches it.
#pragma once

#include <cstddef>

#include <sluice/device.hpp>

namespace sluice {

// own[i] = the sum over ranks of their g[i], in fp32, where g of rank `rank` is `own` and the
// others lie in `others` in ascending order of ranks, at intervals of `stride` floats. Device
// memory. Less than 65,536 ranks.
struct ShardSum {
  float* own = nullptr;
  const float* others = nullptr;
  std::size_t stride = 0;
  std::size_t count = 0;
  int ranks = 1;
  int rank = 0;
};

// Launches the kernel on `stream`. Throws Error(kDevice).
void launch_shard_sum(const ShardSum& sum, StreamView stream);

}  // namespace sluice
