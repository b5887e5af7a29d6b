#include "comm/mpi/mpi_session.hpp"

#include <gtest/gtest.h>
#include <mpi.h>

#include <cstdlib>
#include <string>

#include <sluice/error.hpp>
#include <sluice/mpi.hpp>

#include "comm/group/collectives.hpp"
#include "tests/comm/group/both_transports.hpp"

namespace sluice {
namespace {

TEST(MpiSessionTest, LeavesAnMpiThatIsAlreadyInitialisedAlone) {
  {
    const MpiSession second(nullptr, nullptr);
    EXPECT_EQ(second.world()->size(), testing::world().size());
  }
  int finalized = 0;
  MPI_Finalized(&finalized);
  EXPECT_EQ(finalized, 0);
}

TEST(MpiSessionTest, SaysWhatRunsTheJob) {
  const MpiInfo info = mpi_info();
  EXPECT_NE(info.library.find("MPI"), std::string::npos) << info.library;
  EXPECT_EQ(info.library.find('\n'), std::string::npos);
  EXPECT_GE(info.standard, "3");
  EXPECT_TRUE(info.thread_level == "funneled" || info.thread_level == "serialized" ||
              info.thread_level == "multiple")
      << info.thread_level;
  EXPECT_FALSE(info.host.empty());
  EXPECT_GE(info.tag_upper_bound, 32767);
  EXPECT_EQ(info.local_size, testing::world().size());
  EXPECT_EQ(info.local_rank, testing::world().rank());
  EXPECT_GE(info.cores, 1);
}

TEST(MpiSessionTest, KnowsTheRanksOfItsHost) {
  EXPECT_EQ(testing::world().local_size(), testing::world().size());
  EXPECT_STREQ(testing::world().name(), "mpi");
}

TEST(MpiInteropTest, TakesACallersCommunicatorAndLeavesItUsable) {
  MPI_Comm part = MPI_COMM_NULL;
  MPI_Comm_split(MPI_COMM_WORLD, testing::world().rank() % 2, 0, &part);
  int size = 0;
  MPI_Comm_size(part, &size);
  {
    const auto comm = communicator_of(make_world(part));
    EXPECT_EQ(comm->size(), size);
    EXPECT_EQ(comm->local_size(), testing::world().size());
    Collectives(*comm, 0, nullptr).barrier();
  }
  int sum = 0;
  const int one = 1;
  MPI_Allreduce(&one, &sum, 1, MPI_INT, MPI_SUM, part);
  EXPECT_EQ(sum, size);
  MPI_Comm_free(&part);
}

TEST(MpiInteropTest, RefusesNoCommunicator) {
  EXPECT_THROW((void)make_world(MPI_COMM_NULL), Error);
}

TEST(MpiInteropTest, RefusesAnInterCommunicator) {
  const Communicator& world = testing::world();
  if (world.size() == 1) return;
  const bool first = world.rank() == 0;
  MPI_Comm part = MPI_COMM_NULL, both = MPI_COMM_NULL;
  MPI_Comm_split(MPI_COMM_WORLD, first ? 0 : 1, 0, &part);
  MPI_Intercomm_create(part, 0, MPI_COMM_WORLD, first ? 1 : 0, 0, &both);
  try {
    (void)make_world(both);
    ADD_FAILURE() << "it was taken";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUsage);
    EXPECT_NE(std::string(error.what()).find("inter-communicator"), std::string::npos);
  }
  MPI_Comm_free(&both);
  MPI_Comm_free(&part);
}

TEST(MpiInteropTest, NamesTheCallThatFailed) {
  const auto comm = testing::world().duplicate();
  try {
    (void)comm->start_send(comm->size(), 0, {});
    ADD_FAILURE() << "a rank that does not exist was written to";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kMpi);
    EXPECT_NE(std::string(error.what()).find("MPI_Isend failed: "), std::string::npos)
        << error.what();
  }
}

}  // namespace
}  // namespace sluice
