// `sluice schedule compare`: the schedules next to each other on the same work.
// `sluice schedule auto`: the schedule that search_schedule() finds for given costs.
#pragma once

#include <map>
#include <string>
#include <vector>

#include <sluice/search.hpp>

#include "runtime/explore/schedule_costs.hpp"
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

// What search_schedule() makes of the costs, which are of CostsOf::kRankShare or of layers, for the
// request's ranks, micro-batches, chunks and objective. `layers` of 0: the model can be cut
// anywhere.
[[nodiscard]] SearchResult search_with(const Costs& costs, SearchRequest request, int layers);
// One line: what was found, and how far it is from the bound.
[[nodiscard]] std::string describe_search(const SearchResult& result, Objective objective);

// Arguments exclude the program's name and both words of the command. Return the exit code.
int schedule_compare_command(const std::vector<std::string>& arguments);
int schedule_auto_command(const std::vector<std::string>& arguments);

}  // namespace sluice
