// Lines for the program that supervises a job (`sluice run`): what it must know and cannot see from
// the exit code of a launcher. runtime/supervise/job_output.hpp reads them.
#pragma once

#include <string>

namespace sluice {

// Set in the environment of a job that is supervised. The launcher of Open MPI passes each variable
// that begins with OMPI_ on to ranks on all hosts, and others to those on its own host alone.
inline constexpr const char* kSupervised = "SLUICE_SUPERVISED";
inline constexpr const char* kSupervisedByMpi = "OMPI_SLUICE_SUPERVISED";

[[nodiscard]] bool is_supervised() noexcept;

// "sluice-event <json>" as one line on standard error, in one write, where the job is supervised;
// otherwise nothing. `json`: one object without line breaks. Never throws.
void tell_supervisor(const std::string& json) noexcept;

}  // namespace sluice
