#include <algorithm>
#include <cmath>

#include <sluice/compute.hpp>
#include <sluice/error.hpp>

#include "stages/compute/backend.hpp"

namespace sluice {

// Stages may free their memory after this, so the stream's work must end here.
ComputeContext::~ComputeContext() {
  try {
    stream_.view().synchronize();
  } catch (const Error&) {  // the device has failed: nothing runs there
  }
}

void ComputeContext::set_tf32(bool allowed) { backend_->set_tf32(allowed); }

void* ComputeContext::native_blas() const { return backend_->native_blas(); }

std::byte* ComputeContext::workspace(std::size_t bytes) {
  workspace_peak_ = std::max(workspace_peak_, bytes);
  reserve_workspace(bytes);
  return workspace_.data();
}

void ComputeContext::reserve_workspace(std::size_t bytes) {
  if (bytes <= workspace_.size()) return;
  stream_.view().synchronize();  // what still runs may use the old one
  workspace_ = Buffer();         // first: the two together may be more than there is
  workspace_ = memory_.allocate(bytes);
}

const float* ComputeContext::rotary_table(std::int64_t sequence, std::int64_t head_dim,
                                          float base) {
  for (const RotaryTable& table : rotary_tables_) {
    if (table.sequence >= sequence && table.head_dim == head_dim && table.base == base) {
      return reinterpret_cast<const float*>(table.values.data());
    }
  }
  const std::int64_t half = head_dim / 2;
  const std::size_t bytes = rotary_table_bytes(sequence, head_dim);
  std::vector<float> values(bytes / sizeof(float));
  float* row = values.data();
  for (std::int64_t position = 0; position < sequence; ++position, row += 3 * half) {
    for (std::int64_t i = 0; i < half; ++i) {
      const double exponent = -2.0 * static_cast<double>(i) / static_cast<double>(head_dim);
      const double angle = static_cast<double>(position) * std::pow(base, exponent);
      row[i] = static_cast<float>(std::cos(angle));
      row[half + i] = static_cast<float>(std::sin(angle));
      row[2 * half + i] = -row[half + i];
    }
  }
  rotary_tables_.push_back({sequence, head_dim, base, memory_.allocate(bytes)});
  std::byte* const table = rotary_tables_.back().values.data();
  copy_now(device(), table, values.data(), bytes);
  return reinterpret_cast<const float*>(table);
}

std::size_t ComputeContext::rotary_table_bytes(std::int64_t sequence, std::int64_t head_dim) {
  return static_cast<std::size_t>(sequence * 3 * (head_dim / 2)) * sizeof(float);
}

}  // namespace sluice
