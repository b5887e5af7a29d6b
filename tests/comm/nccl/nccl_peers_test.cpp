// What needs no GPU: opening NCCL's library, and who is refused by what name.
#include "comm/nccl/nccl_peers.hpp"

#include <gmock/gmock.h>

#include "comm/nccl/nccl_api.hpp"
#include "tests/comm/nccl/nccl_ranks.hpp"

namespace sluice {
namespace {

using ::testing::AllOf;
using testing::error_of;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(NcclLibraryTest, NamesAMissingLibraryInOneLine) {
  const Error error = error_of([] { const nccl::Library none("libnccl-missing.so.2"); });
  EXPECT_EQ(error.code(), ErrorCode::kDevice);
  EXPECT_THAT(error.what(), AllOf(HasSubstr("NCCL is missing: libnccl-missing.so.2: "),
                                  HasSubstr("--transport mpi"), Not(HasSubstr("\n"))));
}

TEST(NcclLibraryTest, NamesAFileThatIsNoNccl) {
  const Error error = error_of([] { const nccl::Library other("libc.so.6"); });
  EXPECT_EQ(error.code(), ErrorCode::kDevice);
  EXPECT_THAT(error.what(), HasSubstr("NCCL in libc.so.6 cannot be used: it has no nccl"));
}

TEST(NcclLibraryTest, KnowsItsVersion) {
  std::optional<nccl::Library> library;
  try {
    library.emplace();
  } catch (const Error& error) {
    GTEST_SKIP() << error.what();
  }
  EXPECT_GE(library->version(), 21900);
  EXPECT_EQ(nccl::version_text(22809), "2.28.9");
}

// [rank] each on a host of its own, on the GPU at the same address.
std::vector<nccl::Peer> peer_table_of(int ranks) {
  std::vector<nccl::Peer> peer_table(static_cast<std::size_t>(ranks));
  char number = '0';
  for (nccl::Peer& member : peer_table) {
    member.rank = number - '0';
    member.version = 22809;
    member.device = {DeviceKind::kCuda, 0};
    member.host = {'h', number};
    member.machine = {'m', number};
    member.gpu = {'0'};
    ++number;
  }
  return peer_table;
}

TEST(NcclPeersTest, TellsHostsApart) {
  auto peer_table = peer_table_of(3);
  EXPECT_EQ(nccl::refusal(peer_table, "x"), std::nullopt);  // one address on three hosts
  peer_table[2].machine = peer_table[0].machine;
  EXPECT_STREQ(nccl::refusal(peer_table, "x")->what(),
               "NCCL cannot serve x: rank 0 on h0 (cuda:0) and rank 2 on h2 (cuda:0) share the GPU "
               "at 0; give each rank its own, or --transport mpi");
}

TEST(NcclPeersTest, NamesTheFirstRankOfAnotherVersion) {
  auto peer_table = peer_table_of(3);
  peer_table[1].version = 22203;
  const auto refused = nccl::refusal(peer_table, "x");
  EXPECT_EQ(refused->code(), ErrorCode::kMismatch);
  EXPECT_STREQ(refused->what(),
               "NCCL cannot serve x: rank 0 on h0 (cuda:0) has NCCL 2.28.9, rank 1 on h1 (cuda:0) "
               "has NCCL 2.22.3; all ranks need one version");
}

TEST(NcclPeersTest, NamesARankWithoutTheLibrary) {
  auto peer_table = peer_table_of(3);
  peer_table[2].version = 0;
  peer_table[2].problem = {'N', 'o'};
  const auto refused = nccl::refusal(peer_table, "x");
  EXPECT_EQ(refused->code(), ErrorCode::kDevice);
  EXPECT_STREQ(refused->what(), "NCCL cannot serve x: rank 2 on h2 (cuda:0): No");
}

}  // namespace
}  // namespace sluice
