#include "comm/device/gpu_monitor.hpp"

#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <utility>

namespace sluice {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

// How often the fake library is initialised in this process.
int open_count() {
  void* const library = dlopen(SLUICE_FAKE_NVML, RTLD_NOW);
  if (library == nullptr) return -1;
  const int count = reinterpret_cast<int (*)()>(dlsym(library, "fake_opened"))();
  dlclose(library);
  return count;
}

TEST(GpuMonitorTest, ReadsWhatTheDriverMeasures) {
  const GpuMonitor monitor("0000:01:00.0", SLUICE_FAKE_NVML);
  ASSERT_TRUE(monitor.works());
  const GpuState state = monitor.read();
  EXPECT_EQ(state.known, 1U);
  EXPECT_DOUBLE_EQ(state.watts, 650.5);
  EXPECT_DOUBLE_EQ(state.limit_watts, 700);
  EXPECT_EQ(state.sm_mhz, 1545U);
  EXPECT_EQ(state.memory_used, std::uint64_t{41} << 30);
  EXPECT_EQ(state.celsius, 0U);  // this driver has no such call
  EXPECT_THAT(names_of_reasons(state.held_back), ElementsAre("power limit", "temperature"));
}

TEST(GpuMonitorTest, LeavesOutWhatTheDriverRefuses) {
  const GpuState state = GpuMonitor("0000:02:00.0", SLUICE_FAKE_NVML).read();
  EXPECT_EQ(state.known, 1U);
  EXPECT_DOUBLE_EQ(state.watts, 650.5);
  EXPECT_EQ(state.limit_watts, 0);
  EXPECT_EQ(state.held_back, 0U);
  EXPECT_THAT(names_of_reasons(0), IsEmpty());
}

TEST(GpuMonitorTest, ReadsNothingWhereNothingAnswers) {
  for (const auto& [identity, library] :
       {std::pair("", SLUICE_FAKE_NVML), std::pair("0000:03:00.0", SLUICE_FAKE_NVML),
        std::pair("0000:01:00.0", "libm.so.6"), std::pair("0000:01:00.0", "/nowhere.so")}) {
    const GpuMonitor monitor(identity, library);
    EXPECT_FALSE(monitor.works()) << library;
    EXPECT_EQ(monitor.read().known, 0U);
  }
}

TEST(GpuMonitorTest, ClosesWhatItOpened) {
  {
    const GpuMonitor monitor("0000:01:00.0", SLUICE_FAKE_NVML);
    const GpuMonitor unknown("0000:03:00.0", SLUICE_FAKE_NVML);  // opened, but of no use
    EXPECT_EQ(open_count(), 1);
  }
  EXPECT_EQ(open_count(), 0);
}

}  // namespace
}  // namespace sluice
