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

}  // namespace

RecomputeOption parse_recompute(const std::string& text) {
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
          "with a number of blocks or without, such as block*4,attention*2,none",
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
