// Commands that look at models in files, and need no MPI. `arguments` exclude the program's name
// and the command. Each returns the exit code.
#pragma once

#include <string>
#include <vector>

namespace sluice {

int digest_command(const std::vector<std::string>& arguments);
int verify_command(const std::vector<std::string>& arguments);
int inspect_command(const std::vector<std::string>& arguments);
int export_command(const std::vector<std::string>& arguments);

}  // namespace sluice
