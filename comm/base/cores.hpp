// The job's cores and ranks on this host, known before any message can be sent.
#pragma once

#include <string>
#include <vector>

namespace sluice {

// Cores of this host that the job may use: those online, within the CPU set and the CPU quota of
// this process's control group. The affinity mask does not count: a launcher binds each rank to
// its own core. Read once, at the first call.
[[nodiscard]] int host_cores();

// Cores in this process's affinity mask, which a launcher sets for each rank; at least 1.
[[nodiscard]] int affinity_cores();
// Their numbers, ascending; empty where the system does not say.
[[nodiscard]] std::vector<int> affinity_list();
// As a kernel CPU list: "0-3,8" for 0, 1, 2, 3, 8. `cores` is ascending.
[[nodiscard]] std::string to_cpu_list(const std::vector<int>& cores);

// The job's ranks on this host and this rank's index among them, from the launcher's environment
// (Open MPI, PMIx launchers, Slurm, MPICH, Intel MPI); 0 and -1 where it is unset.
struct LauncherInfo {
  int local_size = 0;
  int local_rank = -1;
};
[[nodiscard]] LauncherInfo launcher_info();

// Number of CPUs in a kernel CPU list such as "0-3,8"; 0 where the text is not one.
[[nodiscard]] int count_cpu_list(const std::string& text);

// Ranks per node from Slurm's SLURM_TASKS_PER_NODE form, "4(x2),3": the largest; 0 if malformed.
[[nodiscard]] int largest_slurm_count(const std::string& text);

}  // namespace sluice
