// `sluice schedule compare`: the schedules next to each other on the same work.
#pragma once

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

// A sentence where zb-h2's shorter spans, which papers count, do not shorten a step that ends with
// a barrier; else empty.
[[nodiscard]] std::string remark_on_barrier(const StepTimes& zb_h1, const StepTimes& zb_h2);

// Arguments exclude the program's name and both words of the command. Returns the exit code.
int schedule_compare_command(const std::vector<std::string>& arguments);

}  // namespace sluice
