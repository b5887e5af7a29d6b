// A library with NVML's names, for tests: one GPU on bus 0000:01:00.0, and one on ...:02:00.0 whose
// driver tells nothing but its power.
#include <cstring>

namespace {
int opened = 0;
}  // namespace

// The names are NVML's.
// NOLINTBEGIN(readability-identifier-naming)
extern "C" {

struct FakeMemory {
  unsigned long long total, free, used;
};

int nvmlInit_v2() {
  ++opened;
  return 0;
}
int nvmlShutdown() {
  --opened;
  return 0;
}
int fake_opened() { return opened; }

int nvmlDeviceGetHandleByPciBusId_v2(const char* bus, void** device) {
  constexpr int kNotFound = 6;
  if (opened == 0) return 1;
  if (std::strcmp(bus, "0000:01:00.0") == 0)
    *device = reinterpret_cast<void*>(0x1);
  else if (std::strcmp(bus, "0000:02:00.0") == 0)
    *device = reinterpret_cast<void*>(0x2);
  else
    return kNotFound;
  return 0;
}
int nvmlDeviceGetPowerUsage(void*, unsigned* milliwatts) {
  *milliwatts = 650500;
  return 0;
}
int nvmlDeviceGetEnforcedPowerLimit(void* device, unsigned* milliwatts) {
  *milliwatts = 700000;
  return device == reinterpret_cast<void*>(0x1) ? 0 : 3;
}
int nvmlDeviceGetClockInfo(void* device, int type, unsigned* mhz) {
  *mhz = type == 1 ? 1545 : 99999;
  return device == reinterpret_cast<void*>(0x1) ? 0 : 3;
}
int nvmlDeviceGetMemoryInfo(void* device, FakeMemory* memory) {
  *memory = {.total = 141ULL << 30, .free = 100ULL << 30, .used = 41ULL << 30};
  return device == reinterpret_cast<void*>(0x1) ? 0 : 3;
}
// This driver has no nvmlDeviceGetTemperature.
int nvmlDeviceGetCurrentClocksThrottleReasons(void* device, unsigned long long* reasons) {
  *reasons = 0x1 | 0x4 | 0x40;
  return device == reinterpret_cast<void*>(0x1) ? 0 : 3;
}

}  // extern "C"
// NOLINTEND(readability-identifier-naming)
