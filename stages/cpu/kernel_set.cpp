#include "stages/cpu/kernel_set.hpp"

#include <fmt/format.h>

#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include <sluice/error.hpp>

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
  throw Error(ErrorCode::kUsage,
              fmt::format("SLUICE_KERNELS is '{}'; this machine runs: {}", wanted, legal));
}

}  // namespace sluice
