// The program's commands, and the frame every program of ours (examples too) runs in.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "comm/communicator.hpp"
#include "comm/error.hpp"
#include "comm/mpi_session.hpp"

namespace sluice {

class OptionTable;

// Runs `body` with MPI up; returns the process's exit code. An error is printed once in the whole
// job, by the rank that saw it first. Where every rank throws the same Error(kUsage), all of them
// return its exit code and MPI ends in peace; any other error ends the job on every rank within
// about two seconds by MPI_Abort with exit_code(code). An exception that is no Error has the code
// of code_of_foreign(). Nothing escapes.
int run_main(int argc, char** argv,
             const std::function<void(MpiSession& session, Communicator& world)>& body);

// run_main for a command line: `parse` runs before MPI is up and throws what it refuses; a text it
// returns (help) is printed once and ends the command. Refusals of a process started alone need no
// MPI; in a job every rank refuses alike, see above. Before anything else the ranks of a job
// compare `command`: where one runs another, that is Error(kMismatch).
int run_command(const std::string& command, int argc, char** argv,
                const std::function<std::string()>& parse,
                const std::function<void(MpiSession& session, Communicator& world)>& body);

// The same for what needs no MPI. Standard output that cannot be written is Error(kIo).
int run_guarded(const std::function<void()>& body);

// run_guarded for a command line: parses it, and prints the help where it is asked for; else runs
// `body`.
int run_guarded(OptionTable& table, const std::vector<std::string>& arguments,
                const std::function<void()>& body);

// "sluice: error: <message> [rank <r>]" on standard error, in one piece; without the rank where
// there is none, and for kUsage, which all ranks see alike.
void print_error(const Error& error);

// By the launcher's environment, before MPI is up: this process's rank in a job, or -1 where it was
// started alone.
[[nodiscard]] int launched_rank();
[[nodiscard]] inline bool first_of_job() { return launched_rank() <= 0; }

// Does standard output end at a terminal? Under mpirun, which hands its ranks a terminal whatever
// its own output is, that of the launcher counts.
[[nodiscard]] bool terminal_output();

// `sluice <command> ...`; arguments exclude the program's name and the command. Each returns the
// exit code; commands without MPI (schedule, digest) never start it.
int train_command(int argc, char** argv);
int generate_command(int argc, char** argv);
int schedule_command(const std::vector<std::string>& arguments);
int digest_command(const std::vector<std::string>& arguments);
int doctor_command(int argc, char** argv);

}  // namespace sluice
