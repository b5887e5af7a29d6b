// Lines for the program that supervises a job (`sluice run`): what it must know and cannot see from
// the exit code of a launcher.
#pragma once

#include <string>

namespace sluice {

// "sluice-event <json>" as one line on standard error, in one write, where SLUICE_SUPERVISED is set
// in the environment; otherwise nothing. `json`: one object without line breaks. Never throws.
void tell_supervisor(const std::string& json) noexcept;

}  // namespace sluice
