#include "comm/group/clock_offset.hpp"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>

#include "tests/comm/group/both_transports.hpp"

namespace sluice {
namespace {

double host_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// What rank r's clock shows more than the host's: nothing, a day, less, drifting, far back.
struct FakeClock {
  double ahead = 0;
  double drift = 0;

  explicit FakeClock(int rank) {
    constexpr std::array kAhead = {0.0, 86400.0, -0.25, 3.5, -1e6};
    constexpr std::array kDrift = {0.0, 0.0, 0.0, 1e-3, -5e-4};
    ahead = kAhead[static_cast<std::size_t>(rank) % kAhead.size()];
    drift = kDrift[static_cast<std::size_t>(rank) % kDrift.size()];
  }
  [[nodiscard]] double of(double host) const { return host + ahead + drift * (host - kEpoch); }
  [[nodiscard]] ClockReader reader() const {
    return [*this] { return of(host_seconds()); };
  }
  // The clock's offset when it shows `time`.
  [[nodiscard]] double offset_at(double time) const {
    const double host = (time - ahead + drift * kEpoch) / (1 + drift);
    return time - host;
  }

  static inline const double kEpoch = host_seconds();
};

// Of doubles around 1e6.
constexpr double kRounding = 1e-8;

SLUICE_COMM_TEST(ClockOffsetTest, TheErrorBoundsTheDistanceToTheTrueOffset) {
  Collectives ranks(comm, 0, nullptr);
  const FakeClock clock(comm.rank());
  const ClockOffset found = measure_clock_offset(ranks, clock.reader());
  EXPECT_LE(std::abs(found.offset - clock.offset_at(found.at)), found.error + kRounding);
  if (comm.rank() == 0) {
    EXPECT_EQ(found.offset, 0);
    EXPECT_EQ(found.error, 0);
  } else {
    EXPECT_GT(found.error, 0);
  }
}

SLUICE_COMM_TEST(ClockOffsetTest, TwoMeasurementsPutADriftingClockRight) {
  Collectives ranks(comm, 0, nullptr);
  const FakeClock clock(comm.rank());
  const ClockOffset first = measure_clock_offset(ranks, clock.reader());
  const double between = host_seconds();
  const ClockOffset last = measure_clock_offset(ranks, clock.reader());
  const double bound = std::max(first.error, last.error) + kRounding;
  EXPECT_NEAR(on_first_rank(first, last, clock.of(between)), between, bound);
}

SLUICE_COMM_TEST(ClockOffsetTest, RanksThatShareAClockHaveNoOffset) {
  Collectives ranks(comm, 0, nullptr);
  EXPECT_EQ(measure_clock_offset(ranks, host_seconds).offset, 0);
}

// A clock that advances by a millisecond with each look makes all round trips equal and long.
SLUICE_COMM_TEST(ClockOffsetTest, EndsSoonWhereRoundTripsAreLong) {
  Collectives ranks(comm, 0, nullptr);
  int looks = 0;
  const ClockOffset found = measure_clock_offset(ranks, [&] { return 1e-3 * ++looks; });
  constexpr int kLeast = 8;
  if (comm.rank() > 0) {
    EXPECT_EQ(looks, kLeast);
    EXPECT_GT(found.error, 0);
  } else {
    EXPECT_EQ(looks, 2 * kLeast * (comm.size() - 1) + 1);
  }
}

SLUICE_COMM_TEST(ClockOffsetTest, EndsAfterSixtyFourRoundTripsOnAStoppedClock) {
  Collectives ranks(comm, 0, nullptr);
  int looks = 0;
  (void)measure_clock_offset(ranks, [&] {
    ++looks;
    return 5.0;
  });
  if (comm.rank() > 0) {
    EXPECT_EQ(looks, 64);
  }
}

TEST(ClockFitTest, FollowsTheLineBetweenTheMeasurementsAndStaysOutsideThem) {
  const ClockOffset first{.at = 100, .offset = 10, .error = 0};
  const ClockOffset last{.at = 200, .offset = 12, .error = 0};
  EXPECT_DOUBLE_EQ(on_first_rank(first, last, 100), 90);
  EXPECT_DOUBLE_EQ(on_first_rank(first, last, 150), 139);
  EXPECT_DOUBLE_EQ(on_first_rank(first, last, 200), 188);
  EXPECT_DOUBLE_EQ(on_first_rank(first, last, 50), 40);
  EXPECT_DOUBLE_EQ(on_first_rank(first, last, 250), 238);
  EXPECT_DOUBLE_EQ(on_first_rank(first, first, 150), 140);
}

}  // namespace
}  // namespace sluice
