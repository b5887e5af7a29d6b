// A limit on the time that a process waits for the other ranks of its job at the start. It needs
// neither MPI nor the thread that waits.
#pragma once

#include <chrono>
#include <stop_token>
#include <string>
#include <thread>

#include "runtime/entry/network_facts.hpp"

namespace sluice {

// The seconds in the environment variable SLUICE_START_TIMEOUT, 60 where it is unset, 0 for no
// limit. Error(kUsage) where it is not a number of seconds up to a million.
[[nodiscard]] std::chrono::seconds start_time_limit();

// What a process says that has waited for ranks on other hosts: its interfaces, those that MPI
// should not use, and the network to choose.
[[nodiscard]] std::string network_advice(const NetworkFacts& facts);

// While it exists, a thread watches the clock. After `limit` the thread of each host's first rank
// that is not stopped writes a line to standard error, which names the ranks of the host that are;
// a second later it ends the process with exit_code(kPeer), without cleaning up. A limit of 0 does
// nothing.
class StartLimit {
 public:
  // `what`: the part of the start that may not take longer, such as "MPI_Init".
  StartLimit(std::string what, std::chrono::milliseconds limit);
  StartLimit(const StartLimit&) = delete;
  StartLimit& operator=(const StartLimit&) = delete;

 private:
  void watch(const std::stop_token& stop, std::chrono::milliseconds limit) const;
  [[nodiscard]] std::string line(std::chrono::milliseconds waited, bool was_stopped) const;

  std::string what_;
  std::jthread thread_;
};

}  // namespace sluice
