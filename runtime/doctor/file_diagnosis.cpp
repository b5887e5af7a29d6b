#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "runtime/doctor/diagnosis.hpp"

namespace sluice {
namespace {

constexpr double kSlowDisk = 20e6;    // bytes per second
constexpr double kLateSeconds = 0.5;  // until a host sees a new file

using Ranks = std::vector<RankFacts>;
using Findings = std::vector<Finding>;

void check_data(const Ranks& ranks, Findings& findings) {
  const RankFacts* first = nullptr;  // that can read it
  for (const RankFacts& rank : ranks) {
    if (first == nullptr && rank.data.problem.empty()) first = &rank;
  }
  for (const RankFacts* host : first_of_hosts(ranks)) {
    const DataFacts& data = host->data;
    if (data.path.empty()) continue;
    if (!data.problem.empty()) {
      findings.push_back({true, fmt::format("{}: rank {} cannot read data file '{}': {}; copy it "
                                            "to the same path on every host, or give a path that "
                                            "all hosts share",
                                            host->mpi.host, host->rank, data.path, data.problem)});
      continue;
    }
    if (data.bytes == first->data.bytes && data.hash == first->data.hash) continue;
    const char* compared = data.bytes != first->data.bytes ? "sizes"
                           : is_hashed_whole(data.bytes)   ? "all bytes"
                                                           : "size, first and last MiB";
    findings.push_back(
        {true,
         fmt::format("data file '{}' differs: {} bytes, hash {} on {}, {} bytes, hash {} on "
                     "{} (compared: {}); copy one of them to every host",
                     data.path, first->data.bytes, first->data.hash.substr(0, 8), first->mpi.host,
                     data.bytes, data.hash.substr(0, 8), host->mpi.host, compared)});
  }
}

void say_data(const Ranks& ranks, Findings& findings) {
  const DataFacts& data = ranks.front().data;
  if (data.path.empty() || !findings.empty()) return;
  findings.push_back(
      {false, fmt::format("data file '{}' has {} bytes and looks the same on all hosts (compared: "
                          "{})",
                          data.path, data.bytes,
                          is_hashed_whole(data.bytes) ? "all bytes" : "size, first and last MiB")});
}

std::string not_seen(const RankFacts& first, const RankFacts& host) {
  const bool network = host.save.file_system == "nfs" || host.save.file_system == "cifs" ||
                       host.save.file_system == "smb2";
  if (network) {
    return fmt::format(
        "{}: a new file of rank 0 ({}) in '{}' is not seen in time: the mount ({}) "
        "remembers too long which names are missing; mount it with "
        "'lookupcache=positive' or a short 'acdirmax'",
        host.mpi.host, first.mpi.host, host.save.path, host.save.file_system);
  }
  return fmt::format(
      "{}: a new file of rank 0 ({}) in '{}' is not seen: the hosts do not share "
      "the directory; give one that they share, or --save-local for one on each",
      host.mpi.host, first.mpi.host, host.save.path);
}

// Of the ranks that have measured on a host: its first one.
void check_directory(const Ranks& ranks, Findings& findings) {
  const RankFacts& first = ranks.front();
  if (first.save.path.empty()) return;
  for (const RankFacts* host : first_of_hosts(ranks)) {
    const DirectoryFacts& save = host->save;
    const bool blind = first.save.problem.empty() && save.seen_after < 0;
    if (blind) {
      findings.push_back({true, not_seen(first, *host)});
    } else if (!save.problem.empty()) {
      findings.push_back({true, fmt::format("{}: rank {} cannot write to directory '{}': {}",
                                            host->mpi.host, host->rank, save.path, save.problem)});
    } else if (save.bytes_per_second < kSlowDisk) {
      findings.push_back(
          {true, fmt::format("{}: directory '{}' takes {}, written and "
                             "synced: saves take long; give one on a quicker disk, "
                             "or save less often",
                             host->mpi.host, save.path, bandwidth_text(save.bytes_per_second))});
    }
    if (save.seen_after > kLateSeconds) {
      findings.push_back(
          {true, fmt::format("{}: a new file in '{}' is seen after {:.1f} s only: the "
                             "mount remembers too long which names are missing "
                             "(NFS: mount with 'lookupcache=positive')",
                             host->mpi.host, save.path, save.seen_after)});
    }
  }
}

void say_directory(const Ranks& ranks, Findings& findings) {
  if (ranks.front().save.path.empty()) return;
  double slowest = ranks.front().save.bytes_per_second, latest = 0;
  for (const RankFacts* host : first_of_hosts(ranks)) {
    slowest = std::min(slowest, host->save.bytes_per_second);
    latest = std::max(latest, host->save.seen_after);
  }
  findings.push_back({false, fmt::format("directory '{}' takes {} on the slowest host, written and "
                                         "synced; all hosts see a new file within {:.0f} ms",
                                         ranks.front().save.path, bandwidth_text(slowest),
                                         std::ceil(latest * 1000))});
}

}  // namespace

std::vector<Finding> diagnose_files(const std::vector<RankFacts>& ranks) {
  Findings findings, directory;
  check_data(ranks, findings);
  say_data(ranks, findings);
  check_directory(ranks, directory);
  if (directory.empty()) say_directory(ranks, directory);
  findings.insert(findings.end(), directory.begin(), directory.end());
  return findings;
}

}  // namespace sluice
