#include "tests/emulated_cuda/matmul.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

namespace sluice::emulated {

namespace {

// A tile of the result: kTileRows x kTileColumns elements, summed in registers.
constexpr std::int64_t kTileRows = 32;
constexpr std::int64_t kTileColumns = 4;

using Tile = float[kTileColumns][kTileRows];

float load(cudaDataType type, const void* data, std::int64_t index) {
  if (type == CUDA_R_32F) return static_cast<const float*>(data)[index];
  const std::uint32_t bits = static_cast<const std::uint16_t*>(data)[index];
  return std::bit_cast<float>(bits << 16);
}

void store(cudaDataType type, void* data, std::int64_t index, float value) {
  if (type == CUDA_R_32F) {
    static_cast<float*>(data)[index] = value;
    return;
  }
  auto bits = std::bit_cast<std::uint32_t>(value);
  // To the nearest, ties to even; a NaN stays one.
  bits = std::isnan(value) ? bits | 0x400000U : bits + 0x7FFFU + (bits >> 16 & 1U);
  static_cast<std::uint16_t*>(data)[index] = static_cast<std::uint16_t>(bits >> 16);
}

float rounded_to_tf32(float value) {
  if (!std::isfinite(value)) return value;
  auto bits = std::bit_cast<std::uint32_t>(value);
  bits += 0xFFFU + (bits >> 13 & 1U);
  return std::bit_cast<float>(bits & ~0x1FFFU);
}

// One batch of op(A) or op(B).
struct Operand {
  const Matrix& matrix;
  const void* data;
  std::int64_t offset;  // elements
  bool is_transposed;
  bool tf32;

  [[nodiscard]] float at(std::int64_t row, std::int64_t column) const {
    const std::int64_t index =
        is_transposed ? column + row * matrix.leading : row + column * matrix.leading;
    const float value = load(matrix.type, data, offset + index);
    return tf32 && matrix.type == CUDA_R_32F ? rounded_to_tf32(value) : value;
  }
};

// Tiles of op(A): for each k the elements of kTileRows rows; of op(B): of kTileColumns columns.
// Beyond the edge zeros.
std::vector<float> pack_rows(const Operand& a, std::int64_t first, std::int64_t m, std::int64_t k) {
  std::vector<float> packed(static_cast<std::size_t>(kTileRows * k), 0.0F);
  const std::int64_t rows = std::min(kTileRows, m - first);
  for (std::int64_t p = 0; p < k; ++p) {
    float* to = packed.data() + p * kTileRows;
    for (std::int64_t i = 0; i < rows; ++i) to[i] = a.at(first + i, p);
  }
  return packed;
}

std::vector<float> pack_columns(const Operand& b, std::int64_t k, std::int64_t n) {
  const std::int64_t tiles = (n + kTileColumns - 1) / kTileColumns;
  std::vector<float> packed(static_cast<std::size_t>(tiles * kTileColumns * k), 0.0F);
  for (std::int64_t j = 0; j < n; ++j) {
    float* to = packed.data() + j / kTileColumns * kTileColumns * k + j % kTileColumns;
    for (std::int64_t p = 0; p < k; ++p) to[p * kTileColumns] = b.at(p, j);
  }
  return packed;
}

[[gnu::always_inline]] inline void add_products(const float* a, const float* b, std::int64_t k,
                                                Tile& sums) {
  Tile local = {};
  for (std::int64_t p = 0; p < k; ++p) {
    for (std::int64_t j = 0; j < kTileColumns; ++j) {
      for (std::int64_t i = 0; i < kTileRows; ++i) {
        local[j][i] += a[p * kTileRows + i] * b[p * kTileColumns + j];
      }
    }
  }
  std::memcpy(sums, local, sizeof local);
}

void sum_tile_anywhere(const float* a, const float* b, std::int64_t k, Tile& sums) {
  add_products(a, b, k, sums);
}

#if defined(__x86_64__)
// The same operations in the same order, in longer vectors.
[[gnu::target("avx2")]] void sum_tile_avx2(const float* a, const float* b, std::int64_t k,
                                           Tile& sums) {
  add_products(a, b, k, sums);
}
#endif

void sum_tile(const float* a, const float* b, std::int64_t k, Tile& sums) {
#if defined(__x86_64__)
  static const bool has_avx2 = __builtin_cpu_supports("avx2") != 0;
  if (has_avx2) {
    sum_tile_avx2(a, b, k, sums);
    return;
  }
#endif
  sum_tile_anywhere(a, b, k, sums);
}

bool has(cublasLtEpilogue_t epilogue, int part) { return (static_cast<int>(epilogue) & part) != 0; }

bool is_gelu(cublasLtEpilogue_t epilogue) { return has(epilogue, CUBLASLT_EPILOGUE_GELU); }

bool is_gelu_gradient(cublasLtEpilogue_t epilogue) { return has(epilogue, 64); }

constexpr float kGeluScale = 0.7978845608F;  // sqrt(2 / pi)
constexpr float kGeluCube = 0.044715F;

float gelu(float x) {
  return 0.5F * x * (1.0F + std::tanh(kGeluScale * (x + kGeluCube * x * x * x)));
}

float gelu_gradient(float x) {
  const float t = std::tanh(kGeluScale * (x + kGeluCube * x * x * x));
  const float slope = kGeluScale * (1.0F + 3.0F * kGeluCube * x * x);
  return 0.5F * (1.0F + t) + 0.5F * x * (1.0F - t * t) * slope;
}

// One batch.
class Job {
 public:
  Job(const Matmul& matmul, std::int64_t batch)
      : matmul_(matmul),
        a_{matmul.a, matmul.a_data, batch * matmul.a.batch_stride, matmul.transpose_a, matmul.tf32},
        b_{matmul.b, matmul.b_data, batch * matmul.b.batch_stride, matmul.transpose_b, matmul.tf32},
        c_offset_(batch * matmul.c.batch_stride),
        d_offset_(batch * matmul.d.batch_stride),
        bias_offset_(batch * matmul.bias_stride),
        aux_offset_(batch * matmul.aux_stride),
        m_(matmul.d.rows),
        n_(matmul.d.columns),
        k_(matmul.transpose_a ? matmul.a.rows : matmul.a.columns) {}

  void run() {
    if (matmul_.epilogue == CUBLASLT_EPILOGUE_BGRADA) sum_operand(a_, m_, true);
    if (matmul_.epilogue == CUBLASLT_EPILOGUE_BGRADB) sum_operand(b_, n_, false);
    row_sums_.assign(static_cast<std::size_t>(m_), 0.0F);
    const std::vector<float> columns = pack_columns(b_, k_, n_);
    for (std::int64_t row = 0; row < m_; row += kTileRows) {
      const std::vector<float> rows = pack_rows(a_, row, m_, k_);
      for (std::int64_t column = 0; column < n_; column += kTileColumns) {
        Tile sums;
        sum_tile(rows.data(), columns.data() + column * k_, k_, sums);
        for (std::int64_t j = column; j < std::min(n_, column + kTileColumns); ++j) {
          for (std::int64_t i = row; i < std::min(m_, row + kTileRows); ++i) {
            finish(i, j, sums[j - column][i - row]);
          }
        }
      }
    }
    if (matmul_.epilogue == CUBLASLT_EPILOGUE_DGELU_BGRAD) {
      for (std::int64_t i = 0; i < m_; ++i) {
        store(matmul_.d.type, matmul_.bias, bias_offset_ + i,
              row_sums_[static_cast<std::size_t>(i)]);
      }
    }
  }

 private:
  void finish(std::int64_t i, std::int64_t j, float sum) {
    const cudaDataType type = matmul_.d.type;
    float value = matmul_.alpha * sum;
    if (matmul_.beta != 0) {
      value += matmul_.beta *
               load(matmul_.c.type, matmul_.c_data, c_offset_ + i + j * matmul_.c.leading);
    }
    if (reads_bias(matmul_.epilogue)) value += load(type, matmul_.bias, bias_offset_ + i);
    const std::int64_t aux = aux_offset_ + i + j * matmul_.aux_leading;
    if (is_gelu(matmul_.epilogue)) {
      if (uses_aux(matmul_.epilogue)) store(type, matmul_.aux, aux, value);
      value = gelu(value);
    } else if (is_gelu_gradient(matmul_.epilogue)) {
      value *= gelu_gradient(load(type, matmul_.aux, aux));
      row_sums_[static_cast<std::size_t>(i)] += value;
    }
    store(type, matmul_.d_data, d_offset_ + i + j * matmul_.d.leading, value);
  }

  // Over k, of each row of op(A) or each column of op(B).
  void sum_operand(const Operand& operand, std::int64_t count, bool rows) {
    for (std::int64_t i = 0; i < count; ++i) {
      float sum = 0;
      for (std::int64_t p = 0; p < k_; ++p) sum += rows ? operand.at(i, p) : operand.at(p, i);
      store(matmul_.d.type, matmul_.bias, bias_offset_ + i, sum);
    }
  }

  const Matmul& matmul_;
  Operand a_, b_;
  std::int64_t c_offset_, d_offset_, bias_offset_, aux_offset_;  // elements
  std::int64_t m_, n_, k_;
  std::vector<float> row_sums_;
};

}  // namespace

bool reads_bias(cublasLtEpilogue_t epilogue) { return has(epilogue, CUBLASLT_EPILOGUE_BIAS); }

bool writes_bias(cublasLtEpilogue_t epilogue) {
  return epilogue == CUBLASLT_EPILOGUE_DGELU_BGRAD || epilogue == CUBLASLT_EPILOGUE_BGRADA ||
         epilogue == CUBLASLT_EPILOGUE_BGRADB;
}

bool uses_aux(cublasLtEpilogue_t epilogue) { return has(epilogue, 128); }

void compute(const Matmul& matmul) {
  for (std::int64_t batch = 0; batch < matmul.d.batches; ++batch) Job(matmul, batch).run();
}

bool is_known(std::uint32_t epilogue) {
  switch (static_cast<cublasLtEpilogue_t>(epilogue)) {
    case CUBLASLT_EPILOGUE_DEFAULT:
    case CUBLASLT_EPILOGUE_BIAS:
    case CUBLASLT_EPILOGUE_GELU:
    case CUBLASLT_EPILOGUE_GELU_BIAS:
    case CUBLASLT_EPILOGUE_GELU_AUX:
    case CUBLASLT_EPILOGUE_GELU_AUX_BIAS:
    case CUBLASLT_EPILOGUE_DGELU:
    case CUBLASLT_EPILOGUE_DGELU_BGRAD:
    case CUBLASLT_EPILOGUE_BGRADA:
    case CUBLASLT_EPILOGUE_BGRADB:
      return true;
    default:
      return false;
  }
}

}  // namespace sluice::emulated
