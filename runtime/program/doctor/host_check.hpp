// What `sluice doctor --hosts` finds out before mpirun starts anything: whether each host of a host
// file answers over ssh and has what a job needs. Needs no MPI.
#pragma once

#include <string>

namespace sluice {

struct HostCheckOptions {
  std::string hosts;        // a host file of mpirun
  std::string ssh = "ssh";  // the command that reaches a host; it is followed by the host's name
  std::string data, save;   // as of `sluice train`; may be empty
};

// Asks all hosts at once, for at most 20 s, prints a table and the problems. Throws Error(kPeer)
// with their number if there are any, and what read_host_file() throws.
void check_hosts(const HostCheckOptions& options);

}  // namespace sluice
