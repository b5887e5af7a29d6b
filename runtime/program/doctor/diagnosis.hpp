// What the facts of a job's ranks lead to. Each finding says what to do, in the words of the
// launcher where it is the launcher's matter.
#pragma once

#include <fmt/core.h>

#include <string>
#include <utility>
#include <vector>

#include "runtime/group/collective_costs.hpp"
#include "runtime/layout/device_choice.hpp"
#include "runtime/program/doctor/facts.hpp"
#include "runtime/program/doctor/network_probe.hpp"

namespace sluice {

struct Finding {
  bool wrong = false;  // false: worth knowing, nothing to repair
  std::string text;    // the fact, and what to do about it
};

// Findings in the order in which they were made.
class Findings {
 public:
  template <typename... Args>
  void add(bool wrong, fmt::format_string<Args...> text, Args&&... args) {
    list_.push_back({wrong, fmt::format(text, std::forward<Args>(args)...)});
  }
  template <typename... Args>
  void wrong(fmt::format_string<Args...> text, Args&&... args) {
    add(true, text, std::forward<Args>(args)...);
  }
  template <typename... Args>
  void note(fmt::format_string<Args...> text, Args&&... args) {
    add(false, text, std::forward<Args>(args)...);
  }
  [[nodiscard]] const std::vector<Finding>& list() const { return list_; }

 private:
  std::vector<Finding> list_;
};

// Of each rank and each host alone, and of what ranks have to have in common. `ranks` ascend and
// are not empty; so below.
[[nodiscard]] std::vector<Finding> diagnose(const std::vector<RankFacts>& ranks);
// Of interfaces, settings and links between hosts. The links are those of `probe`.
[[nodiscard]] std::vector<Finding> diagnose_network(const std::vector<RankFacts>& ranks,
                                                    const ProbeResult& probe);
// Of the data file and the directory of saves, where they were asked for.
[[nodiscard]] std::vector<Finding> diagnose_files(const std::vector<RankFacts>& ranks);
// Of sums over replicas on CPUs, with the device of each rank: what the order of ranks lets cross
// between hosts. `others`: the orders that could be asked for instead, by name.
[[nodiscard]] std::vector<Finding> diagnose_sums(
    const Topology& topology, const std::vector<RankDevice>& devices,
    const std::vector<std::pair<std::string, Topology>>& others);

// Ranks that share a stage, and what their collectives take, in seconds and bytes per second; all
// 0: not measured.
struct TensorGroup {
  std::vector<int> ranks;  // of the job
  CollectiveCosts costs;
};
[[nodiscard]] double seconds_of_sum(const TensorGroup& group, double bytes);
// Of those that are on several hosts: what their sums cost, also against those of one host.
[[nodiscard]] std::vector<Finding> diagnose_tensor_groups(const std::vector<RankFacts>& ranks,
                                                          const std::vector<TensorGroup>& groups);

// How messages travel from `from` to `to`: the interface at `from`, where a TCP connection of the
// two is known; else "memory" on one host, and "no TCP" between hosts.
[[nodiscard]] std::string way_of(const RankFacts& from, const RankFacts& to);
// "1160 MB/s", "5.9 MB/s".
[[nodiscard]] std::string bandwidth_text(double bytes_per_second);
// Host -> its first rank's facts, in order of rank.
[[nodiscard]] std::vector<const RankFacts*> first_of_hosts(const std::vector<RankFacts>& ranks);

}  // namespace sluice
