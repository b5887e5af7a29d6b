// The frame of a command of `sluice` with MPI.
#pragma once

#include <functional>
#include <string>

#include "comm/group/communicator.hpp"

namespace sluice {

// run_main() for a command line. `parse` runs before MPI is up. A text that it returns (help) is
// printed once and ends the command. An error that it throws ends a process started alone without
// MPI; in a job every rank throws it, see above. The ranks of a job first compare `command`: where
// one runs another, that is Error(kMismatch).
int run_command(const std::string& command, const std::function<std::string()>& parse,
                const std::function<void(Communicator& world)>& body);

}  // namespace sluice
