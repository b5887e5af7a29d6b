// What a rank tells the others of itself, again and again, and what one rank knows of the others.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "runtime/job/activity.hpp"

namespace sluice {

struct RankStatus {
  Activity activity;
  // Seconds since the activity changed, without times in which the whole process was stopped.
  double still = 0;
  std::uint64_t saved_plus_one = 0;  // as ActivityBoard::saved_plus_one()
  std::uint32_t table_requests = 0;
  std::int32_t unheard = -1;  // a rank that it has not heard for half of its time limit; -1: none
  bool expects_end = false;   // a stop was asked for, or an error is on its way
};

inline constexpr std::size_t kStatusBytes = 120;
using StatusBytes = std::array<std::byte, kStatusBytes>;

[[nodiscard]] StatusBytes pack(const RankStatus& status);
// Nothing where the bytes are none of pack()'s.
[[nodiscard]] std::optional<RankStatus> unpack_status(std::span<const std::byte> bytes);

// A rank of the job, for people.
struct WatchedRank {
  std::string host;
  std::vector<int> stages;  // global
  int replica = 0;
};

// What this rank knows of a rank.
struct Sighting {
  bool observed = false;  // it sends its status to this rank, or is this rank
  bool seen = false;      // a status has come
  double silent = 0;      // seconds since it was heard; without a status, since the start
  bool gone = false;      // its process ended without a goodbye
  double gone_for = 0;    // seconds
  bool left = false;      // it has said goodbye: its pipeline is destroyed
  RankStatus status;
};

}  // namespace sluice
