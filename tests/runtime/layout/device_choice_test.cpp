// Which device a rank gets, and the error where a GPU cannot be used.
#include "runtime/layout/device_choice.hpp"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/loopback/loopback.hpp"
#include "tests/runtime/expect_error.hpp"
#ifdef SLUICE_EMULATED
#include <cuda_runtime_api.h>

#include "tests/emulated_cuda/control.hpp"
#include "tests/emulated_cuda/modules.hpp"
#endif

namespace sluice {
namespace {

TEST(DeviceChoiceTest, RanksThatFellBackToTheCpuSayWhy) {
  const RankDevice gpu{{DeviceKind::kCuda, 0}, "h", "0", 0, ""}, cpu{{}, "h", "", 0, ""};
  RankDevice old = cpu, without = cpu;
  old.no_gpu = "too old";
  without.no_gpu = "no driver";
  EXPECT_EQ(describe_devices({gpu, old, cpu}),
            "  devices: 0 cuda:0 on h, 1 cpu (too old) on h, 2 cpu on h\n");
  EXPECT_EQ(describe_devices({old, without}),
            "  devices: 0 cpu (too old) on h, 1 cpu (no driver) on h\n");
  EXPECT_EQ(describe_devices({old, old}),
            built_with_cuda() ? "  devices: cpu (GPUs: too old)\n" : "");
}

TEST(DeviceChoiceTest, DriversThatDifferAreNamedWithTheirRanks) {
  RankDevice old{{DeviceKind::kCuda, 0}, "a", "0", 0, ""}, cpu{{}, "c", "", 0, ""};
  old.driver = "CUDA 12.4, driver 550.54.15";
  RankDevice other = old;
  other.host = "b";
  EXPECT_EQ(describe_different_drivers({old, other, cpu}), "");
  EXPECT_EQ(describe_different_drivers({cpu, cpu}), "");
  other.driver = "CUDA 13.0, driver 580.65.06";
  EXPECT_EQ(describe_different_drivers({old, other, cpu, old}),
            "  drivers of the GPUs differ: CUDA 12.4, driver 550.54.15 (rank 0 on a, rank 3 on a); "
            "CUDA 13.0, driver 580.65.06 (rank 1 on b)\n");
  EXPECT_NE(describe_different_drivers({old, other, old, old, old, old})
                .find("rank 3 on a, rank 4 on a and 1 more)"),
            std::string::npos);
}

#ifdef SLUICE_EMULATED
std::vector<RankDevice> choose(Communicator& comm, const char* devices, int replicas = 1) {
  Collectives world(comm, 0, nullptr);
  return choose_devices(world,
                        make_topology(2, {2 / replicas, replicas, 1}, RankOrder::kPipelineFirst),
                        parse_devices(devices), {"host", "host"});
}

// cuda:1 is older than Sluice supports.
class OldGpuTest : public ::testing::Test {
 protected:
  static constexpr const char* kWhy =
      "device cuda:1 has compute capability 7.5; legal: 8.0 and newer, or cpu";
  void SetUp() override { emulated::set_compute_capability(1, 75); }
  void TearDown() override { emulated::set_compute_capability(1, 90); }
};

TEST_F(OldGpuTest, IsRefusedByNameWhereItIsAskedFor) {
  expect_error(ErrorCode::kUsage, {kWhy}, [] { require_device({DeviceKind::kCuda, 1}); });
  require_device({DeviceKind::kCuda, 0});
  run_loopback(2, [](Communicator& comm) {
    expect_error(ErrorCode::kUsage, {"rank 1 on ", kWhy},
                 [&] { static_cast<void>(choose(comm, "cuda")); });
  });
}

TEST_F(OldGpuTest, IsPassedOverByAutoWithTheReason) {
  run_loopback(2, [](Communicator& comm) {
    const std::vector<RankDevice> devices = choose(comm, "auto");
    EXPECT_EQ(to_string(devices[0].device), "cuda:0");
    EXPECT_EQ(to_string(devices[1].device), "cpu");
    EXPECT_EQ(devices[0].no_gpu, "");
    EXPECT_EQ(devices[1].no_gpu, kWhy);
    expect_error(ErrorCode::kUsage, {"rank 0 has cuda:0 and rank 1 has cpu (device cuda:1 has"},
                 [&] { static_cast<void>(choose(comm, "auto", 2)); });
  });
}

// cuda:1 is newer than the program was compiled for.
class GpuWithoutCodeTest : public ::testing::Test {
 protected:
  static constexpr const char* kWhy =
      "device cuda:1 (Emulated CUDA device) has compute capability 12.1, for which this build has "
      "no code: its kernels were compiled for 8.0, 9.0 (no kernel image is available for execution "
      "on the device; driver for CUDA ";
  static constexpr const char* kLegal =
      "); legal: a build with 121 in SLUICE_CUDA_ARCHITECTURES, or cpu";
  void SetUp() override {
    emulated::set_compute_capability(1, 121);
    emulated::set_kernel_status(1, cudaErrorNoKernelImageForDevice);
  }
  void TearDown() override {
    emulated::set_compute_capability(1, 90);
    emulated::set_kernel_status(1, cudaSuccess);
  }
};

TEST_F(GpuWithoutCodeTest, IsRefusedOnEveryRankBeforeAnythingRunsThere) {
  require_device({DeviceKind::kCuda, 1});
  run_loopback(2, [](Communicator& comm) {
    expect_error(ErrorCode::kUsage, {"rank 1 on ", kWhy, kLegal},
                 [&] { static_cast<void>(choose(comm, "cuda")); });
  });
}

TEST_F(GpuWithoutCodeTest, IsPassedOverByAutoWithTheReason) {
  run_loopback(2, [](Communicator& comm) {
    const std::vector<RankDevice> devices = choose(comm, "auto");
    EXPECT_EQ(to_string(devices[0].device), "cuda:0");
    EXPECT_EQ(to_string(devices[1].device), "cpu");
    EXPECT_NE(devices[1].no_gpu.find(kWhy), std::string::npos) << devices[1].no_gpu;
  });
}

TEST_F(GpuWithoutCodeTest, IsOneWhoseDriverCannotCompileThePtxToo) {
  emulated::set_kernel_status(1, cudaErrorUnsupportedPtxVersion);
  expect_error(ErrorCode::kUsage, {"no code", "cudaErrorUnsupportedPtxVersion", kLegal}, [] {
    open_device({DeviceKind::kCuda, 1});
  });
}

TEST_F(GpuWithoutCodeTest, IsNotOneThatFails) {
  emulated::set_kernel_status(1, cudaErrorInvalidResourceHandle);
  expect_error(ErrorCode::kDevice, {"cudaFuncGetAttributes: invalid resource handle"}, [] {
    open_device({DeviceKind::kCuda, 1});
  });
}

// Not the fault of an option, but an error all the same.
TEST_F(GpuWithoutCodeTest, IsADevicesFailureOnEveryRankWhereTheGpuFails) {
  emulated::set_kernel_status(1, cudaErrorInvalidResourceHandle);
  run_loopback(2, [](Communicator& comm) {
    for (const char* devices : {"cuda", "auto"}) {
      expect_error(ErrorCode::kDevice,
                   {"rank 1 on ", "cudaFuncGetAttributes: invalid resource handle"},
                   [&] { static_cast<void>(choose(comm, devices)); });
    }
  });
}

// Driver 12.0 finds GPUs, but does not accept the parameters of the largest kernels.
TEST(DeviceChoiceTest, ADriverBeforeTheOldestIsNamedWithBothVersions) {
  emulated::set_driver_version(12000);
  const std::string needed = CUDART_VERSION >= 13000 ? "13." : "12.1";
  expect_error(
      ErrorCode::kUsage,
      {"device cuda:0 cannot be used: the driver speaks CUDA 12.0, this build needs " + needed},
      [] {
        require_device({DeviceKind::kCuda, 0});
      });
  EXPECT_EQ(device_count(DeviceKind::kCuda), 0);
  emulated::set_driver_version(CUDART_VERSION);
}

TEST(DeviceChoiceTest, ATooOldDriverIsNamedWithBothVersions) {
  emulated::set_driver_version(11080);
  const std::string runtime =
      std::to_string(CUDART_VERSION / 1000) + "." + std::to_string(CUDART_VERSION % 1000 / 10);
  const std::string why = "the driver speaks CUDA 11.8, this build needs " + runtime;
  expect_error(ErrorCode::kUsage, {"device cuda:0 cannot be used: " + why + "; legal: cpu"}, [] {
    require_device({DeviceKind::kCuda, 0});
  });
  run_loopback(1, [&](Communicator& comm) {
    Collectives world(comm, 0, nullptr);
    const auto devices = choose_devices(world, Topology{}, parse_devices("auto"), {"host"});
    EXPECT_EQ(describe_devices(devices), "  devices: cpu (GPUs: " + why + ")\n");
  });
  emulated::set_driver_version(CUDART_VERSION);
}
#endif

}  // namespace
}  // namespace sluice
