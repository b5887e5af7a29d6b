// The rules by which a job that hangs has a culprit: who is lost, who is deadlocked, who is busy.
//
// Pure functions of what a rank knows of the others at one moment; they read no clock.
//
//   lost      a process has ended, or is silent for the time limit
//   deadlock  all are heard, each of them waits for others for the time limit, nobody computes
//   busy      a rank is in one action for the time limit, and is heard: it is not stuck in MPI's
//             hands, so this is a notice; an end only with a limit for actions
//
// A few ranks, the monitors, hear all others. The lowest monitor that is not lost decides. Where a
// rank hears fewer hosts than it has lost, it is its own host that is cut off.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "runtime/group/activity.hpp"

namespace sluice {

// What a rank tells the others of itself, again and again; sent as bytes, as all ranks have the
// same build.
struct RankStatus {
  Activity activity;
  // Seconds since the activity changed, without times in which the whole process was stopped.
  double still = 0;
  std::uint64_t saved_plus_one = 0;  // as ActivityBoard::saved_plus_one()
  std::uint32_t table_requests = 0;
  std::int32_t unheard = -1;  // a rank that it has not heard for half of its time limit; -1: none
  bool expects_end = false;   // a stop was asked for, or an error is on its way
};

// A rank of the job, for people.
struct WatchedRank {
  std::string host;
  std::vector<int> stages;  // global
  int replica = 0;
  int shard_group = 0;  // ShardGroups::group_of()
  int tensor = -1;      // coordinate; -1: no ranks share stages
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

struct WatchLimits {
  double timeout = 30;        // seconds
  double action_timeout = 0;  // seconds; 0: none
  double beat = 1;            // seconds between two statuses of a rank
};

// The limits of a job that goes at this pace. `timeout` and `action_timeout` as
// PipelineOptions::Watch.
[[nodiscard]] WatchLimits limits_of(double timeout, double action_timeout, const StepPace& pace);

struct Verdict {
  enum class Kind { kLost, kDeadlock, kBusy };
  Kind kind = Kind::kLost;
  std::vector<int> ranks;  // culprits, ascending; of a deadlock in the order in which they wait
  bool cut_off = false;    // the culprits are this rank and those that it hears
};

// What the rank `me` knows.
struct WatchView {
  int me = 0;
  std::span<const int> monitors;  // ascending
  std::span<const WatchedRank> ranks;
  std::span<const Sighting> sightings;  // [rank]
  bool network_down = false;            // none of this host's networks is up
};

// The ranks that hear all others: the first of each host, then the first ranks, at most 8.
[[nodiscard]] std::vector<int> monitors_of(std::span<const WatchedRank> ranks);
// The lowest monitor that is neither lost nor has left; `me` where there is none.
[[nodiscard]] int leader(const WatchView& view, const WatchLimits& limits);
[[nodiscard]] bool lost(const Sighting& sighting, const WatchLimits& limits);

// Nothing while all is well, while another rank decides, and while more may become known soon.
[[nodiscard]] std::optional<Verdict> judge(const WatchView& view, const WatchLimits& limits);

// Whether a rank that waits for `peer` needs what the peer has not done yet; nothing where that is
// not known.
[[nodiscard]] std::optional<bool> peer_is_behind(const RankStatus& waiting, const RankStatus& peer);

}  // namespace sluice
