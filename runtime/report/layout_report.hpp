// The text on a job's layout that `sluice train` prints before the first step, and the table of its
// ranks: where each runs, what it computes on, and its place.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include <sluice/stage.hpp>

#include "comm/group/collectives.hpp"
#include "runtime/group/collective_costs.hpp"
#include "runtime/layout/job_layout.hpp"

namespace sluice {

// A row per rank of a pipeline, and per tensor rank of it, with its stages, layers and memory;
// then, where a rank computes on a GPU, devices and routes; then the notes of stages.
[[nodiscard]] std::string describe_layout(const JobLayout& layout, const Partition& partition);

// What the ranks that share stages pass each other in a step, and what that takes by the simulation
// with `costs`, unless they are all 0. One line; empty where none shares stages.
[[nodiscard]] std::string describe_shared_calls(const JobLayout& layout,
                                                const CollectiveCosts& costs);

struct RankRow {
  std::string host, device;
  int replica = 0;
  std::vector<int> stages;
  std::vector<int> cores;  // that the process is bound to, ascending
  int host_cores = 1;      // that the job may use there
  int threads = 1;
  std::vector<std::string> interfaces;  // of its TCP connections over IPv4, loopback left out
  int tensor = -1;                      // coordinate; -1: no ranks share stages
};

// Lines with a title, one for each rank of the job, and what the columns mean. Each begins with
// `indent`. At most 64 ranks are shown.
[[nodiscard]] std::string rank_table(const std::vector<RankRow>& ranks, std::string_view indent);

// Collective: rank_table() of the job. `threads`: of this rank. Interfaces are those of connections
// that are open now: MPI opens one with the first message.
[[nodiscard]] std::string gather_rank_table(Collectives& world, const JobLayout& layout,
                                            int threads, std::string_view indent);

}  // namespace sluice
