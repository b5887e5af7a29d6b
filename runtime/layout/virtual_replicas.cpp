#include "runtime/layout/virtual_replicas.hpp"

#include <fmt/core.h>

#include <algorithm>
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

std::vector<int> dividing(int virtual_replicas) {
  std::vector<int> replicas = {virtual_replicas};
  while (replicas.back() % 2 == 0) replicas.push_back(replicas.back() / 2);
  if (replicas.back() > 1) replicas.push_back(1);
  std::reverse(replicas.begin(), replicas.end());
  return replicas;
}

std::string legal_virtual_replicas(int virtual_replicas, int replicas) {
  if (replicas == 1) return "legal are numbers from 1";
  std::int64_t below = replicas;
  while (2 * below < virtual_replicas) below *= 2;
  const bool both = below < virtual_replicas && 2 * below <= std::numeric_limits<int>::max();
  return fmt::format(
      "legal is the number of replicas times a power of two, here {}{}, or one replica with any "
      "number",
      below, both ? fmt::format(" or {}", 2 * below) : "");
}

int shares_of(int virtual_replicas, int replicas) {
  if (can_divide(virtual_replicas, replicas)) {
    return virtual_replicas == 0 ? 1 : virtual_replicas / replicas;
  }
  throw_usage("{} virtual replicas{}; {}", virtual_replicas,
              replicas == 1 ? "" : fmt::format(" with {} replicas", replicas),
              legal_virtual_replicas(virtual_replicas, replicas));
}

}  // namespace sluice
