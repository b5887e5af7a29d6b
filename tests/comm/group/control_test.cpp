#include "comm/group/control.hpp"

#include <chrono>
#include <optional>
#include <string>

#include "comm/group/collectives.hpp"
#include "tests/comm/group/both_transports.hpp"

namespace sluice {
namespace {

// Polls until the channel throws.
Error next_error(Communicator& comm, ControlChannel& control) {
  Waiter waiter(comm.local_size());
  for (;;) {
    try {
      control.poll();
    } catch (const Error& error) {
      return error;
    }
    waiter.pause();
  }
}

SLUICE_COMM_TEST(ControlChannelTest, IsSilentWithoutAnError) {
  for (int round = 0; round < 3; ++round) {
    ControlChannel control(comm);
    for (int i = 0; i < 100; ++i) {
      control.poll();
    }
    Collectives(comm, 0, &control).barrier();
  }
}

SLUICE_COMM_TEST(ControlChannelTest, TellsEveryRankOfOneRanksError) {
  for (int origin = 0; origin < comm.size(); ++origin) {
    ControlChannel control(comm);
    std::optional<Error> seen;
    if (comm.rank() == origin) {
      seen = control.report(Error(ErrorCode::kNumeric, "loss is nan in micro-batch 3"));
    } else {
      seen = next_error(comm, control);
    }
    EXPECT_EQ(seen->code(), ErrorCode::kNumeric);
    EXPECT_EQ(seen->rank(), origin);
    EXPECT_STREQ(seen->what(), "loss is nan in micro-batch 3");
    EXPECT_THROW(control.poll(), Error);  // and again
    Collectives(comm, 0, nullptr).barrier();
  }
}

SLUICE_COMM_TEST(ControlChannelTest, KeepsTheRankThatSawTheErrorFirst) {
  ControlChannel control(comm);
  const Error carried(ErrorCode::kData, "as told by another", 42);
  const Error seen =
      comm.rank() == comm.size() - 1 ? control.report(carried) : next_error(comm, control);
  EXPECT_EQ(seen.rank(), 42);
}

SLUICE_COMM_TEST(ControlChannelTest, EndsABlockingCollectiveOfTheOthers) {
  const auto copy = comm.duplicate();
  ControlChannel control(comm);
  Collectives collectives(*copy, 0, &control);
  const int origin = comm.size() - 1;
  if (comm.rank() == origin) {
    EXPECT_STREQ(control.report(Error(ErrorCode::kIo, "disk full")).what(), "disk full");
    return;
  }
  try {
    collectives.barrier();
    ADD_FAILURE() << "a barrier ended that one rank never entered";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kIo);
    EXPECT_STREQ(error.what(), "disk full");
  }
}

SLUICE_COMM_TEST(ControlChannelTest, AgreesOnOneErrorWhenAllRanksReport) {
  ControlChannel control(comm);
  const Error winner =
      control.report(Error(ErrorCode::kData, "rank " + std::to_string(comm.rank()) + " failed"));
  EXPECT_EQ(winner.what(), "rank " + std::to_string(winner.rank()) + " failed");
  Collectives collectives(comm, 0, nullptr);
  for (const std::string& text : collectives.all_gather_strings(winner.what())) {
    EXPECT_EQ(text, winner.what());
  }
}

SLUICE_COMM_TEST(ControlChannelTest, TheFirstErrorWinsOverALaterOne) {
  if (comm.size() < 2) {
    return;
  }
  ControlChannel control(comm);
  Collectives plain(comm, 0, nullptr);
  const int first = comm.size() - 1;
  if (comm.rank() == first) {
    EXPECT_STREQ(control.report(Error(ErrorCode::kData, "the cause")).what(), "the cause");
  } else if (comm.rank() == 0) {
    EXPECT_STREQ(next_error(comm, control).what(), "the cause");
    EXPECT_STREQ(control.report(Error(ErrorCode::kPeer, "the consequence")).what(), "the cause");
  }
  plain.barrier();
  // The others come late, with consequences of their own.
  EXPECT_STREQ(control.report(Error(ErrorCode::kPeer, "a consequence")).what(), "the cause");
}

SLUICE_COMM_TEST(ControlChannelTest, AgreesOnOneErrorWhereRankZeroComputesForLong) {
  if (comm.size() < 3) {
    return;
  }
  ControlChannel control(comm);
  Collectives plain(comm, 0, nullptr);
  const auto compute = [] {
    const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(1500);
    while (std::chrono::steady_clock::now() < end) continue;
  };
  if (comm.rank() == 0) compute();
  const Error seen =
      comm.rank() == 0
          ? next_error(comm, control)
          : control.report(Error(ErrorCode::kData, "disk of rank " + std::to_string(comm.rank())));
  for (const std::string& text : plain.all_gather_strings(seen.what())) {
    EXPECT_EQ(text, seen.what());
  }
}

#ifndef SLUICE_UNDER_MPI
TEST(ControlChannelTest, ReportReturnsItsOwnErrorWhereRankZeroDoesNotLook) {
  run_loopback(2, [](Communicator& comm) {
    ControlChannel control(comm);
    if (comm.rank() == 0) {
      return;
    }
    const Error seen = control.report(Error(ErrorCode::kDevice, "the device is lost"),
                                      std::chrono::milliseconds(10));
    EXPECT_STREQ(seen.what(), "the device is lost");
    EXPECT_EQ(seen.rank(), 1);
  });
}
#endif

SLUICE_COMM_TEST(ControlChannelTest, CutsATextThatIsTooLong) {
  ControlChannel control(comm);
  const std::string text(5000, 'x');
  const Error seen =
      comm.rank() == 0 ? control.report(Error(ErrorCode::kPlan, text)) : next_error(comm, control);
  const std::string got = seen.what();
  EXPECT_GT(got.size(), 1000U);
  EXPECT_LT(got.size(), 2048U);
  EXPECT_EQ(got.substr(got.size() - 4), "x...");
}

}  // namespace
}  // namespace sluice
