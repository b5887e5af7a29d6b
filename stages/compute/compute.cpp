#include <algorithm>
#include <cmath>

#include <sluice/compute.hpp>
#include <sluice/error.hpp>

#include "stages/compute/backend.hpp"
#include "stages/compute/context_hooks.hpp"

namespace sluice {

namespace {

constexpr double kPi = 3.14159265358979323846;

// A frequency after scaling, as Hugging Face's modeling_rope_utils.py computes it.
double scaled_frequency(double frequency, const RotaryScaling& scaling) {
  const double slowed = frequency / scaling.factor;
  switch (scaling.kind) {
    case RotaryScaling::Kind::kNone:
      return frequency;
    case RotaryScaling::Kind::kLinear:
      return slowed;
    case RotaryScaling::Kind::kLlama3:
      break;
  }
  const double low = scaling.low_frequency_factor, high = scaling.high_frequency_factor;
  const double turns = scaling.original_context * frequency / (2 * kPi);  // over the old context
  if (turns > high) return frequency;
  if (turns < low) return slowed;
  const double share = (turns - low) / (high - low);
  return (1 - share) * slowed + share * frequency;
}

}  // namespace

void ComputeContext::set_tf32(bool allowed) { backend_->set_tf32(allowed); }

void* ComputeContext::native_blas() const { return backend_->native_blas(); }

std::string ComputeContext::arithmetic() const { return backend_->arithmetic(threads()); }

std::byte* ComputeContext::workspace(std::size_t bytes) {
  workspace_peak_ = std::max(workspace_peak_, bytes);
  reserve_workspace(bytes);
  return workspace_.data();
}

void ComputeContext::wait() {
  if (device().kind == DeviceKind::kCpu) return;
  if (device_wait_ == nullptr) return stream_.view().synchronize();
  passed_.record(stream_.view());
  device_wait_->until(passed_);
}

void ComputeContext::progress() const {
  if (hook_ != nullptr) hook_->progress();
}

void ComputeContext::reserve_workspace(std::size_t bytes) {
  if (bytes <= workspace_.size()) return;
  wait();  // what still runs may use the old one
  if (workspace_.size() > 0) outgrown_.push_back(std::move(workspace_));
  workspace_ = Buffer();
  try {
    workspace_ = memory_.allocate(bytes);
  } catch (const OutOfMemory&) {
    if (outgrown_.empty()) throw;
    outgrown_.clear();
    workspace_ = memory_.allocate(bytes);
  }
}

const float* ComputeContext::rotary_table(std::int64_t sequence, std::int64_t head_dim,
                                          const RotaryPositions& positions) {
  for (const RotaryTable& table : rotary_tables_) {
    if (table.sequence >= sequence && table.head_dim == head_dim && table.positions == positions) {
      return reinterpret_cast<const float*>(table.values.data());
    }
  }
  const std::int64_t half = head_dim / 2;
  const std::size_t bytes = rotary_table_bytes(sequence, head_dim);
  Buffer memory = memory_.allocate(bytes);
  std::vector<float> values(bytes / sizeof(float));
  std::vector<double> frequencies(static_cast<std::size_t>(half));
  for (std::int64_t i = 0; i < half; ++i) {
    const double exponent = -2.0 * static_cast<double>(i) / static_cast<double>(head_dim);
    frequencies[static_cast<std::size_t>(i)] =
        scaled_frequency(std::pow(positions.base, exponent), positions.scaling);
  }
  float* row = values.data();
  for (std::int64_t position = 0; position < sequence; ++position, row += 3 * half) {
    for (std::int64_t i = 0; i < half; ++i) {
      const double angle = static_cast<double>(position) * frequencies[static_cast<std::size_t>(i)];
      row[i] = static_cast<float>(std::cos(angle));
      row[half + i] = static_cast<float>(std::sin(angle));
      row[2 * half + i] = -row[half + i];
    }
  }
  copy_now(device(), memory.data(), values.data(), bytes);
  rotary_tables_.push_back({sequence, head_dim, positions, std::move(memory)});
  return reinterpret_cast<const float*>(rotary_tables_.back().values.data());
}

std::size_t ComputeContext::rotary_table_bytes(std::int64_t sequence, std::int64_t head_dim) {
  return TensorSpec{DType::kF32, {sequence, 3, head_dim / 2}}.bytes();
}

}  // namespace sluice
