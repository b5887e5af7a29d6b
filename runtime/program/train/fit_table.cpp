#include "runtime/program/train/fit_table.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <set>
#include <utility>
#include <vector>

#include "comm/base/index.hpp"
#include "runtime/layout/parameter_cut.hpp"

namespace sluice {
namespace {

using OffloadTo = PipelineOptions::Offload::To;

double mebi(double bytes) { return bytes / (1 << 20); }

// Of the fullest rank, with what its host has beside a device.
double most_bytes(const JobLayout& layout) {
  std::size_t most = 0;
  for (const RankMemory& each : layout.memory.ranks)
    most = std::max(most, each.total() + each.host());
  return static_cast<double>(most);
}

// Of the rank that moves most.
double moved_bytes(const JobLayout& layout) {
  double most = 0;
  for (int rank = 0; rank < layout.plans.placement().ranks(); ++rank) {
    most = std::max(most, moved_bytes(layout, rank));
  }
  return most;
}

// What the rank that gathers most gets of parameters in a step beside what an update sends.
double gathered_bytes(const JobLayout& layout) {
  double most = 0;
  for (const RankPlan& rank : layout.plans.train.ranks) {
    double bytes = 0;
    std::set<int> seen;
    for (const PlanOp& op : rank.ops) {
      if (op.kind != OpKind::kCompute || op.action == ActionKind::kRecompute) continue;
      if (seen.insert(op.stage).second) continue;  // an update sends as much
      for (const ShardedUnit& unit : sharded_units(layout.parameters.stages[at(op.stage)])) {
        bytes += static_cast<double>(unit.bytes());
      }
    }
    most = std::max(most, bytes);
  }
  const double replicas = layout.place.topology.size.replica;
  return most * (replicas - 1) / replicas;
}

// Of a training's operations, how many are computed once more.
double share_again(const TransformerConfig& model) {
  const auto sum = [](const std::vector<double>& costs) {
    return std::accumulate(costs.begin(), costs.end(), 0.0);
  };
  return sum(recompute_costs(model)) / (3 * sum(layer_costs(model)));  // forward, I, W
}

class FitTable {
 public:
  FitTable(const TransformerConfig& model, const PipelineOptions& options, const JobLayout& given,
           const LayoutOfOptions& layout_of)
      : model_(model), options_(options), given_(given), layout_of_(layout_of) {}

  std::string text() {
    add("as given", given_, "");
    const std::vector<ShardLevel> shards = levels();
    const bool offloads = options_.offload.activations == OffloadTo::kNowhere && waits();
    const bool recomputes =
        std::ranges::all_of(model_.recompute_blocks,
                            [](Recompute each) { return each == Recompute::kNone; }) &&
        model_.recompute == Recompute::kNone;
    const ShardLevel as_given = options_.shape.shard;
    for (const ShardLevel level : shards) plan(level, false, Recompute::kNone);
    if (offloads) plan(as_given, true, Recompute::kNone);
    if (recomputes) {
      plan(as_given, false, Recompute::kAttention);
      plan(as_given, false, Recompute::kBlock);
    }
    const Recompute most = recomputes ? Recompute::kBlock : Recompute::kNone;
    if (offloads || recomputes) {
      for (const ShardLevel level : shards) plan(level, offloads, most);
    }
    if (shards.empty() && offloads && recomputes) plan(as_given, true, most);
    return rows_ > 1 ? text_ : "";
  }

 private:
  // Whether a stage has more micro-batches in flight than stay.
  [[nodiscard]] bool waits() const {
    for (int stage = 0; stage < given_.plans.num_stages(); ++stage) {
      const StageEntry& entry = given_.parameters.stages[at(stage)];
      if (entry.state_moves && StepPlans::states_of(given_.plans.train, stage).slots > 2)
        return true;
    }
    return false;
  }

  // Those above the one given.
  [[nodiscard]] std::vector<ShardLevel> levels() const {
    std::vector<ShardLevel> all;
    if (options_.shape.replicas == 1 || options_.devices.all_reduce) return all;
    for (const ShardLevel level : {ShardLevel::kOptimizer, ShardLevel::kParameters}) {
      if (level > options_.shape.shard) all.push_back(level);
    }
    return all;
  }

  void plan(ShardLevel shards, bool offloads, Recompute recompute) {
    TransformerConfig model = model_;
    PipelineOptions options = options_;
    std::string names, costs;
    const auto append = [](std::string& text, const char* between, const std::string& more) {
      text += (text.empty() ? "" : between) + more;
    };
    options.shape.shard = shards;
    if (shards != options_.shape.shard) {
      append(names, " ", fmt::format("--shard {}", name_of(shards)));
    }
    const bool on_gpus = std::ranges::all_of(given_.place.devices, [](const RankDevice& each) {
      return each.device.kind != DeviceKind::kCpu;
    });
    if (offloads) {
      options.offload = {.activations = on_gpus ? OffloadTo::kHost : OffloadTo::kDisk,
                         .directory = on_gpus ? "" : "DIR"};
      append(names, " ", on_gpus ? "--offload activations:host" : "--offload activations:disk=DIR");
    }
    if (recompute != Recompute::kNone) {
      model.recompute = recompute;
      model.recompute_blocks.clear();
      append(names, " ",
             recompute == Recompute::kBlock ? "--recompute block" : "--recompute attention");
    }
    const JobLayout layout = layout_of_(model, options);
    if (shards != options_.shape.shard) {
      append(costs, "; ",
             layout.parameters.gather != Gather::kPerUse
                 ? "no more bytes over the network"
                 : fmt::format("{:.1f} MiB more to a rank a step", mebi(gathered_bytes(layout))));
    }
    if (offloads) {
      append(costs, "; ", fmt::format("{:.1f} MiB out and back a step", mebi(moved_bytes(layout))));
    }
    if (recompute != Recompute::kNone) {
      append(costs, "; ", fmt::format("{:.1f} % more operations", 100 * share_again(model)));
    }
    add(names, layout, costs);
  }

  void add(const std::string& names, const JobLayout& layout, const std::string& costs) {
    if (rows_++ == 0) {
      text_ = "  what takes less memory and changes no bit, in MiB of the fullest rank:\n";
    }
    text_ += fmt::format("    {:<78} {:>10.1f}{}\n", names, mebi(most_bytes(layout)),
                         costs.empty() ? "" : "  " + costs);
  }

  const TransformerConfig& model_;
  const PipelineOptions& options_;
  const JobLayout& given_;
  const LayoutOfOptions& layout_of_;
  int rows_ = 0;
  std::string text_;
};

}  // namespace

std::string describe_fit(const TransformerConfig& model, const PipelineOptions& options,
                         const JobLayout& given, const LayoutOfOptions& layout_of) {
  return FitTable(model, options, given, layout_of).text();
}

}  // namespace sluice
