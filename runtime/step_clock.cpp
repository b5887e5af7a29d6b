#include "runtime/step_clock.hpp"

#include <cmath>
#include <fstream>
#include <string>

#include "runtime/trace.hpp"

namespace sluice {
namespace {

constexpr double kLeastSpan = 0.001;   // seconds over which a rate is measured
constexpr double kMostError = 0.0001;  // of a span, that a rate may be off by
constexpr double kMostDrift = 0.0005;  // between two rates

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

StepClock::StepClock() : trusted_(kernel_trusts_counter()), first_(read()) {
  for (int i = 0; i < 4; ++i) {
    if (const Reading again = read(); again.gap < first_.gap) first_ = again;
  }
}

double StepClock::steady() { return steady_seconds(); }

StepClock::Reading StepClock::read() {
  Reading reading;
  reading.ticks = ticks();
  reading.seconds = steady();
  reading.gap = ticks() - reading.ticks;
  return reading;
}

void StepClock::begin_step() {
  if (!trusted_) return;
  const Reading reading = read();
  const double span = reading.seconds - first_.seconds;
  const auto passed = static_cast<double>(reading.ticks - first_.ticks);
  // Something came between the two clocks: the rate of before stays good for a while.
  if (span < kLeastSpan || static_cast<double>(reading.gap) > kMostError * passed) return;
  const double rate = span / passed;
  trusted_ = rate_ == 0 || std::abs(rate / rate_ - 1) < kMostDrift;
  rate_ = trusted_ ? rate : 0;
  latest_ = reading;
}

}  // namespace sluice
