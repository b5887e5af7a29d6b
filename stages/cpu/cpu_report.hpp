// What computes on this CPU, for reports and for the choice of matmuls. Internal to stages/.
#pragma once

#include <string>

namespace sluice {

struct Kernels;  // stages/cpu_kernels/kernels.hpp

// The widest set of kernels this machine can run, or the one SLUICE_KERNELS names
// (baseline|avx2|avx512). Throws Error(kUsage) for a name that is none or that this machine cannot
// run.
[[nodiscard]] const Kernels& choose_kernels();

// The name of that which a context made now would run.
[[nodiscard]] std::string kernel_set();
// The matrix library with version and its instruction set, for reports; and, where matmuls of bf16
// are widened, that they are.
[[nodiscard]] std::string matmul_library();
// Whether this CPU has instructions that make matmuls of bf16 faster than those of f32: AMX, or
// AVX512_BF16 at twice the rate of f32. Intel's processors run the latter at half of f32's rate
// (0.49 of it seen on a 5th generation Xeon without AMX); AMD's are taken to run it at twice.
[[nodiscard]] bool native_bf16();

}  // namespace sluice
