#include <gtest/gtest.h>

#include <optional>
#include <utility>
#include <vector>

#include <sluice/device.hpp>
#include <sluice/error.hpp>

#include "tests/gpus/required_gpus.hpp"

namespace sluice {
namespace {

constexpr Device kGpu{DeviceKind::kCuda, 0};
constexpr auto kTemporary = DeviceMemory::Use::kTemporary;

TEST(DeviceMemoryTest, OnACpuEveryBufferIsItsOwn) {
  const DeviceMemory memory;
  memory.reserve(1 << 20);
  const Buffer buffer = memory.allocate(1000);
  EXPECT_EQ(buffer.size(), 1000U);
  EXPECT_NE(buffer.data(), nullptr);
  EXPECT_EQ(memory.figures().arena, 0U);
  EXPECT_EQ(memory.figures().outside_arena, 0U);
  EXPECT_EQ(memory.allocate(0).data(), nullptr);
}

// A block of 16 pieces of the alignment.
class BlockTest : public ::testing::Test {
 protected:
  void SetUp() override {
    SLUICE_NEED_A_GPU();
    memory_.emplace(kGpu);
    memory_->reserve(16 * kBufferAlignment);
    begin_ = memory_->allocate(1).data();
  }
  [[nodiscard]] Buffer take(std::size_t pieces,
                            DeviceMemory::Use use = DeviceMemory::Use::kPersistent) {
    return memory_->allocate(pieces * kBufferAlignment - 1, use);
  }
  // Where it starts, in pieces.
  [[nodiscard]] std::ptrdiff_t place(const Buffer& buffer) const {
    return (buffer.data() - begin_) / static_cast<std::ptrdiff_t>(kBufferAlignment);
  }

  std::optional<DeviceMemory> memory_;
  std::byte* begin_ = nullptr;
};

TEST_F(BlockTest, WhatStaysLiesLowAndWhatPassesHigh) {
  const Buffer first = take(2), passing = take(3, kTemporary), second = take(4);
  const Buffer other = take(1, kTemporary);
  EXPECT_EQ(place(first), 0);
  EXPECT_EQ(place(second), 2);
  EXPECT_EQ(place(passing), 13);
  EXPECT_EQ(place(other), 12);
  EXPECT_EQ(memory_->figures().used, 10 * kBufferAlignment);
}

TEST_F(BlockTest, TakesTheFirstGapThatIsLargeEnough) {
  Buffer first = take(2);
  const Buffer second = take(1);
  Buffer third = take(3);
  const Buffer fourth = take(1);
  first = Buffer();
  third = Buffer();
  EXPECT_EQ(place(take(3)), 3);
  EXPECT_EQ(place(take(2)), 0);
  EXPECT_EQ(place(take(4)), 7);
}

TEST_F(BlockTest, NeighboursGivenBackInAnyOrderAreOneGap) {
  for (const auto& order : {std::pair(0, 2), std::pair(2, 0), std::pair(1, 0), std::pair(1, 2)}) {
    std::vector<Buffer> buffers;
    for (int i = 0; i < 3; ++i) buffers.push_back(take(2));
    const Buffer last = take(1);
    buffers[static_cast<std::size_t>(order.first)] = Buffer();
    buffers[static_cast<std::size_t>(order.second)] = Buffer();
    buffers.clear();
    EXPECT_EQ(place(take(6)), 0);
  }
  EXPECT_EQ(place(take(16)), 0);
  EXPECT_EQ(memory_->figures().used, 0U);
  EXPECT_EQ(memory_->figures().peak, 16 * kBufferAlignment);
}

TEST_F(BlockTest, WhatDoesNotFitIsTakenApartAndCounted) {
  const Buffer most = take(15), outside = take(2), fits = take(1);
  EXPECT_EQ(place(fits), 15);
  EXPECT_TRUE(place(outside) < 0 || place(outside) >= 16);
  EXPECT_EQ(memory_->figures().outside_arena, 1U);
  EXPECT_EQ(memory_->figures().outside_arena_bytes, outside.size());
  EXPECT_EQ(memory_->figures().used, 16 * kBufferAlignment);
}

TEST_F(BlockTest, LivesAsLongAsAnyBufferOfIt) {
  Buffer kept = take(1), moved = std::move(kept);
  memory_.reset();
  const int number = 4711;
  copy_now(kGpu, moved.data(), &number, sizeof number);
  int back = 0;
  copy_now(kGpu, &back, moved.data(), sizeof back);
  EXPECT_EQ(back, number);
}

TEST_F(BlockTest, IsTakenOnceAndSaysWhatCannotBeHad) {
  EXPECT_THROW(memory_->reserve(1), Error);
  const DeviceMemory other(kGpu);
  EXPECT_THROW(other.reserve(std::size_t{1} << 50), OutOfMemory);
  EXPECT_EQ(other.figures().arena, 0U);
}

}  // namespace
}  // namespace sluice
