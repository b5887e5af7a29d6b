#include "tests/benchmarks/gpu/sampler.hpp"

#include <algorithm>
#include <chrono>

#include "comm/base/joined.hpp"

namespace sluice::benchmarks {

GpuSampler::GpuSampler(const std::string& identity, const std::string& library)
    : monitor_(identity, library) {
  if (!monitor_.works()) return;
  thread_ = std::jthread([this](const std::stop_token& stop) { run(stop); });
}

GpuSampler::~GpuSampler() = default;

void GpuSampler::run(const std::stop_token& stop) {
  constexpr std::chrono::milliseconds kPause(50);
  std::unique_lock lock(mutex_);
  while (!wake_.wait_for(lock, stop, kPause, [&] { return stop.stop_requested(); })) {
    if (!measured_) continue;
    const GpuState state = monitor_.read();
    // What ended meanwhile may have left the GPU idle.
    if (!measured_ || state.known == 0) continue;
    sums_.samples += 1;
    sums_.watts += state.watts;
    sums_.limit_watts += state.limit_watts;
    sums_.sm_mhz += state.sm_mhz;
    sums_.celsius = std::max(sums_.celsius, state.celsius);
    held_back_ |= state.held_back;
  }
}

GpuSampler::Figures GpuSampler::figures() const {
  const std::lock_guard lock(mutex_);
  Figures figures = sums_;
  if (figures.samples == 0) return figures;
  figures.watts /= figures.samples;
  figures.limit_watts /= figures.samples;
  figures.sm_mhz /= figures.samples;
  figures.held_back = held_back_ == 0 ? "nothing" : joined(names_of_reasons(held_back_), ", ");
  return figures;
}

}  // namespace sluice::benchmarks
