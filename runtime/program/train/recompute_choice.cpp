#include "runtime/program/train/recompute_choice.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <string_view>
#include <utility>

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

// A stage's blocks, and what one of them frees and costs on average.
struct StageBlocks {
  int first = 0, count = 0;
  std::int64_t freed_by_attention = 0, freed_by_block = 0;  // bytes, over all micro-batches held
  double cost_of_attention = 0, cost_of_block = 0;
};

// Settings of the first stages of a rank.
struct Pick {
  std::int64_t freed = 0;
  double cost = 0;
  std::vector<Counts> stages = {};
};

// Those of which no other one costs less and frees as much, from cheap to dear, up to the first
// that frees `needed`.
std::vector<Pick> best_of(std::vector<Pick> picks, std::int64_t needed) {
  std::ranges::sort(picks, [](const Pick& a, const Pick& b) {
    return a.cost != b.cost ? a.cost < b.cost : a.freed > b.freed;
  });
  std::vector<Pick> best;
  for (Pick& pick : picks) {
    if (!best.empty() && pick.freed <= best.back().freed) continue;
    best.push_back(std::move(pick));
    if (best.back().freed >= needed) break;
  }
  return best;
}

// Each setting of the stage after each of `before`. Of many blocks, counts in steps.
// `stages`: of the rank; the more, the coarser the counts.
std::vector<Pick> with_stage(const std::vector<Pick>& before, const StageBlocks& stage,
                             int stages) {
  constexpr int kSteps = 128;
  const int step = 1 + stage.count / std::max(kSteps / (stages * stages), 1);
  std::vector<Pick> after;
  const auto counts_to = [&](int most, const auto& visit) {
    for (int count = 0; count < most; count += step) visit(count);
    visit(most);
  };
  for (const Pick& pick : before) {
    counts_to(stage.count, [&](int block) {
      counts_to(stage.count - block, [&](int attention) {
        Pick& made = after.emplace_back(pick);
        made.freed += attention * stage.freed_by_attention + block * stage.freed_by_block;
        made.cost += attention * stage.cost_of_attention + block * stage.cost_of_block;
        made.stages.push_back({attention, block});
      });
    });
  }
  return after;
}

class RecomputeSearch {
 public:
  RecomputeSearch(const TransformerConfig& model, const Partition& partition, std::size_t limit,
                  const LayoutOfModel& layout_of)
      : model_(model),
        partition_(partition),
        limit_(limit),
        layout_of_(layout_of),
        blocks_(at(model.layers), Recompute::kNone) {}

  RecomputeChoice run() {
    layouts_.push_back(planned());
    if (fits(layouts_[0])) return choice(layouts_[0]);
    for (const Recompute kind : {Recompute::kAttention, Recompute::kBlock}) {
      blocks_.assign(blocks_.size(), kind);
      layouts_.push_back(planned());
    }
    MemoryTable least;  // of each rank
    for (int rank = 0; rank < ranks(); ++rank) {
      least.ranks.push_back(memory_of(layouts_[at(least_kind(rank))], rank));
    }
    require_within(limit_, least,
                   "no --recompute needs less; a smaller --micro-batch-size, more ranks in the "
                   "pipeline or another schedule do");
    blocks_.assign(blocks_.size(), Recompute::kNone);
    freed_.assign(at(ranks()), 0);
    JobLayout layout = layouts_[0];
    for (int attempt = 0; !fits(layout); ++attempt) {
      for (int rank = 0; rank < ranks(); ++rank) {
        const std::size_t total = memory_of(layout, rank).total();
        if (total <= limit_) continue;
        const std::int64_t needed = freed_[at(rank)] + static_cast<std::int64_t>(total - limit_);
        if (attempt >= kAttempts || !choose(rank, needed)) take_least(rank);
      }
      layout = planned();
      if (attempt > 2 * kAttempts) require_within(limit_, layout.memory, "no setting was found");
    }
    return choice(layout);
  }

 private:
  static constexpr int kAttempts = 8;

  [[nodiscard]] int ranks() const { return layouts_[0].plans.placement().ranks(); }
  [[nodiscard]] TransformerConfig chosen() const {
    TransformerConfig model = model_;
    model.recompute_blocks = blocks_;
    return model;
  }
  [[nodiscard]] JobLayout planned() const { return layout_of_(chosen()); }
  [[nodiscard]] bool fits(const JobLayout& layout) const {
    return std::ranges::all_of(layout.memory.ranks,
                               [&](const RankMemory& each) { return each.total() <= limit_; });
  }

  // The setting of all blocks with which a rank needs least.
  [[nodiscard]] int least_kind(int rank) const {
    int least = 0;
    for (int kind = 1; kind < std::ssize(layouts_); ++kind) {
      if (memory_of(layouts_[at(kind)], rank).total() <
          memory_of(layouts_[at(least)], rank).total()) {
        least = kind;
      }
    }
    return least;
  }

  [[nodiscard]] StageBlocks blocks_of(int stage) const {
    const int first = std::max(partition_.first[at(stage)] - 1, 0);
    const int end = std::min(partition_.first[at(stage) + 1] - 1, model_.layers);
    StageBlocks all{.first = first, .count = std::max(end - first, 0)};
    if (all.count == 0) return all;
    const auto kept = [&](std::size_t kind) {
      const JobLayout& layout = layouts_[kind];
      const bool splits = layout.plans.splits_backward();
      return static_cast<std::int64_t>(
          layout.parameters_at(0).stages[at(stage)].state.in_plan(splits).slot() *
          at(layout.plans.states_of(stage).slots));
    };
    const auto cost = [&](Recompute kind) {
      TransformerConfig model = model_;
      model.recompute_blocks.assign(blocks_.size(), kind);
      const std::vector<double> costs = recompute_costs(model);
      double sum = 0;
      for (int block = first; block < end; ++block) sum += costs[at(block) + 1];
      return sum / all.count;
    };
    all.freed_by_attention = (kept(0) - kept(1)) / all.count;
    all.freed_by_block = (kept(0) - kept(2)) / all.count;
    all.cost_of_attention = cost(Recompute::kAttention);
    all.cost_of_block = cost(Recompute::kBlock);
    return all;
  }

  // False where no setting frees `needed` bytes by this count.
  bool choose(int rank, std::int64_t needed) {
    std::vector<StageBlocks> stages;
    std::vector<Pick> picks = {{}};
    const std::vector<int>& own = layouts_[0].plans.placement().stages_of(rank);
    for (const int stage : own) {
      stages.push_back(blocks_of(stage));
      picks = best_of(with_stage(picks, stages.back(), static_cast<int>(own.size())), needed);
    }
    if (picks.back().freed < needed) return false;
    freed_[at(rank)] = picks.back().freed;
    for (std::size_t i = 0; i < stages.size(); ++i) {
      const Counts& counts = picks.back().stages[i];
      // Its last block is the first to go back: what that recomputes can run before the gradient is
      // there (RECOMPUTE).
      const auto end = blocks_.begin() + stages[i].first + stages[i].count;
      std::fill_n(end - stages[i].count, stages[i].count, Recompute::kNone);
      std::fill_n(end - counts.block - counts.attention, counts.attention, Recompute::kAttention);
      std::fill_n(end - counts.block, counts.block, Recompute::kBlock);
    }
    return true;
  }

  // The head goes by the last block, also where it is alone on its stage.
  void take_least(int rank) {
    const auto kind = static_cast<Recompute>(least_kind(rank));
    for (const int stage : layouts_[0].plans.placement().stages_of(rank)) {
      const StageBlocks stage_blocks = blocks_of(stage);
      std::fill_n(blocks_.begin() + stage_blocks.first, stage_blocks.count, kind);
      if (stage + 1 == partition_.stages()) blocks_.back() = kind;
    }
  }

  [[nodiscard]] RecomputeChoice choice(const JobLayout& layout) const {
    std::size_t most = 0;
    for (const RankMemory& each : layout.memory.ranks) most = std::max(most, each.total());
    return {chosen(), fmt::format("recompute auto: {}; at most {:.1f} MiB a rank of {:.1f} MiB",
                                  text_of(blocks_), mebi(most), mebi(limit_))};
  }

  const TransformerConfig& model_;
  const Partition& partition_;
  const std::size_t limit_;
  const LayoutOfModel& layout_of_;
  std::vector<Recompute> blocks_;    // [block] as chosen so far
  std::vector<JobLayout> layouts_;   // [setting of all blocks]
  std::vector<std::int64_t> freed_;  // [rank] by the last choice, as it counted
};

}  // namespace

RecomputeChoice choose_recompute(const TransformerConfig& model, const Partition& partition,
                                 std::size_t limit, const LayoutOfModel& layout_of) {
  return RecomputeSearch(model, partition, limit, layout_of).run();
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
