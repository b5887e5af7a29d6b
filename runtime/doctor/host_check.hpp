// What `sluice doctor --hosts` finds out before mpirun starts anything: whether each host of a host
// file answers over ssh and has what a job needs. Needs no MPI.
#pragma once

#include <string>
#include <vector>

namespace sluice {

struct HostCheckOptions {
  std::string hosts;        // a host file of mpirun
  std::string ssh = "ssh";  // the command that reaches a host; it is followed by the host's name
  std::string data, save;   // as of `sluice train`; may be empty
};

// What one host said.
struct HostAnswer {
  std::string host;
  bool reached = false;
  std::string problem;            // the last line of ssh where it was not reached
  std::string mpi;                // the first line of 'mpirun --version'; empty: not on the PATH
  std::string daemon;             // path of the launcher's daemon; empty: not on the PATH
  bool daemon_in_prefix = false;  // it lies where this host has it, though not on the PATH
  std::string program;            // by --version; empty: missing
  std::string data;               // size and checksum; "missing"; empty: not asked for
  std::string save;               // "seen", "unseen"; empty: not asked for
};

// The facts of this host, with which the others are compared.
struct OwnFacts {
  std::string mpi, daemon_name, prefix, program_path, program, data;
};

// What is wrong with a host, one line each, with what to do.
[[nodiscard]] std::vector<std::string> problems_of(const HostAnswer& answer, const OwnFacts& own);

// Asks all hosts at once, for at most 20 s, prints a table and the problems. Throws Error(kPeer)
// with their number if there are any, and what read_host_file() throws.
void check_hosts(const HostCheckOptions& options);

}  // namespace sluice
