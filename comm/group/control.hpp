// The control channel: how one rank's failure ends the job everywhere, with its message.
//
// A receive is always posted; every blocking wait polls it (it is the Interrupt). The first error
// wins, by time seen on rank 0, then by rank. Non-zero ranks report to rank 0; rank 0 tells all,
// when it next polls or reports: a rank that reports waits for what rank 0 computes meanwhile.
#pragma once

#include <chrono>
#include <memory>

#include <sluice/communicator.hpp>
#include <sluice/error.hpp>

#include "comm/group/waiter.hpp"

namespace sluice {

class ControlChannel : public Interrupt {
 public:
  // Collective over `comm`, of which this duplicates its own.
  explicit ControlChannel(Communicator& comm);
  ~ControlChannel() override;
  ControlChannel(const ControlChannel&) = delete;
  ControlChannel& operator=(const ControlChannel&) = delete;

  // Throws the winning Error if any rank has reported one; else returns at once (an MPI_Test, or
  // less, every few calls).
  void poll() override;

  // Longer than a rank usually computes without a look at the channel; and no longer than a program
  // should stand still whose rank 0 has left the pipeline's calls and does not look again.
  static constexpr std::chrono::milliseconds kReportTimeout = std::chrono::seconds(60);

  // Tells every other rank; then waits until rank 0 has decided whose error wins, and returns the
  // winner, which the caller throws. The winner is this rank's own error where the communicator
  // fails and where rank 0 does not look within `timeout`. Never throws itself.
  [[nodiscard]] Error report(const Error& error,
                             std::chrono::milliseconds timeout = kReportTimeout) noexcept;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace sluice
