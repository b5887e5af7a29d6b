#include "comm/loopback.hpp"

#include <gtest/gtest.h>

#include <stdexcept>
#include <string>

#include "comm/error.hpp"

namespace sluice {
namespace {

TEST(LoopbackTest, RethrowsTheErrorOfTheLowestRank) {
  try {
    run_loopback(4, [](Communicator& comm) {
      if (comm.rank() >= 2) {
        throw std::runtime_error("from rank " + std::to_string(comm.rank()));
      }
    });
    ADD_FAILURE() << "no error";
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "from rank 2");
  }
}

TEST(LoopbackTest, EndsRanksThatWaitForOneThatThrew) {
  try {
    run_loopback(3, [](Communicator& comm) {
      if (comm.rank() == 2) {
        throw std::runtime_error("the cause");
      }
      Collectives(comm, 0, nullptr).barrier();
    });
    ADD_FAILURE() << "no error";
  } catch (const std::exception& error) {
    EXPECT_STREQ(error.what(), "the cause");
  }
}

TEST(LoopbackTest, EndsRanksThatWaitInASplit) {
  EXPECT_THROW(run_loopback(2,
                            [](Communicator& comm) {
                              if (comm.rank() == 1) {
                                throw std::runtime_error("the cause");
                              }
                              (void)comm.duplicate();
                            }),
               std::runtime_error);
}

TEST(LoopbackTest, RefusesNoRanks) {
  EXPECT_THROW(run_loopback(0, [](Communicator&) {}), Error);
}

TEST(LoopbackTest, RefusesAPeerOutsideTheGroup) {
  run_loopback(2, [](Communicator& comm) {
    EXPECT_THROW((void)comm.start_send(2, 0, {}), Error);
    EXPECT_THROW((void)comm.post_recv(-2, 0, {}), Error);
    EXPECT_THROW((void)comm.start_send(0, -1, {}), Error);
  });
}

}  // namespace
}  // namespace sluice
