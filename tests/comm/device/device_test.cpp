#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <utility>

#include <sluice/device.hpp>
#include <sluice/error.hpp>

#include "tests/runtime/gradients/resident_bytes.hpp"

// The address sanitizer ends a program that asks for too much, unless set to answer as malloc
// does.
extern "C" const char* __asan_default_options() { return "allocator_may_return_null=1"; }

namespace sluice {
namespace {

TEST(BufferTest, StartsAtAMultipleOfTheAlignment) {
  for (const std::size_t bytes : {1UL, 255UL, 256UL, 257UL, 100'000UL}) {
    const Buffer buffer(Device{}, bytes);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(buffer.data()) % kBufferAlignment, 0U);
    EXPECT_EQ(buffer.size(), bytes);
  }
}

TEST(BufferTest, OwnsNothingWhenEmpty) {
  EXPECT_EQ(Buffer(Device{}, 0).data(), nullptr);
  EXPECT_EQ(Buffer().data(), nullptr);
}

TEST(BufferTest, LeavesItsSourceEmptyWhenMoved) {
  Buffer first(Device{}, 100);
  std::byte* memory = first.data();
  Buffer second(std::move(first));
  EXPECT_EQ(second.data(), memory);
  EXPECT_EQ(first.data(), nullptr);
  EXPECT_EQ(first.size(), 0U);
  Buffer third(Device{}, 50);
  third = std::move(second);
  EXPECT_EQ(third.data(), memory);
  EXPECT_EQ(third.size(), 100U);
  EXPECT_EQ(second.data(), nullptr);
}

TEST(BufferTest, NamesTheSizeThatCannotBeHad) {
  // One that no machine has, and one whose rounding up would wrap around.
  for (const std::size_t bytes : {std::size_t{1} << 60, SIZE_MAX - 10}) {
    try {
      const Buffer buffer(Device{}, bytes);
      ADD_FAILURE() << "got " << buffer.size() << " bytes";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kDevice);
      EXPECT_NE(std::string(error.what()).find(std::to_string(bytes)), std::string::npos);
    }
  }
}

TEST(BufferTest, TakesNoPagesBeyondItsSize) {
  constexpr std::size_t kHugePage = std::size_t{2} << 20, kRest = 4096;
  const Buffer buffer(Device{}, 2 * kHugePage + kRest);
  std::memset(buffer.data(), 1, buffer.size());
  auto* const end = reinterpret_cast<float*>(buffer.data() + buffer.size());
  EXPECT_EQ(testing::resident_bytes(std::span(end, (kHugePage - kRest) / sizeof(float))), 0U);
}

TEST(DeviceTest, RefusesADeviceThatTheBuildLacks) {
  const Device cuda{DeviceKind::kCuda, 4000};  // nor has any machine that many
  EXPECT_EQ(to_string(cuda), "cuda:4000");
  EXPECT_EQ(to_string(Device{}), "cpu");
  EXPECT_THROW(Buffer(cuda, 8), Error);
  EXPECT_THROW(Stream{cuda}, Error);
  EXPECT_THROW(Event{cuda}, Error);
}

TEST(EventTest, IsDoneWhenMade) {
  const Stream stream{Device{}};
  Event event{Device{}};
  event.record(stream.view());
  EXPECT_TRUE(event.done());
  EXPECT_TRUE(Event().done());
}

TEST(ErrorTest, HasTheDocumentedExitCodes) {
  EXPECT_EQ(exit_code(ErrorCode::kUsage), 2);
  EXPECT_EQ(exit_code(ErrorCode::kData), 3);
  EXPECT_EQ(exit_code(ErrorCode::kIo), 4);
  EXPECT_EQ(exit_code(ErrorCode::kWeights), 5);
  EXPECT_EQ(exit_code(ErrorCode::kMismatch), 6);
  EXPECT_EQ(exit_code(ErrorCode::kNumeric), 7);
  EXPECT_EQ(exit_code(ErrorCode::kPlan), 8);
  EXPECT_EQ(exit_code(ErrorCode::kMpi), 9);
  EXPECT_EQ(exit_code(ErrorCode::kDevice), 10);
  EXPECT_EQ(exit_code(ErrorCode::kPeer), 11);
  EXPECT_EQ(exit_code(ErrorCode::kInternal), 70);
}

TEST(ErrorTest, CarriesCodeRankAndPlace) {
  const Error error(ErrorCode::kPlan, "text", 3);
  EXPECT_STREQ(name_of(error.code()), "plan");
  EXPECT_EQ(error.rank(), 3);
  EXPECT_NE(std::string(error.location().file_name()).find("device_test.cpp"), std::string::npos);
}

}  // namespace
}  // namespace sluice
