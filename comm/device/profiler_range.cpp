#include "comm/device/profiler_range.hpp"

#include <cstdlib>

// A build without the CUDA toolkit may find no NVTX.
#if __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>
#define SLUICE_WITH_NVTX 1
#else
#define SLUICE_WITH_NVTX 0
#endif

namespace sluice {

#if SLUICE_WITH_NVTX

// NVTX loads the library that this variable names; Nsight's tools set it for what they start.
bool profiler_listens() { return std::getenv("NVTX_INJECTION64_PATH") != nullptr; }

ProfilerRange::ProfilerRange(const char* name) : is_open_(name != nullptr) {
  if (is_open_) nvtxRangePushA(name);
}
ProfilerRange::~ProfilerRange() {
  if (is_open_) nvtxRangePop();
}

#else

bool profiler_listens() { return false; }
ProfilerRange::ProfilerRange(const char* /*name*/) : is_open_(false) {}
ProfilerRange::~ProfilerRange() = default;

#endif

}  // namespace sluice
