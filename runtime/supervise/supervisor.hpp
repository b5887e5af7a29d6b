// `sluice run`: starts a job, and starts it again while that helps.
#pragma once

#include <string>
#include <vector>

namespace sluice {

struct SupervisorOptions {
  std::vector<std::string> command;  // with placeholders (runtime/launch/command_template.hpp)
  int restarts = 100;
  double grace = 300;   // seconds from a request to stop to SIGTERM
  double pause = 1;     // before the first restart, in seconds
  std::string hosts;    // a host file; may be empty
  std::string layouts;  // "4x2,2x2"; may be empty
  bool verbose = false;
};

// Runs the job to its end and returns its last exit code; 12 where it was asked to stop between two
// starts. Error(kUsage) or Error(kData) before anything is started for options that do not fit
// together, and where the program cannot be started. For a process with one thread and no children.
int supervise(const SupervisorOptions& options);

}  // namespace sluice
