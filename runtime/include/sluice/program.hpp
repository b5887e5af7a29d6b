// The frame of every program with MPI: the examples, the commands of `sluice`, and yours.
#pragma once

#include <functional>
#include <string>

#include <sluice/communicator.hpp>

namespace sluice {

// Runs `body` with MPI up; returns the process's exit code. An error is printed once in the whole
// job, by the rank that saw it first. Where every rank throws the same Error(kUsage), all of them
// return its exit code and MPI ends normally; any other error ends the job on every rank within
// about two seconds by MPI_Abort with exit_code(code). An exception that is no Error has the code
// of code_of_foreign(). Nothing escapes.
int run_main(int argc, char** argv, const std::function<void(Communicator& world)>& body);

// run_main() for a command line. `parse` runs before MPI is up. A text that it returns (help) is
// printed once and ends the command. An error that it throws ends a process started alone without
// MPI; in a job every rank throws it, see above. The ranks of a job first compare `command`: where
// one runs another, that is Error(kMismatch).
int run_command(const std::string& command, int argc, char** argv,
                const std::function<std::string()>& parse,
                const std::function<void(Communicator& world)>& body);

}  // namespace sluice
