// The arithmetic behind the emulated cublasLtMatmul: plain loops over column-major matrices. Each
// element of a result is summed in f32, one product after the other in ascending k, whatever the
// shape, so results repeat bit for bit on every machine.
#pragma once

#include <cublasLt.h>

#include <cstdint>

namespace sluice::emulated {

// Column-major: element (row, column) at row + column * leading.
struct Matrix {
  cudaDataType type = CUDA_R_32F;  // or CUDA_R_16BF
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  std::int64_t leading = 0;
  std::int64_t batches = 1;
  std::int64_t batch_stride = 0;  // elements
};

// D = epilogue(alpha * op(A) * op(B) + beta * C); C is not read where beta is 0.
struct Matmul {
  Matrix a, b, c, d;  // as they lie in memory
  bool transpose_a = false;
  bool transpose_b = false;
  bool tf32 = false;  // rounds operands of f32 to 10 bits behind the point
  float alpha = 1;
  float beta = 0;
  cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  const void* a_data = nullptr;
  const void* b_data = nullptr;
  const void* c_data = nullptr;
  void* d_data = nullptr;
  // The bias that is read, or the gradient of the bias that is written; elements of D's type.
  void* bias = nullptr;
  std::int64_t bias_stride = 0;  // per batch
  // What went into GELU; elements of D's type; column-major.
  void* aux = nullptr;
  std::int64_t aux_leading = 0;
  std::int64_t aux_stride = 0;  // per batch
};

// Epilogue parts; see cublasLt.h for their meaning.
[[nodiscard]] bool reads_bias(cublasLtEpilogue_t epilogue);
[[nodiscard]] bool writes_bias(cublasLtEpilogue_t epilogue);
[[nodiscard]] bool uses_aux(cublasLtEpilogue_t epilogue);

void compute(const Matmul& matmul);

// Whether Matmul computes this cublasLtEpilogue_t.
[[nodiscard]] bool is_known(std::uint32_t epilogue);

}  // namespace sluice::emulated
