#include <fmt/format.h>

#include <limits>

#include "runtime/explore/schedule_auto.hpp"
#include "runtime/explore/schedule_output.hpp"
#include "runtime/options/option_table.hpp"
#include "runtime/options/process.hpp"

namespace sluice {
namespace {

constexpr int kMaxInt = std::numeric_limits<int>::max();
constexpr const char* kAbout =
    "Searches for the schedule, the number of chunks, the placement and the layers of each stage\n"
    "that make the step shortest for the costs given, within a memory limit. A heuristic: it says\n"
    "how far it is from a lower bound. Times are of one micro-batch on one rank's whole share of\n"
    "the model, which can be cut anywhere; with --layers, of one layer, and stages are whole "
    "layers.\n"
    "\n"
    "  sluice schedule auto --ranks 8 --micro-batches 32 --memory-limit 16 --message-time 0.02\n"
    "  sluice schedule auto --ranks 4 --layers 6 --forward-time 4,1,1,1,1,2 --format file";

struct AutoOptions {
  SearchRequest request = {.ranks = 4, .micro_batches = 8};
  CostOptions costs;
  int chunks = 0, layers = 0;
  bool whole_backward = false;
  std::string objective = "makespan";
  ScheduleOutput output;
};

OptionTable make_table(AutoOptions& options) {
  OptionTable table("sluice schedule auto [options]", kAbout);
  table.add_integer("ranks", options.request.ranks, 1, kMaxInt, "pipeline depth");
  table.add_integer("micro-batches", options.request.micro_batches, 1, kMaxInt, "per step");
  table.add_choice("objective", options.objective, {"makespan", "span"},
                   "makespan: the step with its barrier; span: as the papers rank");
  table.add_integer("chunks", options.chunks, 1, kMaxSearchedChunks,
                    "stages per rank; auto: 1, 2, 4 or 8", "auto");
  table.add_integer("layers", options.layers, 1, kMaxInt,
                    "of the model, costs being of layers; any: it can be cut anywhere", "any");
  table.add_flag("whole-backward", options.whole_backward,
                 "only schedules that do not part the backward pass");
  table.add_integer("effort", options.request.effort, 0, std::numeric_limits<std::int64_t>::max(),
                    "actions that the last improvement plays");
  add_output_options(table, options.output);
  add_cost_options(table, options.costs, CostsOf::kRankShare);
  return table;
}

void run(AutoOptions& options, const OptionTable& table) {
  const Costs costs(options.costs, table,
                    options.layers > 0 ? CostsOf::kStage : CostsOf::kRankShare);
  SearchRequest request = options.request;
  request.objective = options.objective == "span" ? Objective::kSpan : Objective::kMakespan;
  request.split_backward = !options.whole_backward;
  if (options.chunks > 0) request.chunks = {options.chunks};
  const Objective objective = request.objective;
  const AutoSchedule found =
      find_schedule(std::move(request), costs, options.layers, detail_of(options.output));
  write_output(options.output, [&](const PutText& put) {
    if (options.output.format == "json") {
      put(to_json_text(found, objective));
      return;
    }
    if (options.output.format == "grid") put(to_table_text(found, objective));
    put_schedule(found.report, options.output, put);
  });
}

}  // namespace

int schedule_auto_command(const std::vector<std::string>& arguments) {
  AutoOptions options;
  OptionTable table = make_table(options);
  return run_guarded(table, arguments, [&] { run(options, table); });
}

}  // namespace sluice
