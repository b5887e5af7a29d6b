// The kernel that sums shards by the tree over ranks, on one GPU, against a recursion on the host.
#include <gtest/gtest.h>

#include <bit>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "comm/nccl/ordered_sum.hpp"
#include "tests/comm/group/addends.hpp"
#include "tests/comm/nccl/nccl_ranks.hpp"
#include "tests/gpus/required_gpus.hpp"

namespace sluice {
namespace {

using testing::addends;
using testing::differing;
using testing::OnDevice;

constexpr Device kGpu = {DeviceKind::kCuda, 0};
constexpr float kPoison = std::numeric_limits<float>::quiet_NaN();

struct Case {
  std::size_t count = 0;
  std::size_t stride = 0;
  std::size_t offset = 0;  // of own and others, in floats from aligned memory
};

// Of element i: split at the largest power of two below the number of shards.
float tree_sum(std::span<const std::vector<float>> shards, std::size_t i) {
  if (shards.size() == 1) return shards[0][i];
  const std::size_t half = std::bit_floor(shards.size() - 1);
  return tree_sum(shards.first(half), i) + tree_sum(shards.subspan(half), i);
}

class CudaSumTest : public ::testing::Test {
 protected:
  void SetUp() override {
    SLUICE_NEED_A_GPU();
    use_device(kGpu);
  }

  // Compares for one own rank, with everything around the shards: none of it may change.
  static void check(const Case& what, int ranks, int rank) {
    std::vector<std::vector<float>> shards(static_cast<std::size_t>(ranks));
    std::vector<float> own(what.offset, kPoison), others(what.offset, kPoison), expected = own;
    for (int other = 0; other < ranks; ++other) {
      std::vector<float>& shard = shards[static_cast<std::size_t>(other)];
      shard = addends(other, what.count);
      std::vector<float>& place = other == rank ? own : others;
      place.insert(place.end(), shard.begin(), shard.end());
      if (other != rank) others.resize(others.size() + what.stride - what.count, kPoison);
    }
    for (std::size_t i = 0; i < what.count; ++i) {
      expected.push_back(tree_sum(shards, i));
    }
    own.resize(own.size() + 5, kPoison);
    expected.resize(own.size(), kPoison);

    const OnDevice<float> own_there(kGpu, own), others_there(kGpu, others);
    const Stream stream(kGpu);
    launch_shard_sum({.own = own_there.values().data() + what.offset,
                      .others = others_there.values().data() + what.offset,
                      .stride = what.stride,
                      .count = what.count,
                      .ranks = ranks,
                      .rank = rank},
                     stream.view());
    stream.view().synchronize();
    EXPECT_EQ(differing(own_there.read(), expected), 0U);
    EXPECT_EQ(differing(others_there.read(), others), 0U) << "what others sent was changed";
  }

  static void check_every_rank(const Case& what) {
    for (const int ranks : {2, 3, 5, 8}) {
      for (int rank = 0; rank < ranks; ++rank) {
        SCOPED_TRACE(std::to_string(what.count) + " floats, stride " + std::to_string(what.stride) +
                     ", offset " + std::to_string(what.offset) + ", rank " + std::to_string(rank) +
                     " of " + std::to_string(ranks));
        check(what, ranks, rank);
      }
    }
  }
};

TEST_F(CudaSumTest, HasTheBitsOfTheTreeOnTheHost) {
  for (const std::size_t count : {1UL, 3UL, 5UL, 257UL, 1001UL}) {
    check_every_rank({.count = count, .stride = count});
  }
}

// Four floats at a time, where addresses, stride and count allow it; one of them does not.
TEST_F(CudaSumTest, HasThemForAlignedShardsAndForThoseThatAreNot) {
  check_every_rank({.count = 4, .stride = 4});
  check_every_rank({.count = 1028, .stride = 1040});
  check_every_rank({.count = 1028, .stride = 1029});
  check_every_rank({.count = 1027, .stride = 1028});
  check_every_rank({.count = 1028, .stride = 1028, .offset = 1});
}

TEST_F(CudaSumTest, TakesMoreValuesThanThreads) {
  check({.count = 700001, .stride = 700001}, 3, 1);
  check({.count = 2200000, .stride = 2200000}, 2, 0);
}

TEST_F(CudaSumTest, TakesAnyNumberOfRanks) {
  for (const int ranks : {1, 7, 15, 16, 23, 64})
    check({.count = 33, .stride = 33}, ranks, ranks / 2);
}

TEST_F(CudaSumTest, OfNothingIsNothing) { check({.count = 0, .stride = 4}, 3, 2); }

}  // namespace
}  // namespace sluice
