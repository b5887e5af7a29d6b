// What the CUDA kernels and operators of one compute context share: the libraries' handles, bound
// to the compute stream, the scratch memory of matmuls, and tickets for the blocks of a
// kernel. What operators prepare with these is the part of CudaBackend
// (stages/cuda/cuda_backend.hpp).
//
// Made for the device of one memory and one stream, which outlives it; the device is the current
// one of the calling thread whenever a member or an operator is called. Used from one thread.
// Nothing here blocks the host once a matmul or graph was made.
//
// The toolkit's headers are not needed to include this: cublasLtHandle_t and cudnnHandle_t are
// pointers to the two types declared below.
#pragma once

#include <cstddef>
#include <string>

#include <sluice/compute.hpp>
#include <sluice/device.hpp>

#include "stages/compute/backend.hpp"
#include "stages/compute/context_access.hpp"

struct cublasLtContext;
struct cudnnContext;

namespace sluice::cuda {

class Context : public Backend {
 public:
  // Bytes of scratch that every matmul may use: what NVIDIA advises for Hopper. Part of what a
  // matmul's bits depend on, hence fixed.
  static constexpr std::size_t kWorkspaceBytes = std::size_t{32} << 20;
  static constexpr int kTickets = 1024;
  // Of the memory that workspace() and tickets() share.
  static constexpr std::size_t kDeviceBytes = kWorkspaceBytes + kTickets * sizeof(unsigned);

  // Throws Error(kDevice) naming the call that failed.
  Context(const OperatorTable& operators, const DeviceMemory& memory, StreamView stream);
  ~Context() override;

  [[nodiscard]] Device device() const { return memory_.device(); }
  [[nodiscard]] StreamView stream() const { return stream_; }
  // Major * 10 + minor: 90 for an H100 or H200.
  [[nodiscard]] int compute_capability() const { return compute_capability_; }
  // Bytes of one multiprocessor, which the blocks on it share.
  [[nodiscard]] std::size_t shared_memory() const { return shared_memory_; }

  // The handle is a cublasLtHandle_t.
  [[nodiscard]] cublasLtContext* cublas() const { return cublas_; }
  [[nodiscard]] void* native_blas() override { return cublas_; }
  // Device memory, kWorkspaceBytes at a multiple of 256, taken on first use. Any work on
  // stream() may use it, in stream order; the next operator overwrites it.
  [[nodiscard]] std::byte* workspace();
  // kTickets numbers in device memory, allocated with workspace(). Each is 0 when a kernel on
  // stream() starts, and the kernel must leave it 0 (as last_block() does in
  // stages/cuda_kernels/device_tools.hpp).
  [[nodiscard]] unsigned* tickets();

  // cudnnHandle_t, bound to stream(); created on first use, which is slow. Null in builds without
  // cuDNN. Throws Error(kDevice) if the library cannot start.
  [[nodiscard]] cudnnContext* cudnn();

  // Whether matmuls, attention's too, may round f32 operands to TF32 (10 bits of mantissa), which
  // is several times as fast. Off by default (--precision tf32). Set it before the first matmul.
  [[nodiscard]] bool tf32() const { return tf32_; }
  void set_tf32(bool allowed) override { tf32_ = allowed; }

 private:
  DeviceMemory memory_;
  StreamView stream_;
  int compute_capability_ = 0;
  std::size_t shared_memory_ = 0;
  bool tf32_ = false;
  Buffer workspace_;  // followed by the tickets
  cublasLtContext* cublas_ = nullptr;
  cudnnContext* cudnn_ = nullptr;
};

// Of a compute context for a GPU.
[[nodiscard]] inline Context& context_of(const ComputeContext& ctx) {
  return static_cast<Context&>(ContextAccess::backend(ctx));
}

// "cuBLASLt 13.1.0, cuDNN 9.19.0": the libraries in use, for reports.
[[nodiscard]] std::string libraries();

}  // namespace sluice::cuda
