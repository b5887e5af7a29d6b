// What each block of a training's model recomputes: --recompute.
#pragma once

#include <string>
#include <vector>

#include <sluice/transformer.hpp>

namespace sluice {

// "block*2,attention,none" of the model's blocks in order. A setting without a number is one
// block's; the last one is that of all that remain.
struct RecomputeOption {
  struct Run {
    Recompute kind = Recompute::kNone;
    int blocks = 0;  // 0: all that remain, of the last run alone
  };
  std::vector<Run> runs = {{}};
};

// Throws Error(kUsage) that names the part.
[[nodiscard]] RecomputeOption parse_recompute(const std::string& text);
[[nodiscard]] std::string to_string(const RecomputeOption& option);

// Sets what the model's blocks recompute. Throws Error(kUsage) where the option is for more or for
// fewer blocks.
void take_recompute(const RecomputeOption& option, TransformerConfig& model);

}  // namespace sluice
