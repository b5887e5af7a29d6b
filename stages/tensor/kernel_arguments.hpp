// Constants of one call of an element-wise kernel, as every backend's kernels take them. Plain
// types only and no standard header: also read by sources that are compiled once per instruction
// set and by device compilers.
#pragma once

#include <stdint.h>

namespace sluice {

// Key and place of a dropout mask: element i is kept where word i % 4 of Philox block i / 4,
// shifted right by 8, is at least `threshold`; kept elements are multiplied by `factor`.
struct DropoutArguments {
  uint32_t key[2];
  uint32_t threshold;  // of 2^24
  float factor;
  uint64_t first;  // index of the range's first element
  // Null, or where a device finds the step that the key is of, with the rest of its RandomKey.
  const uint64_t* step;
  uint64_t seed;
  uint64_t site;
};

struct AdamWArguments {
  float learning_rate, beta1, beta2, epsilon, decay, inverse1, inverse2, grad_scale;
  float coupled_decay;  // added to the gradient
};

// The vectors of one AdamW update. first, second: of f32, or of bf16 with the key of its random
// rounding and the index of the range's first element. bf16_copy: of the values, or
// null.
struct AdamWRange {
  float* value;
  const float* grad;
  void* first;
  void* second;
  void* bf16_copy;
  uint32_t key[2];
  uint64_t element;
};

struct SgdArguments {
  float learning_rate, momentum, decay, grad_scale;
  bool nesterov;
};

}  // namespace sluice
