// The frame of a command that needs no MPI, and what a process knows of its job before MPI is up.
#pragma once

#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include <sluice/error.hpp>

namespace sluice {

class OptionTable;

// The Error that the exception now handled stands for: itself, or kInternal. Call from a catch
// clause.
[[nodiscard]] Error current_error();

// Runs `body`, which needs no MPI, as run_main() does: returns the exit code, prints an error.
// Standard output that cannot be written is Error(kIo).
int run_guarded(const std::function<void()>& body);

// The result of body(); a std::invalid_argument that it throws becomes Error(kUsage).
template <typename Body>
auto usage_errors(const Body& body) {
  try {
    return body();
  } catch (const std::invalid_argument& error) {
    throw Error(ErrorCode::kUsage, error.what());
  }
}

// Empties the buffers of standard output.
void flush_stdout();

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

}  // namespace sluice
