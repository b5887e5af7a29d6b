// The host's clock inside a step, read several times per action: steady_seconds() at a third of its
// price where the processor's time stamp counter can be trusted. Internal to the engine.
//
// It is trusted on x86-64 where Linux keeps its own time by it, that is where it runs at one rate
// and equally on all cores, for as long as it agrees with the steady clock. Its rate is measured
// against that clock from step to step.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <x86intrin.h>
#endif

namespace sluice {

class StepClock {
 public:
  StepClock();
  // Sets it by the steady clock.
  void begin_step();
  // In seconds, comparable with steady_seconds() of any thread or process of the machine, within
  // some ten thousandths of the time since begin_step().
  [[nodiscard]] double now() const {
    return rate_ > 0 ? latest_.seconds + static_cast<double>(ticks() - latest_.ticks) * rate_
                     : steady();
  }

 private:
  struct Reading {
    double seconds = 0;
    std::uint64_t ticks = 0;
    std::uint64_t gap = 0;  // ticks that reading both took
  };

  static std::uint64_t ticks() {
#if defined(__x86_64__)
    return __rdtsc();
#else
    return 0;
#endif
  }
  static double steady();
  static Reading read();

  bool trusted_;
  double rate_ = 0;  // seconds per tick; 0: the steady clock is read instead
  Reading first_, latest_;
};

}  // namespace sluice
