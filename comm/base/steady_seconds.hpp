// The host's clock inside a step.
#pragma once

#include <chrono>

namespace sluice {

// Seconds of the steady clock. All processes of a host and a time namespace share it; others do
// not.
[[nodiscard]] inline double steady_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct TimeSpan {
  double start = 0, end = 0;  // as steady_seconds()
};

}  // namespace sluice
