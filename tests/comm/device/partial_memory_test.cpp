// On a CPU, and what is computed without a device. On a GPU: partial_gpu_memory_test.cpp.
#include "comm/device/partial_memory.hpp"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

#include <sluice/error.hpp>

namespace sluice {
namespace {

using Range = PartialMemory::Range;

const auto kPage = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
constexpr std::size_t kUnit = std::size_t{2} << 20;  // of a GPU's

bool all_are(const PartialMemory& memory, std::size_t begin, std::size_t bytes, int value) {
  const std::byte* const first = memory.data() + begin;
  return std::all_of(first, first + bytes,
                     [value](std::byte each) { return each == std::byte(value); });
}

// Pages of these bytes that take memory.
std::size_t present_pages(const PartialMemory& memory, std::size_t begin, std::size_t bytes) {
  std::vector<unsigned char> pages(bytes / kPage);
  EXPECT_EQ(mincore(memory.data() + begin, bytes, pages.data()), 0);
  return static_cast<std::size_t>(
      std::count_if(pages.begin(), pages.end(), [](unsigned char page) { return page & 1; }));
}

TEST(PartialMemoryTest, DropGivesTheWholePagesOfARangeBackAndKeepsTheRest) {
  // Pages 1 to 5 without the first and the last byte, and pages 8 and 9.
  PartialMemory memory({}, 10 * kPage, {{kPage + 1, 5 * kPage - 2, 0}, {8 * kPage, 2 * kPage, 0}});
  EXPECT_EQ(memory.size(), 10 * kPage);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory.data()) % kPage, 0U);
  std::byte* const data = memory.data();
  std::memset(data, 1, memory.size());
  EXPECT_EQ(present_pages(memory, 0, 10 * kPage), 10U);

  memory.drop(0);
  EXPECT_EQ(present_pages(memory, 2 * kPage, 3 * kPage), 0U);
  EXPECT_EQ(present_pages(memory, 0, 10 * kPage), 7U);
  EXPECT_TRUE(all_are(memory, 0, 2 * kPage, 1));
  EXPECT_TRUE(all_are(memory, 5 * kPage, 5 * kPage, 1));

  memory.drop(1);
  EXPECT_EQ(present_pages(memory, 8 * kPage, 2 * kPage), 0U);
  std::memset(data + kPage + 1, 2, 5 * kPage - 2);
  EXPECT_TRUE(all_are(memory, kPage + 1, 5 * kPage - 2, 2));
  EXPECT_EQ(present_pages(memory, 0, 10 * kPage), 8U);
  EXPECT_EQ(memory.data(), data);
}

TEST(PartialMemoryTest, GivesBackWhatLiesInHugePages) {
  constexpr std::size_t kBytes = std::size_t{8} << 20;
  PartialMemory memory({}, kBytes, {{kPage, kBytes - 2 * kPage, 0}});
  for (int i = 1; i < 3; ++i) {
    std::memset(memory.data(), i, kBytes);
    memory.drop(0);
    EXPECT_EQ(present_pages(memory, kPage, kBytes - 2 * kPage), 0U);
    EXPECT_TRUE(all_are(memory, 0, kPage, i));
    EXPECT_TRUE(all_are(memory, kBytes - kPage, kPage, i));
  }
}

TEST(PartialMemoryTest, TakesNoMemoryBeforeTheFirstWrite) {
  {
    const Buffer before({}, 16 * kPage);  // malloc hands it out again
    std::memset(before.data(), 1, before.size());
  }
  const PartialMemory memory({}, 8 * kPage, {{0, 8 * kPage, 0}});
  EXPECT_EQ(present_pages(memory, 0, 8 * kPage), 0U);
}

TEST(PartialMemoryTest, IsMovedWithItsAddressesAndLeavesNothing) {
  static_assert(!std::is_copy_constructible_v<PartialMemory>);
  PartialMemory from({}, 3 * kPage, {{kPage, kPage, 0}});
  std::byte* const data = from.data();
  std::memset(data, 1, 3 * kPage);
  PartialMemory to = std::move(from);
  EXPECT_EQ(to.data(), data);
  EXPECT_TRUE(all_are(to, 0, 3 * kPage, 1));
  to.drop(0);
  EXPECT_EQ(present_pages(to, 0, 3 * kPage), 2U);
  EXPECT_EQ(from.data(), nullptr);  // NOLINT(bugprone-use-after-move): what is tested
  EXPECT_EQ(from.size(), 0U);
  EXPECT_THROW(from.drop(0), Error);
  to = PartialMemory({}, 1, {});
  EXPECT_EQ(to.size(), 1U);
}

TEST(PartialMemoryTest, MayHaveNoBytesOrNoRanges) {
  PartialMemory empty({}, 0, {{0, 0, 0}});
  EXPECT_EQ(empty.data(), nullptr);
  EXPECT_EQ(empty.size(), 0U);
  empty.drop(0);
  const PartialMemory plain({}, 100, {});
  std::memset(plain.data(), 1, plain.size());
  EXPECT_TRUE(all_are(plain, 0, 100, 1));
  EXPECT_EQ(PartialMemory().data(), nullptr);
}

TEST(PartialMemoryTest, SaysWhatCannotBeHad) {
  try {
    const PartialMemory memory({}, std::size_t{1} << 60, {});
    FAIL();
  } catch (const OutOfMemory& error) {
    EXPECT_NE(std::string(error.what()).find("bytes on cpu"), std::string::npos) << error.what();
  }
  EXPECT_THROW(PartialMemory({}, SIZE_MAX, {}), OutOfMemory);
  const std::vector<std::vector<Range>> wrong = {{{0, 101, 0}},
                                                 {{101, 0, 0}},
                                                 {{0, 50, 0}, {49, 1, 0}},
                                                 {{50, 1, 0}, {0, 1, 0}},
                                                 {{0, 1, -1}}};
  for (const std::vector<Range>& ranges : wrong) {
    try {
      const PartialMemory memory({}, 100, ranges);
      ADD_FAILURE() << ranges[0].begin;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInternal);
    }
  }
}

TEST(PartialMemoryTest, OnACpuPlansWhatStays) {
  const auto bytes_for = [](std::size_t bytes, const std::vector<Range>& ranges) {
    return PartialMemory::bytes_for(DeviceKind::kCpu, bytes, ranges);
  };
  EXPECT_EQ(bytes_for(0, {}), 0U);
  EXPECT_EQ(bytes_for(1, {}), kPage);
  EXPECT_EQ(bytes_for(10 * kPage, {{kPage + 1, 5 * kPage - 2, 0}, {8 * kPage, 2 * kPage, 3}}),
            5 * kPage);
  EXPECT_EQ(bytes_for(10 * kPage, {{kPage + 1, kPage, 0}}), 10 * kPage);
}

TEST(PartialMemoryTest, OnAGpuPlansTheLongestRangeOfEachSlot) {
  const auto bytes_for = [](std::size_t bytes, const std::vector<Range>& ranges) {
    return PartialMemory::bytes_for(DeviceKind::kCuda, bytes, ranges);
  };
  EXPECT_EQ(bytes_for(0, {}), 0U);
  EXPECT_EQ(bytes_for(1, {}), kUnit);
  EXPECT_EQ(bytes_for(10 * kUnit, {{0, 3 * kUnit, 0}, {3 * kUnit, 4 * kUnit, 0}}), 7 * kUnit);
  EXPECT_EQ(bytes_for(10 * kUnit, {{0, 3 * kUnit, 0}, {3 * kUnit, 4 * kUnit, 1}}), 10 * kUnit);
  // Of the second range one unit is whole.
  EXPECT_EQ(bytes_for(6 * kUnit, {{0, 2 * kUnit, 0}, {2 * kUnit + 1, 3 * kUnit - 2, 0}}),
            5 * kUnit);
}

}  // namespace
}  // namespace sluice
