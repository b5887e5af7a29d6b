// How the host waits between two polls, and what may interrupt the wait.
#pragma once

#include <cstdint>

namespace sluice {

// Blocks the calling thread between polls. Spins briefly if the job may use at least as many cores
// of the host as it has local ranks; then yields; then sleeps for 20 to 50 us. Before its first
// sleep it sets the calling thread's timer slack to 1 us, as the default of 50 us would triple a
// sleep. One per waiting site; call reset() after every success.
class Waiter {
 public:
  explicit Waiter(int local_ranks);
  void pause();
  void reset() { polls_ = 0; }

 private:
  std::uint32_t spin_polls_;  // polls that only spin
  std::uint32_t polls_ = 0;   // since the last success
  bool slack_set_ = false;
};

// Called between polls of a blocking wait; throws to end it (the control channel's poll()).
class Interrupt {
 public:
  virtual ~Interrupt() = default;
  virtual void poll() = 0;
};

}  // namespace sluice
