// Named ranges of a thread's time in NVIDIA's profilers (Nsight Systems and Compute), by NVTX. A
// build without CUDA's headers has none.
#pragma once

namespace sluice {

// Whether a profiler listens. It says so by an environment variable before the program starts.
[[nodiscard]] bool profiler_listens();

class ProfilerRange {
 public:
  // Null: no range. The profiler copies the name.
  explicit ProfilerRange(const char* name);
  ~ProfilerRange();
  ProfilerRange(const ProfilerRange&) = delete;
  ProfilerRange& operator=(const ProfilerRange&) = delete;

 private:
  bool is_open_;
};

}  // namespace sluice
