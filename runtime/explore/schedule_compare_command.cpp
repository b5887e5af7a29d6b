#include <fmt/format.h>

#include <cstdio>
#include <limits>

#include "runtime/explore/schedule_compare.hpp"
#include "runtime/options/option_table.hpp"
#include "runtime/options/process.hpp"

namespace sluice {

int schedule_compare_command(const std::vector<std::string>& arguments) {
  constexpr int kMaxInt = std::numeric_limits<int>::max();
  ScheduleShape shape = {.ranks = 4, .micro_batches = 8, .chunks = 0};
  CostOptions options;
  std::string format = "grid", objective = "makespan";
  OptionTable table(
      "sluice schedule compare [options]",
      "Proves and simulates every schedule on the same work and lists them by makespan. Times\n"
      "and bytes are of one micro-batch on one rank's whole share of the model; with v chunks "
      "per\n"
      "rank each action takes a v-th of them. Lists have one number per rank's share, in the\n"
      "model's order. Messages keep their bytes. What a rank can't hold is left out.\n"
      "\n"
      "  sluice schedule compare --ranks 8 --micro-batches 32");
  table.add_integer("ranks", shape.ranks, 1, kMaxInt, "pipeline depth");
  table.add_integer("micro-batches", shape.micro_batches, 1, kMaxInt, "per step");
  table.add_integer("chunks", shape.chunks, 1, kMaxChunks,
                    "stages per rank; auto: 2 for schedules that take them", "auto");
  table.add_choice("objective", objective, {"makespan", "span"},
                   "to sort by: the step with its barrier, or a rank's longest own span");
  table.add_choice("format", format, {"grid", "json"}, "of the output");
  add_cost_options(table, options, CostsOf::kRankShare);
  return run_guarded(table, arguments, [&] {
    const Comparison comparison =
        compare_schedules(shape, Costs(options, table, CostsOf::kRankShare),
                          objective == "span" ? Objective::kSpan : Objective::kMakespan);
    fmt::print("{}", format == "json" ? to_json_text(comparison) : to_table_text(comparison));
  });
}

}  // namespace sluice
