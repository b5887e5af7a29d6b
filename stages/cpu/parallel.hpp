// What the CPU operators share: places of elements, and cutting a range for threads.
#pragma once

#include <algorithm>
#include <cstdint>

#include <sluice/compute.hpp>
#include <sluice/tensor.hpp>

#include "comm/base/held_signals.hpp"

namespace sluice {

// Address of element `index` of an operand of any type.
[[nodiscard]] inline std::byte* element(const Tensor& tensor, std::int64_t index) {
  return tensor.as<std::byte>() + index * static_cast<std::int64_t>(size_of(tensor.spec.dtype));
}

// work(begin, end) over pieces of [0, count), one per thread, each but the last a multiple of
// `grain`. The work of one index must not depend on where the pieces end. Threads of the team that
// start here take no signals: oneDNN uses the same team, see library_call.hpp.
template <typename Work>
void parallel_range(int threads, std::int64_t count, std::int64_t grain, const Work& work) {
  const std::int64_t grains = (count + grain - 1) / grain;
  const std::int64_t pieces = std::min<std::int64_t>(threads, grains);
  if (pieces <= 1) {
    if (count > 0) work(std::int64_t{0}, count);
    return;
  }
  const HeldSignals held;
#pragma omp parallel for schedule(static) num_threads(static_cast <int>(pieces))
  for (std::int64_t piece = 0; piece < pieces; ++piece) {
    const std::int64_t begin = grains * piece / pieces * grain;
    const std::int64_t end = std::min(count, grains * (piece + 1) / pieces * grain);
    work(begin, end);
  }
}

template <typename Work>
void parallel_range(const ComputeContext& ctx, std::int64_t count, std::int64_t grain,
                    const Work& work) {
  parallel_range(ctx.threads(), count, grain, work);
}

// Multiples of this many columns or elements go to one thread: whole cache lines and vectors.
inline constexpr std::int64_t kColumnGrain = 64;
inline constexpr std::int64_t kElementGrain = 4096;

}  // namespace sluice
