// The commands of the program, but for `sluice schedule` (runtime/explore/schedule_command.hpp) and
// `sluice run` (runtime/supervise/run_command.hpp).
#pragma once

#include <string>
#include <vector>

namespace sluice {

// `sluice <command> ...`; arguments exclude the program's name and the command. Each returns the
// exit code; digest and verify never start MPI.
int train_command(int argc, char** argv);
int generate_command(int argc, char** argv);
int evaluate_command(int argc, char** argv);
int digest_command(const std::vector<std::string>& arguments);
int verify_command(const std::vector<std::string>& arguments);
int doctor_command(int argc, char** argv);

}  // namespace sluice
