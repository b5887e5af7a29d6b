#include "stages/cpu/cpu_report.hpp"

#include <fmt/core.h>

#include <cstdlib>
#include <dnnl.hpp>
#include <string_view>
#include <utility>
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
  using Isa = dnnl::cpu_isa;
  constexpr std::pair<Isa, const char*> kNames[] = {{Isa::sse41, "sse41"},
                                                    {Isa::avx, "avx"},
                                                    {Isa::avx2, "avx2"},
                                                    {Isa::avx2_vnni, "avx2_vnni"},
                                                    {Isa::avx512_core, "avx512_core"},
                                                    {Isa::avx512_core_vnni, "avx512_core_vnni"},
                                                    {Isa::avx512_core_bf16, "avx512_core_bf16"},
                                                    {Isa::avx512_core_amx, "avx512_core_amx"}};
  for (const auto& [set, name] : kNames) {
    if (set == dnnl::get_effective_cpu_isa()) return name;
  }
  return "another instruction set";
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
