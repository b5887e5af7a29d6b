// The host file of a launcher: which hosts there are, and how many ranks each takes.
//
// One host a line, as Open MPI reads it: "node1 slots=4", "user@node1", any further "key=value",
// '#' starts a comment. "node1:4", as MPICH has it, is legal too. A host without slots may have a
// line for each slot, as PBS and Slurm write it.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace sluice {

struct HostLine {
  std::string name;                // without user and slots
  std::optional<int> slots;        // none: one line without a number; the launcher counts the cores
  std::vector<std::string> lines;  // as they stand in the file, without comments
};

// The hosts in the order of their first lines. Error(kData) names the first line that is wrong and
// says what is legal: no host, a number of slots outside 1 to 1,000,000, slots given twice for a
// host. Error(kData) too for a file that cannot be read, has more than 16 MiB or names no host.
[[nodiscard]] std::vector<HostLine> read_host_file(const std::string& path);

// A host file of these hosts.
[[nodiscard]] std::string host_file_text(std::span<const HostLine> hosts);

// Whether two names mean one host: they are equal, or one is the other with its domain.
[[nodiscard]] bool same_host(std::string_view a, std::string_view b);

}  // namespace sluice
