// Threads of Sluice's own.
#pragma once

#include <condition_variable>
#include <mutex>
#include <stop_token>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "comm/base/held_signals.hpp"
#include "comm/base/throw_error.hpp"

namespace sluice {

// Runs `body` on a thread that takes no signal but those of its own faults: others are the
// program's. Throws Error(kDevice) that names `purpose` where the system has no more threads.
template <typename Thread = std::thread, typename Body>
[[nodiscard]] Thread start_thread(const std::string& purpose, Body body) {
  const HeldSignals held;
  try {
    return Thread(std::move(body));
  } catch (const std::system_error& error) {
    throw_error(
        ErrorCode::kDevice,
        "cannot start a thread ({}): {}; its limits are ulimit -u, ulimit -v and pids.max of "
        "the cgroup",
        purpose, error.code().message());
  }
}

// Blocks a std::jthread for `time`, or until it is to stop; whether it is.
template <typename Duration>
[[nodiscard]] bool stopped_within(const std::stop_token& stop, Duration time) {
  std::mutex mutex;
  std::unique_lock lock(mutex);
  std::condition_variable_any().wait_for(lock, stop, time, [] { return false; });
  return stop.stop_requested();
}

}  // namespace sluice
