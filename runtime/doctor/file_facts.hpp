// What a rank sees of the data file and of the directory of saves.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "comm/group/collectives.hpp"

namespace sluice {

struct DataFacts {
  std::string path;     // empty: none was asked for
  std::string problem;  // why it cannot be read; else empty
  std::int64_t bytes = 0;
  std::string hash;  // of what is_hashed_whole() says
};

// Bytes at each end of a data file that are compared; a file of at most twice as many is compared
// as a whole.
inline constexpr std::int64_t kHashedEnd = std::int64_t{1} << 20;
[[nodiscard]] inline bool is_hashed_whole(std::int64_t bytes) { return bytes <= 2 * kHashedEnd; }

// Reads at most 2 x kHashedEnd bytes. An unreadable file is a fact, not an error.
[[nodiscard]] DataFacts data_facts(const std::filesystem::path& path);

// Of a directory that --save would be given. Times are seconds.
struct DirectoryFacts {
  std::string path;             // empty: none was asked for
  std::string problem;          // why the rank cannot write there; else empty
  std::string file_system;      // "nfs", "ext4", ...; empty: unknown
  double bytes_per_second = 0;  // written and synced; 0: another rank of the host measured
  double seen_after = -1;       // until the host saw a file that rank 0 made; -1: not within the
                                // time limit; 0 on rank 0's own host
};

struct DirectoryLimits {
  double write_seconds = 1;  // no piece of the written file begins later
  double seen_seconds = 5;   // a host that has not seen rank 0's file by then does not see it
};

// Collective. `host` names this rank's host; ranks with the host of rank 0 count as seeing what
// that rank sees. Creates the directory where rank 0 does not have it, and a file per host of at
// most 16 MiB. All of that is removed again. An unusable directory is a fact, not an error.
[[nodiscard]] DirectoryFacts probe_directory(Collectives& collectives, const std::string& host,
                                             const std::filesystem::path& path,
                                             const DirectoryLimits& limits);

}  // namespace sluice
