// The control channel: how one rank's failure ends the job everywhere, with its message.
//
// A receive is always posted, and every blocking wait polls it: the channel is the Interrupt. Other
// ranks report to rank 0. Rank 0 sends the first error to all when it next polls or reports; of
// errors seen together, that of the lowest rank. A reporting rank waits while rank 0 computes.
#pragma once

#include <chrono>
#include <memory>

#include <sluice/error.hpp>

#include "comm/group/communicator.hpp"
#include "comm/group/waiter.hpp"

namespace sluice {

class ControlChannel : public Interrupt {
 public:
  // Collective over `comm`, which it duplicates.
  explicit ControlChannel(Communicator& comm);
  ~ControlChannel() override;

  // Throws the winning Error if any rank has reported one; else returns at once. Every fourth call
  // tests the receive.
  void poll() override;

  // Longer than a rank usually computes between two polls, and an acceptable delay for a program
  // whose rank 0 never polls again.
  static constexpr std::chrono::milliseconds kReportTimeout = std::chrono::seconds(60);

  // Reports the error, waits until rank 0 has chosen the winner, and returns it for the caller to
  // throw. Returns this rank's own error if the communicator fails or rank 0 does not poll within
  // `timeout`. Never throws.
  [[nodiscard]] Error report(const Error& error,
                             std::chrono::milliseconds timeout = kReportTimeout) noexcept;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace sluice
