// A run of `sluice train`, from its options to its summary.
#pragma once

#include <string>
#include <vector>

namespace sluice {

// `arguments` exclude the program's name and the command. Returns the exit code.
int train_command(const std::vector<std::string>& arguments);

}  // namespace sluice
