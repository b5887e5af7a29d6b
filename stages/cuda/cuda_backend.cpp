#include "stages/cuda/cuda_backend.hpp"

#if SLUICE_WITH_CUDNN
#include "stages/cuda/attention_cudnn.hpp"
#endif

namespace sluice::cuda {

CudaBackend::CudaBackend(const OperatorTable& operators, const DeviceMemory& memory,
                         StreamView stream)
    : Context(operators, memory, stream), matmuls_(*this) {
#if SLUICE_WITH_CUDNN
  cudnn_attention_ = std::make_shared<CudnnAttention>(*this);
#endif
}

CudaBackend::~CudaBackend() = default;

}  // namespace sluice::cuda
