// The frame of a command that needs no MPI, and the facts of a job that a process has before MPI is
// up.
#pragma once

#include <functional>
#include <string>

#include <sluice/error.hpp>

namespace sluice {

// As caught_error(). Standard output that cannot be written is kIo.
[[nodiscard]] Error current_error();

// Runs `body`, which needs no MPI. Returns the exit code and prints an error, as run_main() does.
// Standard output that cannot be written is Error(kIo).
int run_guarded(const std::function<void()>& body);

// Empties the buffers of standard output.
void flush_stdout();
// The same. Throws Error(kIo) where standard output has not taken everything.
void require_stdout();

// "sluice: error: <message> [rank <r>]" on standard error, in one piece; without the rank where
// there is none, and for kUsage, which is the same on all ranks. Returns the error's exit code.
int print_error(const Error& error);

// This process's rank in a job, by the launcher's environment; -1 where it was started alone. Needs
// no MPI.
[[nodiscard]] int launched_rank();
// The number of ranks of that job by the launcher's environment; 1 where it is not known.
[[nodiscard]] int launched_size();
[[nodiscard]] inline bool first_of_job() { return launched_rank() <= 0; }

// Whether standard output is a terminal. mpirun always gives its ranks a terminal, so under it the
// launcher's own output counts.
[[nodiscard]] bool terminal_output();

}  // namespace sluice
