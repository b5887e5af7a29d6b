#include "runtime/program/supervise/restart_policy.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <csignal>
#include <cstring>

#include "comm/base/joined.hpp"
#include "runtime/program/supervise/hosts.hpp"

namespace sluice {
namespace {

constexpr double kMinute = 60;
constexpr int kTimesLost = 2, kEndsInARow = 3, kMostWithoutProgress = 2;
constexpr int kSignalBase = 128;  // an exit code after a signal: this and its number
constexpr int kHostLostCode = 205;

struct KnownCode {
  const char* meaning;
  bool retried = false;
};
// Others are not Sluice's.
const std::map<int, KnownCode> kKnownCodes = {
    {1, {"an error of the launcher or of another program", true}},
    {2, {"an option, shape or layout that cannot work"}},
    {3, {"an input file that is missing, too short or wrong"}},
    {4, {"an output that cannot be written"}},
    {5, {"saved weights that are damaged or do not fit"}},
    {6, {"ranks that disagree"}},
    {7, {"NaN or infinity in loss or gradients"}},
    {8, {"a schedule that breaks a rule"}},
    {9, {"MPI", true}},
    {10, {"a device, or no memory or threads", true}},
    {11, {"a rank died or stopped answering", true}},
    {kStoppedCode, {"stopped as asked, saved"}},
    {13, {"an exception of the program's own code"}},
    {70, {"an internal error of Sluice"}},
    {kHostLostCode, {"Open MPI lost a host", true}},
    {255, {"Open MPI or ssh did not reach a host", true}},
};

// By SIGABRT, SIGBUS, SIGFPE, SIGKILL, SIGUSR1 or SIGSEGV.
bool is_crash(int code) { return code >= kSignalBase + SIGABRT && code <= kSignalBase + SIGSEGV; }

std::string signal_name(int signal) {
  const char* const name = ::sigabbrev_np(signal);
  return name == nullptr ? fmt::format("signal {}", signal) : fmt::format("SIG{}", name);
}

std::string describe_code(const JobEnd& end) {
  const auto known = kKnownCodes.find(end.code);
  if (known != kKnownCodes.end()) {
    return fmt::format("exit code {}: {}", end.code, known->second.meaning);
  }
  if (end.code > kSignalBase && end.code < kSignalBase + NSIG) {
    return fmt::format("exit code {}: {}killed by {}", end.code,
                       end.by_signal ? "the launcher " : "", signal_name(end.code - kSignalBase));
  }
  return fmt::format("exit code {}", end.code);
}

// "ranks 2, 3 on node2"
std::string describe_ranks(const JobEvent& report) {
  std::string who = report.ranks.empty()
                        ? "a rank"
                        : fmt::format("rank{} {}", report.ranks.size() == 1 ? "" : "s",
                                      joined(report.ranks, ", "));
  if (!report.hosts.empty()) who += fmt::format(" on {}", joined(report.hosts, ", "));
  return who;
}

// The hosts of a report by the names of `hosts`, each once.
std::vector<std::string> known_hosts(const JobEvent& report, std::span<const std::string> hosts) {
  std::vector<std::string> result;
  for (const std::string& host : hosts) {
    const auto same = [&](const std::string& named) { return same_host(named, host); };
    if (std::ranges::any_of(report.hosts, same)) result.push_back(host);
  }
  return result;
}

}  // namespace

void Attempt::add(const JobEvent& event) {
  using Kind = JobEvent::Kind;
  if (event.kind == Kind::kHang) {
    std::optional<JobEvent>& report = event.hang == JobEvent::Hang::kEnded ? ended : hang;
    if (!report) report = event;
    return;
  }
  if (event.kind == Kind::kStart || !steps) {
    const std::uint64_t start = event.kind == Kind::kStart ? event.step : 0;
    steps = AttemptSteps{.start = start, .last = start, .saved = start};
  }
  if (event.kind == Kind::kSave) steps->saved = std::max(steps->saved, event.step);
  if (event.step < steps->last) return;  // a save that completes later
  steps->last = event.step;
  if (event.kind == Kind::kStep || event.kind == Kind::kEnd) {
    steps->seconds = std::max(steps->seconds, event.seconds);
  }
  steps->complete = event.kind == Kind::kEnd;
}

// A start goes on from a save: of the starts before it only the steps up to there count.
RunTotals totals_of(std::span<const AttemptSteps> attempts) {
  RunTotals totals;
  if (attempts.empty()) return totals;
  const AttemptSteps& final = attempts.back();
  std::uint64_t kept = final.complete ? final.last : final.saved;
  for (auto attempt = attempts.rbegin(); attempt != attempts.rend(); ++attempt) {
    const std::uint64_t end = std::clamp(kept, attempt->start, attempt->last);
    const auto all = static_cast<double>(attempt->last - attempt->start);
    if (all > 0) {
      totals.step_seconds += attempt->seconds * static_cast<double>(end - attempt->start) / all;
    }
    totals.steps_lost += attempt->last - end;
    kept = std::min(kept, attempt->start);
  }
  return totals;
}

std::string describe(const Attempt& attempt) {
  const auto& hang = attempt.hang;
  const auto& ended = attempt.ended;
  const int code = attempt.end.code;
  if (hang && hang->hang == JobEvent::Hang::kDeadlock) {
    return fmt::format("all ranks wait for each other in step {}", hang->step);
  }
  if (hang)
    return fmt::format("{} stopped answering in step {}", describe_ranks(*hang), hang->step);
  if (!ended || attempt.end.by_signal) return describe_code(attempt.end);
  if (!is_crash(code)) {
    return fmt::format("{}; {} ended first", describe_code(attempt.end), describe_ranks(*ended));
  }
  return fmt::format("{} was killed by {}", describe_ranks(*ended),
                     signal_name(code - kSignalBase));
}

bool RestartPolicy::is_retried(const Attempt& attempt) const {
  if (is_crash(attempt.end.code)) return true;
  const auto known = kKnownCodes.find(attempt.end.code);
  if (known != kKnownCodes.end()) return known->second.retried;
  return attempt.hang || !missed_.empty();
}

bool RestartPolicy::makes_progress(const Attempt& attempt) {
  if (!speaks_) return attempt.seconds >= kMinute;
  if (!attempt.steps) return false;
  // The attempt before saved what this one started from, and ended before it could say so.
  if (attempt.steps->start > newest_save_) without_progress_ = 0;
  newest_save_ = std::max({newest_save_, attempt.steps->start, attempt.steps->saved});
  return attempt.steps->saved > attempt.steps->start;
}

std::vector<std::string> RestartPolicy::hosts_to_leave_out(const Attempt& attempt,
                                                           std::span<const std::string> hosts) {
  std::vector<std::string> lost, candidates;
  if (attempt.hang && attempt.hang->hang == JobEvent::Hang::kLost) {
    lost = known_hosts(*attempt.hang, hosts);
  } else if (attempt.ended && attempt.end.code == kHostLostCode) {
    lost = known_hosts(*attempt.ended, hosts);
  }
  const bool began = speaks_ ? attempt.steps.has_value() : attempt.seconds >= kMinute;
  if (lost.empty() && !began) candidates = missed_;
  for (const std::string& host : lost) {
    if (++times_lost_[host] >= kTimesLost) candidates.push_back(host);
  }
  missed_.clear();
  for (const std::string& host : lost) {
    if (times_lost_[host] < kTimesLost) missed_.push_back(host);
  }

  std::string ended;
  if (attempt.ended && lost.empty()) {
    const std::vector<std::string> known = known_hosts(*attempt.ended, hosts);
    if (!known.empty()) ended = known.front();
  }
  ended_in_a_row_ = ended.empty() ? 0 : ended == ended_host_ ? ended_in_a_row_ + 1 : 1;
  ended_host_ = ended;
  if (ended_in_a_row_ >= kEndsInARow) candidates.push_back(ended);
  if (candidates.size() == hosts.size() && !hosts.empty()) candidates.pop_back();
  return candidates;
}

double RestartPolicy::pause_after(double attempt_seconds) {
  if (attempt_seconds >= kMinute) next_pause_ = first_pause_;
  const double pause = next_pause_;
  next_pause_ = std::max(first_pause_, std::min(2 * next_pause_, kMinute));
  return pause;
}

RestartDecision RestartPolicy::after(const Attempt& attempt, std::span<const std::string> hosts) {
  RestartDecision decision;
  if (!is_retried(attempt)) {
    decision.reason = "another start ends in the same way";
    return decision;
  }
  speaks_ = speaks_ || attempt.steps.has_value();
  const bool progress = makes_progress(attempt);
  decision.left_out = hosts_to_leave_out(attempt, hosts);
  if (progress || !decision.left_out.empty()) {
    without_progress_ = 0;
  } else if (!first_) {
    ++without_progress_;
  }
  first_ = false;
  if (restarts_ >= most_) {
    decision.reason = most_ == 0 ? "no restarts are allowed (--restarts 0)"
                                 : fmt::format("{} restarts are all that --restarts allows", most_);
  } else if (without_progress_ >= kMostWithoutProgress) {
    decision.reason =
        speaks_ ? "two restarts in a row added no save; does the job save (--save, --save-every) "
                  "and go on from there (--resume auto)?"
                : "two restarts in a row ended within a minute";
  } else {
    decision.again = true;
    ++restarts_;
    decision.pause = pause_after(attempt.seconds);
  }
  return decision;
}

}  // namespace sluice
