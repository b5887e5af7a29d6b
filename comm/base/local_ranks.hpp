// The job's processes on this host as /proc shows them: for a start in which a rank is silent.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

namespace sluice {

struct LocalRank {
  int rank = -1;  // of the job
  pid_t process = 0;
  char state = 'R';  // as /proc/<process>/stat has it
  [[nodiscard]] bool stopped() const { return state == 'T' || state == 't'; }
};

// By rank, each once; of a rank's several processes one that is stopped, if there is one. Empty
// where the launcher does not name its job (PMIX_NAMESPACE).
[[nodiscard]] std::vector<LocalRank> local_ranks();

// Why ranks of a job of `size` are silent, as far as this host shows it: "rank 1 (process 4242) is
// stopped (state T), rank 2 does not run", or that this host has all ranks, and they run. Empty
// where the cause may be on another host.
[[nodiscard]] std::string silence_on_host(const std::vector<LocalRank>& ranks, int size);

}  // namespace sluice
