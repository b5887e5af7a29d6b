// What a GPU's driver measures: power, clocks, memory, temperature, and what holds its clocks back.
// The driver's library NVML is opened at run time, so builds and machines without it have this too.
// A monitor is used by one thread at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace sluice {

// Plain data, which ranks may exchange as bytes. What the driver does not tell is 0.
struct GpuState {
  double watts = 0, limit_watts = 0;
  std::uint32_t sm_mhz = 0, celsius = 0;
  std::uint64_t memory_used = 0;  // bytes, by all processes
  std::uint64_t held_back = 0;    // NVML's reasons for lower clocks, one bit each
  std::uint64_t known = 0;        // 0: no answer at all
};

// "power limit", "temperature" and so on: what the bits of GpuState::held_back mean. Not with them:
// an idle GPU, and clocks that a person set.
[[nodiscard]] std::vector<std::string> names_of_reasons(std::uint64_t held_back);

class GpuMonitor {
 public:
  static constexpr const char* kLibrary = "libnvidia-ml.so.1";

  // `identity`: DeviceProperties::identity. Without the library, or without an answer from it, the
  // monitor reads nothing; nothing is thrown.
  explicit GpuMonitor(const std::string& identity, const std::string& library = kLibrary);
  ~GpuMonitor();

  [[nodiscard]] bool works() const { return nvml_ != nullptr; }
  // Now. A driver call per field.
  [[nodiscard]] GpuState read() const;

 private:
  struct Nvml;
  std::unique_ptr<Nvml> nvml_;  // null: nothing answers
};

}  // namespace sluice
