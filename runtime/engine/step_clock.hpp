// The host's clock inside a step, read several times per action: steady_seconds() at a third of its
// price where the processor's time stamp counter can be trusted. Internal to the engine.
//
// It is trusted on x86-64 where Linux keeps its own time by it, that is where it runs at one rate
// and equally on all cores, until it once parts from the steady clock between two steps. Its rate
// is measured against that clock from step to step.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <x86intrin.h>
#endif

namespace sluice {

// Seconds of the steady clock, the same on all ranks of a host.
[[nodiscard]] double steady_seconds();

class StepClock {
 public:
  // Both clocks at one moment but for `gap` ticks, which reading them took.
  struct Reading {
    double seconds = 0;
    std::uint64_t ticks = 0, gap = 0;
  };

  StepClock();
  // Of a counter that is trusted, for tests.
  explicit StepClock(const Reading& first) : trusted_(true), first_(first), latest_(first) {}

  // Sets it by the steady clock.
  void begin_step();
  void begin_step(const Reading& reading);
  // In seconds, comparable with steady_seconds() of any thread or process of the machine, within
  // microseconds and a thousandth of the time since begin_step().
  [[nodiscard]] double now() const { return counts() ? seconds_at(ticks()) : steady(); }

  // Whether the counter is read, not the steady clock.
  [[nodiscard]] bool counts() const { return rate_ > 0; }
  [[nodiscard]] double seconds_at(std::uint64_t ticks) const {
    return latest_.seconds + static_cast<double>(ticks - latest_.ticks) * rate_;
  }

 private:
  static std::uint64_t ticks() {
#if defined(__x86_64__)
    return __rdtsc();
#else
    return 0;
#endif
  }
  static double steady();
  static Reading read();
  [[nodiscard]] bool agrees(const Reading& reading) const;

  bool trusted_;
  double rate_ = 0;  // seconds per tick; 0: not known, or never again
  Reading first_;    // of the span over which the rate is measured
  Reading latest_;
};

}  // namespace sluice
