// `sluice schedule compare`: the schedules next to each other on the same work.
// `sluice schedule auto`: the schedule that search_schedule() finds for given costs.
#pragma once

#include <map>
#include <string>
#include <vector>

#include <sluice/search.hpp>

#include "runtime/options/option_table.hpp"

namespace sluice {

// --objective, with the help text of the command.
void add_objective(OptionTable& table, Objective& objective, const std::string& help);
[[nodiscard]] const char* name_of(Objective objective);

struct StepTimes {
  double makespan = 0, span = 0;
};

// A sentence where the shorter spans of zb-h2, which papers count, do not shorten a step that ends
// with a barrier; else empty. `times`: of schedules by name; without zb-h1 or zb-h2 it is empty.
[[nodiscard]] std::string remark_on_barrier(const std::map<std::string, StepTimes>& times);

// Arguments exclude the program's name and both words of the command. Return the exit code.
int schedule_compare_command(const std::vector<std::string>& arguments);
int schedule_auto_command(const std::vector<std::string>& arguments);

}  // namespace sluice
