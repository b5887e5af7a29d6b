#include "stages/compute.hpp"

#include <fmt/format.h>
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <dnnl.hpp>
#include <utility>

#include "comm/error.hpp"
#include "stages/cpu/kernel_set.hpp"
#include "stages/matmul.hpp"
#if SLUICE_WITH_CUDA
#include "stages/cuda/context.hpp"
#endif

namespace sluice {

namespace {

int checked_threads(int threads) {
  if (threads < 1) {
    throw Error(ErrorCode::kUsage, fmt::format("{} compute threads; at least 1 is legal", threads));
  }
  omp_set_num_threads(threads);
  return threads;
}

const char* matmul_instruction_set() {
  switch (dnnl::get_effective_cpu_isa()) {
    case dnnl::cpu_isa::sse41:
      return "sse41";
    case dnnl::cpu_isa::avx:
      return "avx";
    case dnnl::cpu_isa::avx2:
      return "avx2";
    case dnnl::cpu_isa::avx2_vnni:
      return "avx2_vnni";
    case dnnl::cpu_isa::avx512_core:
      return "avx512_core";
    case dnnl::cpu_isa::avx512_core_vnni:
      return "avx512_core_vnni";
    case dnnl::cpu_isa::avx512_core_bf16:
      return "avx512_core_bf16";
    case dnnl::cpu_isa::avx512_core_amx:
      return "avx512_core_amx";
    default:
      return "another instruction set";
  }
}

}  // namespace

ComputeContext::ComputeContext(Device device, int threads)
    : memory_(device),
      threads_(checked_threads(threads)),
      stream_(device),
      matmuls_(std::make_unique<MatMulCache>(Device{})),
      kernels_(&choose_kernels()) {
#if SLUICE_WITH_CUDA
  if (device.kind == DeviceKind::kCuda) {
    use_device(device);
    cuda_ = cuda::make_context(memory_, stream_.view());
  }
#endif
}

// Stages may give their memory back after this, and nobody can wait for the stream any more.
ComputeContext::~ComputeContext() {
  try {
    stream_.view().synchronize();
  } catch (const Error&) {  // the device has failed: nothing runs there
  }
}

void ComputeContext::set_tf32([[maybe_unused]] bool allowed) {
#if SLUICE_WITH_CUDA
  if (cuda_ != nullptr) cuda_->set_tf32(allowed);
#endif
}

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

std::size_t library_bytes([[maybe_unused]] DeviceKind device) {
#if SLUICE_WITH_CUDA
  if (device == DeviceKind::kCuda) return cuda::Context::kDeviceBytes;
#endif
  return 0;
}

std::string kernel_set() { return choose_kernels().name; }

std::string matmul_library() {
  const dnnl_version_t* version = dnnl_version();
  return fmt::format("oneDNN {}.{}.{} ({}{})", version->major, version->minor, version->patch,
                     matmul_instruction_set(), native_bf16() ? "" : ", bf16 widened to f32");
}

bool native_bf16() {
  // The library's sets are bit masks: a set has the bits of those it contains.
  const auto set = static_cast<unsigned>(dnnl::get_effective_cpu_isa());
  const auto has = [set](dnnl::cpu_isa wanted) {
    const auto bits = static_cast<unsigned>(wanted);
    return (set & bits) == bits;
  };
  if (has(dnnl::cpu_isa::avx512_core_amx)) return true;
#if defined(__x86_64__)
  return has(dnnl::cpu_isa::avx512_core_bf16) && !__builtin_cpu_is("intel");
#else
  return false;
#endif
}

}  // namespace sluice
