// Compute context: what operators need besides their operands: device, stream, threads, the cache
// of prepared library primitives, and scratch memory. One per rank; used from one thread. Making
// one takes none of the device's memory but what its libraries take for their handles.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "comm/device.hpp"

namespace sluice {

class MatMulCache;  // stages/matmul.hpp
struct Kernels;     // stages/cpu/kernels/kernels.hpp
namespace cuda {
class Context;  // stages/cuda/context.hpp
}

class ComputeContext {
 public:
  // threads >= 1, else Error(kUsage); binds the calling thread's OpenMP team to that size. Error
  // (kUsage) also where SLUICE_KERNELS names no kernel set, or one this machine cannot run, and
  // where the device cannot be used (require_device). On a GPU it becomes the calling thread's.
  ComputeContext(Device device, int threads);
  ~ComputeContext();  // waits for what is on the stream
  ComputeContext(const ComputeContext&) = delete;
  ComputeContext& operator=(const ComputeContext&) = delete;

  [[nodiscard]] Device device() const { return memory_.device(); }
  // Where the buffers of everything that computes here come from, a stage's own included.
  [[nodiscard]] const DeviceMemory& memory() const { return memory_; }
  [[nodiscard]] int threads() const { return threads_; }
  [[nodiscard]] StreamView stream() const { return stream_.view(); }
  [[nodiscard]] MatMulCache& matmuls() { return *matmuls_; }
  [[nodiscard]] const Kernels& kernels() const { return *kernels_; }

  // Whether a GPU's fp32 products may round their operands to TF32 (off at first); nothing on a
  // CPU. Before the first product.
  void set_tf32(bool allowed);
  // Of a GPU: library handles, prepared products. Requires device().kind == kCuda.
  [[nodiscard]] cuda::Context& cuda() { return *cuda_; }

  // Scratch of one operator call, on the device; contents do not survive the next call. Grows when
  // asked for more than ever before, for which the host waits for the device: a pipeline reserves
  // what its stages describe.
  [[nodiscard]] std::byte* workspace(std::size_t bytes);
  void reserve_workspace(std::size_t bytes);
  // Where it is now; null before it was first asked for.
  [[nodiscard]] const std::byte* workspace_place() const { return workspace_.data(); }
  // The most that operators have asked for so far.
  [[nodiscard]] std::size_t workspace_peak() const { return workspace_peak_; }

  // For positions 0 .. sequence - 1: cosines, sines, negated sines of position *
  // base^(-2i/head_dim), [sequence, 3, head_dim / 2], on the device. Made on first use.
  [[nodiscard]] const float* rotary_table(std::int64_t sequence, std::int64_t head_dim, float base);
  [[nodiscard]] static std::size_t rotary_table_bytes(std::int64_t sequence, std::int64_t head_dim);

 private:
  struct RotaryTable {
    std::int64_t sequence, head_dim;
    float base;
    Buffer values;
  };

  DeviceMemory memory_;
  int threads_;
  Stream stream_;
  Buffer workspace_;
  std::size_t workspace_peak_ = 0;
  std::unique_ptr<MatMulCache> matmuls_;
  std::vector<RotaryTable> rotary_tables_;
  std::shared_ptr<cuda::Context> cuda_;  // null on the CPU
  const Kernels* kernels_;
};

// Bytes of its memory() that a context takes for itself: scratch of the libraries it holds, and
// what kernels keep on the device from one to the next.
[[nodiscard]] std::size_t library_bytes(DeviceKind device);

// "avx512" | "avx2" | "baseline": which build of the element-wise loops a context made now would
// run (SLUICE_KERNELS=baseline|avx2|avx512 in the environment lowers it).
[[nodiscard]] std::string kernel_set();
// The matrix library with version and its instruction set, for reports; and, where products of bf16
// are widened, that they are.
[[nodiscard]] std::string matmul_library();
// Whether this CPU has instructions that make products of bf16 faster than those of f32: AMX, or
// AVX512_BF16 at twice the rate of f32. Intel's processors run the latter at half of f32's rate
// (0.49 of it seen on a 5th generation Xeon without AMX); AMD's are taken to run it at twice.
[[nodiscard]] bool native_bf16();

}  // namespace sluice
