// `sluice schedule auto`: the schedule that search_schedule() finds for given costs.
#pragma once

#include <string>
#include <vector>

namespace sluice {

// Arguments exclude the program's name and both words of the command. Returns the exit code.
int schedule_auto_command(const std::vector<std::string>& arguments);

}  // namespace sluice
