// Creates compute contexts, and ends them: chooses the backend of a device.
#include "stages/operators/context.hpp"

#include <fmt/core.h>

#include <latch>
#include <thread>
#include <vector>

#include <sluice/compute.hpp>
#include <sluice/error.hpp>

#include "comm/base/threads.hpp"
#include "comm/base/throw_error.hpp"
#include "stages/compute/backend.hpp"
#include "stages/compute/operator_profile.hpp"
#include "stages/cpu/cpu_backend.hpp"
#if SLUICE_WITH_CUDA
#include "stages/cpu/cpu_report.hpp"
#include "stages/cuda/cuda_backend.hpp"
#endif

namespace sluice {

namespace {

// OpenMP ends the process where it cannot start a thread: as many are started here before.
int checked_threads(int threads) {
  if (threads < 1 || threads > ComputeContext::kMostThreads) {
    throw_usage("{} compute threads; legal are 1 to {}", threads, ComputeContext::kMostThreads);
  }
  std::latch all_started(1);
  std::vector<std::jthread> team;
  team.reserve(static_cast<std::size_t>(threads));
  try {
    for (int i = 1; i < threads; ++i) {
      team.push_back(start_thread<std::jthread>(
          fmt::format("{} of {} that compute", i + 1, threads), [&] { all_started.wait(); }));
    }
  } catch (...) {
    all_started.count_down();
    throw;
  }
  all_started.count_down();
  return threads;
}

std::unique_ptr<Backend> make_backend([[maybe_unused]] const DeviceMemory& memory,
                                      [[maybe_unused]] StreamView stream) {
#if SLUICE_WITH_CUDA
  if (memory.device().kind == DeviceKind::kCuda) {
    static_cast<void>(choose_kernels());  // SLUICE_KERNELS is checked for a GPU's rank too
    use_device(memory.device());
    return std::make_unique<cuda::CudaBackend>(memory, stream);
  }
#endif
  return std::make_unique<CpuBackend>(cpu::kOperators);
}

}  // namespace

ComputeContext::ComputeContext(Device device, int threads)
    : memory_(device),
      threads_(checked_threads(threads)),
      stream_(device),
      passed_(device),
      backend_(make_backend(memory_, stream_.view())) {}

// Stages may free their memory after this, so the stream's work must end here.
ComputeContext::~ComputeContext() {
  try {
    stream_.view().synchronize();
  } catch (const Error&) {  // the device has failed: nothing runs there
  }
}

void ComputeContext::profile_operators(bool on) {
  profile_ = on ? std::make_unique<OperatorProfile>(*this) : nullptr;
}

std::vector<OperatorTime> ComputeContext::operator_times() {
  return profile_ == nullptr ? std::vector<OperatorTime>() : profile_->times();
}

const OperatorTable& operators_for([[maybe_unused]] DeviceKind device) {
#if SLUICE_WITH_CUDA
  if (device == DeviceKind::kCuda) return cuda::kOperators;
#endif
  return cpu::kOperators;
}

std::size_t library_bytes([[maybe_unused]] DeviceKind device) {
#if SLUICE_WITH_CUDA
  if (device == DeviceKind::kCuda) return cuda::Context::kDeviceBytes;
#endif
  return 0;
}

}  // namespace sluice
