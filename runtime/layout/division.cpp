#include "runtime/layout/division.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>

#include "comm/base/throw_error.hpp"

namespace sluice {

bool can_divide(int parts, int holders) {
  if (parts == 0) return true;
  if (parts < 0 || parts % holders != 0) return false;
  return holders == 1 || std::has_single_bit(static_cast<unsigned>(parts / holders));
}

std::vector<int> dividing(int parts) {
  std::vector<int> holders = {parts};
  while (holders.back() % 2 == 0) holders.push_back(holders.back() / 2);
  if (holders.back() > 1) holders.push_back(1);
  std::reverse(holders.begin(), holders.end());
  return holders;
}

std::string legal_parts(int parts, int holders, const DivisionNames& names) {
  if (holders == 1) return "legal are numbers from 1";
  std::int64_t below = holders;
  while (2 * below < parts) below *= 2;
  const bool both = below < parts && 2 * below <= std::numeric_limits<int>::max();
  return fmt::format(
      "legal is the number of {0}s times a power of two, here {1}{2}, or one {0} with any number",
      names.holder, below, both ? fmt::format(" or {}", 2 * below) : "");
}

int shares_of(int parts, int holders, const DivisionNames& names) {
  if (can_divide(parts, holders)) return parts == 0 ? 1 : parts / holders;
  throw_usage("{} {}{}; {}", parts, names.parts,
              holders == 1 ? "" : fmt::format(" with {} {}s", holders, names.holder),
              legal_parts(parts, holders, names));
}

}  // namespace sluice
