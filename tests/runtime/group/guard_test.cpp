#include "runtime/group/guard.hpp"

#include <gtest/gtest.h>

#include <sluice/error.hpp>

#include "comm/group/collectives.hpp"
#include "tests/loopback/loopback.hpp"

namespace sluice {
namespace {

TEST(GuardTest, ToldOfAnExceptionOfAnyTypeEveryRankThrowsAnError) {
  run_loopback(2, [](Communicator& comm) {
    ControlChannel control(comm);
    Collectives collectives(comm, 0, &control);
    try {
      guarded(control, comm.rank(), [&] {
        if (comm.rank() == 1) throw 42;
        collectives.barrier();
      });
      ADD_FAILURE() << "nothing was thrown";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kUser);
      EXPECT_EQ(error.rank(), 1);
      EXPECT_STREQ(error.what(), "an exception that is not a std::exception");
    }
  });
}

TEST(GuardTest, SaysWhereAnExceptionOfAnyTypeCameFrom) {
  try {
    try {
      throw 42;
    } catch (...) {
      rethrow_from("stage 1, 0F0");
    }
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUser);
    EXPECT_STREQ(error.what(), "stage 1, 0F0: an exception that is not a std::exception");
  }
}

}  // namespace
}  // namespace sluice
