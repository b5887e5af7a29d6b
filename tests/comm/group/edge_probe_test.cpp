// Messages of full size over the edges of a job, and what is said where one does not arrive whole.
#include "comm/group/edge_probe.hpp"

#include <gtest/gtest.h>

#include <memory>
#include <utility>
#include <vector>

#include "tests/comm/group/both_transports.hpp"
#include "tests/comm/group/passing_communicator.hpp"

namespace sluice {
namespace {

// Between neighbours, both ways; the larger ones go by rendezvous.
std::vector<ProbedEdge> edges_of(const Communicator& comm) {
  std::vector<ProbedEdge> edges;
  for (int rank = 1; rank < comm.size(); ++rank) {
    const std::size_t bytes = rank % 2 == 0 ? 1001 : (std::size_t{1} << 20) + 3;
    edges.push_back({rank - 1, rank, bytes});
    edges.push_back({rank, rank - 1, bytes});
  }
  return edges;
}

SLUICE_COMM_TEST(EdgeProbeTest, FindsNothingWhereAllBytesArrive) {
  const auto own = comm.duplicate();
  EXPECT_EQ(probe_edges(*own, DeviceMemory(), edges_of(comm), nullptr), std::nullopt);
}

SLUICE_COMM_TEST(EdgeProbeTest, PassesOverEdgesOfNothingAndOfOneRank) {
  const auto own = comm.duplicate();
  const std::vector<ProbedEdge> edges = {{0, 0, 100}, {0, comm.size() - 1, 0}};
  EXPECT_EQ(probe_edges(*own, DeviceMemory(), edges, nullptr), std::nullopt);
}

// Passes everything on; the last byte of what goes to one rank is another.
class Spoiler final : public testing::PassingCommunicator {
 public:
  Spoiler(Communicator& comm, int spoiled) : PassingCommunicator(comm), spoiled_rank_(spoiled) {}
  Request start_send(int peer, int tag, std::span<const std::byte> bytes) override {
    if (peer != spoiled_rank_) return inner().start_send(peer, tag, bytes);
    spoiled_.assign(bytes.begin(), bytes.end());
    spoiled_.back() ^= std::byte{1};
    return inner().start_send(peer, tag, spoiled_);
  }

 private:
  int spoiled_rank_;
  std::vector<std::byte> spoiled_;
};

SLUICE_COMM_TEST(EdgeProbeTest, NamesTheEdgeWhoseBytesDiffer) {
  if (comm.size() < 2) return;
  Spoiler spoiler(comm, comm.size() - 1);
  const std::vector<ProbedEdge> edges = edges_of(comm);
  const auto broken = probe_edges(spoiler, DeviceMemory(), edges, nullptr);
  if (comm.rank() == comm.size() - 1) {
    EXPECT_EQ(broken, edges[edges.size() - 2]);
  } else {
    EXPECT_EQ(broken, std::nullopt);
  }
}

class Failing final : public Interrupt {
 public:
  void poll() override { throw Error(ErrorCode::kPeer, "the other rank is gone"); }
};

SLUICE_COMM_TEST(EdgeProbeTest, EndsWhereTheInterruptSaysSo) {
  if (comm.size() < 2) return;
  const auto own = comm.duplicate();
  Failing failing;
  // Rank 0 receives what rank 1 never sends.
  const std::vector<ProbedEdge> edges = {{1, 0, 100}};
  if (comm.rank() == 0) {
    EXPECT_THROW(static_cast<void>(probe_edges(*own, DeviceMemory(), edges, &failing)), Error);
  }
}

}  // namespace
}  // namespace sluice
