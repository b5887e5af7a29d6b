// What ranks see of the data file and of the directory of saves, and what that leads to.
#include <algorithm>
#include <cmath>
#include <span>
#include <string>
#include <system_error>

#include <sluice/error.hpp>

#include "comm/base/index.hpp"
#include "comm/base/steady_seconds.hpp"
#include "runtime/checkpoint/save_directory.hpp"
#include "runtime/files/atomic_file.hpp"
#include "runtime/files/checksum.hpp"
#include "runtime/files/read_file.hpp"
#include "runtime/files/sha256.hpp"
#include "runtime/files/writable.hpp"
#include "runtime/program/doctor/diagnosis.hpp"

namespace sluice {
namespace fs = std::filesystem;
namespace {

constexpr double kSlowDisk = 20e6;    // bytes per second
constexpr double kLateSeconds = 0.5;  // until a host sees a new file

using Ranks = std::vector<RankFacts>;

const char* compared(std::int64_t bytes) {
  return is_hashed_whole(bytes) ? "all bytes" : "size, first and last MiB";
}

void check_data(const Ranks& ranks, Findings& findings) {
  const auto first = std::ranges::find_if(ranks, [](const RankFacts& rank) {
    return rank.data.problem.empty();  // that can read it
  });
  bool alike = true;
  for (const RankFacts* host : first_of_hosts(ranks)) {
    const DataFacts& data = host->data;
    if (data.path.empty()) return;
    if (!data.problem.empty()) {
      findings.wrong(
          "{}: rank {} cannot read data file '{}': {}; copy it to the same path on every host, or "
          "give a path that all hosts share",
          host->mpi.host, host->rank, data.path, data.problem);
      alike = false;
    } else if (data.bytes != first->data.bytes || data.hash != first->data.hash) {
      findings.wrong(
          "data file '{}' differs: {} bytes, hash {} on {}, {} bytes, hash {} on {} (compared: "
          "{}); copy one of them to every host",
          data.path, first->data.bytes, first->data.hash.substr(0, 8), first->mpi.host, data.bytes,
          data.hash.substr(0, 8), host->mpi.host,
          data.bytes != first->data.bytes ? "sizes" : compared(data.bytes));
      alike = false;
    }
  }
  const DataFacts& data = ranks.front().data;
  if (!alike) return;
  findings.note("data file '{}' has {} bytes and looks the same on all hosts (compared: {})",
                data.path, data.bytes, compared(data.bytes));
}

// Of the ranks that have measured on a host: its first one.
void check_directory(const Ranks& ranks, Findings& findings) {
  const RankFacts& first = ranks.front();
  double slowest = first.save.bytes_per_second, latest = 0;
  const std::size_t before = findings.list().size();
  for (const RankFacts* host : first_of_hosts(ranks)) {
    const DirectoryFacts& save = host->save;
    if (save.path.empty()) return;
    if (save.seen_after < 0) {
      findings.wrong(
          "{}: a new file of rank 0 ({}) in '{}' is not seen: the hosts do not share the "
          "directory; give one that they share, or --save-local for one on each",
          host->mpi.host, first.mpi.host, save.path);
    } else if (!save.problem.empty()) {
      findings.wrong("{}: rank {} {}", host->mpi.host, host->rank, save.problem);
    } else if (save.bytes_per_second < kSlowDisk) {
      findings.wrong(
          "{}: directory '{}' takes {}, written and synced: saves take long; give one on a quicker "
          "disk, or save less often",
          host->mpi.host, save.path, bandwidth_text(save.bytes_per_second));
    }
    if (save.seen_after > kLateSeconds) {
      findings.wrong(
          "{}: a new file in '{}' is seen after {:.1f} s only: the mount remembers too long which "
          "names are missing (NFS: mount with 'lookupcache=positive')",
          host->mpi.host, save.path, save.seen_after);
    }
    slowest = std::min(slowest, save.bytes_per_second);
    latest = std::max(latest, save.seen_after);
  }
  if (findings.list().size() > before) return;
  findings.note(
      "directory '{}' takes {} on the slowest host, written and synced; all hosts see a new file "
      "within {:.0f} ms",
      first.save.path, bandwidth_text(slowest), std::ceil(latest * 1000));
}

// Into `facts`: bytes per second, or the problem.
void measure_writing(const fs::path& file, DirectoryFacts& facts) {
  const std::vector<std::byte> bytes(std::size_t{8} << 20, std::byte{0x5A});
  const double start = steady_seconds();
  try {
    AtomicFile out(file);
    out.write(bytes);
    out.commit();
    facts.bytes_per_second = static_cast<double>(bytes.size()) / (steady_seconds() - start);
  } catch (const Error& error) {
    facts.problem = error.what();
  }
  std::error_code ignored;
  fs::remove(file, ignored);
}

}  // namespace

DataFacts data_facts(const fs::path& path) {
  DataFacts facts;
  facts.path = path.string();
  try {
    const ReadFile file(path);
    facts.bytes = static_cast<std::int64_t>(file.bytes());
    const bool whole = is_hashed_whole(facts.bytes);
    std::vector<std::byte> bytes(static_cast<std::size_t>(whole ? facts.bytes : 2 * kHashedEnd));
    const std::span<std::byte> all(bytes);
    const auto end = static_cast<std::size_t>(kHashedEnd);
    const std::size_t got =
        whole ? file.read(all, 0)
              : file.read(all.first(end), 0) + file.read(all.subspan(end), file.bytes() - end);
    if (got < all.size()) throw ReadProblem("it became shorter while it was read");
    facts.hash = checksum_hex(bytes);
  } catch (const ReadProblem& problem) {
    facts.problem = problem.what();
  }
  return facts;
}

DirectoryFacts probe_directory(Collectives& collectives, const std::vector<std::string>& hosts,
                               const fs::path& path, double patience) {
  const int rank = collectives.communicator().rank();
  const fs::path there = nearest_existing(path);
  const Visibility seen = find_visibility(collectives, hosts, there, patience);
  DirectoryFacts facts;
  facts.path = path.string();
  if (rank == 0) facts.problem = seen.problem;
  facts.seen_after = seen.after[at(rank)];
  const bool first_of_host = std::ranges::find(hosts, hosts[at(rank)]) - hosts.begin() == rank;
  if (first_of_host && facts.problem.empty()) {
    // A start of a training removes what begins like this, should the process be killed here.
    measure_writing(there / (std::string(kVisiblePrefix) + random_id()), facts);
  }
  return facts;
}

std::vector<Finding> diagnose_files(const std::vector<RankFacts>& ranks) {
  Findings findings;
  check_data(ranks, findings);
  check_directory(ranks, findings);
  return findings.list();
}

}  // namespace sluice
