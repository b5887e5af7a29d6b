#include "runtime/engine/step_clock.hpp"

#include <chrono>
#include <cmath>
#include <fstream>
#include <string>

namespace sluice {
namespace {

constexpr double kFirstSpan = 0.001;   // seconds over which a rate is measured for the first time
constexpr double kSpan = 0.1;          // and later
constexpr double kMostError = 0.0001;  // of the first span, that the rate may be off by
constexpr double kMostGap = 2e-6;      // seconds that a reading may be off by
constexpr double kMostDrift = 0.001;   // of the time between two readings; NTP slews by half of it

bool kernel_trusts_counter() {
#if defined(__x86_64__)
  std::ifstream file("/sys/devices/system/clocksource/clocksource0/current_clocksource");
  std::string name;
  return static_cast<bool>(file >> name) && name == "tsc";
#else
  return false;
#endif
}

}  // namespace

double steady_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

StepClock::StepClock() : trusted_(kernel_trusts_counter()), first_(read()), latest_(first_) {}

double StepClock::steady() { return steady_seconds(); }

// The best of three: the thread may be interrupted between the two.
StepClock::Reading StepClock::read() {
  Reading best;
  for (int i = 0; i < 3; ++i) {
    Reading reading;
    reading.ticks = ticks();
    reading.seconds = steady();
    reading.gap = ticks() - reading.ticks;
    if (i == 0 || reading.gap < best.gap) best = reading;
  }
  return best;
}

void StepClock::begin_step() {
  if (trusted_) begin_step(read());
}

bool StepClock::agrees(const Reading& reading) const {
  if (reading.ticks <= latest_.ticks) return false;
  if (!counts()) return true;
  const double allowed = kMostDrift * (reading.seconds - latest_.seconds) + 2 * kMostGap;
  return std::abs(seconds_at(reading.ticks) - reading.seconds) <= allowed;
}

void StepClock::begin_step(const Reading& reading) {
  const double span = reading.seconds - first_.seconds;
  const auto passed = static_cast<double>(reading.ticks - first_.ticks);
  const auto gap = static_cast<double>(reading.gap + first_.gap);
  // Something came between the two clocks: what was known before stays good for a while.
  if (counts() ? static_cast<double>(reading.gap) * rate_ > kMostGap : gap > kMostError * passed) {
    return;
  }
  trusted_ = trusted_ && agrees(reading);
  if (!trusted_) {
    rate_ = 0;
    return;
  }
  if (span >= kSpan || (!counts() && span >= kFirstSpan)) rate_ = span / passed;
  if (span >= kSpan) first_ = reading;
  latest_ = reading;
}

}  // namespace sluice
