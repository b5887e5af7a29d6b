// The host's clock inside a step.
#pragma once

#include <chrono>

namespace sluice {

// Seconds of the steady clock, which all processes of a host share.
[[nodiscard]] inline double steady_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace sluice
