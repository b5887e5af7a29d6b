#include "runtime/engine/step_clock.hpp"

#include <gtest/gtest.h>

namespace sluice {
namespace {

using Reading = StepClock::Reading;

// A counter at 2 GHz, and a steady clock that agrees with it.
Reading at(double seconds, std::uint64_t gap = 50) {
  return {1000 + seconds, 7'000'000 + static_cast<std::uint64_t>(seconds * 2e9), gap};
}

TEST(StepClockTest, MeasuresTheRateOfItsCounter) {
  StepClock clock(at(0));
  clock.begin_step(at(0.0005));
  EXPECT_FALSE(clock.counts()) << "half a millisecond is too short";
  clock.begin_step(at(0.002));
  ASSERT_TRUE(clock.counts());
  EXPECT_NEAR(clock.seconds_at(at(0.102).ticks), 1000.102, 1e-9);
  clock.begin_step(at(3600));
  ASSERT_TRUE(clock.counts());
  EXPECT_NEAR(clock.seconds_at(at(3601).ticks), 4601, 1e-6);
}

TEST(StepClockTest, ReadsTheSteadyClockForGoodOnceTheTwoPart) {
  for (const double uptime : {0.5, 100.0, 10'000.0}) {
    StepClock clock(at(0));
    clock.begin_step(at(uptime));
    ASSERT_TRUE(clock.counts());
    Reading off = at(uptime + 1);
    off.seconds += 0.01;  // of one second
    clock.begin_step(off);
    EXPECT_FALSE(clock.counts()) << uptime;
    clock.begin_step(at(uptime + 2));
    EXPECT_FALSE(clock.counts()) << uptime;
  }
  StepClock clock(at(1));
  Reading backwards = at(2);
  backwards.ticks = at(0.5).ticks;
  clock.begin_step(backwards);
  EXPECT_FALSE(clock.counts()) << "not even once";
  clock.begin_step(at(3));
  EXPECT_FALSE(clock.counts());
}

// As far as the kernel may slew its clock.
TEST(StepClockTest, FollowsASteadyClockThatIsSlewed) {
  StepClock clock(at(0));
  clock.begin_step(at(1));
  for (int second = 2; second < 10; ++second) {
    Reading slewed = at(second);
    slewed.seconds += (second - 1) * 0.0005;
    clock.begin_step(slewed);
    ASSERT_TRUE(clock.counts()) << second;
    EXPECT_NEAR(clock.seconds_at(at(second + 1).ticks), slewed.seconds + 1.0005, 1e-6);
  }
}

TEST(StepClockTest, TakesNoReadingThatWasInterrupted) {
  StepClock clock(at(0));
  clock.begin_step(at(1));
  Reading late = at(2, 2'000'000);  // a millisecond
  late.seconds += 0.001;
  clock.begin_step(late);
  ASSERT_TRUE(clock.counts());
  EXPECT_NEAR(clock.seconds_at(at(2).ticks), 1002, 1e-9);
}

}  // namespace
}  // namespace sluice
