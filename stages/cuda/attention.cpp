// Attention on a GPU: cuDNN's fused graphs, or the kernels of
// stages/cuda_kernels/flash_attention.hpp. The kernels run in f32, with dropout (cuDNN's random
// numbers are not Sluice's), with a window, for shapes that cuDNN refuses, and in builds without
// it, on tensor cores if they can. All keep the same state. The choice depends on shape, type,
// dropout, tf32(), device model and library only, so forward and backward agree, and all depths of
// a pipeline agree.
#include "stages/compute/call_arguments.hpp"
#include "stages/cuda/cuda_backend.hpp"
#include "stages/cuda_kernels/flash_attention.hpp"
#include "stages/cuda_kernels/kernels.hpp"

#if SLUICE_WITH_CUDNN
#include "stages/cuda/attention_cudnn.hpp"
#endif

namespace sluice::cuda {

namespace {

// Why cuDNN does not compute it; empty if it does.
#if SLUICE_WITH_CUDNN
std::string why_own(ComputeContext& ctx, const AttentionShape& shape, DType dtype, bool dropout) {
  if (shape.slides()) return "sliding window";
  if (dtype != DType::kBf16) return std::string(name_of(dtype)) + "; cuDNN takes bf16";
  if (dropout) return "dropout; cuDNN's random numbers would be its own";
  const std::string& refusal = backend_of(ctx).cudnn_attention()->refusal(shape);
  return refusal.empty() ? refusal : "cuDNN: " + refusal;
}

bool takes_cudnn(ComputeContext& ctx, const AttentionShape& shape, DType dtype, bool dropout) {
  return why_own(ctx, shape, dtype, dropout).empty();
}
#else
std::string why_own(ComputeContext& /*ctx*/, const AttentionShape& shape, DType /*dtype*/,
                    bool /*dropout*/) {
  return shape.slides() ? "sliding window" : "built without cuDNN";
}
#endif

}  // namespace

std::shared_ptr<CudnnAttention> make_cudnn_attention([[maybe_unused]] Context& context) {
#if SLUICE_WITH_CUDNN
  return std::make_shared<CudnnAttention>(context);
#else
  return nullptr;
#endif
}

std::string attention_engine(ComputeContext& ctx, const AttentionShape& shape, DType dtype,
                             bool dropout) {
  const std::string why = why_own(ctx, shape, dtype, dropout);
  if (why.empty()) return "cuDNN";
  const bool tensor_cores = attention_on_tensor_cores(ctx, shape, dtype);
  return std::string("own kernels") + (tensor_cores ? " on tensor cores (" : " (") + why + ")";
}

std::size_t attention_state_bytes(DeviceKind /*device*/, const AttentionShape& shape,
                                  DType /*dtype*/) {
  return bytes_of_all(sizeof(float), {shape.samples, shape.sequence, shape.heads});
}

std::size_t attention_forward_workspace([[maybe_unused]] ComputeContext& ctx,
                                        [[maybe_unused]] const AttentionShape& shape,
                                        [[maybe_unused]] DType dtype, [[maybe_unused]] bool drops) {
#if SLUICE_WITH_CUDNN
  if (takes_cudnn(ctx, shape, dtype, drops)) {
    return backend_of(ctx).cudnn_attention()->forward_workspace(shape);
  }
#endif
  return 0;
}

std::size_t attention_backward_workspace([[maybe_unused]] ComputeContext& ctx,
                                         const AttentionShape& shape, [[maybe_unused]] DType dtype,
                                         [[maybe_unused]] bool drops) {
#if SLUICE_WITH_CUDNN
  if (takes_cudnn(ctx, shape, dtype, drops)) {
    return backend_of(ctx).cudnn_attention()->backward_workspace(shape);
  }
#endif
  return flash_attention_backward_workspace(shape);
}

void attention_forward(ComputeContext& ctx, const AttentionShape& shape, const Tensor& qkv,
                       const Dropout& dropout, const Tensor& out, std::byte* state) {
  if (shape.rows() == 0) return;
#if SLUICE_WITH_CUDNN
  if (takes_cudnn(ctx, shape, qkv.spec.dtype, dropout.probability > 0)) {
    backend_of(ctx).cudnn_attention()->forward(ctx, shape, qkv, out, state);
    return;
  }
#endif
  flash_attention_forward(ctx, shape, qkv, dropout, out, state);
}

void attention_backward(ComputeContext& ctx, const AttentionShape& shape, const Tensor& qkv,
                        const Tensor& out, const Tensor& dout, const Dropout& dropout,
                        const std::byte* state, const Tensor& dqkv) {
  if (shape.rows() == 0) return;
#if SLUICE_WITH_CUDNN
  if (takes_cudnn(ctx, shape, qkv.spec.dtype, dropout.probability > 0)) {
    backend_of(ctx).cudnn_attention()->backward(ctx, shape, qkv, out, dout, state, dqkv);
    return;
  }
#endif
  flash_attention_backward(ctx, shape, qkv, out, dout, dropout, state, dqkv);
}

}  // namespace sluice::cuda
