#include "comm/nccl/nccl_sums.hpp"

#include <algorithm>

#include <sluice/error.hpp>

#include "tests/comm/group/addends.hpp"
#include "tests/comm/nccl/nccl_ranks.hpp"
#ifdef SLUICE_EMULATED
#include "tests/emulated_cuda/control.hpp"
#endif

namespace sluice {
namespace {

using testing::addends;
using testing::differing;
using testing::OnDevice;
using testing::Rank;

class NcclSumsTest : public testing::NcclRanksTest {};
class NcclSumsPeersTest : public testing::NcclRanksTest {};
SLUICE_NCCL_RANKS(NcclSumsTest);
SLUICE_NCCL_PEERS(NcclSumsPeersTest);

// What the host makes of the same values.
std::vector<float> on_host(Rank& rank, std::vector<float> values) {
  rank.bootstrap.ordered_sum(values);
  return values;
}

TEST_P(NcclSumsTest, HaveTheBitsOfTheHostsOrderedSum) {
  run([](Rank& rank) {
    NcclQueue queue(rank.device, 8, rank.size());
    NcclSums sums(queue, rank.bootstrap, DeviceMemory(rank.device), NcclLabel{"the replicas"},
                  NcclSums::Method::kOrdered, {}, &rank.control);
    const Stream compute(rank.device);
    Event ready(rank.device);
    // Fewer values than ranks, than a shard's multiple, odd ones, and whole shards.
    for (const std::size_t count : {1UL, 2UL, 3UL, 5UL, 31UL, 33UL, 128UL, 1000UL, 4099UL}) {
      const std::vector<float> mine = addends(rank.rank(), count);
      const OnDevice<float> values(rank.device, mine);
      const OnDevice<float> workspace(rank.device, sums.workspace(count));
      ready.record(compute.view());
      NcclTicket summed = sums.sum(values.values(), workspace.values(), ready);
      queue.wait(summed, &rank.control);
      EXPECT_EQ(differing(values.read(), on_host(rank, mine)), 0U) << "of " << count;
    }
    queue.finalize(&rank.control);
  });
}

TEST_P(NcclSumsTest, DoNotDependOnHowARangeIsCut) {
  run([](Rank& rank) {
    NcclQueue queue(rank.device, 16, rank.size());
    NcclSums sums(queue, rank.bootstrap, DeviceMemory(rank.device), NcclLabel{"the replicas"},
                  NcclSums::Method::kOrdered, {}, &rank.control);
    const std::size_t count = 3001;
    const std::vector<float> mine = addends(rank.rank(), count);
    const OnDevice<float> values(rank.device, std::vector<float>(count));
    const OnDevice<float> workspace(rank.device, sums.workspace(1024));
    const Stream compute(rank.device);
    Event ready(rank.device);
    // Four buckets through one workspace, the last one short, none aligned to 16 bytes but the
    // first, while the stream still brings the values.
    copy_async(values.bytes().data(), mine.data(), count * sizeof(float), compute.view());
    ready.record(compute.view());
    std::vector<NcclTicket> tickets;
    for (std::size_t begin = 0; begin < count; begin += 1001) {
      tickets.push_back(
          sums.sum(values.values().subspan(begin, std::min<std::size_t>(1001, count - begin)),
                   workspace.values(), ready));
    }
    for (NcclTicket& ticket : tickets) queue.wait_issued(ticket, &rank.control);
    for (NcclTicket& ticket : tickets) queue.wait_on(compute.view(), ticket);
    compute.view().synchronize();
    EXPECT_EQ(differing(values.read(), on_host(rank, mine)), 0U);
    queue.finalize(&rank.control);
  });
}

// Of `count` values: in no order of ranks and with gaps, the first rank's is empty; or one rank has
// all.
std::vector<NcclSums::Piece> pieces_of(int ranks, std::size_t count, int only) {
  std::vector<NcclSums::Piece> pieces;
  const auto all = static_cast<std::size_t>(ranks);
  for (std::size_t rank = 0; rank < all; ++rank) {
    const std::size_t begin = count / all * (all - 1 - rank);
    if (only < 0) pieces.push_back({begin, count / all * rank / all});
    if (only >= 0) pieces.push_back({0, rank == static_cast<std::size_t>(only) ? count : 0});
  }
  return pieces;
}

TEST_P(NcclSumsTest, HaveTheirBitsInTwoHalvesOverPiecesOfAnySizes) {
  run([](Rank& rank) {
    NcclQueue queue(rank.device, 8, rank.size());
    NcclSums sums(queue, rank.bootstrap, DeviceMemory(rank.device), NcclLabel{"the replicas"},
                  NcclSums::Method::kOrdered, {}, &rank.control);
    const Stream compute(rank.device);
    Event ready(rank.device);
    const std::size_t count = 4100;
    const std::vector<float> mine = addends(rank.rank(), count);
    const std::vector<float> sum = on_host(rank, mine);
    const OnDevice<float> workspace(rank.device, NcclSums::scatter_workspace(count, rank.size()));
    for (int only = -1; only < rank.size(); ++only) {
      const std::vector<NcclSums::Piece> pieces = pieces_of(rank.size(), count, only);
      const OnDevice<float> values(rank.device, mine);
      std::vector<float> expected = mine;  // only pieces are to change
      const auto expect_sum_in = [&](NcclSums::Piece piece) {
        const auto begin = static_cast<std::ptrdiff_t>(piece.begin);
        std::copy_n(sum.begin() + begin, piece.size, expected.begin() + begin);
      };
      ready.record(compute.view());
      NcclTicket done = sums.reduce_scatter(values.values(), pieces, workspace.values(), ready);
      queue.wait(done, &rank.control);
      expect_sum_in(pieces[static_cast<std::size_t>(rank.rank())]);
      EXPECT_EQ(differing(values.read(), expected), 0U) << only;
      ready.record(compute.view());
      done = sums.gather(values.values(), pieces, ready);
      queue.wait(done, &rank.control);
      for (const NcclSums::Piece& piece : pieces) expect_sum_in(piece);
      EXPECT_EQ(differing(values.read(), expected), 0U) << only;
    }
    queue.finalize(&rank.control);
  });
}

// Two groups at a time: ranks of even and of odd numbers.
TEST_P(NcclSumsTest, GatherAmongSomeOfTheRanks) {
  run([](Rank& rank) {
    NcclQueue queue(rank.device, 8, rank.size());
    NcclSums sums(queue, rank.bootstrap, DeviceMemory(rank.device), NcclLabel{"the replicas"},
                  NcclSums::Method::kOrdered, {}, &rank.control);
    const auto ranks = static_cast<std::size_t>(rank.size());
    std::vector<float> expected(2 * ranks), mine(2 * ranks, -1);
    std::vector<NcclSums::Piece> pieces;
    std::vector<int> among;
    for (std::size_t peer = 0; peer < ranks; ++peer) {
      const bool shares = static_cast<int>(peer) % 2 == rank.rank() % 2;
      pieces.push_back({2 * peer, 2});
      if (shares) among.push_back(static_cast<int>(peer));
      for (const std::size_t i : {2 * peer, 2 * peer + 1}) {
        if (static_cast<int>(peer) == rank.rank()) mine[i] = static_cast<float>(i);
        expected[i] = shares ? static_cast<float>(i) : -1;
      }
    }
    const OnDevice<float> values(rank.device, mine);
    const Event now;
    NcclTicket done = sums.gather(values.values(), pieces, now, among);
    queue.wait(done, &rank.control);
    EXPECT_EQ(values.read(), expected);
    queue.finalize(&rank.control);
  });
}

TEST_P(NcclSumsTest, ByTheLibraryAreCloseToTheOrderedOnes) {
  run([](Rank& rank) {
    NcclQueue queue(rank.device, 8, rank.size());
    NcclSums sums(queue, rank.bootstrap, DeviceMemory(rank.device), NcclLabel{"the replicas"},
                  NcclSums::Method::kAllReduce, std::vector<std::size_t>{1000, 4000},
                  &rank.control);
    EXPECT_EQ(sums.workspace(1000), 0U);
    const std::vector<float> mine = addends(rank.rank(), 1000);
    const OnDevice<float> values(rank.device, mine);
    const Event now;
    NcclTicket summed = sums.sum(values.values(), {}, now);
    queue.wait(summed, &rank.control);
    const std::vector<float> expected = on_host(rank, mine);
    const std::vector<float> got = values.read();
    for (std::size_t i = 0; i < got.size(); ++i) {
      EXPECT_NEAR(got[i], expected[i], 1e-3F * static_cast<float>(rank.size())) << i;
    }
    queue.finalize(&rank.control);
  });
}

#ifdef SLUICE_EMULATED
TEST_P(NcclSumsPeersTest, MakeAFirstSumOfEverySizeOnFewMultiprocessors) {
  // The last GPU is small: its quarter bounds the blocks of all.
  for (int gpu = 0; gpu < GetParam(); ++gpu) emulated::set_multiprocessors(gpu, 132);
  emulated::set_multiprocessors(GetParam() - 1, 20);
  const std::size_t asked = emulated::most_blocks_asked().size();
  const std::size_t made = emulated::all_reduce_sizes().size();
  run([](Rank& rank) {
    NcclQueue queue(rank.device, 8, rank.size());
    const NcclSums sums(queue, rank.bootstrap, DeviceMemory(rank.device), NcclLabel{"the replicas"},
                        NcclSums::Method::kAllReduce, std::vector<std::size_t>{7, 4000, 123},
                        &rank.control);
    queue.finalize(&rank.control);
  });
  const std::vector<int> blocks = emulated::most_blocks_asked();
  for (std::size_t i = asked; i < blocks.size(); ++i) EXPECT_EQ(blocks[i], 5);
  for (int gpu = 0; gpu < GetParam(); ++gpu) emulated::set_multiprocessors(gpu, 4);
  const std::vector<std::size_t> sizes = emulated::all_reduce_sizes();
  for (const std::size_t size : {7UL, 4000UL, 123UL}) {
    EXPECT_EQ(std::count(sizes.begin() + static_cast<std::ptrdiff_t>(made), sizes.end(), size),
              GetParam())
        << size;
  }
}
#endif

TEST_P(NcclSumsPeersTest, RefuseAWorkspaceTooSmall) {
  run([](Rank& rank) {
    NcclQueue queue(rank.device, 8, rank.size());
    NcclSums sums(queue, rank.bootstrap, DeviceMemory(rank.device), NcclLabel{"the replicas"},
                  NcclSums::Method::kOrdered, {}, &rank.control);
    const OnDevice<float> values(rank.device, 100);
    const OnDevice<float> workspace(rank.device, sums.workspace(100));
    const Event now;
    EXPECT_THROW(static_cast<void>(sums.sum(
                     values.values(), workspace.values().first(sums.workspace(100) - 1), now)),
                 Error);
    queue.finalize(&rank.control);
  });
}

TEST_P(NcclSumsPeersTest, RefusePiecesThatAreNoneAndAWorkspaceForLess) {
  run([](Rank& rank) {
    NcclQueue queue(rank.device, 8, rank.size());
    NcclSums sums(queue, rank.bootstrap, DeviceMemory(rank.device), NcclLabel{"the replicas"},
                  NcclSums::Method::kOrdered, {}, &rank.control);
    const OnDevice<float> values(rank.device, 100);
    const OnDevice<float> workspace(rank.device, NcclSums::scatter_workspace(100, rank.size()));
    const Event now;
    std::vector<NcclSums::Piece> good(static_cast<std::size_t>(rank.size()), {100, 0});
    good.front() = {0, 100};
    std::vector<std::vector<NcclSums::Piece>> wrong(3, good);
    wrong[0].pop_back();
    wrong[1].front() = {1, 100};
    wrong[2].back() = {101, 0};
    for (const std::vector<NcclSums::Piece>& pieces : wrong) {
      EXPECT_THROW(
          static_cast<void>(sums.reduce_scatter(values.values(), pieces, workspace.values(), now)),
          Error);
      EXPECT_THROW(static_cast<void>(sums.gather(values.values(), pieces, now)), Error);
    }
    // Also on the ranks whose own piece is empty.
    const std::span<float> less = workspace.values().first(workspace.values().size() - 1);
    EXPECT_THROW(static_cast<void>(sums.reduce_scatter(values.values(), good, less, now)), Error);
    queue.finalize(&rank.control);
  });
}

}  // namespace
}  // namespace sluice
