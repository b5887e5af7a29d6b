// On the emulation, whose GPUs the tests' library with NVML's names knows.
#include <gtest/gtest.h>

#include <vector>

#include "runtime/report/job_gpus.hpp"
#include "tests/loopback/loopback.hpp"

namespace sluice {
namespace {

constexpr int kGpuTags = 100;  // that nothing else uses here

// The driver tells all of the first GPU, and the power of the second alone.
TEST(JobGpusTest, RankZeroHasTheStatesOfAllRanks) {
  run_loopback(3, [](Communicator& comm) {
    Collectives world(comm, kGpuTags, nullptr);
    JobGpus gpus(world, "machine", {DeviceKind::kCuda, comm.rank() == 2 ? 0 : comm.rank()},
                 SLUICE_FAKE_NVML);
    EXPECT_EQ(gpus.peak(MatmulPrecision::kBf16), 0);  // such a card is in no table
    const std::vector<GpuState> states = gpus.read();
    ASSERT_EQ(states.size(), comm.rank() == 0 ? 3U : 0U);
    if (comm.rank() != 0) return;
    EXPECT_EQ(states[0].sm_mhz, 1545U);
    EXPECT_EQ(states[1].sm_mhz, 0U);
    EXPECT_EQ(states[1].watts, 650.5);
    EXPECT_EQ(states[2].sm_mhz, 1545U);
  });
}

}  // namespace
}  // namespace sluice
