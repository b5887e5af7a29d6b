#include "runtime/layout/edge_route.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <sluice/options.hpp>

#include "tests/loopback/loopback.hpp"
#include "tests/runtime/expect_error.hpp"

namespace sluice {
namespace {

using ::testing::HasSubstr;

// Edges of one stage whose input is i32 [samples, positions].
std::vector<std::vector<EdgeTensor>> edges_of(std::int64_t samples, std::int64_t positions) {
  const std::vector<EdgeTensor> edge = {{{DType::kI32, Shape{samples, positions}}, false}};
  return {edge, edge};
}

TEST(EdgeTableTest, ShapesDifferInSamplesAndInPositions) {
  EdgeTable edges({{.samples = 4}, {.samples = 1}}, {edges_of(4, 16), edges_of(1, 16)});
  EXPECT_EQ(edges.largest(), (UnitShape{4, 0}));
  const auto whole = edges.inputs({.samples = 4}, 0);
  for (const std::int64_t positions : {1, 8}) {
    EXPECT_FALSE(edges.has({4, positions}));
    edges.add({4, positions}, edges_of(4, positions), {{DType::kF32, Shape{4, positions}}});
    EXPECT_TRUE(edges.has({4, positions}));
    EXPECT_FALSE(edges.has({1, positions}));
  }
  EXPECT_EQ(edges.inputs({4, 8}, 1)[0].spec.shape, (Shape{4, 8}));
  EXPECT_EQ(edges.inputs({4, 1}, 0)[0].spec.shape, (Shape{4, 1}));
  EXPECT_EQ(edges.answers({4, 8})[0].shape, (Shape{4, 8}));
  EXPECT_TRUE(edges.answers({4, 0}).empty());
  EXPECT_EQ(whole[0].spec.shape, (Shape{4, 16}));  // still valid
  EXPECT_EQ(edges.largest(), (UnitShape{4, 0}));
  EXPECT_EQ(edges.sizes().size(), 4U);
  expect_error(ErrorCode::kInternal, {"a micro-batch of 2 samples of 8 positions"}, [&] {
    (void)edges.inputs({2, 8}, 0);
  });
}

RankDevice gpu(int index) {
  return {{DeviceKind::kCuda, index}, "host", "0000:0" + std::to_string(index) + ":00.0", 0, ""};
}
RankDevice cpu() { return {{}, "host", "", 0, ""}; }

std::vector<EdgeRoute> choose_routes(const Placement& placement, const RouteQuestion& question) {
  return RouteChoice(question).edges(placement);
}

std::vector<RouteKind> kinds(const std::vector<EdgeRoute>& routes) {
  std::vector<RouteKind> result;
  for (const EdgeRoute& route : routes) result.push_back(route.kind);
  return result;
}

RouteQuestion question(TransportChoice wanted, std::vector<RankDevice> devices) {
  return {.wanted = wanted,
          .no_device_messages = "",
          .nccl_refusal = "",
          .devices = std::move(devices)};
}

TEST(EdgeRouteTest, GpusOfTheirOwnAreJoinedByNccl) {
  const auto routes = choose_routes(Placement::linear(3),
                                    question(TransportChoice::kAuto, {gpu(0), gpu(1), cpu()}));
  EXPECT_EQ(kinds(routes), (std::vector{RouteKind::kLocal, RouteKind::kNccl, RouteKind::kStaged}));
  const auto none =
      choose_routes(Placement::linear(2), question(TransportChoice::kAuto, {cpu(), cpu()}));
  EXPECT_EQ(none[1].kind, RouteKind::kHost);
}

// Containers of one machine have a name each; machines may have GPUs at the same address.
TEST(EdgeRouteTest, AGpuIsSharedByContainersOfOneMachineAlone) {
  RankDevice one = gpu(0), other = gpu(0);
  one.nccl_machine = other.nccl_machine = "m";
  other.host = "another container";
  EXPECT_THAT(why_no_nccl({one, other}), HasSubstr(SLUICE_WITH_NCCL == 1 ? "share" : "NCCL"));
  other.nccl_machine = "n";
  other.host = one.host;
  EXPECT_EQ(why_no_nccl({one, other}).empty(), SLUICE_WITH_NCCL == 1);
}

TEST(EdgeRouteTest, EqualHostIdsOfTwoMachinesAreNamed) {
  RankDevice one = gpu(0), other = gpu(0);
  one.nccl_machine = other.nccl_machine = "set by hand";
  one.machine = "m";
  other.machine = "n";
  EXPECT_THAT(why_no_nccl({one, other}),
              HasSubstr(SLUICE_WITH_NCCL == 1 ? "NCCL_HOSTID is equal" : "NCCL"));
}

TEST(EdgeRouteTest, RanksThatAreNoNeighboursAreJoinedByTheSameRule) {
  RouteQuestion asked = question(TransportChoice::kAuto, {gpu(0), cpu(), gpu(1), gpu(2)});
  EXPECT_EQ(RouteChoice(asked).between(0, 0).kind, RouteKind::kLocal);
  EXPECT_EQ(RouteChoice(asked).between(0, 3).kind, RouteKind::kNccl);
  EXPECT_EQ(RouteChoice(asked).between(3, 1).kind, RouteKind::kStaged);
  asked.wanted = TransportChoice::kMpi;
  const EdgeRoute staged = RouteChoice(asked).between(0, 3);
  EXPECT_EQ(describe_route(staged),
            "through page-locked host memory (asked for by --transport mpi)");
}

TEST(EdgeRouteTest, MpiTakesAGpusMemoryOnlyWhereItCanAndNoEdgeIsNccls) {
  RouteQuestion asked = question(TransportChoice::kMpi, {gpu(0), gpu(1), cpu()});
  const auto direct = choose_routes(Placement::linear(3), asked);
  EXPECT_EQ(kinds(direct),
            (std::vector{RouteKind::kLocal, RouteKind::kDirect, RouteKind::kStaged}));
  EXPECT_EQ(direct[1].reason, "asked for by --transport mpi; MPI takes a GPU's memory");

  asked.no_device_messages = "rank 1: MPI is not CUDA-aware";
  const auto staged = choose_routes(Placement::linear(3), asked);
  EXPECT_EQ(kinds(staged),
            (std::vector{RouteKind::kLocal, RouteKind::kStaged, RouteKind::kStaged}));
  EXPECT_EQ(staged[1].reason, "asked for by --transport mpi; rank 1: MPI is not CUDA-aware");
  EXPECT_THAT(describe_routes(staged),
              HasSubstr("stages 0-1: through page-locked host memory (asked for by --transport "
                        "mpi; rank 1: MPI is not CUDA-aware)"));
}

TEST(EdgeRouteTest, MpiIsAskedForDeviceMemoryOnlyWhereAMessageMayNeedIt) {
  constexpr const char* kAsked = "loopback moves host memory";
  constexpr const char* kNotAsked = kDeviceMessagesNotTried;
  run_loopback(2, [&](Communicator& comm) {
    Collectives world(comm, 0, nullptr);
    const auto answer = [&](const std::vector<RankDevice>& job, TransportChoice wanted, int depth) {
      return why_no_device_messages(world, job, wanted, why_no_nccl(job), depth);
    };
    const std::vector<RankDevice> shared = {gpu(0), gpu(0)}, own = {gpu(0), gpu(1)};
    EXPECT_EQ(answer(shared, TransportChoice::kAuto, 2), kAsked);
    EXPECT_EQ(answer(own, TransportChoice::kMpi, 2), kAsked);
    EXPECT_EQ(answer(own, TransportChoice::kAuto, 2), SLUICE_WITH_NCCL == 1 ? kNotAsked : kAsked);
    EXPECT_EQ(answer(own, TransportChoice::kNccl, 2), kNotAsked);
    EXPECT_EQ(answer(shared, TransportChoice::kMpi, 1), kNotAsked);
    EXPECT_EQ(answer({gpu(0), cpu()}, TransportChoice::kMpi, 2), kNotAsked);
    EXPECT_EQ(answer({cpu(), cpu()}, TransportChoice::kMpi, 2), kNotAsked);
  });
}

TEST(EdgeRouteTest, GpusThatNcclRefusesAreJoinedByMpi) {
  RouteQuestion asked = question(TransportChoice::kAuto, {gpu(0), gpu(0)});
  asked.nccl_refusal = why_no_nccl(asked.devices);
  ASSERT_FALSE(asked.nccl_refusal.empty());
  EXPECT_EQ(choose_routes(Placement::linear(2), asked)[1].kind, RouteKind::kDirect);
  asked.wanted = TransportChoice::kNccl;
  expect_error(ErrorCode::kUsage, {"transport nccl cannot join pipeline ranks 0 (cuda:0) and 1"},
               [&] { (void)choose_routes(Placement::linear(2), asked); });
}

// More streams than a GPU has hardware queues could wait for one another.
TEST(EdgeRouteTest, NcclJoinsARankWithFourOthersAtMost) {
  RouteQuestion asked =
      question(TransportChoice::kAuto, {gpu(0), gpu(1), gpu(2), gpu(3), gpu(4), gpu(5)});
  RouteChoice choice(asked);
  const auto edges = choice.edges(Placement::linear(6));
  for (std::size_t s = 1; s < edges.size(); ++s) EXPECT_EQ(edges[s].kind, RouteKind::kNccl);
  for (const int other : {2, 3, 4, 1}) {
    EXPECT_EQ(choice.between(0, other).kind, RouteKind::kNccl) << other;
  }
  const EdgeRoute fifth = choice.between(5, 0);
  EXPECT_EQ(fifth.kind, RouteKind::kStaged);
  EXPECT_THAT(fifth.reason, HasSubstr("rank 0 of the pipeline exchanges with 4 others over NCCL"));
  EXPECT_EQ(choice.between(5, 3).kind, RouteKind::kNccl);
  asked.wanted = TransportChoice::kNccl;
  expect_error(ErrorCode::kUsage,
               {"cannot join pipeline ranks 5 (cuda:5) and 0", "hardware queues", "legal: auto"},
               [&] { (void)choice.between(5, 0); });
}

TEST(EdgeRouteTest, SumsOverReplicasSayWhatCarriesThemAndWhy) {
  RouteQuestion asked = question(TransportChoice::kAuto, {gpu(0), gpu(1), cpu()});
  const auto sums = [&](int replicas) {
    std::vector<EdgeRoute> all;
    for (int rank = 0; rank < 3; ++rank) all.push_back(choose_sum_route(rank, replicas, asked));
    return all;
  };
  EXPECT_EQ(describe_sums(sums(1), false), "");
  EXPECT_EQ(
      describe_sums(sums(2), false),
      "  sums over replicas of pipeline ranks 2: by a tree over the replicas, messages of host "
      "memory (computed on the CPU)\n"
      "  sums over replicas of pipeline ranks 0, 1: by a tree over the replicas, NCCL (a GPU of "
      "its own for every replica)\n");
  EXPECT_THAT(describe_sums(sums(2), true),
              HasSubstr("0, 1: NCCL's all-reduce: not depth-invariant (a GPU of its own"));
  asked.devices.pop_back();
  asked.devices.push_back(gpu(2));
  asked.nccl_refusal = "ranks 0 and 3 share cuda:0";
  EXPECT_EQ(describe_sums(sums(2), true),
            "  sums over replicas: by a tree over the replicas, through page-locked host memory "
            "(ranks 0 and 3 share cuda:0)\n");
  asked.wanted = TransportChoice::kMpi;
  EXPECT_EQ(sums(2)[0].reason, "asked for by --transport mpi");
}

TEST(EdgeRouteTest, TensorRanksAreJoinedLikeReplicasAndTakeTheQueuesOfAPartner) {
  RouteQuestion asked = question(TransportChoice::kAuto, {gpu(0), cpu()});
  EXPECT_EQ(choose_tensor_route(0, asked).kind, RouteKind::kLocal);
  EXPECT_EQ(describe_tensor({choose_tensor_route(0, asked)}), "");
  asked.tensor_ranks = 2;
  EXPECT_EQ(describe_tensor({choose_tensor_route(0, asked), choose_tensor_route(1, asked)}),
            "  collectives of tensor ranks of pipeline ranks 1: by a tree over these ranks, "
            "messages of host memory (computed on the CPU)\n"
            "  collectives of tensor ranks of pipeline ranks 0: by a tree over these ranks, NCCL "
            "(a GPU of its own for every tensor rank)\n");
  asked.nccl_refusal = "ranks 0 and 1 share cuda:0";
  EXPECT_EQ(describe_tensor({choose_tensor_route(0, asked)}),
            "  collectives of tensor ranks: by a tree over these ranks, through page-locked host "
            "memory (ranks 0 and 1 share cuda:0)\n");
  asked.wanted = TransportChoice::kNccl;
  expect_error(ErrorCode::kUsage,
               {"transport nccl cannot join the 2 tensor ranks of pipeline rank 0 (cuda:0): ranks "
                "0 and 1 share cuda:0; legal: auto, mpi"},
               [&] { (void)choose_tensor_route(0, asked); });
  RouteQuestion many = question(TransportChoice::kAuto, {gpu(0), gpu(1), gpu(2), gpu(3), gpu(4)});
  many.tensor_ranks = 2;
  RouteChoice choice(many);
  for (const int other : {1, 2, 3}) EXPECT_EQ(choice.between(0, other).kind, RouteKind::kNccl);
  EXPECT_THAT(choice.between(0, 4).reason, HasSubstr("exchanges with 3 others over NCCL already"));
}

TEST(EdgeRouteTest, SumsThatNcclCannotCarryAreRefusedWhereItIsWanted) {
  RouteQuestion asked = question(TransportChoice::kNccl, {gpu(0), cpu()});
  EXPECT_EQ(choose_sum_route(0, 2, asked).kind, RouteKind::kNccl);
  EXPECT_EQ(choose_sum_route(1, 1, asked).kind, RouteKind::kLocal);
  expect_error(ErrorCode::kUsage,
               {"transport nccl cannot sum over the 2 replicas of pipeline rank 1 (cpu): it needs "
                "GPUs; legal: auto, mpi"},
               [&] { (void)choose_sum_route(1, 2, asked); });
  asked.nccl_refusal = "ranks 0 and 1 share cuda:0";
  expect_error(ErrorCode::kUsage,
               {"the 3 replicas of pipeline rank 0 (cuda:0): ranks 0 and 1 share cuda:0; legal"},
               [&] { (void)choose_sum_route(0, 3, asked); });
}

}  // namespace
}  // namespace sluice
