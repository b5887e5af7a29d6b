#include "runtime/supervise/attempt.hpp"

#include <algorithm>

namespace sluice {

void Attempt::add(const JobEvent& event) {
  using Kind = JobEvent::Kind;
  if (event.kind == Kind::kHang) {
    if (!hang) hang = event;
    return;
  }
  if (event.kind == Kind::kStart || !steps) {
    const std::uint64_t start = event.kind == Kind::kStart ? event.step : 0;
    steps = AttemptSteps{.start = start, .last = start, .saved = start};
  }
  if (event.kind == Kind::kSave) steps->saved = std::max(steps->saved, event.step);
  if (event.step < steps->last) return;  // a save that completes later
  steps->last = event.step;
  if (event.kind == Kind::kStep || event.kind == Kind::kEnd) {
    steps->seconds = std::max(steps->seconds, event.seconds);
  }
  steps->complete = event.kind == Kind::kEnd;
}

}  // namespace sluice
