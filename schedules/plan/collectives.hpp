// The collectives that a stage makes within its actions: which of them an action makes, and which
// are legal.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <sluice/plan.hpp>

namespace sluice {

// Those of an action of this kind, in order: B has I's, then W's; a forward-only schedule those
// over tensor ranks alone.
[[nodiscard]] std::vector<PlannedCollective> collectives_of(const StageCollectives& stage,
                                                            ActionKind kind, bool forward_only);

// Why a collective cannot be, in words that follow its text; empty: it can.
[[nodiscard]] std::string_view why_illegal(const PlannedCollective& collective);

// "a sum of 24 bytes of f64", "an all-gather of ...".
[[nodiscard]] std::string in_sentence(CollectiveKind kind, std::uint64_t bytes, DType type);
// The same, over its axis.
[[nodiscard]] std::string in_sentence(const PlannedCollective& collective);

// Why `smaller` cannot be the list of a smaller micro-batch where `largest` is that of the largest:
// its axes, kinds and types are others, or it has more bytes. Empty: it can.
[[nodiscard]] std::string why_unlike(std::span<const PlannedCollective> largest,
                                     std::span<const PlannedCollective> smaller);

// Those of an op, whose range is legal.
[[nodiscard]] inline std::span<const PlannedCollective> collectives_of(const Plan& plan,
                                                                       const PlanOp& op) {
  return std::span(plan.collectives)
      .subspan(static_cast<std::size_t>(op.first_collective),
               static_cast<std::size_t>(op.collectives));
}

// The lists of all stages of a plan, each stage's in one piece: F, then I, then W.
class CollectiveLists {
 public:
  // `stages`: PlanOptions::collectives. The lists are appended to `all`.
  CollectiveLists(const std::vector<StageCollectives>& stages, bool forward_only,
                  std::vector<PlannedCollective>& all);
  // Sets the range of a compute op.
  void name(PlanOp& op) const;

 private:
  struct Ends {  // of the lists; each begins where the one before it ends
    std::int32_t begin = 0, forward = 0, recompute = 0, input = 0, weight = 0;
  };
  std::vector<Ends> stages_;  // [stage]; empty: none makes any
};

}  // namespace sluice
