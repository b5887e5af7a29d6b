#include "comm/device/gpu_monitor.hpp"

#include <dlfcn.h>

#include <array>

namespace sluice {

namespace {

// The C interface of NVML, by NVIDIA's "NVML API Reference Guide". It is stable: names with _v2 are
// the current ones, and structures that grow get new names.
using NvmlDevice = void*;
constexpr int kSuccess = 0;
constexpr int kSmClock = 1;      // NVML_CLOCK_SM
constexpr int kTemperature = 0;  // NVML_TEMPERATURE_GPU

struct Reason {
  std::uint64_t bits;
  const char* name;
};
constexpr std::array<Reason, 5> kReasons = {{{0x04, "power limit"},
                                             {0x08, "hardware slowdown"},
                                             {0x20 | 0x40, "temperature"},
                                             {0x80, "power brake"},
                                             {0x10, "clocks of other GPUs"}}};

}  // namespace

struct GpuMonitor::Nvml {
  struct Memory {  // not in the namespace above: GCC 14 crashes on it where a room is one file
    unsigned long long total, free, used;
  };

  void* library = nullptr;
  bool is_open = false;
  NvmlDevice device = nullptr;
  int (*init)() = nullptr;
  int (*shutdown)() = nullptr;
  int (*find)(const char*, NvmlDevice*) = nullptr;
  int (*power)(NvmlDevice, unsigned*) = nullptr;
  int (*power_limit)(NvmlDevice, unsigned*) = nullptr;
  int (*clock)(NvmlDevice, int, unsigned*) = nullptr;
  int (*temperature)(NvmlDevice, int, unsigned*) = nullptr;
  int (*memory)(NvmlDevice, Memory*) = nullptr;
  int (*reasons)(NvmlDevice, unsigned long long*) = nullptr;

  Nvml() = default;
  Nvml(const Nvml&) = delete;
  Nvml& operator=(const Nvml&) = delete;
  ~Nvml() {
    if (is_open) shutdown();
    if (library != nullptr) dlclose(library);
  }

  template <typename Function>
  void take(Function& function, const char* name) {
    function = reinterpret_cast<Function>(dlsym(library, name));
  }
  bool open(const std::string& name, const std::string& identity) {
    library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return false;
    take(init, "nvmlInit_v2");
    take(shutdown, "nvmlShutdown");
    take(find, "nvmlDeviceGetHandleByPciBusId_v2");
    take(power, "nvmlDeviceGetPowerUsage");
    take(power_limit, "nvmlDeviceGetEnforcedPowerLimit");
    take(clock, "nvmlDeviceGetClockInfo");
    take(temperature, "nvmlDeviceGetTemperature");
    take(memory, "nvmlDeviceGetMemoryInfo");
    take(reasons, "nvmlDeviceGetCurrentClocksThrottleReasons");
    if (init == nullptr || shutdown == nullptr || find == nullptr) return false;
    is_open = init() == kSuccess;
    return is_open && find(identity.c_str(), &device) == kSuccess;
  }
};

GpuMonitor::GpuMonitor(const std::string& identity, const std::string& library)
    : nvml_(std::make_unique<Nvml>()) {
  if (identity.empty() || !nvml_->open(library, identity)) nvml_.reset();
}
GpuMonitor::~GpuMonitor() = default;

GpuState GpuMonitor::read() const {
  GpuState state;
  if (!works()) return state;
  // Functions that this driver does not have are null.
  const auto ask = [&](auto function, auto... arguments) {
    if (function == nullptr || function(nvml_->device, arguments...) != kSuccess) return false;
    state.known = 1;
    return true;
  };
  unsigned number = 0;
  if (ask(nvml_->power, &number)) state.watts = number * 1e-3;
  if (ask(nvml_->power_limit, &number)) state.limit_watts = number * 1e-3;
  if (ask(nvml_->clock, kSmClock, &number)) state.sm_mhz = number;
  if (ask(nvml_->temperature, kTemperature, &number)) state.celsius = number;
  Nvml::Memory memory{};
  if (ask(nvml_->memory, &memory)) state.memory_used = memory.used;
  unsigned long long reasons = 0;
  if (ask(nvml_->reasons, &reasons)) state.held_back = reasons;
  return state;
}

std::vector<std::string> names_of_reasons(std::uint64_t held_back) {
  std::vector<std::string> names;
  for (const Reason& reason : kReasons) {
    if ((held_back & reason.bits) != 0) names.emplace_back(reason.name);
  }
  return names;
}

}  // namespace sluice
