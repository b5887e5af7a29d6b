// What the driver says of a GPU while something is measured on it: power, clock, temperature, and
// what held the clock back.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>

#include "comm/device/gpu_monitor.hpp"

namespace sluice::benchmarks {

class GpuSampler {
 public:
  // Over all samples. Without one, all is 0 and empty.
  struct Figures {
    int samples = 0;
    double watts = 0, limit_watts = 0, sm_mhz = 0;  // means
    std::uint32_t celsius = 0;                      // highest
    std::string held_back;                          // names, or "nothing"
  };

  // As GpuMonitor. A thread reads the driver every 50 ms as long as a Measuring lives.
  explicit GpuSampler(const std::string& identity,
                      const std::string& library = GpuMonitor::kLibrary);
  ~GpuSampler();
  GpuSampler(const GpuSampler&) = delete;
  GpuSampler& operator=(const GpuSampler&) = delete;

  [[nodiscard]] Figures figures() const;

  class Measuring {
   public:
    explicit Measuring(GpuSampler& sampler) : sampler_(sampler) { sampler_.measured_ = true; }
    ~Measuring() { sampler_.measured_ = false; }
    Measuring(const Measuring&) = delete;
    Measuring& operator=(const Measuring&) = delete;

   private:
    GpuSampler& sampler_;
  };

 private:
  void run(const std::stop_token& stop);

  GpuMonitor monitor_;
  std::atomic<bool> measured_ = false;
  mutable std::mutex mutex_;  // of sums_ and held_back_
  std::condition_variable_any wake_;
  Figures sums_;  // sums in place of means
  std::uint64_t held_back_ = 0;
  std::jthread thread_;  // last: it uses all above
};

}  // namespace sluice::benchmarks
