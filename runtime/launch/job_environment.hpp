// The environment of a job that is started by a supervisor.
#pragma once

#include <span>
#include <string>
#include <vector>

namespace sluice {

// `current` ("NAME=value") without what a launcher gives to its ranks, so that the launcher of the
// job starts as if by hand. Settings of a user stay: OMPI_MCA_*, PMIX_MCA_*, PRTE_MCA_* and
// OMPI_ALLOW_RUN_AS_ROOT*. Where `current` is itself that of a rank of Open MPI, so do not those
// OMPI_MCA_* that mpirun made. Adds what makes ranks speak to the supervisor, on all hosts.
[[nodiscard]] std::vector<std::string> job_environment(std::span<const std::string> current);

// The number of ranks of the MPI job that `current` belongs to; 1 outside of one. The variables of
// a Slurm script do not count: it may start jobs.
[[nodiscard]] int ranks_around(std::span<const std::string> current);

}  // namespace sluice
