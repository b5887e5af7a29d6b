#include "stages/cpu/cpu_report.hpp"

#include <fmt/format.h>

#include <dnnl.hpp>

#include "stages/cpu/kernel_set.hpp"

namespace sluice {

namespace {

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
