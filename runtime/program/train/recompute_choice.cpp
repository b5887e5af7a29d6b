#include "runtime/program/train/recompute_choice.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <numeric>
#include <optional>
#include <string_view>
#include <utility>

#include <sluice/plan.hpp>

#include "comm/base/index.hpp"
#include "comm/base/joined.hpp"
#include "comm/base/throw_error.hpp"
#include "runtime/planning/memory_plan.hpp"
#include "runtime/program/explore/schedule_costs.hpp"
#include "runtime/program/options/option_table.hpp"

namespace sluice {
namespace {

constexpr std::array<std::pair<std::string_view, Recompute>, 3> kKinds = {
    {{"none", Recompute::kNone},
     {"attention", Recompute::kAttention},
     {"block", Recompute::kBlock}}};

std::string_view name_of(Recompute kind) {
  return std::ranges::find(kKinds, kind, &decltype(kKinds)::value_type::second)->first;
}

// "block*2"; a number of 0 is left out.
std::string text_of(Recompute kind, int blocks) {
  return blocks == 0 ? std::string(name_of(kind)) : fmt::format("{}*{}", name_of(kind), blocks);
}

double mebi(std::size_t bytes) { return static_cast<double>(bytes) / (1024 * 1024); }

// "block*2,none*4"
std::string text_of(const std::vector<Recompute>& blocks) {
  RecomputeOption option{.runs = {}};
  for (const Recompute kind : blocks) {
    if (option.runs.empty() || option.runs.back().kind != kind) option.runs.push_back({kind, 0});
    ++option.runs.back().blocks;
  }
  if (option.runs.size() == 1) option.runs.back().blocks = 0;
  return to_string(option);
}

// Of the ranks that share a stage, the one that needs most.
const RankMemory& memory_of(const JobLayout& layout, int rank) {
  const auto first = layout.memory.ranks.begin() + rank * layout.memory.tensors;
  return *std::max_element(first, first + layout.memory.tensors,
                           [](const auto& a, const auto& b) { return a.total() < b.total(); });
}

// How many blocks of a stage recompute what.
struct Counts {
  int attention = 0, block = 0;
};

// What a stage has of a micro-batch, in bytes, where all of its blocks are of a kind, or the last
// one alone is kBlock: what comes after it goes with it.
struct StageShare {
  double none = 0, attention = 0, block = 0, last = 0;
};

// A stage's blocks; what it has, and what of that moves; and the operations that a block repeats
// for a sample.
struct StageBlocks {
  int first = 0, count = 0;
  StageShare slot = {}, kept = {};
  double cost_of_attention = 0, cost_of_block = 0;

  // What `counts` change of `bytes`.
  [[nodiscard]] double less(const StageShare& bytes, const Counts& counts) const {
    double less = 0;
    if (counts.attention > 0) less += counts.attention * (bytes.none - bytes.attention) / count;
    if (counts.block > 0) less += bytes.none - bytes.last;
    if (counts.block > 1) less += (counts.block - 1) * (bytes.last - bytes.block) / (count - 1);
    return less;
  }
};

// What a stage does with micro-batches that wait, where it keeps so many.
struct StageMoves {
  int resident = 0;  // LowerOptions::resident
  int slots = 0, moves = 0;
};

// Settings of the first stages of a rank.
struct Pick {
  double freed = 0;  // bytes
  double cost = 0;   // operations that are repeated for a sample
  std::vector<Counts> stages = {};
};

// A rank's whole setting.
struct RankPick {
  Pick pick;
  std::size_t level = 0;  // of what leaves
  double seconds = 0, moved = 0;
};

// Those of which no other one costs less and frees as much, from cheap to dear.
std::vector<Pick> best_of(std::vector<Pick> picks) {
  std::ranges::sort(picks, [](const Pick& a, const Pick& b) {
    return a.cost != b.cost ? a.cost < b.cost : a.freed > b.freed;
  });
  std::vector<Pick> best;
  for (Pick& pick : picks) {
    if (best.empty() || pick.freed > best.back().freed) best.push_back(std::move(pick));
  }
  return best;
}

// Which kinds blocks of a rank have beside none.
struct Kinds {
  bool attention = false, block = false;
};

// Each setting of the stage, of which `slots` micro-batches stay, after each of `before`. Of many
// blocks, counts in steps. `stages`: of the rank; the more, the coarser the counts.
std::vector<Pick> with_stage(const std::vector<Pick>& before, const StageBlocks& stage, int slots,
                             int stages, Kinds allowed) {
  constexpr int kSteps = 128;
  const int step = 1 + stage.count / std::max(kSteps / (stages * stages), 1);
  std::vector<Pick> after;
  const auto counts_to = [&](int most, const auto& visit) {
    for (int count = 0; count < most; count += step) visit(count);
    visit(most);
  };
  for (const Pick& pick : before) {
    counts_to(allowed.block ? stage.count : 0, [&](int block) {
      counts_to(allowed.attention ? stage.count - block : 0, [&](int attention) {
        Pick& made = after.emplace_back(pick);
        made.stages.push_back({attention, block});
        made.freed += slots * stage.less(stage.slot, made.stages.back());
        made.cost += attention * stage.cost_of_attention + block * stage.cost_of_block;
      });
    });
  }
  return after;
}

// [stage] How many micro-batches leave in a step.
std::vector<int> moves_of(const Plan& plan) {
  std::vector<int> moves(at(plan.placement.stages()));
  for (const RankPlan& rank : plan.ranks) {
    for (const PlanOp& op : rank.ops) {
      if (op.kind != OpKind::kStartMove || op.action != ActionKind::kOffload) continue;
      ++moves[at(op.stage)];
    }
  }
  return moves;
}

class FitSearch {
 public:
  FitSearch(const TransformerConfig& model, const Partition& partition,
            const PipelineOptions& options, const LayoutOfOptions& layout_of)
      : model_(model),
        partition_(partition),
        given_(options),
        layout_of_(layout_of),
        offloads_(options.offload.activations != PipelineOptions::Offload::To::kNowhere),
        blocks_(at(model.layers), Recompute::kNone) {
    if (offloads_) resident_.assign(at(partition.stages()), 0);
  }

  RecomputeChoice run() {
    layouts_.push_back(planned());
    if (fits(layouts_[0])) return choice(layouts_[0]);
    find_levels();
    plan_settings();
    MemoryTable least;  // of each rank
    for (int rank = 0; rank < ranks(); ++rank) {
      least.ranks.push_back(memory_of(layouts_[at(least_setting(rank))], rank));
    }
    require_within(limit(), least,
                   offloads_ ? "no --recompute and no --offload of activations need less; the list "
                               "of --dry-run, a smaller --micro-batch-size, more ranks in the "
                               "pipeline or another schedule may"
                             : "no --recompute needs less; the list of --dry-run, a smaller "
                               "--micro-batch-size, more ranks in the pipeline or another schedule "
                               "may");
    blocks_.assign(blocks_.size(), Recompute::kNone);
    std::ranges::fill(resident_, 0);
    freed_.assign(at(ranks()), 0);
    JobLayout layout = layouts_[0];
    for (int attempt = 0; !fits(layout); ++attempt) {
      for (int rank = 0; rank < ranks(); ++rank) {
        const std::size_t total = memory_of(layout, rank).total();
        if (total <= limit()) continue;
        const double needed = freed_[at(rank)] + static_cast<double>(total - limit());
        if (attempt >= kAttempts || !choose(rank, needed)) take_least(rank);
      }
      layout = planned();
      if (attempt > 2 * kAttempts) require_within(limit(), layout.memory, "no setting was found");
    }
    return choice(layout);
  }

 private:
  static constexpr int kAttempts = 8;
  static constexpr int kLevels = 8;  // of what leaves, beside nothing

  [[nodiscard]] std::size_t limit() const { return given_.devices.memory; }
  [[nodiscard]] const Placement& placement() const { return layouts_[0].plans.placement(); }
  [[nodiscard]] int ranks() const { return placement().ranks(); }
  [[nodiscard]] TransformerConfig chosen() const {
    TransformerConfig model = model_;
    model.recompute_blocks = blocks_;
    return model;
  }
  [[nodiscard]] JobLayout planned() const {
    PipelineOptions options = given_;
    options.offload.resident = resident_;
    // All with the gathers of the one that keeps all; the run chooses again.
    if (!layouts_.empty() && layouts_[0].parameters.gather == Gather::kPerUse) {
      options.shape.shard_gather = ShardGather::kUse;
    }
    return layout_of_(chosen(), options);
  }
  [[nodiscard]] bool fits(const JobLayout& layout) const {
    return std::ranges::all_of(layout.memory.ranks,
                               [&](const RankMemory& each) { return each.total() <= limit(); });
  }

  // From nothing that leaves to as much as can.
  void find_levels() {
    const Schedule& order = layouts_[0].plans.order;
    const std::vector<int> in_flight = most_in_flight(order);
    const int most = offloads_ ? *std::ranges::max_element(in_flight) : 0;
    const int levels = std::clamp(most - 2, 0, kLevels);
    for (int level = 0; level <= levels; ++level) {
      std::vector<int> resident;
      for (const int held : in_flight) {
        resident.push_back(level == 0 || held <= 2 ? 0 : held - (held - 2) * level / levels);
      }
      const Plan plan =
          assemble_plan(lower(order, {.reduce_grad = false, .tied = {}, .resident = resident}), {});
      const std::vector<int> moves = moves_of(plan);
      std::vector<StageMoves>& stages = levels_.emplace_back();
      for (std::size_t s = 0; s < resident.size(); ++s) {
        stages.push_back({.resident = resident[s],
                          .slots = StepPlans::states_of(plan, static_cast<int>(s)).slots,
                          .moves = moves[s]});
      }
    }
  }

  // All blocks of one kind, and all stages at the first level or at the last one.
  void plan_settings() {
    for (int stage = 0; stage < partition_.stages(); ++stage) {
      const int last = std::min(partition_.first[at(stage) + 1] - 1, model_.layers) - 1;
      if (last >= std::max(partition_.first[at(stage)] - 1, 0)) {
        blocks_[at(last)] = Recompute::kBlock;
      }
    }
    last_blocks_ = planned();
    for (const std::size_t level : {std::size_t{0}, levels_.size() - 1}) {
      for (std::size_t s = 0; s < resident_.size(); ++s) resident_[s] = levels_[level][s].resident;
      for (const auto& [name, kind] : kKinds) {
        blocks_.assign(blocks_.size(), kind);
        if (level > 0 || kind != Recompute::kNone) layouts_.push_back(planned());
      }
      if (levels_.size() == 1) break;
    }
  }

  // The one of them with which a rank needs least.
  [[nodiscard]] int least_setting(int rank) const {
    int least = 0;
    for (int setting = 1; setting < std::ssize(layouts_); ++setting) {
      if (memory_of(layouts_[at(setting)], rank).total() <
          memory_of(layouts_[at(least)], rank).total()) {
        least = setting;
      }
    }
    return least;
  }

  [[nodiscard]] StageBlocks blocks_of(int stage) const {
    const int first = std::max(partition_.first[at(stage)] - 1, 0);
    const int end = std::min(partition_.first[at(stage) + 1] - 1, model_.layers);
    StageBlocks all{.first = first, .count = std::max(end - first, 0)};
    const auto bytes = [&](const auto& of) {
      const auto in = [&](const JobLayout& layout) {
        const StateBytes& state = layout.parameters_at(0).stages[at(stage)].state;
        return static_cast<double>(std::invoke(of, state.in_plan(layout.plans.splits_backward())));
      };
      return StageShare{in(layouts_[0]), in(layouts_[1]), in(layouts_[2]), in(*last_blocks_)};
    };
    all.slot = bytes(&StateBytes::slot);
    all.kept = bytes(&StateBytes::kept);
    const auto cost = [&](Recompute kind) {
      TransformerConfig model = model_;
      model.recompute_blocks.assign(blocks_.size(), kind);
      const std::vector<double> costs = recompute_costs(model);
      return std::accumulate(costs.begin() + first + 1, costs.begin() + first + 1 + all.count,
                             0.0) /
             std::max(all.count, 1);
    };
    all.cost_of_attention = cost(Recompute::kAttention);
    all.cost_of_block = cost(Recompute::kBlock);
    return all;
  }

  // Over the layers of a rank.
  [[nodiscard]] double sum_of(const std::vector<double>& costs, int rank) const {
    double sum = 0;
    for (const int stage : placement().stages_of(rank)) {
      const auto first = costs.begin() + partition_.first[at(stage)];
      sum = std::accumulate(first, costs.begin() + partition_.first[at(stage) + 1], sum);
    }
    return sum;
  }
  [[nodiscard]] Rates rates_of(int rank) const {
    return estimated_rates(given_, layouts_[0].place.devices[at(rank)].device.kind);
  }

  // What a rank computes, and beside it moves out and back, in a step in which it repeats so many
  // operations for a sample and offloads so many bytes.
  [[nodiscard]] std::pair<double, double> seconds_of(int rank, double repeated,
                                                     double moved) const {
    const JobLayout& layout = layouts_[0];
    const double operations = 3 * sum_of(layer_costs(model_), rank) + repeated;  // forward, I, W
    const double samples = static_cast<double>(layout.wires.edges.largest().samples) *
                           layout.plans.train.micro_batches / layout.place.topology.size.tensor;
    const Rates rates = rates_of(rank);
    return {operations * samples / rates.operations, 2 * moved / rates.bytes};
  }

  // What a rank needs beside its states where some of its blocks are of these kinds: workspace.
  [[nodiscard]] double beside_states(int rank, const std::vector<StageBlocks>& stages,
                                     Kinds kinds) const {
    const auto of = [&](const JobLayout& layout, double StageShare::*all) {
      double more = static_cast<double>(memory_of(layout, rank).total()) -
                    static_cast<double>(memory_of(layouts_[0], rank).total());
      for (std::size_t i = 0; i < stages.size(); ++i) {
        const int slots = levels_[0][at(placement().stages_of(rank)[i])].slots;
        more += slots * (stages[i].slot.none - stages[i].slot.*all);
      }
      return more;
    };
    return std::max(kinds.attention ? of(layouts_[1], &StageShare::attention) : 0,
                    kinds.block ? of(layouts_[2], &StageShare::block) : 0);
  }

  // Takes one that frees `needed` bytes by this count, at a level and with blocks of these kinds,
  // where its step is shorter than that of `best`, or as long and moves less.
  void consider(std::size_t level, Kinds kinds, int rank, const std::vector<StageBlocks>& stages,
                double needed, std::optional<RankPick>& best) const {
    const std::vector<int>& own = placement().stages_of(rank);
    Pick leaves{.freed = -beside_states(rank, stages, kinds)};
    double kept = 0;
    for (std::size_t i = 0; i < own.size(); ++i) {
      const auto s = at(own[i]);
      leaves.freed += (levels_[0][s].slots - levels_[level][s].slots) * stages[i].slot.none;
      kept += levels_[level][s].moves * stages[i].kept.none;
    }
    std::vector<Pick> picks = {leaves};
    for (std::size_t i = 0; i < own.size(); ++i) {
      picks = best_of(with_stage(picks, stages[i], levels_[level][at(own[i])].slots,
                                 static_cast<int>(own.size()), kinds));
    }
    for (Pick& pick : picks) {
      if (pick.freed < needed) continue;
      double moved = kept;
      for (std::size_t i = 0; i < own.size(); ++i) {
        moved -= levels_[level][at(own[i])].moves * stages[i].less(stages[i].kept, pick.stages[i]);
      }
      const auto [computing, moving] = seconds_of(rank, pick.cost, moved);
      const double seconds = std::max(computing, moving);
      if (best && std::pair(seconds, moved) >= std::pair(best->seconds, best->moved)) continue;
      best = RankPick{std::move(pick), level, seconds, moved};
    }
  }

  // False where no setting frees `needed` bytes by this count.
  bool choose(int rank, double needed) {
    std::vector<StageBlocks> stages;
    for (const int stage : placement().stages_of(rank)) stages.push_back(blocks_of(stage));
    std::optional<RankPick> best;
    for (std::size_t level = 0; level < levels_.size(); ++level) {
      for (const Kinds kinds :
           {Kinds{}, {.attention = true}, {.block = true}, {.attention = true, .block = true}}) {
        consider(level, kinds, rank, stages, needed, best);
      }
    }
    if (!best) return false;
    freed_[at(rank)] = best->pick.freed;
    take_level(rank, best->level);
    for (std::size_t i = 0; i < stages.size(); ++i) {
      const Counts& counts = best->pick.stages[i];
      // Its last block is the first to go back: what that recomputes can run before the gradient is
      // there (RECOMPUTE).
      const auto end = blocks_.begin() + stages[i].first + stages[i].count;
      std::fill_n(end - stages[i].count, stages[i].count, Recompute::kNone);
      std::fill_n(end - counts.block - counts.attention, counts.attention, Recompute::kAttention);
      std::fill_n(end - counts.block, counts.block, Recompute::kBlock);
    }
    return true;
  }

  void take_level(int rank, std::size_t level) {
    if (!offloads_) return;
    for (const int stage : placement().stages_of(rank)) {
      resident_[at(stage)] = levels_[level][at(stage)].resident;
    }
  }

  // The head goes by the last block, also where it is alone on its stage.
  void take_least(int rank) {
    const auto setting = at(least_setting(rank));
    const auto kind = static_cast<Recompute>(setting % kKinds.size());
    take_level(rank, setting < kKinds.size() ? 0 : levels_.size() - 1);
    for (const int stage : placement().stages_of(rank)) {
      const StageBlocks stage_blocks = blocks_of(stage);
      std::fill_n(blocks_.begin() + stage_blocks.first, stage_blocks.count, kind);
      if (stage + 1 == partition_.stages()) blocks_.back() = kind;
    }
  }

  [[nodiscard]] RecomputeChoice choice(const JobLayout& layout) const {
    std::size_t most = 0;
    for (const RankMemory& each : layout.memory.ranks) most = std::max(most, each.total());
    RecomputeChoice choice{.model = chosen(), .offload = given_.offload, .remark = {}};
    choice.remark = fmt::format("recompute auto: {}; at most {:.1f} MiB a rank of {:.1f} MiB",
                                text_of(blocks_), mebi(most), mebi(limit()));
    if (!offloads_) return choice;
    const std::string leaves = leaving(layout, choice.model);
    if (!leaves.empty()) {
      choice.offload.resident = resident_;
      choice.remark += "; " + leaves;
    } else {
      using To = PipelineOptions::Offload::To;
      choice.offload.activations = To::kNowhere;
      if (choice.offload.optimizer == To::kNowhere) choice.offload.directory.clear();
      choice.remark += "; no activations are offloaded: ";
      choice.remark += layouts_.size() == 1 ? "it fits as it is"
                                            : "recomputation takes less time, " + estimates(0);
    }
    return choice;
  }

  // Of the rank whose moves take most of its step; empty: nothing leaves.
  [[nodiscard]] std::string leaving(const JobLayout& layout, const TransformerConfig& model) const {
    const std::vector<double> repeated = recompute_costs(model);
    std::string text;
    double most = 0;
    for (int rank = 0; rank < ranks(); ++rank) {
      const auto [computing, moving] =
          seconds_of(rank, sum_of(repeated, rank), moved_bytes(layout, rank));
      if (computing <= 0 || moving <= most * computing) continue;
      most = moving / computing;
      text = fmt::format(
          "offload: on rank {}, which moves most, {:.2g} s of moves beside {:.2g} s of computing, "
          "{}",
          rank, moving, computing, estimates(rank));
    }
    return text;
  }
  [[nodiscard]] std::string estimates(int rank) const {
    const Rates rates = rates_of(rank);
    return fmt::format("by estimates of {:g} GB/s and {:g} Gflop/s", rates.bytes / 1e9,
                       rates.operations / 1e9);
  }

  const TransformerConfig& model_;
  const Partition& partition_;
  const PipelineOptions& given_;
  const LayoutOfOptions& layout_of_;
  const bool offloads_;
  std::vector<Recompute> blocks_;  // [block] as chosen so far
  std::vector<int> resident_;      // [stage] likewise; empty: nothing may leave
  // [setting of all blocks] with all that stays; then with as much that leaves as can.
  std::vector<JobLayout> layouts_;
  std::optional<JobLayout> last_blocks_;         // kBlock for each stage's last block alone
  std::vector<std::vector<StageMoves>> levels_;  // [level][stage]; at the first one nothing leaves
  std::vector<double> freed_;                    // [rank] by the last choice, as it counted
};

}  // namespace

Rates estimated_rates(const PipelineOptions& options, DeviceKind kind) {
  constexpr double kThread = 5e10, kGpu = 1e14, kHost = 2e10, kDisk = 5e8;
  const bool to_host = options.offload.activations == PipelineOptions::Offload::To::kHost;
  return {.operations = kind == DeviceKind::kCpu ? options.devices.threads * kThread : kGpu,
          .bytes = to_host ? kHost : kDisk};
}

double moved_bytes(const JobLayout& layout, int rank) {
  const std::vector<int> moves = moves_of(layout.plans.train);
  double bytes = 0;
  for (const int stage : layout.plans.placement().stages_of(rank)) {
    bytes +=
        moves[at(stage)] * static_cast<double>(layout.parameters.stages[at(stage)].state.kept());
  }
  return bytes;
}

RecomputeChoice choose_recompute(const TransformerConfig& model, const Partition& partition,
                                 const PipelineOptions& options, const LayoutOfOptions& layout_of) {
  return FitSearch(model, partition, options, layout_of).run();
}

RecomputeOption parse_recompute(const std::string& text) {
  if (text == "auto") return {.automatic = true};
  RecomputeOption option{.runs = {}};
  std::vector<std::string> parts = parts_of(text);
  if (parts.empty()) parts.emplace_back();
  for (const std::string& part : parts) {
    const std::size_t star = part.find('*');
    const auto kind = std::ranges::find(kKinds, std::string_view(part).substr(0, star),
                                        &decltype(kKinds)::value_type::first);
    int blocks = 0;
    const bool counted = star != std::string::npos;
    if (kind == kKinds.end() ||
        (counted && (!parse_whole(std::string_view(part).substr(star + 1), blocks) || blocks < 1 ||
                     blocks > TransformerLimits::kLayers))) {
      throw_usage(
          "option --recompute: '{}' in '{}' is no setting; legal are none, attention, block, each "
          "with a number of blocks or without, such as block*4,attention*2,none; or auto",
          part, text);
    }
    option.runs.push_back({kind->second, blocks});
  }
  for (std::size_t i = 0; i + 1 < option.runs.size(); ++i) {
    option.runs[i].blocks = std::max(option.runs[i].blocks, 1);
  }
  return option;
}

std::string to_string(const RecomputeOption& option) {
  if (option.automatic) return "auto";
  std::vector<std::string> parts;
  for (const auto& [kind, blocks] : option.runs) parts.push_back(text_of(kind, blocks));
  return joined(parts, ",");
}

void take_recompute(const RecomputeOption& option, TransformerConfig& model) {
  model.recompute_blocks.clear();
  model.recompute = option.runs.back().kind;
  if (option.runs.size() == 1 && option.runs.back().blocks == 0) return;
  std::int64_t named = 0;
  for (const RecomputeOption::Run& run : option.runs) named += run.blocks;
  const bool rest = option.runs.back().blocks == 0;
  if (named > model.layers || (named < model.layers && !rest)) {
    throw_usage("option --recompute: '{}' is for {} block{}, --layers has {}; legal: {}",
                to_string(option), named, named == 1 ? "" : "s", model.layers,
                named < model.layers ? to_string(option) + ",none"
                                     : "numbers of blocks that add up to these");
  }
  for (const auto& [kind, blocks] : option.runs) {
    const std::size_t all = model.recompute_blocks.size();
    model.recompute_blocks.resize(blocks == 0 ? at(model.layers) : all + at(blocks), kind);
  }
}

}  // namespace sluice
