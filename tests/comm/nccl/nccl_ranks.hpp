// Runs one test body as ranks that each own a GPU, once per number of ranks from 1 to 4: threads
// over loopback, rank r on cuda:r; with SLUICE_UNDER_MPI the job's own processes, where every other
// number of ranks is left to another job. Where the job has fewer GPUs the case is skipped by name;
// the emulation has 8. A test is written
//
//   TEST_P(NcclQueueTest, PassesAroundTheRing) { run([](Rank& rank) { ... }); }
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <sluice/device.hpp>
#include <sluice/error.hpp>

#include "comm/group/collectives.hpp"
#include "comm/group/communicator.hpp"
#include "comm/group/control.hpp"
#include "tests/gpus/required_gpus.hpp"
#ifdef SLUICE_UNDER_MPI
#include "comm/base/host.hpp"
#include "tests/comm/mpi/mpi_main.hpp"
#include "tests/gpus/gpus_of_job.hpp"
#else
#include "tests/loopback/loopback.hpp"
#endif

namespace sluice::testing {

struct Rank {
  Communicator& comm;
  Collectives& bootstrap;
  ControlChannel& control;
  Device device;
  [[nodiscard]] int rank() const { return comm.rank(); }
  [[nodiscard]] int size() const { return comm.size(); }
  [[nodiscard]] int next() const { return (rank() + 1) % size(); }
  [[nodiscard]] int previous() const { return (rank() + size() - 1) % size(); }
};

class NcclRanksTest : public ::testing::TestWithParam<int> {
 protected:
  // Skips the case where there are fewer than `gpus`.
  void SetUp() override {
#ifdef SLUICE_UNDER_MPI
    if (world().size() != GetParam()) return;
    SLUICE_NEED_GPUS(GetParam(), gpus_of_job(world()));
#else
    SLUICE_NEED_GPUS(GetParam(), device_count(DeviceKind::kCuda));
#endif
  }
  static void run(const std::function<void(Rank&)>& body) { run_with(GetParam(), body); }
  static void run_with(int ranks, const std::function<void(Rank&)>& body) {
#ifdef SLUICE_UNDER_MPI
    if (world().size() != ranks) return;
    const auto comm = world().duplicate();
    Collectives places(*comm, 0, nullptr);
    int on_host = 0;
    const auto machines = places.all_gather_strings(machine_id());
    for (int r = 0; r < comm->rank(); ++r) {
      on_host += machines[static_cast<std::size_t>(r)] == machine_id() ? 1 : 0;
    }
    run_as(*comm, on_host % device_count(DeviceKind::kCuda), body);
#else
    run_loopback(ranks, [&](Communicator& comm) { run_as(comm, comm.rank(), body); });
#endif
  }

 private:
  static void run_as(Communicator& comm, int gpu, const std::function<void(Rank&)>& body) {
    ControlChannel control(comm);
    Collectives bootstrap(comm, 0, &control);
    Rank rank{comm, bootstrap, control, {DeviceKind::kCuda, gpu}};
    use_device(rank.device);
    body(rank);
  }
};

inline std::string ranks_name(const ::testing::TestParamInfo<int>& info) {
  return std::to_string(info.param) + "Ranks";
}

// Every number of ranks, and those that have a peer.
#define SLUICE_NCCL_RANKS(suite) \
  INSTANTIATE_TEST_SUITE_P(Gpus, suite, ::testing::Range(1, 5), ::sluice::testing::ranks_name)
#define SLUICE_NCCL_PEERS(suite) \
  INSTANTIATE_TEST_SUITE_P(Gpus, suite, ::testing::Range(2, 5), ::sluice::testing::ranks_name)

// Values in device memory.
template <typename T>
class OnDevice {
 public:
  OnDevice(Device device, std::size_t count)
      : device_(device), count_(count), memory_(device, count * sizeof(T)) {}
  OnDevice(Device device, const std::vector<T>& values) : OnDevice(device, values.size()) {
    copy_now(device_, memory_.data(), values.data(), count_ * sizeof(T));
  }
  [[nodiscard]] std::span<T> values() const {
    return {reinterpret_cast<T*>(memory_.data()), count_};
  }
  [[nodiscard]] std::span<std::byte> bytes() const { return {memory_.data(), count_ * sizeof(T)}; }
  // What lies there now; nothing may be under way.
  [[nodiscard]] std::vector<T> read() const {
    std::vector<T> result(count_);
    copy_now(device_, result.data(), memory_.data(), count_ * sizeof(T));
    return result;
  }

 private:
  Device device_;
  std::size_t count_;
  Buffer memory_;
};

// The error of `call`; a failure where there is none.
template <typename Call>
Error error_of(Call call) {
  try {
    call();
  } catch (const Error& error) {
    return error;
  }
  ADD_FAILURE() << "nothing was thrown";
  return Error(ErrorCode::kInternal, "nothing was thrown");
}

// Throws Error(kPeer) once, at the given poll counted from 1.
class ThrowingInterrupt : public Interrupt {
 public:
  ThrowingInterrupt(int poll, std::string message) : left_(poll), message_(std::move(message)) {}
  void poll() override {
    if (--left_ == 0) throw Error(ErrorCode::kPeer, message_);
  }

 private:
  int left_;
  std::string message_;
};

}  // namespace sluice::testing
