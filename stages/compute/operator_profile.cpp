#include "stages/compute/operator_profile.hpp"

#include <algorithm>
#include <chrono>

namespace sluice {

namespace {

// Calls whose events are read at once.
constexpr std::size_t kOpenCalls = 1024;

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

double update_bytes(std::span<const UpdateRun> runs, DType state) {
  double bytes = 0;
  for (const UpdateRun& run : runs) {
    const int vectors = (run.first != nullptr ? 1 : 0) + (run.second != nullptr ? 1 : 0);
    const std::size_t each = 3 * sizeof(float) +
                             2 * static_cast<std::size_t>(vectors) * size_of(state) +
                             (run.bf16_copy != nullptr ? sizeof(Bf16) : 0);
    bytes += static_cast<double>(run.count) * static_cast<double>(each);
  }
  return bytes;
}

double operand_bytes(const NormGradients& gradients) {
  double bytes = 0;
  for (const Tensor* each : {&gradients.dx, &gradients.residual, &gradients.rounded,
                             &gradients.dgamma, &gradients.dbeta}) {
    bytes += operand_bytes(*each);
  }
  return bytes;
}

OperatorProfile::OperatorProfile(ComputeContext& context) : context_(context) {
  if (context.device().kind == DeviceKind::kCpu) return;
  for (std::size_t i = 0; i < kOpenCalls; ++i) {
    open_.push_back({nullptr, Event(context.device(), true), Event(context.device(), true)});
  }
}

void OperatorProfile::begin() {
  if (open_.empty()) {
    started_ = now();
    return;
  }
  if (count_ == open_.size()) read_events();
  open_[count_].start.record(context_.stream());
}

void OperatorProfile::end(std::string_view name, double bytes, double flops) {
  Sum& sum = sums_[name];
  ++sum.calls;
  sum.bytes += bytes;
  sum.flops += flops;
  if (open_.empty()) {
    sum.seconds += now() - started_;
    return;
  }
  open_[count_].stop.record(context_.stream());
  open_[count_++].sum = &sum;
}

void OperatorProfile::read_events() {
  if (count_ > 0) context_.wait();
  for (std::size_t i = 0; i < count_; ++i) {
    open_[i].sum->seconds += open_[i].stop.seconds_since(open_[i].start);
  }
  count_ = 0;
}

std::vector<OperatorTime> OperatorProfile::times() {
  read_events();
  std::vector<OperatorTime> times;
  for (const auto& [name, sum] : sums_) {
    times.push_back({std::string(name), sum.calls, sum.seconds, sum.bytes, sum.flops});
  }
  std::stable_sort(times.begin(), times.end(), [](const OperatorTime& a, const OperatorTime& b) {
    return a.seconds > b.seconds;
  });
  return times;
}

}  // namespace sluice
