#include "comm/group/waiter.hpp"

#include <sched.h>
#include <sys/prctl.h>
#include <time.h>

#include <algorithm>

#include "comm/base/cores.hpp"

namespace sluice {

namespace {

constexpr std::uint32_t kSpinPolls = 400;     // about 40 us, polls included
constexpr std::uint32_t kTightPolls = 64;     // the first of these, without a pause instruction
constexpr std::uint32_t kYieldPolls = 20;     // after the spinning
constexpr long kShortestSleep = 20'000;       // ns
constexpr long kLongestSleep = 50'000;        // ns
constexpr long kSleepGrowth = 2'000;          // ns per poll
constexpr unsigned long kTimerSlack = 1'000;  // ns

void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#else
  sched_yield();
#endif
}

}  // namespace

Waiter::Waiter(int local_ranks) : spin_polls_(local_ranks <= host_cores() ? kSpinPolls : 0) {}

void Waiter::pause() {
  const std::uint32_t poll = polls_++;
  if (poll < spin_polls_) {
    if (poll >= kTightPolls) {
      relax();
    }
    return;
  }
  if (poll < spin_polls_ + kYieldPolls) {
    sched_yield();
    return;
  }
  if (!slack_set_) {
    prctl(PR_SET_TIMERSLACK, kTimerSlack);
    slack_set_ = true;
  }
  const long sleeps = static_cast<long>(std::min(poll - spin_polls_ - kYieldPolls, 1000U));
  timespec span{0, std::min(kLongestSleep, kShortestSleep + kSleepGrowth * sleeps)};
  nanosleep(&span, nullptr);
}

}  // namespace sluice
