#include "runtime/engine/device_timer.hpp"

#include "runtime/engine/steady_seconds.hpp"

namespace sluice {

DeviceTimer::DeviceTimer(Device device, std::size_t most) {
  if (device.kind == DeviceKind::kCpu) return;
  origin_ = Event(device, /*timed=*/true);
  spans_.reserve(most);
  for (std::size_t i = 0; i < most; ++i) {
    spans_.push_back(
        {nullptr, false, Event(device, /*timed=*/true), Event(device, /*timed=*/true)});
  }
}

void DeviceTimer::begin(StreamView stream) {
  used_ = 0;
  if (!spans_.empty()) origin_.record(stream);
}

void DeviceTimer::start(StreamView stream, const PlanOp& op, bool follows) {
  if (spans_.empty()) return;
  spans_[used_].op = &op;
  spans_[used_].follows = follows && used_ > 0;
  if (!spans_[used_].follows) spans_[used_].start.record(stream);
}

void DeviceTimer::stop(StreamView stream) {
  if (!spans_.empty()) spans_[used_++].end.record(stream);
}

void DeviceTimer::read(
    const std::function<void(const PlanOp& op, double start, double end)>& take) {
  if (used_ == 0) return;
  // The two clocks are matched at the end of the last op, which the host has just seen.
  const double now = steady_seconds();
  const double length = spans_[used_ - 1].end.seconds_since(origin_);
  double end = 0;
  for (std::size_t i = 0; i < used_; ++i) {
    const double start = spans_[i].follows ? end : spans_[i].start.seconds_since(origin_);
    end = spans_[i].end.seconds_since(origin_);
    take(*spans_[i].op, now - length + start, now - length + end);
  }
  used_ = 0;
}

}  // namespace sluice
