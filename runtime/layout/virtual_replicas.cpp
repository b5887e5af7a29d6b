#include "runtime/layout/virtual_replicas.hpp"

#include <fmt/core.h>

#include <bit>
#include <cstdint>
#include <limits>

#include "comm/base/throw_error.hpp"

namespace sluice {

bool can_divide(int virtual_replicas, int replicas) {
  if (virtual_replicas == 0) return true;
  if (virtual_replicas < 0 || virtual_replicas % replicas != 0) return false;
  return replicas == 1 || std::has_single_bit(static_cast<unsigned>(virtual_replicas / replicas));
}

int shares_of(int virtual_replicas, int replicas) {
  if (can_divide(virtual_replicas, replicas)) {
    return virtual_replicas == 0 ? 1 : virtual_replicas / replicas;
  }
  if (replicas == 1) throw_usage("{} virtual replicas; legal are numbers from 1", virtual_replicas);
  std::int64_t below = replicas;
  while (2 * below < virtual_replicas) below *= 2;
  const bool both = below < virtual_replicas && 2 * below <= std::numeric_limits<int>::max();
  throw_usage(
      "{} virtual replicas with {} replicas; legal is the number of replicas times a power of two, "
      "here {}{}, or one replica with any number",
      virtual_replicas, replicas, below, both ? fmt::format(" or {}", 2 * below) : "");
}

}  // namespace sluice
