#include "runtime/watchdog/report.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>
#include <tuple>
#include <vector>

#include "comm/base/index.hpp"
#include "comm/base/joined.hpp"
#include "runtime/files/json_text.hpp"

namespace sluice {
namespace {

// "31 s", "2.4 s".
std::string seconds_text(double seconds) {
  return seconds < 10 ? fmt::format("{:.1f} s", seconds) : fmt::format("{:.0f} s", seconds);
}

std::string stages_text(const WatchedRank& rank) {
  return fmt::format("stage{} {}{}", rank.stages.size() == 1 ? "" : "s", joined(rank.stages, ", "),
                     rank.tensor < 0 ? "" : fmt::format("; tensor rank {}", rank.tensor));
}

const char* group_text(std::optional<Axis> axis) {
  if (!axis) return "all ranks";
  return *axis == Axis::kPipeline  ? "the pipeline's ranks"
         : *axis == Axis::kReplica ? "the replicas"
                                   : "the ranks of a stage";
}

// "rank 1 (tag 3, 4096 bytes)".
std::string peer_text(const WaitSubject& subject) {
  return fmt::format("rank {} (tag {}, {} bytes)", subject.peer, subject.tag, subject.bytes);
}

// Whether `rank` is one of the group in which `other` makes the collective. Replicas gather within
// groups that divide the parameters.
bool shares(const WatchView& view, int rank, int other, const PlannedCollective& made) {
  const WatchedRank &a = view.ranks[at(rank)], &b = view.ranks[at(other)];
  if (a.stages != b.stages) return false;
  if (made.axis == CollectiveAxis::kTensor) return a.replica == b.replica;
  return a.tensor == b.tensor &&
         (made.kind != CollectiveKind::kAllGather || a.shard_group == b.shard_group);
}

// Whether `theirs` has not come to the collective in which `mine` is.
bool has_not_come(const Activity& mine, const Activity& theirs) {
  return std::tie(theirs.run, theirs.op, theirs.collectives_begun) <
         std::tie(mine.run, mine.op, mine.collectives_begun);
}

// "the sum of 24 bytes of f64 over the tensor ranks (collective 2 of stage 1, forward of
// micro-batch 3); rank 5 did not come, it is in 0F3 of step 7". What was heard before the wait
// began does not say whether a rank has come since.
std::string collective_text(const WatchView& view, int rank) {
  const Sighting& mine = view.sightings[at(rank)];
  const Activity& now = mine.status.activity;
  std::string text = fmt::format("the {} in stage {}, {} of micro-batch {} (its collective {})",
                                 to_string(*now.collective), now.stage, in_words(now.action),
                                 now.micro_batch, now.collectives_begun);
  for (int other = 0; at(other) < view.ranks.size(); ++other) {
    const Sighting& each = view.sightings[at(other)];
    if (other == rank || !shares(view, rank, other, *now.collective)) continue;
    if (each.left) {
      text += fmt::format("; rank {} did not come, its pipeline is destroyed", other);
    } else if (each.seen && has_not_come(now, each.status.activity)) {
      const bool older = each.silent > mine.silent + mine.status.still;
      text += fmt::format("; rank {} {} {}", other,
                          older ? "may not have come, it was heard in" : "did not come, it is in",
                          describe_place(each.status.activity));
    }
  }
  return text;
}

std::string wait_text(const WatchView& view, int rank) {
  const RankStatus& status = view.sightings[at(rank)].status;
  const Activity& now = status.activity;
  if (now.collective) return collective_text(view, rank);
  const WaitSubject& subject = now.subject;
  std::array<char, 96> room{};
  const std::string_view doing = describe_doing(now, room);
  const bool known = subject.peer >= 0 && at(subject.peer) < view.sightings.size();
  std::optional<bool> behind;
  if (known) behind = peer_is_behind(status, view.sightings[at(subject.peer)].status);
  const auto state = [&](const char* not_yet, const char* done) {
    return !behind ? "" : *behind ? fmt::format(": {}", not_yet) : fmt::format(": {}", done);
  };
  switch (subject.what) {
    case WaitSubject::What::kReceive:
      return fmt::format("{} from {}{}", doing, peer_text(subject),
                         state("never sent", "sent, but it does not arrive"));
    case WaitSubject::What::kSend:
      return fmt::format("{} to {}{}", doing, peer_text(subject),
                         state("no receive is posted there", "a receive is posted there"));
    case WaitSubject::What::kCollectiveReceive:
    case WaitSubject::What::kCollectiveSend:
      return fmt::format("a message {} {} among {}, in {}",
                         subject.what == WaitSubject::What::kCollectiveSend ? "to" : "from",
                         peer_text(subject), group_text(now.axis), doing);
    case WaitSubject::What::kDevice:
      return fmt::format("its device, in {}", doing);
    case WaitSubject::What::kNccl:
      return fmt::format("NCCL, in {}", doing);
    case WaitSubject::What::kStore:
      return fmt::format("what it offloads or fetches, in {}", doing);
    case WaitSubject::What::kSave:
      return fmt::format("a save that reads what it offloads, in {}", doing);
  }
  return std::string(doing);
}

std::string state_text(const WatchView& view, const WatchLimits& limits, int rank) {
  const Sighting& each = view.sightings[at(rank)];
  if (each.left) return "has left: its pipeline is destroyed";
  if (!each.observed) return "is not observed by this rank";
  if (!each.seen) return fmt::format("was never heard, for {}", seconds_text(each.silent));
  const Activity& now = each.status.activity;
  const std::string place =
      now.waits ? fmt::format("waiting for {}, in step {}", wait_text(view, rank), now.step)
                : describe_place(now);
  if (each.gone) return fmt::format("its process has ended; last seen in {}", place);
  if (lost(each, limits) || each.silent > limits.timeout / 2) {
    return fmt::format("silent for {}; last seen in {}", seconds_text(each.silent), place);
  }
  const std::string unheard =
      each.status.unheard < 0 ? "" : fmt::format("; it does not hear rank {}", each.status.unheard);
  if (now.waits) {
    return fmt::format("step {}: waits since {} for {}{}", now.step,
                       seconds_text(each.status.still), wait_text(view, rank), unheard);
  }
  return fmt::format("step {}: in {} since {}{}", now.step, describe_place(now),
                     seconds_text(each.status.still), unheard);
}

std::vector<std::string> hosts_of(const WatchView& view, const std::vector<int>& ranks) {
  std::vector<std::string> hosts;
  for (const int rank : ranks) {
    const std::string& host = view.ranks[at(rank)].host;
    if (std::find(hosts.begin(), hosts.end(), host) == hosts.end()) hosts.push_back(host);
  }
  return hosts;
}

// "ranks 2, 3 on node2 (stages 2 and 3)": short also for hundreds of ranks.
std::string culprits_text(const WatchView& view, const std::vector<int>& ranks) {
  if (ranks.size() == 1) return describe_rank(view, ranks.front());
  return fmt::format("ranks {} on {}", joined(ranks, ", "), joined(hosts_of(view, ranks), ", "));
}

std::string lost_headline(const WatchView& view, const Verdict& verdict) {
  const Sighting& first = view.sightings[at(verdict.ranks.front())];
  const bool one = verdict.ranks.size() == 1;
  if (verdict.cut_off) {
    double silent = 0;
    for (const Sighting& each : view.sightings) silent = std::max(silent, each.silent);
    return fmt::format("{} {} cut off from the other hosts, which are silent for {}{}",
                       culprits_text(view, verdict.ranks), one ? "is" : "are", seconds_text(silent),
                       view.network_down ? "; no network of this host is up" : "");
  }
  std::vector<int> gone, silent;
  double longest = 0;
  for (const int rank : verdict.ranks) {
    const Sighting& each = view.sightings[at(rank)];
    (each.gone ? gone : silent).push_back(rank);
    if (!each.gone) longest = std::max(longest, each.silent);
  }
  std::string why = fmt::format("silent for {}", seconds_text(longest));
  if (silent.empty()) {
    why = one ? "its process has ended" : "their processes have ended";
  } else if (!gone.empty()) {
    why = fmt::format("{} ended, {} {}", joined(gone, ", "), joined(silent, ", "), why);
  }
  return fmt::format("{} {} lost: {}; last seen in {}", culprits_text(view, verdict.ranks),
                     one ? "is" : "are", why, describe_place(first.status.activity));
}

std::string deadlock_headline(const WatchView& view, const Verdict& verdict) {
  double still = 1e300;
  for (const Sighting& each : view.sightings) {
    if (!each.left) still = std::min(still, each.status.still);
  }
  std::vector<std::string> waits;
  for (const int rank : verdict.ranks) {
    const Sighting& each = view.sightings[at(rank)];
    if (each.left) {
      waits.push_back(fmt::format("rank {} has destroyed its pipeline", rank));
    } else if (each.status.activity.waits) {
      waits.push_back(
          fmt::format("{} waits for {}", describe_rank(view, rank), wait_text(view, rank)));
    }
  }
  return fmt::format("deadlock: {}; all ranks wait, none has computed for {}", joined(waits, "; "),
                     seconds_text(still));
}

}  // namespace

std::string describe_place(const Activity& activity) {
  std::array<char, 96> room{};
  const std::string_view doing = describe_doing(activity, room);
  if (activity.step == 0) return std::string(doing);
  if (activity.doing == Doing::kOperation) {
    return activity.phase == Phase::kTrain      ? fmt::format("{} of step {}", doing, activity.step)
           : activity.phase == Phase::kEvaluate ? fmt::format("{} of an evaluation", doing)
                                                : fmt::format("{} of an inference", doing);
  }
  const bool within = activity.doing == Doing::kCalling || activity.doing == Doing::kFailing;
  return fmt::format("{}, {} step {}", doing, within ? "in" : "after", activity.step);
}

std::string describe_rank(const WatchView& view, int rank) {
  const WatchedRank& each = view.ranks[at(rank)];
  return fmt::format("rank {} on {} ({})", rank, each.host, stages_text(each));
}

std::string headline(const WatchView& view, const Verdict& verdict) {
  switch (verdict.kind) {
    case Verdict::Kind::kLost:
      return lost_headline(view, verdict);
    case Verdict::Kind::kDeadlock:
      return deadlock_headline(view, verdict);
    case Verdict::Kind::kBusy:
      break;
  }
  const Sighting& first = view.sightings[at(verdict.ranks.front())];
  return fmt::format("{} {} in {} since {}, longer than --action-timeout allows",
                     culprits_text(view, verdict.ranks), verdict.ranks.size() == 1 ? "is" : "are",
                     describe_place(first.status.activity), seconds_text(first.status.still));
}

std::string rank_lines(const WatchView& view, const WatchLimits& limits) {
  std::size_t host_width = 4, stage_width = 5;
  for (const WatchedRank& each : view.ranks) {
    host_width = std::max(host_width, each.host.size());
    stage_width = std::max(stage_width, joined(each.stages, ",").size());
  }
  std::string text =
      fmt::format("  {:>4}  {:<{}}  {:<{}}\n", "rank", "host", host_width, "stage", stage_width);
  for (std::size_t rank = 0; rank < view.ranks.size(); ++rank) {
    const WatchedRank& each = view.ranks[rank];
    text += fmt::format("  {:>4}  {:<{}}  {:<{}}  {}\n", rank, each.host, host_width,
                        joined(each.stages, ","), stage_width,
                        state_text(view, limits, static_cast<int>(rank)));
  }
  return text;
}

std::string newest_save(const WatchView& view, const std::string& directory) {
  if (directory.empty()) return "no saves are made: without --save nothing is left to resume";
  std::uint64_t newest = 0;
  for (const Sighting& each : view.sightings) {
    newest = std::max(newest, each.status.saved_plus_one);
  }
  if (newest == 0) return fmt::format("no complete save in {} is known", directory);
  return fmt::format("newest complete save: {}/step-{:08}", directory, newest - 1);
}

std::uint64_t step_of(const WatchView& view) {
  std::map<std::uint64_t, int> ranks;
  for (const Sighting& each : view.sightings) {
    if (each.seen) ++ranks[each.status.activity.step];
  }
  const auto most = std::max_element(
      ranks.begin(), ranks.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
  return most == ranks.end() ? 0 : most->first;
}

std::string hang_event(const WatchView& view, const Verdict& verdict) {
  const bool gone = std::all_of(verdict.ranks.begin(), verdict.ranks.end(),
                                [&](int rank) { return view.sightings[at(rank)].gone; });
  const char* kind = verdict.kind == Verdict::Kind::kDeadlock ? "deadlock"
                     : verdict.kind == Verdict::Kind::kBusy   ? "busy"
                     : gone                                   ? "ended"
                                                              : "lost";
  const nlohmann::ordered_json json = {
      {"event", "hang"},
      {"kind", kind},
      // Of a busy rank the host works.
      {"hosts", verdict.kind == Verdict::Kind::kBusy ? std::vector<std::string>()
                                                     : hosts_of(view, verdict.ranks)},
      {"ranks", verdict.ranks},
      {"step", step_of(view)}};
  return dump_json(json, -1, InvalidUtf8::replace);
}

std::string status_json(const WatchView& view, const WatchLimits& limits,
                        const std::string& directory, double time, bool ended) {
  nlohmann::ordered_json json = {
      {"format", 1},
      {"time", time},
      {"ended", ended},
      {"written_by", view.me},
      {"step", ended ? view.sightings[at(view.me)].status.activity.step : step_of(view)},
      {"timeout", limits.timeout},
      {"save", newest_save(view, directory)},
      {"ranks", nlohmann::ordered_json::array()}};
  for (std::size_t rank = 0; rank < view.ranks.size(); ++rank) {
    const WatchedRank& each = view.ranks[rank];
    const bool over = ended && !view.sightings[rank].gone;
    json["ranks"].push_back(
        {{"rank", rank},
         {"host", each.host},
         {"stages", each.stages},
         {"replica", each.replica},
         {"state", over ? "ended" : state_text(view, limits, static_cast<int>(rank))}});
    if (each.tensor >= 0) json["ranks"].back()["tensor"] = each.tensor;
  }
  return dump_json(json, 1, InvalidUtf8::replace) + "\n";
}

}  // namespace sluice
