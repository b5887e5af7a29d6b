// A GPU's part of a compute context: the handles and scratch of Context, and the matmuls and
// attention graphs that operators prepared with them so far.
#pragma once

#include <memory>

#include "stages/compute/context_access.hpp"
#include "stages/cuda/matmul.hpp"
#include "stages/cuda_context/context.hpp"
#include "stages/cuda_kernels/kernels.hpp"

namespace sluice::cuda {

inline constexpr OperatorTable kOperators = {SLUICE_OPERATORS(SLUICE_ENTRY) dropout};

class CudnnAttention;  // stages/cuda/attention_cudnn.hpp
// Null where Sluice was built without cuDNN. The context outlives it.
[[nodiscard]] std::shared_ptr<CudnnAttention> make_cudnn_attention(Context& context);

class CudaBackend final : public Context {
 public:
  // As Context.
  CudaBackend(const DeviceMemory& memory, StreamView stream)
      : Context(kOperators, memory, stream),
        matmuls_(*this),
        cudnn_attention_(make_cudnn_attention(*this)) {}

  [[nodiscard]] Matmuls& matmuls() { return matmuls_; }
  // Null where Sluice was built without cuDNN.
  [[nodiscard]] CudnnAttention* cudnn_attention() { return cudnn_attention_.get(); }

 private:
  Matmuls matmuls_;
  std::shared_ptr<CudnnAttention> cudnn_attention_;
};

// Of a compute context for a GPU.
[[nodiscard]] inline CudaBackend& backend_of(const ComputeContext& ctx) {
  return static_cast<CudaBackend&>(ContextAccess::backend(ctx));
}

}  // namespace sluice::cuda
