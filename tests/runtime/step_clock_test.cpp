#include "runtime/step_clock.hpp"

#include <gtest/gtest.h>

#include "runtime/trace.hpp"

namespace sluice {
namespace {

// Neither may step out of what the steady clock says before and after, but for the rate's error.
TEST(StepClockTest, AgreesWithTheSteadyClockAndNeverRunsBackwards) {
  StepClock clock;
  const double first = steady_seconds();
  double last = first;
  for (int step = 0; step < 50; ++step) {
    clock.begin_step();
    const double begun = steady_seconds();
    for (int i = 0; i < 2000; ++i) {
      const double before = steady_seconds();
      const double now = clock.now();
      const double after = steady_seconds();
      const double error = 1e-6 + 1e-3 * (after - begun);
      ASSERT_GE(now, before - error) << "step " << step;
      ASSERT_LE(now, after + error) << "step " << step;
      if (i > 0) {
        ASSERT_GE(now, last) << "step " << step;
      }
      last = now;
    }
  }
}

}  // namespace
}  // namespace sluice
