#include <fmt/format.h>

#include <cstdio>
#include <limits>

#include "runtime/option_table.hpp"
#include "runtime/program.hpp"
#include "runtime/schedule_compare.hpp"

namespace sluice {

int schedule_compare_command(const std::vector<std::string>& arguments) {
  return run_guarded([&] {
    constexpr int kMaxInt = std::numeric_limits<int>::max();
    ScheduleShape shape = {.ranks = 4, .micro_batches = 8, .chunks = 0};
    CostOptions options;
    std::string format = "grid";
    OptionTable table(
        "sluice schedule compare [options]",
        "Proves and simulates every schedule on the same work and lists them by makespan. Times\n"
        "are of one micro-batch on one rank's whole share of the model; with v chunks per rank\n"
        "each action takes a v-th of them.\n"
        "\n"
        "  sluice schedule compare --ranks 8 --micro-batches 32");
    table.add_integer("ranks", shape.ranks, 1, kMaxInt, "pipeline depth");
    table.add_integer("micro-batches", shape.micro_batches, 1, kMaxInt, "per step");
    table.add_integer("chunks", shape.chunks, 1, kMaxInt,
                      "stages per rank; auto: 2 for schedules that take them", "auto");
    table.add_choice("format", format, {"grid", "json"}, "of the output");
    add_cost_options(table, options, CostsOf::kRankShare);
    table.parse(arguments);
    if (table.help_wanted()) {
      fmt::print("{}", table.help());
      return;
    }
    const Comparison comparison =
        compare_schedules(shape, Costs(options, table, CostsOf::kRankShare));
    fmt::print("{}", format == "json" ? to_json_text(comparison) : to_table_text(comparison));
  });
}

}  // namespace sluice
