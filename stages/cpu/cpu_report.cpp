#include "stages/cpu/cpu_report.hpp"

#include <fmt/format.h>

#include <cstdlib>
#include <dnnl.hpp>
#include <string_view>
#include <vector>

#include "comm/base/throw_error.hpp"
#include "stages/cpu_kernels/kernels.hpp"

namespace sluice {

namespace {

// Narrowest first.
std::vector<const Kernels*> runnable_sets() {
  std::vector<const Kernels*> sets = {&baseline::kKernels};
#if defined(__x86_64__)
  // What -march=x86-64-v3 and -v4 may use.
  __builtin_cpu_init();
  const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                  __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
  const bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                  __builtin_cpu_supports("avx512vl");
  if (v3) sets.push_back(&avx2::kKernels);
  if (v4) sets.push_back(&avx512::kKernels);
#endif
  return sets;
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

const Kernels& choose_kernels() {
  const std::vector<const Kernels*> sets = runnable_sets();
  const char* wanted = std::getenv("SLUICE_KERNELS");
  if (wanted == nullptr || *wanted == '\0') return *sets.back();
  std::string legal;
  for (const Kernels* set : sets) {
    if (std::string_view(set->name) == wanted) return *set;
    legal += fmt::format("{}{}", legal.empty() ? "" : ", ", set->name);
  }
  throw_usage("SLUICE_KERNELS is '{}'; this machine runs: {}", wanted, legal);
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
