#include "runtime/supervise/run_account.hpp"

#include <algorithm>

namespace sluice {

// A start goes on from a save: of the starts before it only the steps up to there count.
RunTotals RunAccount::totals() const {
  RunTotals totals;
  if (attempts_.empty()) return totals;
  const AttemptSteps& final = attempts_.back();
  std::uint64_t kept = final.complete ? final.last : final.saved;
  for (auto attempt = attempts_.rbegin(); attempt != attempts_.rend(); ++attempt) {
    const std::uint64_t end = std::clamp(kept, attempt->start, attempt->last);
    const auto all = static_cast<double>(attempt->last - attempt->start);
    if (all > 0) {
      totals.step_seconds += attempt->seconds * static_cast<double>(end - attempt->start) / all;
    }
    totals.steps_lost += attempt->last - end;
    kept = std::min(kept, attempt->start);
  }
  return totals;
}

}  // namespace sluice
