#include "runtime/planning/memory_plan.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include <sluice/device.hpp>
#include <sluice/error.hpp>

#include "comm/base/byte_sums.hpp"
#include "tests/runtime/expect_error.hpp"

namespace sluice {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr std::size_t kMebi = std::size_t{1} << 20;
constexpr RankMemory kNeeded = {.parameters = 60 * kMebi};

void require_shared(const std::vector<RankDevice>& devices, const Topology& topology,
                    MemoryTable memory) {
  memory.shared = shared_memory(devices, topology, memory);
  require_memory(devices, topology, memory);
}

// What the refusal says where so many replicas of a pipeline of two ranks, each of which takes 60
// MiB, run on CPUs of hosts that have 100 MiB; empty where nothing is refused. [rank of the job]
std::string refusal(const std::vector<std::string>& hosts, int replicas) {
  const Topology topology =
      make_topology(static_cast<int>(hosts.size()), {2, replicas, 1}, RankOrder::kPipelineFirst);
  std::vector<RankDevice> devices;
  for (const std::string& host : hosts) {
    RankDevice& device = devices.emplace_back();
    device.host = device.machine = host;
    device.host_memory = 100 * kMebi;
  }
  try {
    require_shared(devices, topology, {.ranks = {kNeeded, kNeeded}});
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kDevice);
    return error.what();
  }
  return "";
}

TEST(MemoryPlanTest, AddsUpTheRanksOfAHost) {
  EXPECT_EQ(refusal({"a", "b"}, 1), "");
  EXPECT_THAT(refusal({"a", "a"}, 1),
              AllOf(HasSubstr("rank 0 on a: the host has 100.0 MiB, but the plan needs 120.0 MiB"),
                    HasSubstr("(each of ranks 0, 1: parameters 60.0, "), Not(HasSubstr("; rank"))));
}

TEST(MemoryPlanTest, AddsUpReplicas) {
  EXPECT_EQ(refusal({"a", "b", "c", "d"}, 2), "");
  EXPECT_THAT(refusal({"a", "b", "c", "b"}, 2),
              HasSubstr("rank 1 on b: the host has 100.0 MiB, but the plan needs 120.0 MiB"));
}

// Of the ranks that share a stage, each has its own.
TEST(MemoryPlanTest, AsksForWhatEachTensorRankNeeds) {
  const Topology topology = make_topology(4, {2, 1, 2}, RankOrder::kPipelineFirst);
  MemoryTable memory = {.ranks = {{}, {}, kNeeded, {.parameters = 10 * kMebi}}, .tensors = 2};
  std::vector<RankDevice> devices(4);
  for (RankDevice& device : devices) device.host = device.machine = "a";
  devices[0].host_memory = 70 * kMebi;
  EXPECT_NO_THROW(require_shared(devices, topology, memory));
  memory.ranks[1].save_copy = kMebi;
  expect_error(ErrorCode::kDevice,
               {"rank 0 on a: the host has 70.0 MiB, but the plan needs 71.0 MiB",
                "; rank 2: parameters 60.0, ", "; rank 3: parameters 10.0, "},
               [&] { require_shared(devices, topology, memory); });
}

TEST(MemoryPlanTest, AsksNothingOfAHostWhoseMemoryIsNotKnown) {
  const Topology topology;
  EXPECT_NO_THROW(require_shared({RankDevice{}}, topology, {.ranks = {kNeeded}}));
}

// Two halves of what a std::size_t holds are more than any memory, known or not.
TEST(MemoryPlanTest, RefusesASumThatCannotBeCounted) {
  const Topology topology = make_topology(2, {2, 1, 1}, RankOrder::kPipelineFirst);
  const RankMemory half = {.parameters = std::size_t{1} << 63};
  EXPECT_EQ((RankMemory{.parameters = half.parameters, .gradients = half.parameters}.total()),
            kTooManyBytes);
  EXPECT_THROW(require_shared({RankDevice{}, RankDevice{}}, topology, {.ranks = {half, half}}),
               Error);
}

TEST(MemoryPlanTest, AskedToFitNamesTheRankAndTheLargestPart) {
  MemoryTable memory = {.ranks = {{}, kNeeded, {.activations = 70 * kMebi}, {}}, .tensors = 2};
  memory.ranks[2].gradients = 20 * kMebi;
  EXPECT_NO_THROW(require_within(0, memory, ""));
  EXPECT_NO_THROW(require_within(90 * kMebi, memory, ""));
  expect_error(
      ErrorCode::kUsage,
      {"--memory: 80.0 MiB a rank, but 90.0 MiB are needed on pipeline rank 1, tensor rank "
       "0, most of it for activations with 70.0 MiB; do this"},
      [&] { require_within(80 * kMebi, memory, "do this"); });
}

TEST(ByteSumsTest, StayAtTheLargestNumber) {
  constexpr std::size_t kHalf = std::size_t{1} << 63;
  EXPECT_EQ(sum_of_bytes({kHalf, kHalf - 1}), kTooManyBytes);
  EXPECT_EQ(sum_of_bytes({kHalf, kHalf, 5}), kTooManyBytes);
  EXPECT_EQ(sum_of_bytes({3, 4, 5}), 12U);
  EXPECT_EQ(multiply_bytes(kHalf, 2), kTooManyBytes);
  EXPECT_EQ(multiply_bytes(kHalf, 1), kHalf);
  EXPECT_EQ(multiply_bytes(kTooManyBytes, 0), 0U);
  EXPECT_EQ(round_up(kTooManyBytes - 10, 256), kTooManyBytes);
  EXPECT_EQ(round_up(kTooManyBytes - 255, 256), kTooManyBytes - 255);
  EXPECT_EQ(round_up(257, 256), 512U);
  EXPECT_THROW((void)DeviceMemory{}.allocate(kTooManyBytes - 10), OutOfMemory);
}

}  // namespace
}  // namespace sluice
