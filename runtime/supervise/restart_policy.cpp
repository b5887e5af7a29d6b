#include "runtime/supervise/restart_policy.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <cstring>
#include <optional>

#include <sluice/error.hpp>

#include "runtime/launch/host_file.hpp"

namespace sluice {
namespace {

constexpr double kMinute = 60;
constexpr int kTimesLost = 2, kKillsInARow = 3, kMostWithoutProgress = 2;

struct KnownCode {
  int code;
  const char* meaning;
};
constexpr std::array kKnownCodes = {
    KnownCode{1, "an error of the launcher or of another program"},
    KnownCode{2, "an option, shape or layout that cannot work"},
    KnownCode{3, "an input file that is missing, too short or wrong"},
    KnownCode{4, "an output that cannot be written"},
    KnownCode{5, "saved weights that are damaged or do not fit"},
    KnownCode{6, "ranks that disagree"},
    KnownCode{7, "NaN or infinity in loss or gradients"},
    KnownCode{8, "a schedule that breaks a rule"},
    KnownCode{9, "MPI"},
    KnownCode{10, "a device, or no memory or threads"},
    KnownCode{11, "a rank died or stopped answering"},
    KnownCode{kStoppedCode, "stopped as asked, saved"},
    KnownCode{13, "an exception of the program's own code"},
    KnownCode{70, "an internal error of Sluice"},
};

// SIGABRT, SIGBUS, SIGFPE, SIGKILL, SIGUSR1 and SIGSEGV.
constexpr int kFirstSignal = kSignalBase + SIGABRT, kLastSignal = kSignalBase + SIGSEGV;

std::string signal_name(int signal) {
  const char* const name = ::sigabbrev_np(signal);
  return name == nullptr ? fmt::format("signal {}", signal) : fmt::format("SIG{}", name);
}

std::string where(const std::string& host) {
  return host.empty() ? "" : fmt::format(" on {}", host);
}

std::string describe_hang(const JobEvent& hang) {
  if (hang.deadlock) return fmt::format("all ranks wait for each other in step {}", hang.step);
  std::string who = hang.ranks.empty() ? "a rank"
                                       : fmt::format("rank{} {}", hang.ranks.size() == 1 ? "" : "s",
                                                     fmt::join(hang.ranks, ", "));
  if (!hang.hosts.empty()) who += fmt::format(" on {}", fmt::join(hang.hosts, ", "));
  return fmt::format("{} stopped answering in step {}", who, hang.step);
}

std::vector<std::string> lost_hosts(const Attempt& attempt) {
  std::vector<std::string> hosts = attempt.findings.lost_hosts;
  if (attempt.hang && !attempt.hang->deadlock) {
    hosts.insert(hosts.end(), attempt.hang->hosts.begin(), attempt.hang->hosts.end());
  }
  return hosts;
}

std::optional<std::string> known_as(const std::string& host, std::span<const std::string> hosts) {
  const auto found = std::find_if(hosts.begin(), hosts.end(),
                                  [&](const std::string& known) { return same_host(known, host); });
  if (found == hosts.end()) return std::nullopt;
  return *found;
}

}  // namespace

ExitKind kind_of_exit(int code) {
  if (code == 0) return ExitKind::kDone;
  if (code == kStoppedCode) return ExitKind::kStopped;
  const bool retried =
      code == 1 || code == exit_code(ErrorCode::kMpi) || code == exit_code(ErrorCode::kDevice) ||
      code == exit_code(ErrorCode::kPeer) || (code >= kFirstSignal && code <= kLastSignal);
  return retried ? ExitKind::kRetried : ExitKind::kHopeless;
}

ExitKind kind_of(const Attempt& attempt) {
  const int code = attempt.end.code;
  const ExitKind kind = kind_of_exit(code);
  const bool of_the_job = std::any_of(kKnownCodes.begin(), kKnownCodes.end(),
                                      [&](const KnownCode& known) { return known.code == code; });
  if (kind != ExitKind::kHopeless || of_the_job) return kind;
  return attempt.hang || !attempt.findings.lost_hosts.empty() ? ExitKind::kRetried : kind;
}

std::string describe_exit(const JobEnd& end) {
  for (const KnownCode& known : kKnownCodes) {
    if (known.code == end.code) return fmt::format("exit code {}: {}", end.code, known.meaning);
  }
  if (end.code > kSignalBase && end.code < kSignalBase + NSIG) {
    return fmt::format("exit code {}: {}killed by {}", end.code,
                       end.by_signal ? "the launcher " : "", signal_name(end.code - kSignalBase));
  }
  return fmt::format("exit code {}", end.code);
}

std::string describe(const Attempt& attempt) {
  const JobFindings& findings = attempt.findings;
  if (attempt.hang) return describe_hang(*attempt.hang);
  if (!findings.lost_hosts.empty()) {
    return fmt::format("lost {}", fmt::join(findings.lost_hosts, ", "));
  }
  if (findings.killed) {
    return fmt::format("rank {}{} was killed by {}", findings.killed->rank,
                       where(findings.killed->host), signal_name(findings.killed->signal));
  }
  return describe_exit(attempt.end);
}

double Pauses::after(double attempt_seconds) {
  if (attempt_seconds >= kMinute) next_ = first_;
  const double pause = next_;
  next_ = std::max(first_, std::min(2 * next_, kMinute));
  return pause;
}

bool RestartPolicy::makes_progress(const Attempt& attempt) {
  speaks_ = speaks_ || attempt.steps.has_value();
  if (!speaks_) return attempt.seconds >= kMinute;
  if (!attempt.steps) return false;
  // The attempt before saved what this one started from, and ended before it could say so.
  if (attempt.steps->start > newest_save_) without_progress_ = 0;
  newest_save_ = std::max({newest_save_, attempt.steps->start, attempt.steps->saved});
  return attempt.steps->saved > attempt.steps->start;
}

std::vector<std::string> RestartPolicy::hosts_to_leave_out(const Attempt& attempt,
                                                           std::span<const std::string> hosts) {
  std::vector<std::string> result;
  const auto leave_out = [&](const std::string& host) {
    if (result.size() + 1 < hosts.size()) result.push_back(host);
  };
  std::vector<std::string> lost;  // by the names of `hosts`, each once
  for (const std::string& host : lost_hosts(attempt)) {
    const auto known = known_as(host, hosts);
    if (known && std::find(lost.begin(), lost.end(), *known) == lost.end()) lost.push_back(*known);
  }
  for (const std::string& host : lost) {
    if (++times_lost_[host] >= kTimesLost) leave_out(host);
  }
  const auto& killed = attempt.findings.killed;
  const std::string host = killed ? known_as(killed->host, hosts).value_or("") : "";
  killed_in_a_row_ = host.empty() || !lost.empty() ? 0
                     : host == killed_host_        ? killed_in_a_row_ + 1
                                                   : 1;
  killed_host_ = host;
  if (killed_in_a_row_ >= kKillsInARow) leave_out(host);
  return result;
}

RestartDecision RestartPolicy::after(const Attempt& attempt, std::span<const std::string> hosts) {
  RestartDecision decision;
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
    return decision;
  }
  if (without_progress_ >= kMostWithoutProgress) {
    decision.reason =
        speaks_ ? "two restarts in a row added no save; does the job save (--save, --save-every) "
                  "and go on from there (--resume auto)?"
                : "two restarts in a row ended within a minute";
    return decision;
  }
  decision.again = true;
  ++restarts_;
  decision.pause = pauses_.after(attempt.seconds);
  return decision;
}

}  // namespace sluice
