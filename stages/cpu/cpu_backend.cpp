#include "stages/cpu/cpu_backend.hpp"

#include "stages/cpu/kernel_set.hpp"

namespace sluice {

CpuBackend::CpuBackend(const OperatorTable& operators)
    : Backend(operators), matmuls_(Device{}), kernels_(choose_kernels()) {}

}  // namespace sluice
