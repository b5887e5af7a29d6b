// The CPU's operators, and its part of a compute context: the element-wise kernels of its
// instruction set, and the matmuls prepared so far. Requires of the contexts given here:
// device().kind == kCpu.
#pragma once

#include <fmt/core.h>

#include <string>

#include <sluice/compute.hpp>

#include "stages/compute/backend.hpp"
#include "stages/compute/context_access.hpp"
#include "stages/compute/operator_table.hpp"
#include "stages/cpu/cpu_report.hpp"
#include "stages/cpu/matmul.hpp"
#include "stages/cpu/row_matmuls.hpp"
#include "stages/cpu_kernels/kernels.hpp"

namespace sluice {

class CpuBackend final : public Backend {
 public:
  // Throws as choose_kernels().
  explicit CpuBackend(const OperatorTable& operators) : Backend(operators) {}

  [[nodiscard]] std::string arithmetic(int threads) const override {
    const std::string rows = row_matmuls_.describe();
    return fmt::format("{} kernels, {}, threads {}{}{}", kernels_.name, matmul_library(), threads,
                       rows.empty() ? "" : ", ", rows);
  }

  [[nodiscard]] const Kernels& kernels() const { return kernels_; }
  [[nodiscard]] MatmulCache& matmuls() { return matmuls_; }
  [[nodiscard]] RowMatmuls& row_matmuls() { return row_matmuls_; }

 private:
  MatmulCache matmuls_{Device{}};
  RowMatmuls row_matmuls_{matmuls_};
  const Kernels& kernels_ = choose_kernels();
};

[[nodiscard]] inline const Kernels& kernels_of(const ComputeContext& ctx) {
  return static_cast<const CpuBackend&>(ContextAccess::backend(ctx)).kernels();
}
// Those of a type.
[[nodiscard]] inline const TypedKernels& kernels_for(const ComputeContext& ctx, DType dtype) {
  return dtype == DType::kBf16 ? kernels_of(ctx).bf16 : kernels_of(ctx).f32;
}
[[nodiscard]] inline MatmulCache& matmuls_of(const ComputeContext& ctx) {
  return static_cast<CpuBackend&>(ContextAccess::backend(ctx)).matmuls();
}

[[nodiscard]] inline RowMatmuls& row_matmuls_of(const ComputeContext& ctx) {
  return static_cast<CpuBackend&>(ContextAccess::backend(ctx)).row_matmuls();
}

// The CPU's operators, the specification of every other backend's.
namespace cpu {
SLUICE_OPERATORS(SLUICE_DECLARE)
void dropout(ComputeContext& ctx, const Tensor& x, const Dropout& dropout, const Tensor& y);
inline constexpr OperatorTable kOperators = {SLUICE_OPERATORS(SLUICE_ENTRY) dropout};
}  // namespace cpu

}  // namespace sluice
