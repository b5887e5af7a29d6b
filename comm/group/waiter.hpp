// How the host waits between two polls, and what may interrupt the wait.
#pragma once

#include <cstdint>

namespace sluice {

// Blocks the calling thread between polls. Spins briefly if the job may use at least as many cores
// of the host as it has local ranks; then yields; then sleeps for 20 to 50 us. Before its first
// sleep it sets the calling thread's timer slack to 1 us, as the default of 50 us would triple a
// sleep. One per waiting site; call reset() before a wait or after its success.
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

// What a blocking wait waits for, for whoever looks at a rank that waits.
struct WaitSubject {
  enum class What : std::uint8_t {
    kReceive,            // of a message of the plan
    kSend,               // likewise: until its memory is free
    kCollectiveReceive,  // a part of a small collective
    kCollectiveSend,
    kDevice,  // work on a GPU
    kNccl,    // operations of NCCL
    kStore,   // what the rank offloads or fetches
    kSave,    // a save that reads what the rank is about to change
  };
  What what = What::kDevice;
  std::int32_t peer = -1;  // rank of the group that the interrupt serves; -1: none, or several
  std::int32_t tag = -1;
  std::uint64_t bytes = 0;
  // Index in the peer's plan of the op that this wait needs; -1: not known.
  std::int32_t needed_op = -1;
};

// Called between polls of a blocking wait; throws to end it (the control channel's poll()).
class Interrupt {
 public:
  virtual ~Interrupt() = default;
  virtual void poll() = 0;
  // Around a wait that blocks, by WaitScope: the subject of the polls in between. Waits do not
  // nest.
  virtual void begin_wait(const WaitSubject& /*subject*/) noexcept {}
  virtual void end_wait() noexcept {}
};

// A wait that blocks. `interrupt` may be null, else it outlives this.
class WaitScope {
 public:
  WaitScope(Interrupt* interrupt, const WaitSubject& subject) noexcept : interrupt_(interrupt) {
    if (interrupt_ != nullptr) interrupt_->begin_wait(subject);
  }
  ~WaitScope() {
    if (interrupt_ != nullptr) interrupt_->end_wait();
  }
  WaitScope(const WaitScope&) = delete;
  WaitScope& operator=(const WaitScope&) = delete;
  void poll() const {
    if (interrupt_ != nullptr) interrupt_->poll();
  }

 private:
  Interrupt* interrupt_;
};

// Blocks until `done()`, which it asks before each poll of `interrupt`; that may be null.
template <typename Done>
void wait_until(Waiter& waiter, Interrupt* interrupt, const WaitSubject& subject,
                const Done& done) {
  if (done()) return;
  const WaitScope scope(interrupt, subject);
  for (waiter.reset(); !done(); waiter.pause()) scope.poll();
}

}  // namespace sluice
