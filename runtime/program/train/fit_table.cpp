#include "runtime/program/train/fit_table.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "comm/base/index.hpp"
#include "runtime/layout/parameter_cut.hpp"
#include "runtime/program/train/offload_option.hpp"

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

// Of the rank that has most of the optimizer's state there.
double state_on_disk(const JobLayout& layout) {
  std::size_t most = 0;
  for (const RankMemory& each : layout.memory.ranks) most = std::max(most, each.optimizer_disk);
  return static_cast<double>(most);
}

// What the rank that gathers most gets of parameters in a step beside what an update sends.
double gathered_bytes(const JobLayout& layout) {
  double most = 0;
  for (const RankPlan& rank : layout.plans.train.ranks) {
    double bytes = 0;
    std::set<int> seen;
    for (const PlanOp& op : rank.ops) {
      if (op.kind != OpKind::kCompute || op.action == ActionKind::kRecompute) continue;
      const StageEntry& stage = layout.parameters.stages[at(op.stage)];
      if (op.action == ActionKind::kBackwardWeight && !stage.weight_reads) continue;
      if (seen.insert(op.stage).second) continue;  // an update sends as much
      for (const ShardedUnit& unit : sharded_units(stage)) {
        bytes += static_cast<double>(unit.bytes());
      }
    }
    most = std::max(most, bytes);
  }
  const double replicas = layout.place.shard_groups.size();
  return most * (replicas - 1) / replicas;
}

// Of a training's operations, how many are computed once more.
double share_again(const TransformerConfig& model) {
  const auto sum = [](const std::vector<double>& costs) {
    return std::accumulate(costs.begin(), costs.end(), 0.0);
  };
  return sum(recompute_costs(model)) / (3 * sum(layer_costs(model)));  // forward, I, W
}

// What leaves beside what is given.
struct Leaves {
  bool activations = false, optimizer = false;
};

class FitTable {
 public:
  FitTable(const TransformerConfig& model, const PipelineOptions& options, const JobLayout& given,
           const LayoutOfOptions& layout_of)
      : model_(model), options_(options), given_(given), layout_of_(layout_of) {}

  std::string text() {
    // What several ranks share and which lacks most, if anything does.
    const std::vector<SharedMemory>& all = given_.memory.shared;
    for (std::size_t i = 0; i < all.size(); ++i) {
      if (all[i].is_enough() || all[i].ranks.size() < 2) continue;
      const auto lacking = [](const SharedMemory& each) { return each.needed - each.available; };
      if (!shared_ || lacking(all[i]) > lacking(all[*shared_])) shared_ = i;
    }
    add("as given", given_, "");
    const std::vector<ShardLevel> shards = levels();
    const Leaves leaves{
        .activations = options_.offload.activations == OffloadTo::kNowhere && waits(),
        .optimizer = options_.offload.optimizer == OffloadTo::kNowhere && has_much_state()};
    const bool offloads = leaves.activations || leaves.optimizer;
    const bool recomputes =
        std::ranges::all_of(model_.recompute_blocks,
                            [](Recompute each) { return each == Recompute::kNone; }) &&
        model_.recompute == Recompute::kNone;
    const ShardLevel as_given = options_.shape.shard;
    for (const ShardLevel level : shards) plan(level, {}, Recompute::kNone);
    if (leaves.activations) plan(as_given, {.activations = true}, Recompute::kNone);
    if (leaves.optimizer) plan(as_given, {.optimizer = true}, Recompute::kNone);
    if (recomputes) {
      plan(as_given, {}, Recompute::kAttention);
      plan(as_given, {}, Recompute::kBlock);
    }
    const Recompute most = recomputes ? Recompute::kBlock : Recompute::kNone;
    if (offloads || recomputes) {
      for (const ShardLevel level : shards) plan(level, leaves, most);
    }
    if (shards.empty() && leaves.activations + leaves.optimizer + recomputes > 1)
      plan(as_given, leaves, most);
    return rows_ > 1 ? text_ : "";
  }

 private:
  // Whether a rank has more of the optimizer's state than offloading it takes, and all could.
  [[nodiscard]] bool has_much_state() const {
    return std::ranges::any_of(
               given_.memory.ranks,
               [&](const RankMemory& each) { return each.optimizer > options_.offload.pool; }) &&
           std::ranges::all_of(given_.place.devices, [](const RankDevice& each) {
             return each.device.kind == DeviceKind::kCpu;
           });
  }

  // Whether a stage has more micro-batches in flight than stay.
  [[nodiscard]] bool waits() const {
    for (int stage = 0; stage < given_.plans.num_stages(); ++stage) {
      const StageEntry& entry = given_.parameters.stages[at(stage)];
      if (entry.state_moves && StepPlans::states_of(given_.plans.train, stage).slots > 2)
        return true;
    }
    return false;
  }

  // Those above the one given. Shards of gradients take no more than those of the optimizer, and
  // less where stages of a rank end one after the other.
  [[nodiscard]] std::vector<ShardLevel> levels() const {
    std::vector<ShardLevel> all;
    if (options_.shape.replicas == 1 || options_.devices.all_reduce) return all;
    const bool gradients = given_.plans.num_stages() > given_.plans.placement().ranks() &&
                           std::ranges::all_of(given_.place.devices, [](const RankDevice& each) {
                             return each.device.kind == DeviceKind::kCpu;
                           });
    for (const ShardLevel level :
         {gradients ? ShardLevel::kGradients : ShardLevel::kOptimizer, ShardLevel::kParameters}) {
      if (level > options_.shape.shard) all.push_back(level);
    }
    return all;
  }

  // Adds what leaves to the options, and says how the program is told.
  [[nodiscard]] std::string offload(const Leaves& leaves, PipelineOptions::Offload& to) const {
    const bool on_gpus = std::ranges::all_of(given_.place.devices, [](const RankDevice& each) {
      return each.device.kind != DeviceKind::kCpu;
    });
    if (leaves.activations) to.activations = on_gpus ? OffloadTo::kHost : OffloadTo::kDisk;
    if (leaves.optimizer) to.optimizer = OffloadTo::kDisk;
    if (to.directory.empty() && !(on_gpus && !leaves.optimizer)) to.directory = "DIR";
    return "--offload " + text_of(to);
  }

  void plan(ShardLevel shards, const Leaves& leaves, Recompute recompute) {
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
    if (leaves.activations || leaves.optimizer) {
      append(names, " ", offload(leaves, options.offload));
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
    if (leaves.activations) {
      append(costs, "; ", fmt::format("{:.1f} MiB out and back a step", mebi(moved_bytes(layout))));
    }
    if (leaves.optimizer) {
      append(costs, "; ",
             fmt::format("{:.1f} MiB read and written an update", mebi(state_on_disk(layout))));
    }
    if (recompute != Recompute::kNone) {
      append(costs, "; ", fmt::format("{:.1f} % more operations", 100 * share_again(model)));
    }
    add(names, layout, costs);
  }

  void add(const std::string& names, const JobLayout& layout, const std::string& costs) {
    if (rows_++ == 0) {
      text_ = fmt::format(
          "  what takes less memory and changes no bit, in MiB of the fullest rank{}:\n",
          shared_ ? shared_name() : "");
    }
    text_ += fmt::format("    {:<78} {:>10.1f}", names, mebi(most_bytes(layout)));
    if (shared_) {
      text_ += fmt::format(" {:>10.1f}",
                           mebi(static_cast<double>(layout.memory.shared[*shared_].needed)));
    }
    text_ += (costs.empty() ? "" : "  " + costs) + "\n";
  }

  [[nodiscard]] std::string shared_name() const {
    using Of = SharedMemory::Of;
    const SharedMemory& shared = given_.memory.shared[*shared_];
    return fmt::format(", and of all {} ranks of {} rank {}, which has {:.1f}", shared.ranks.size(),
                       shared.of == Of::kGpu     ? "the GPU of"
                       : shared.of == Of::kGroup ? "the control group of"
                                                 : "the host of",
                       shared.ranks.front(), mebi(static_cast<double>(shared.available)));
  }

  const TransformerConfig& model_;
  const PipelineOptions& options_;
  const JobLayout& given_;
  const LayoutOfOptions& layout_of_;
  std::optional<std::size_t> shared_;  // index of MemoryTable::shared; it is refused
  int rows_ = 0;
  std::string text_;
};

}  // namespace

std::string describe_fit(const TransformerConfig& model, const PipelineOptions& options,
                         const JobLayout& given, const LayoutOfOptions& layout_of) {
  return FitTable(model, options, given, layout_of).text();
}

}  // namespace sluice
