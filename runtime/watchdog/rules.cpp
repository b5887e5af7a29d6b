#include "runtime/watchdog/rules.hpp"

#include <algorithm>
#include <map>
#include <set>
#include <string>

#include "comm/base/index.hpp"

namespace sluice {
namespace {

constexpr std::size_t kMostMonitors = 8;
// Seconds that a launcher gets to end the job by itself after a process has ended.
constexpr double kLauncherTime = 3;
constexpr double kLeastTimeout = 30, kStepsOfTimeout = 10, kFirstTimeout = 300;
constexpr std::uint64_t kFirstSteps = 2;
constexpr double kShortestBeat = 0.1, kLongestBeat = 1, kBeatsOfTimeout = 10;

// Whether more may become known within a few beats: that a rank is lost as well, or is not.
bool unsettled(const WatchView& view, const WatchLimits& limits) {
  return std::any_of(view.sightings.begin(), view.sightings.end(), [&](const Sighting& each) {
    if (!each.observed || each.left || lost(each, limits)) return false;
    return each.gone || each.silent > limits.timeout - 3 * limits.beat;
  });
}

// Ranks of which every host that has one is dead for this rank, against hosts that are not.
bool is_cut_off(const WatchView& view, const WatchLimits& limits) {
  std::map<std::string, bool> silent;  // [host] whether all its ranks are lost, none by its end
  for (std::size_t rank = 0; rank < view.sightings.size(); ++rank) {
    const Sighting& each = view.sightings[rank];
    if (!each.observed || each.left) continue;
    const bool dead = lost(each, limits) && !each.gone;
    const auto [host, is_new] = silent.emplace(view.ranks[rank].host, dead);
    host->second = host->second && dead;
  }
  const auto dead =
      std::count_if(silent.begin(), silent.end(), [](auto& host) { return host.second; });
  const auto alive = static_cast<std::ptrdiff_t>(silent.size()) - dead;
  return dead > alive || (dead > 0 && view.network_down);
}

std::optional<Verdict> judge_lost(const WatchView& view, const WatchLimits& limits) {
  Verdict verdict{.kind = Verdict::Kind::kLost, .ranks = {}, .cut_off = false};
  bool any = false;
  for (const Sighting& each : view.sightings) any = any || (each.observed && lost(each, limits));
  if (!any) return std::nullopt;
  verdict.cut_off = is_cut_off(view, limits);
  for (std::size_t rank = 0; rank < view.sightings.size(); ++rank) {
    const Sighting& each = view.sightings[rank];
    if (!each.observed || each.left) continue;
    if (lost(each, limits) != verdict.cut_off) verdict.ranks.push_back(static_cast<int>(rank));
  }
  return verdict;
}

// Who waits for whom: from the first rank on, until a rank comes again, does not wait for one rank
// alone, or has done what is waited for.
std::vector<int> chain_of(const WatchView& view) {
  std::vector<int> best;
  for (std::size_t start = 0; start < view.sightings.size(); ++start) {
    if (view.sightings[start].left) continue;
    std::vector<int> chain;
    int rank = static_cast<int>(start);
    while (rank >= 0 && at(rank) < view.sightings.size()) {
      const auto seen = std::find(chain.begin(), chain.end(), rank);
      if (seen != chain.end()) {
        chain.erase(chain.begin(), seen);
        return chain;  // a cycle
      }
      chain.push_back(rank);
      const Sighting& here = view.sightings[at(rank)];
      if (here.left || !here.status.activity.waits) break;
      const int peer = here.status.activity.subject.peer;
      if (peer < 0 || at(peer) >= view.sightings.size()) break;
      const auto behind = peer_is_behind(here.status, view.sightings[at(peer)].status);
      if (behind == false) return {rank, peer};  // a message is on its way, and does not arrive
      rank = peer;
    }
    if (chain.size() > best.size()) best = chain;
  }
  return best;
}

std::optional<Verdict> judge_deadlock(const WatchView& view, const WatchLimits& limits) {
  bool any = false;
  for (const Sighting& each : view.sightings) {
    if (each.left) continue;
    const Activity& now = each.status.activity;
    if (!each.observed || !each.seen || each.silent > 3 * limits.beat + 1 || !now.waits ||
        now.doing == Doing::kFailing || each.status.still < limits.timeout) {
      return std::nullopt;
    }
    any = true;
  }
  // A rank alone waits for its device, which computes.
  if (!any || view.sightings.size() == 1) return std::nullopt;
  return Verdict{.kind = Verdict::Kind::kDeadlock, .ranks = chain_of(view), .cut_off = false};
}

std::optional<Verdict> judge_busy(const WatchView& view, const WatchLimits& limits) {
  if (limits.action_timeout <= 0) return std::nullopt;
  Verdict verdict{.kind = Verdict::Kind::kBusy, .ranks = {}, .cut_off = false};
  for (std::size_t rank = 0; rank < view.sightings.size(); ++rank) {
    const Sighting& each = view.sightings[rank];
    const Activity& now = each.status.activity;
    if (!each.seen || each.left || now.waits || now.doing == Doing::kOutside ||
        now.doing == Doing::kFailing || each.status.still < limits.action_timeout) {
      continue;
    }
    verdict.ranks.push_back(static_cast<int>(rank));
  }
  if (verdict.ranks.empty()) return std::nullopt;
  return verdict;
}

}  // namespace

WatchLimits limits_of(double timeout, double action_timeout, const StepPace& pace) {
  WatchLimits limits{.timeout = timeout, .action_timeout = action_timeout, .beat = 1};
  if (timeout <= 0) {
    limits.timeout = pace.steps <= kFirstSteps
                         ? kFirstTimeout
                         : std::max(kLeastTimeout, kStepsOfTimeout * pace.slowest);
  }
  limits.beat = std::clamp(limits.timeout / kBeatsOfTimeout, kShortestBeat, kLongestBeat);
  return limits;
}

std::vector<int> monitors_of(std::span<const WatchedRank> ranks) {
  std::set<int> monitors;
  const auto add = [&](std::size_t rank) {
    if (monitors.size() < kMostMonitors) monitors.insert(static_cast<int>(rank));
  };
  std::set<std::string> hosts;
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    if (hosts.insert(ranks[rank].host).second) add(rank);
  }
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) add(rank);
  return {monitors.begin(), monitors.end()};
}

bool lost(const Sighting& sighting, const WatchLimits& limits) {
  if (!sighting.observed || sighting.left) return false;
  return sighting.gone ? sighting.gone_for > kLauncherTime : sighting.silent > limits.timeout;
}

int leader(const WatchView& view, const WatchLimits& limits) {
  for (const int monitor : view.monitors) {
    const Sighting& each = view.sightings[at(monitor)];
    if (monitor == view.me || (!each.left && !lost(each, limits))) return monitor;
  }
  return view.me;
}

std::optional<Verdict> judge(const WatchView& view, const WatchLimits& limits) {
  if (leader(view, limits) != view.me) return std::nullopt;
  if (unsettled(view, limits)) return std::nullopt;
  if (auto verdict = judge_lost(view, limits)) return verdict;
  if (std::find(view.monitors.begin(), view.monitors.end(), view.me) == view.monitors.end()) {
    return std::nullopt;  // hears the monitors alone
  }
  if (auto verdict = judge_deadlock(view, limits)) return verdict;
  return judge_busy(view, limits);
}

std::optional<bool> peer_is_behind(const RankStatus& waiting, const RankStatus& peer) {
  const Activity &mine = waiting.activity, &theirs = peer.activity;
  if (!mine.waits || mine.subject.needed_op < 0) return std::nullopt;
  if (theirs.run != mine.run) return theirs.run < mine.run;
  // An op that is current may be under way.
  if (theirs.doing == Doing::kOperation) return theirs.op <= mine.subject.needed_op;
  return std::nullopt;
}

}  // namespace sluice
