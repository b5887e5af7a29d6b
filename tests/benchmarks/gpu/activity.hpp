// When a GPU was at work, by the records of CUPTI: every kernel, copy and fill with the device's
// own times. CUPTI is opened at run time, where the toolkit brings it; nothing links it. It costs
// the host a few microseconds per kernel, so that what is measured with it is never better than
// without.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace sluice::benchmarks {

// Of the device's time, in nanoseconds; end >= start.
struct BusyInterval {
  std::uint64_t start = 0, end = 0;
  std::string name = {};  // the kernel's symbol as the compiler wrote it, "copy" or "fill"
};

// All runs of the kernels of one name in a set of intervals.
struct KernelTime {
  std::string name;  // readable, without namespaces of ours, template arguments and parameters
  int runs = 0;
  double seconds = 0;  // sum over the runs, also where they overlap
};
// Longest first.
[[nodiscard]] std::vector<KernelTime> kernel_times(const std::vector<BusyInterval>& intervals);

// Of all intervals, whatever stream they were on.
struct Coverage {
  double span = 0;     // first start to last end, in seconds
  double covered = 0;  // of that, where at least one interval lies
  [[nodiscard]] double idle_share() const { return span > 0 ? 1 - covered / span : 0; }
};
[[nodiscard]] Coverage coverage_of(std::vector<BusyInterval> intervals);

// One at a time in a process: CUPTI has one set of callbacks.
class ActivityRecorder {
 public:
  // Records from here on. Throws Error(kDevice), one line: no CUPTI in this build or on this
  // machine, or what it answered.
  ActivityRecorder();
  ~ActivityRecorder();
  ActivityRecorder(const ActivityRecorder&) = delete;
  ActivityRecorder& operator=(const ActivityRecorder&) = delete;

  // What ended since the last call; the device has to be idle. Throws Error(kDevice) where records
  // were lost or have no times.
  [[nodiscard]] std::vector<BusyInterval> take();
};

}  // namespace sluice::benchmarks
