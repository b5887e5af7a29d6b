// The loops over elements, as tables of functions. Each kernel set is the same source compiled for
// another instruction set; a context picks one table when it is made.
//
// This header is all that the sets and the rest of Sluice share: plain types and pointers only.
// Nothing inline, no standard header: an inline function compiled for AVX-512 here could be the
// copy the linker keeps for the whole program.
//
// Kernels run on the calling thread over the range they are given; operators cut ranges for
// threads. Rows are dense unless a leading dimension is given. `void*` operands have the table's
// element type T (float, or bfloat16 as 16-bit words) where nothing else is said.
#pragma once

#include <stdint.h>

#include "stages/tensor/kernel_arguments.hpp"

namespace sluice {

// LayerNorm or RMSNorm of the residual stream; dy and y of the table's type T. `void*`: x, residual
// and dx are of type X. stats: mean (LayerNorm alone), rstd per row. RMSNorm has no beta.
struct NormKernels {
  void (*forward)(const void* x, const float* gamma, const float* beta, float epsilon, void* y,
                  float* stats, int64_t rows, int64_t width);
  // dx = residual + the gradient; residual: null, or dx. rounded: dx in bf16, or null.
  void (*backward)(const void* dy, const void* x, const float* gamma, const float* stats,
                   const void* residual, void* dx, void* rounded, int64_t rows, int64_t width);
  // Columns [0, width) of matrices with leading dimension ld.
  void (*weights)(const void* dy, const void* x, const float* stats, int64_t ld, int64_t rows,
                  int64_t width, float* dgamma, float* dbeta);
};

struct PointwiseKernels {
  void (*forward)(const void* x, void* y, int64_t n);
  void (*backward)(const void* x, const void* dy, void* dx, int64_t n);
};

struct TypedKernels {
  const PointwiseKernels* pointwise;  // [Pointwise]
  void (*swiglu_forward)(const void* gate_up, void* y, int64_t rows, int64_t hidden);
  void (*swiglu_backward)(const void* gate_up, const void* dy, void* dgate_up, int64_t rows,
                          int64_t hidden);
  void (*dropout)(const DropoutArguments* dropout, const void* x, void* y, int64_t n);
  void (*dropout_from_float)(const DropoutArguments* dropout, const void* x, void* y,
                             int64_t n);  // x: floats
  // y = residual + dropout(x); residual and y: floats, or of type T
  void (*dropout_residual)(const DropoutArguments* dropout, const void* x, const void* residual,
                           void* y, int64_t n);
  void (*dropout_residual_typed)(const DropoutArguments* dropout, const void* x,
                                 const void* residual, void* y, int64_t n);
  // y += x; y: floats, or of type T
  void (*add)(const void* x, void* y, int64_t n);
  void (*add_typed)(const void* x, void* y, int64_t n);
  // y = x; the other side: floats
  void (*to_float)(const void* x, void* y, int64_t n);
  void (*from_float)(const void* x, void* y, int64_t n);
  // sums[column] += sum over rows, for `width` columns of a matrix with leading dimension `ld`.
  void (*column_sums)(const void* x, int64_t ld, int64_t rows, int64_t width, float* sums);
  // RMSNorm of `heads` vectors of head_dim, in place. raw: what was there, of type T; stats: rstd
  // of each.
  void (*head_norm_forward)(void* x, int64_t heads, int64_t head_dim, const float* gain,
                            float epsilon, void* raw, float* stats);
  // In place: dx holds the gradient of the result, then that of raw. dgain [head_dim] is added to.
  void (*head_norm_backward)(void* dx, const void* raw, int64_t heads, int64_t head_dim,
                             const float* gain, const float* stats, float* dgain);
  // Rotates the halves of `heads` vectors of head_dim, in place; cosine and sine [head_dim / 2].
  void (*rotate)(void* x, int64_t heads, int64_t head_dim, const float* cosine, const float* sine);

  NormKernels layer_norm, rms_norm;              // X = float
  NormKernels layer_norm_typed, rms_norm_typed;  // X = T

  // Rows [first, first + rows) of a causal score matrix: row r sees the last `seen` of columns
  // 0..r. Writes probabilities, and zeros to the rest of columns [begin, end), which hold all that
  // a row sees; begin is a multiple of 16. Pointers are to column 0. Leading dimension ld of both,
  // a multiple of 16 and at least `end`; the rows' padding up to a multiple of 16 columns may be
  // overwritten. `scores` are lost; for T = float they may be the same memory as `probabilities`.
  void (*causal_softmax)(float* scores, int64_t ld, int64_t first, int64_t rows, int64_t seen,
                         int64_t begin, int64_t end, float scale, void* probabilities);
  // dscores = scale * p * (dp - delta[row]) on the same ranges; dscores may be dp for T = float.
  void (*causal_softmax_backward)(const void* probabilities, const float* dprobabilities,
                                  const float* delta, int64_t ld, int64_t first, int64_t rows,
                                  int64_t seen, int64_t begin, int64_t end, float scale,
                                  void* dscores);
  // delta[row] = dot(a row, b row); width elements a row, leading dimension ld.
  void (*row_dots)(const void* a, const void* b, int64_t ld, int64_t rows, int64_t width,
                   float* delta);
  // Row-wise cross-entropy; losses[row] = -log softmax(logits)[target], 0 where target < 0.
  void (*cross_entropy)(void* logits, const int32_t* targets, float scale, bool gradient,
                        double* losses, int64_t rows, int64_t width);
  // The same by panels: classes [first, first + width) of the rows. A row without a target has any
  // maximum, and a sum of 0.
  // maxima[row]: at least what it was; a NaN does not count.
  void (*panel_maxima)(const void* logits, const int32_t* targets, float* maxima, int64_t rows,
                       int64_t width);
  // sums[row] = sum of exp(logit - shift), NaN where a logit is; wanted[row] = the target's logit
  // where it is here. With `gradient` the logits become what panel_gradient() takes.
  void (*panel_sums)(void* logits, const int32_t* targets, int64_t first, const float* shifts,
                     bool gradient, float* sums, float* wanted, int64_t rows, int64_t width);
  void (*panel_gradient)(void* logits, const int32_t* targets, int64_t first, const float* shifts,
                         float scale, const float* sums, int64_t rows, int64_t width);
  // Moments of type T.
  void (*adamw)(const AdamWArguments* arguments, const AdamWRange* range, int64_t n);
};

struct Kernels {
  const char* name;
  TypedKernels f32, bf16;
  // Sum of squared differences; with `gradient`, outputs become factor * (outputs - targets).
  double (*squared_error)(float* outputs, const float* targets, float factor, bool gradient,
                          int64_t n);
  void (*sgd)(const SgdArguments* arguments, float* value, const float* grad, float* velocity,
              int64_t n);
  double (*sum_of_squares)(const float* values, int64_t n);
  // cross_entropy()'s losses, of the rows' sums and the targets' logits.
  void (*row_losses)(const int32_t* targets, const float* shifts, const float* sums,
                     const float* wanted, double* losses, int64_t rows);
};

// One per set; the AVX sets exist on x86-64 only.
namespace baseline {
extern const Kernels kKernels;
}
namespace avx2 {
extern const Kernels kKernels;
}
namespace avx512 {
extern const Kernels kKernels;
}

}  // namespace sluice
