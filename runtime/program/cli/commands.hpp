// The commands of the program that start MPI. Others: `sluice schedule` (runtime/explore), `sluice
// run` (runtime/supervise), `sluice train` (runtime/train), those that look at models in files
// (runtime/saves).
#pragma once

#include <string>
#include <vector>

namespace sluice {

// `sluice <command> ...`; `arguments` exclude the program's name and the command. Each returns the
// exit code.
int generate_command(const std::vector<std::string>& arguments);
int evaluate_command(const std::vector<std::string>& arguments);
int doctor_command(const std::vector<std::string>& arguments);

}  // namespace sluice
