// `sluice run`: starts a job, and starts it again while that helps.
#pragma once

#include <string>
#include <vector>

namespace sluice {

// `arguments`: options and, behind "--", the command of the job; without the program's name and
// "run". Runs the job to its end and returns its last exit code; 12 where it was asked to stop
// between two starts. Returns 2 or 3, before anything is started, for options that do not fit
// together, and where the program cannot be started. For a process with one thread and no children.
[[nodiscard]] int run_job_command(const std::vector<std::string>& arguments);

}  // namespace sluice
