// Runs an operator on the CPU and on the GPU over the same operands and compares what it leaves.
#pragma once

#include <fmt/core.h>

#include <cstring>
#include <functional>
#include <initializer_list>
#include <vector>

#include "tests/stages/cuda/gpu_tools.hpp"

namespace sluice {

// All that an operator reads and writes, in the order in which the call names them.
using Tensors = std::vector<Tensor>;
using OperatorCall = std::function<void(ComputeContext&, const Tensors&)>;

inline bool same_bits(const Operand& a, const Operand& b) {
  return std::memcmp(a.tensor.data, b.tensor.data, a.tensor.spec.bytes()) == 0;
}

// Bit for bit the CPU's.
inline constexpr double kExact = 0;

class GpuCompareTest : public GpuTest {
 protected:
  // Calls the operator on the CPU, over the operands themselves, and twice on the GPU, over copies
  // that start `offset` elements into aligned memory. The GPU leaves the same bits both times, in
  // every operand the CPU's within `tolerance` relative to its norm, and no byte after it changed.
  void compare(std::initializer_list<const Operand*> operands, double tolerance,
               const OperatorCall& call, std::size_t offset = 0) {
    const std::vector<Operand> once = run_on_gpu(operands, call, offset);
    const std::vector<Operand> twice = run_on_gpu(operands, call, offset);
    Tensors tensors;
    for (const Operand* operand : operands) tensors.push_back(operand->tensor);
    call(cpu(), tensors);
    std::size_t i = 0;
    for (const Operand* operand : operands) {
      SCOPED_TRACE(
          fmt::format("operand {}, {}, offset {}", i, to_string(operand->tensor.spec), offset));
      EXPECT_TRUE(same_bits(once[i], twice[i])) << "another result the second time";
      if (tolerance == kExact || operand->tensor.spec.dtype == DType::kI32) {
        EXPECT_TRUE(same_bits(once[i], *operand)) << "not the CPU's bits";
      } else {
        EXPECT_LE(relative_error(once[i].values(), operand->values()), tolerance);
      }
      ++i;
    }
  }

  // As compare, with aligned operands and with operands one element off.
  void compare_shifted(std::initializer_list<const Operand*> operands, double tolerance,
                       const OperatorCall& call) {
    std::vector<Operand> before;
    for (const Operand* operand : operands) {
      before.emplace_back(operand->tensor.spec);
      std::memcpy(before.back().buffer.data(), operand->buffer.data(), operand->buffer.size());
    }
    compare(operands, tolerance, call, 1);
    std::size_t i = 0;
    for (const Operand* operand : operands) {
      std::memcpy(operand->buffer.data(), before[i].buffer.data(), operand->buffer.size());
      ++i;
    }
    compare(operands, tolerance, call, 0);
  }

 private:
  std::vector<Operand> run_on_gpu(std::initializer_list<const Operand*> operands,
                                  const OperatorCall& call, std::size_t offset) {
    std::vector<OnGpu> copies;
    Tensors tensors;
    copies.reserve(operands.size());
    for (const Operand* operand : operands) {
      copies.emplace_back(*operand, offset * size_of(operand->tensor.spec.dtype));
      tensors.push_back(copies.back().tensor());
    }
    call(gpu(), tensors);
    std::vector<Operand> results;
    for (const OnGpu& copy : copies) results.push_back(copy.fetch(gpu()));
    return results;
  }
};

inline constexpr DType kOperandTypes[] = {DType::kF32, DType::kBf16};

}  // namespace sluice
