#include "stages/cpu/cpu_backend.hpp"

#include "stages/cpu/kernel_set.hpp"

namespace sluice {

CpuBackend::CpuBackend() : matmuls_(Device{}), kernels_(choose_kernels()) {}

}  // namespace sluice
