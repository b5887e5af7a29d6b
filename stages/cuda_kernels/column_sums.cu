#include "stages/cuda_kernels/column_sums.cuh"
#include "stages/cuda_kernels/kernels.hpp"

namespace sluice::cuda {

namespace {

template <typename T>
struct Columns {
  static constexpr int kTerms = 1, kRowsAtOnce = 8;
  const T* values;
  int64_t width;
  template <int N>
  __device__ Floats<N> load(int64_t row, int64_t column) const {
    return cuda::load<N>(values + row * width + column);
  }
  template <int N>
  __device__ void add(const Floats<N>& row, Floats<N> (&sums)[kTerms]) const {
    add_to(sums[0], row);
  }
};

}  // namespace

std::size_t column_sums_workspace(std::int64_t rows, std::int64_t width) {
  return column_sums_bytes(rows, width, 1);
}

void sum_columns(ComputeContext& ctx, const Tensor& dy, const Tensor& sums, Write write) {
  const int64_t width = sums.elements(), rows = width == 0 ? 0 : dy.elements() / width;
  with_type(dy.spec.dtype, [&](auto type) {
    using T = decltype(type);
    write_sums<kWide<T>>(ctx, "column sums", Columns<T>{dy.as<T>(), width}, rows, width,
                         width % kWide<T> == 0 && aligned(dy.data), write, {sums.as<float>()});
  });
}

}  // namespace sluice::cuda
