// The hosts of a launcher, and the layout of a job that fits them.
//
// A host file has one host a line, as Open MPI reads it: "node1 slots=4", "user@node1", any further
// "key=value", '#' starts a comment. "node1:4", as MPICH has it, is legal too. A host without slots
// may have a line for each slot, as PBS and Slurm write it.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/layout/division.hpp"

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

// Whether two names mean one host: they are equal, or one is the other with its domain.
[[nodiscard]] bool same_host(std::string_view a, std::string_view b);

struct Layout {
  int pipeline = 1, replicas = 1, tensor = 1;
  [[nodiscard]] int ranks() const { return pipeline * replicas * tensor; }
  friend bool operator==(const Layout&, const Layout&) = default;
};

// "4x2", with several tensor ranks "4x2x2"
[[nodiscard]] std::string to_string(const Layout& layout);

// "4x2,2x2x2", best first. Error(kUsage) names the part that is wrong and says what is legal: "PxR"
// or "PxRxT" with at most 1,000,000 ranks, none twice.
[[nodiscard]] std::vector<Layout> parse_layouts(std::string_view text);

// Throws Error(kUsage) with the legal numbers for `holders`, the replicas or tensor ranks, that
// cannot divide so many parts.
void require_division(std::string_view layouts, int Layout::*holders, const DivisionNames& names,
                      int parts);

// The hosts that are left, and the first layout that fits them.
class Places {
 public:
  // Either may be empty: no host file, which fits any layout; no layouts. Error(kData) as of
  // read_host_file(), and for a host without slots where there are layouts; Error(kUsage) as of
  // parse_layouts(), and where none fits.
  Places(const std::string& host_file, const std::string& layouts);

  // False where no layout fits the hosts that are left.
  bool leave_out(const std::vector<std::string>& names);

  [[nodiscard]] std::vector<std::string> names() const;
  // A host file of the hosts that are left.
  [[nodiscard]] std::string host_file() const;
  [[nodiscard]] const std::optional<Layout>& layout() const { return layout_; }
  // Of all hosts that are left; a host without slots has none.
  [[nodiscard]] int slots() const;

 private:
  bool choose();

  bool any_fits_;
  std::vector<HostLine> hosts_;
  std::vector<Layout> layouts_;
  std::optional<Layout> layout_;
};

}  // namespace sluice
