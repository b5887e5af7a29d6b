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
    constexpr RealRange kTime = {.low = 0, .high = std::numeric_limits<double>::infinity()};
    ScheduleShape shape = {.ranks = 4, .micro_batches = 8, .chunks = 0};
    StageTimes times;
    double message = 0;
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
    table.add_real("forward-time", times.forward, kTime, "of one micro-batch on one rank");
    table.add_real("backward-input-time", times.backward_input, kTime, "likewise");
    table.add_real("backward-weight-time", times.backward_weight, kTime, "likewise");
    table.add_real("message-time", message, kTime, "latency of a message between ranks");
    table.add_choice("format", format, {"grid", "json"}, "of the output");
    table.parse(arguments);
    if (table.help_wanted()) {
      fmt::print("{}", table.help());
      return;
    }
    const Comparison comparison = compare_schedules(shape, times, message);
    fmt::print("{}", format == "json" ? to_json_text(comparison) : to_table_text(comparison));
  });
}

}  // namespace sluice
