// `sluice schedule`: plans, proofs, simulations and drawings, without MPI and without a GPU.
#pragma once

#include <string>
#include <vector>

namespace sluice {

// `sluice schedule ...`; arguments exclude the program's name and the command. Returns the exit
// code.
int schedule_command(const std::vector<std::string>& arguments);

}  // namespace sluice
