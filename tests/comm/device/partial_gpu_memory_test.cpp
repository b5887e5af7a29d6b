#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include <sluice/device.hpp>
#include <sluice/error.hpp>

#include "comm/device/partial_memory.hpp"
#include "tests/gpus/required_gpus.hpp"
#ifdef SLUICE_EMULATED
#include "tests/emulated_cuda/control.hpp"
#endif

namespace sluice {
namespace {

class PartialGpuMemoryTest : public ::testing::Test {
 protected:
  static constexpr Device kGpu{DeviceKind::kCuda, 0};
  static constexpr std::size_t kUnit = std::size_t{2} << 20;

  void SetUp() override { SLUICE_NEED_A_GPU(); }
  // Nothing stays behind, whatever a case does.
  void TearDown() override {
#ifdef SLUICE_EMULATED
    EXPECT_EQ(emulated::virtual_memory(), emulated::VirtualMemory());
#endif
  }
  static void write(const PartialMemory& memory, std::size_t begin, std::size_t bytes, int value) {
    const std::vector<std::byte> from(bytes, std::byte(value));
    copy_now(kGpu, memory.data() + begin, from.data(), bytes);
  }
  // The one value that these bytes have, or -1.
  [[nodiscard]] static int value(const PartialMemory& memory, std::size_t begin,
                                 std::size_t bytes) {
    std::vector<std::byte> found(bytes);
    copy_now(kGpu, found.data(), memory.data() + begin, bytes);
    return found == std::vector<std::byte>(bytes, found[0]) ? std::to_integer<int>(found[0]) : -1;
  }
};

TEST_F(PartialGpuMemoryTest, RangesOfASlotShareMemoryAndTheRestPersists) {
  // Half a unit, three ranges of which the first two share a slot, half a unit.
  const std::vector<PartialMemory::Range> ranges = {
      {kUnit / 2, 2 * kUnit + kUnit / 2, 0}, {3 * kUnit, 3 * kUnit, 0}, {6 * kUnit, kUnit, 1}};
  PartialMemory memory(kGpu, 7 * kUnit + kUnit / 2, ranges);
  const std::byte* const data = memory.data();
  write(memory, 0, memory.size(), 9);
  write(memory, ranges[0].begin, ranges[0].bytes, 1);
  EXPECT_EQ(value(memory, ranges[0].begin, ranges[0].bytes), 1) << "a range holds what is written";
  EXPECT_EQ(value(memory, 3 * kUnit, 2 * kUnit), 1) << "where the slot is shared";
  EXPECT_EQ(value(memory, 5 * kUnit, kUnit), 9) << "the slot's third unit";
  write(memory, ranges[1].begin, ranges[1].bytes, 2);
  EXPECT_EQ(value(memory, ranges[1].begin, ranges[1].bytes), 2);
  EXPECT_EQ(value(memory, kUnit, 2 * kUnit), 2);
  EXPECT_EQ(value(memory, ranges[2].begin, ranges[2].bytes), 9) << "another slot";
  EXPECT_EQ(value(memory, 0, kUnit / 2), 9) << "outside";
  EXPECT_EQ(value(memory, 7 * kUnit, kUnit / 2), 9) << "outside";
  memory.drop(1);
  EXPECT_EQ(value(memory, ranges[1].begin, ranges[1].bytes), 2) << "dropping does nothing";
  EXPECT_EQ(memory.data(), data);
}

#ifdef SLUICE_EMULATED
TEST_F(PartialGpuMemoryTest, TakesWhatIsPlanned) {
  const std::vector<PartialMemory::Range> ranges = {
      {0, kUnit, 0}, {kUnit, 3 * kUnit, 1}, {4 * kUnit + 5, 3 * kUnit, 0}, {8 * kUnit, kUnit, 1}};
  const std::size_t before = properties_of(kGpu).free_memory;
  const PartialMemory memory(kGpu, 10 * kUnit, ranges);
  EXPECT_EQ(before - properties_of(kGpu).free_memory,
            PartialMemory::bytes_for(DeviceKind::kCuda, 10 * kUnit, ranges));
  // Three mappings of memory of their own; seven of slots, which have two and three units.
  EXPECT_EQ(emulated::virtual_memory(), (emulated::VirtualMemory{3 + 5, 1, 3 + 7}));
}
#endif

TEST_F(PartialGpuMemoryTest, IsMovedWithItsAddressesAndLeavesNothing) {
  PartialMemory from(kGpu, 3 * kUnit, {{kUnit, kUnit, 0}});
  const std::byte* const data = from.data();
  PartialMemory to = std::move(from);
  EXPECT_EQ(to.data(), data);
  EXPECT_EQ(from.data(), nullptr);  // NOLINT(bugprone-use-after-move): what is tested
  EXPECT_EQ(from.size(), 0U);
  write(to, 0, to.size(), 3);
  EXPECT_EQ(value(to, 0, to.size()), 3);
  to = PartialMemory(kGpu, 1, {});
  write(to, 0, 1, 4);
  EXPECT_EQ(value(to, 0, 1), 4);
}

TEST_F(PartialGpuMemoryTest, MayHaveNoBytes) {
  const PartialMemory memory(kGpu, 0, {});
  EXPECT_EQ(memory.data(), nullptr);
  EXPECT_EQ(memory.size(), 0U);
}

// Its addresses can be had, and two units of memory, but not the rest.
TEST_F(PartialGpuMemoryTest, SaysWhatCannotBeHadAndGivesBackThePart) {
  const std::size_t total = round_up(properties_of(kGpu).memory, kUnit);
  const std::size_t planned = total + 2 * kUnit;
  try {
    const PartialMemory memory(kGpu, planned, {{kUnit, kUnit, 0}});
    FAIL();
  } catch (const OutOfMemory& error) {
    EXPECT_NE(std::string(error.what())
                  .find("cannot allocate " + std::to_string(planned) +
                        " bytes on cuda:0: out of memory ("),
              std::string::npos)
        << error.what();
  }
}

// As cudaFree does: work that uses the memory ends before the memory does. Work that writes memory
// that is gone ends the process.
TEST_F(PartialGpuMemoryTest, WaitsForTheDeviceBeforeItGoes) {
  const Stream stream(kGpu);
  for (int i = 0; i < 10; ++i) {
    const PartialMemory memory(kGpu, 4 * kUnit, {});
    for (int j = 0; j < 10; ++j) fill_zero_async(memory.data(), memory.size(), stream.view());
  }
  stream.view().synchronize();
}

}  // namespace
}  // namespace sluice
