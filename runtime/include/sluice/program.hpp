// The frame that every program with MPI runs in: the examples, the commands of `sluice`, and yours.
#pragma once

#include <functional>
#include <string>

#include <sluice/communicator.hpp>

namespace sluice {

// Runs `body` with MPI up; returns the process's exit code. An error is printed once in the whole
// job, by the rank that saw it first. Where every rank throws the same Error(kUsage), all of them
// return its exit code and MPI ends in peace; any other error ends the job on every rank within
// about two seconds by MPI_Abort with exit_code(code). An exception that is no Error has the code
// of code_of_foreign(). Nothing escapes.
int run_main(int argc, char** argv, const std::function<void(Communicator& world)>& body);

// run_main for a command line: `parse` runs before MPI is up and throws what it refuses; a text it
// returns (help) is printed once and ends the command. Refusals of a process started alone need no
// MPI; in a job every rank refuses alike, see above. Before anything else the ranks of a job
// compare `command`: where one runs another, that is Error(kMismatch).
int run_command(const std::string& command, int argc, char** argv,
                const std::function<std::string()>& parse,
                const std::function<void(Communicator& world)>& body);

}  // namespace sluice
