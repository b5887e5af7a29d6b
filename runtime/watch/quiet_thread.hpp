// Threads that the program's signals do not reach.
#pragma once

#include <thread>
#include <utility>

#include "comm/base/held_signals.hpp"

namespace sluice {

// Runs `body` on a thread that takes no signal but those of its own faults.
template <typename Body>
[[nodiscard]] std::thread start_thread(Body body) {
  const HeldSignals held;
  return std::thread(std::move(body));
}

}  // namespace sluice
