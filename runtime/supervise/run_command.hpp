// `sluice run`.
#pragma once

#include <string>
#include <vector>

namespace sluice {

// `arguments`: without the program's name and the command. Returns the exit code.
[[nodiscard]] int run_job_command(const std::vector<std::string>& arguments);

}  // namespace sluice
