// The layouts that a job may take, best first: "4x2,2x2" are a pipeline of 4 ranks with 2 replicas,
// else one of 2.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/launch/host_file.hpp"

namespace sluice {

struct Layout {
  int pipeline = 1, replicas = 1;
  [[nodiscard]] int ranks() const { return pipeline * replicas; }
  friend bool operator==(const Layout&, const Layout&) = default;
};

// "4x2"
[[nodiscard]] std::string to_string(const Layout& layout);

// Error(kUsage) names the part that is wrong and says what is legal: "PxR" with numbers from 1 to
// 100,000, at most 1,000,000 ranks, none twice.
[[nodiscard]] std::vector<Layout> parse_layouts(std::string_view text);

// Ranks that the hosts take; none where a host's number of slots is not known.
[[nodiscard]] std::optional<int> slots_of(std::span<const HostLine> hosts);

// The first layout of at most so many ranks. Without `slots` the first.
[[nodiscard]] std::optional<Layout> first_that_fits(std::span<const Layout> layouts,
                                                    std::optional<int> slots);

}  // namespace sluice
