#include "comm/mpi/first_contact.hpp"

#include <gtest/gtest.h>
#include <mpi.h>

#include <optional>
#include <string>
#include <vector>

#include <sluice/error.hpp>

#include "comm/mpi/mpi_session.hpp"
#include "tests/comm/group/both_transports.hpp"

namespace sluice {
namespace {

constexpr auto kShort = std::chrono::milliseconds(200);
constexpr auto kLongWait = std::chrono::seconds(50);

std::optional<Error> refusal(const std::string& build, std::chrono::milliseconds limit) {
  try {
    make_first_contact(build, limit);
    return std::nullopt;
  } catch (const Error& error) {
    return error;
  }
}

bool contains(const Error& error, const std::string& part) {
  return std::string(error.what()).find(part) != std::string::npos;
}

TEST(FirstContactTest, EqualRanksPassAgainAndAgain) {
  for (int i = 0; i < 3; ++i) EXPECT_FALSE(refusal("1.0 build a", kLongWait));
}

TEST(FirstContactTest, EveryRankNamesTheRankWithAnotherBuild) {
  const int last = testing::world().size() - 1;
  if (last == 0) GTEST_SKIP() << "one rank";
  const bool other = testing::world().rank() == last;
  const std::optional<Error> error = refusal(other ? "1.0 build b" : "1.0 build a", kLongWait);
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), ErrorCode::kMismatch);
  EXPECT_EQ(error->rank(), 0);
  const std::string host = mpi_info().host;
  EXPECT_TRUE(contains(*error, "rank 0 on " + host + " has '1.0 build a'")) << error->what();
  EXPECT_TRUE(
      contains(*error, "rank " + std::to_string(last) + " on " + host + " has '1.0 build b'"))
      << error->what();
}

TEST(FirstContactTest, ASilentRankIsNamed) {
  const int last = testing::world().size() - 1;
  if (last == 0) GTEST_SKIP() << "one rank";
  if (testing::world().rank() != last) {
    const std::optional<Error> error = refusal("1.0 build a", kShort);
    ASSERT_TRUE(error);
    EXPECT_EQ(error->code(), ErrorCode::kPeer);
    EXPECT_TRUE(contains(*error, "no message from rank " + std::to_string(last) + " reached"))
        << error->what();
    EXPECT_TRUE(contains(*error, "all ranks are on this host, and none is stopped"))
        << error->what();
  }
  MPI_Barrier(MPI_COMM_WORLD);
}

TEST(FirstContactTest, ASilentFirstRankIsNoticed) {
  const int ranks = testing::world().size();
  if (ranks == 1) GTEST_SKIP() << "one rank";
  if (testing::world().rank() != 0) {
    const std::optional<Error> error = refusal("1.0 build a", kShort / 2);
    ASSERT_TRUE(error);
    EXPECT_EQ(error->code(), ErrorCode::kPeer);
    EXPECT_EQ(error->rank(), testing::world().rank());
    EXPECT_TRUE(contains(*error, "hears nothing from rank 0")) << error->what();
    EXPECT_TRUE(contains(*error, " on " + mpi_info().host)) << error->what();
  } else {
    // What the others sent.
    for (int peer = 1; peer < ranks; ++peer) {
      MPI_Status status;
      MPI_Probe(peer, mpi_info().tag_upper_bound, MPI_COMM_WORLD, &status);
      int bytes = 0;
      MPI_Get_count(&status, MPI_BYTE, &bytes);
      std::vector<char> text(static_cast<std::size_t>(bytes));
      MPI_Recv(text.data(), bytes, MPI_BYTE, peer, mpi_info().tag_upper_bound, MPI_COMM_WORLD,
               MPI_STATUS_IGNORE);
      EXPECT_STREQ(text.data(), "1.0 build a");
    }
  }
  MPI_Barrier(MPI_COMM_WORLD);
}

}  // namespace
}  // namespace sluice
