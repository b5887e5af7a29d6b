// The mathematics of the element-wise operators, written once. V is the value type of whoever
// includes this: a vector of the CPU's kernel sets or a single float of the CUDA kernels, W a word
// (or vector of words) to go with it. Arithmetic is in f32 for every type of operand.
//
// Stands on the operations of stages/cpu_kernels/vector.hpp or stages/tensor/kernel_lane.hpp, which
// are included first (templates over built-in types find only what was declared before them).
#pragma once

#include <stdint.h>

#include "stages/tensor/kernel_arguments.hpp"

namespace sluice::SLUICE_KERNEL_NAMESPACE {

// --- bfloat16: the upper half of an f32, in the low 16 bits of a word ---
// To nearest even; NaN becomes the quiet NaN 0x7FC0.
template <typename V>
SLUICE_MATH typename Lanes<V>::Word round_to_bf16(V value) {
  using W = typename Lanes<V>::Word;
  const W bits = bits_as<W>(value);
  const W rounded = (bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16;
  return value == value ? rounded : constant<W>(0x7FC0U);
}

// To one of the two neighbours, up in magnitude with the probability that makes the mean exact. The
// low 16 bits of `random` are uniform; what is above them does not count.
template <typename V>
SLUICE_MATH typename Lanes<V>::Word round_at_random(V value, typename Lanes<V>::Word random) {
  using W = typename Lanes<V>::Word;
  const W rounded = (bits_as<W>(value) + (random & 0xFFFFU)) >> 16;
  return value == value ? rounded : constant<W>(0x7FC0U);
}

// --- losses ---
// To the nearest multiple of 2^-26, below what f32 logits tell apart. Sums of such numbers are
// exact up to 2^27, so they have no order: not of rows, micro-batches or replicas.
SLUICE_MATH double rounded_loss(double loss) {
  constexpr double kShift = 1.5 * (1 << 26);  // whose last bit is 2^-26
  return loss + kShift - kShift;
}

// --- functions of one number ---
// e^x to about 1 ulp for x in [-86.9, high], the nearest end's value outside, NaN for NaN (one
// whose low nine bits are zero, as those that arithmetic makes and conversion leaves); high is at
// most 88.3. Range reduction by a two-part ln 2 and Cephes' expf polynomial; 2^n by adding to the
// exponent.
template <typename V>
SLUICE_MATH V exponential(V x, float high = 88.3F) {
  using I = typename Lanes<V>::Int;
  const V magic = constant<V>(12582912.0F);  // 1.5 * 2^23
  x = minimum(constant<V>(high), maximum(constant<V>(-86.9F), x));
  const V shifted = fma(x, constant<V>(1.44269504088896341F), magic);
  const V n = shifted - magic;
  V r = fma(n, constant<V>(-0.693359375F), x);
  r = fma(n, constant<V>(2.12194440e-4F), r);
  V p = constant<V>(1.9875691500e-4F);
  p = fma(p, r, constant<V>(1.3981999507e-3F));
  p = fma(p, r, constant<V>(8.3334519073e-3F));
  p = fma(p, r, constant<V>(4.1665795894e-2F));
  p = fma(p, r, constant<V>(1.6666665459e-1F));
  p = fma(p, r, constant<V>(5.0000001201e-1F));
  p = fma(p, r * r, r) + 1.0F;
  return bits_as<V>(bits_as<I>(p) + (bits_as<I>(shifted) << 23));
}

#if defined(__CUDA_ARCH__)
// The same on a GPU, whose instruction for 2^f takes the polynomial's place: half the instructions,
// and within 2 ulp more (ex2.approx: 2^-22). Times 2^n, exactly: to add n to the exponent would
// make a number of a GPU's NaN, 0x7FFFFFFF.
SLUICE_MATH float exponential(float x, float high = 88.3F) {
  constexpr float kMagic = 12582912.0F;
  asm("max.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(-86.9F));
  asm("min.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(high));
  const float shifted = fma(x, 1.44269504088896341F, kMagic);
  const float n = shifted - kMagic;
  float f = fma(x, 1.44269502162933350F, -n);  // and what that lacks of log2 e
  f = fma(x, 1.92596303e-8F, f);
  asm("ex2.approx.ftz.f32 %0, %0;" : "+f"(f));
  return f * bits_as<float>((bits_as<int32_t>(shifted) << 23) + 0x3F800000);
}
#endif

// e^x for x <= 0, NaN for NaN, where small results may be less exact: on a GPU a product and ex2, 0
// below 2^-126. Relative error there at most 2^-22 + 1.4e-7 |x|: both roundings of x, the
// constant's, ex2.approx's 2^-22.
template <typename V>
SLUICE_MATH V exponential_below_one(V x) {
#if defined(__CUDA_ARCH__)
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x * 1.44269504088896341F));
  return result;
#else
  return exponential(x);
#endif
}

// At least e^-80, so that nothing here is ever denormal.
template <typename V>
SLUICE_MATH V sigmoid(V x) {
  return reciprocal(1.0F + exponential(-x, 80.0F));
}

// The normal distribution: its density, and its function to about 5e-7 of the result, for x in
// [-13, 13]; the nearest end's outside. The tail beyond |x| is e^(-x^2/2) t q(t) with t = 1 / (1 +
// 0.3 |x|), the form of Abramowitz and Stegun 7.1.26; q is fitted by least squares at Chebyshev
// nodes.
template <typename V>
struct NormalPoint {
  V density, function;
};
template <typename V>
SLUICE_MATH NormalPoint<V> normal_at(V x) {
  const V zero = constant<V>(0.0F);
  const V away = minimum(constant<V>(13.0F), x < 0.0F ? zero - x : x);
  const V e = exponential(away * away * -0.5F);
  const V t = reciprocal(fma(away, constant<V>(0.3F), constant<V>(1.0F)));
  V q = constant<V>(0.0366498902F);
  q = fma(q, t, constant<V>(-0.16117619F));
  q = fma(q, t, constant<V>(0.213043198F));
  q = fma(q, t, constant<V>(-0.0596977994F));
  q = fma(q, t, constant<V>(0.131669611F));
  q = fma(q, t, constant<V>(0.0989928693F));
  q = fma(q, t, constant<V>(0.120898366F));
  q = fma(q, t, constant<V>(0.119620055F));
  const V tail = e * t * q;
  return {e * 0.3989422804F, x < 0.0F ? tail : 1.0F - tail};
}

// --- Pointwise: value(x), and gradient(x, dy) = dy times the derivative at x ---
// In the order of the enumeration; X is called with each name.
#define SLUICE_POINTWISE(X) X(Relu) X(Gelu) X(GeluTanh) X(Silu) X(Tanh) X(Sigmoid)

struct Relu {
  template <typename V>
  SLUICE_MATH V value(V x) {
    return x < 0.0F ? V{} : x;  // NaN stays
  }
  template <typename V>
  SLUICE_MATH V gradient(V x, V dy) {
    return x > 0.0F ? dy : V{};
  }
};

struct Gelu {
  template <typename V>
  SLUICE_MATH V value(V x) {
    return maximum(constant<V>(-13.0F), x) * normal_at(x).function;
  }
  template <typename V>
  SLUICE_MATH V gradient(V x, V dy) {
    const NormalPoint<V> at = normal_at(x);
    const V within = minimum(constant<V>(13.0F), maximum(constant<V>(-13.0F), x));
    return dy * fma(within, at.density, at.function);
  }
};

// x (1 + tanh(u)) / 2 = x sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3). Up to 5e-4 from Gelu.
struct GeluTanh {
  static constexpr float kScale = 1.5957691216057308F;  // 2 sqrt(2 / pi)
  static constexpr float kCubic = 0.044715F;
  template <typename V>
  SLUICE_MATH V value(V x) {
    return x * sigmoid(x * kScale * fma(x * x, constant<V>(kCubic), constant<V>(1.0F)));
  }
  template <typename V>
  SLUICE_MATH V gradient(V x, V dy) {
    const V one = constant<V>(1.0F), square = x * x;
    const V s = sigmoid(x * kScale * fma(square, constant<V>(kCubic), one));
    const V du = kScale * fma(square, constant<V>(3 * kCubic), one);
    return dy * fma(x * du, s - s * s, s);
  }
};

struct Silu {
  template <typename V>
  SLUICE_MATH V value(V x) {
    return x * sigmoid(x);
  }
  template <typename V>
  SLUICE_MATH V gradient(V x, V dy) {
    const V s = sigmoid(x);
    return dy * fma(x, s - s * s, s);
  }
};

// tanh(x) = 2 sigmoid(2x) - 1: within 2^-23 of it, which near 0 is not relative.
struct Tanh {
  template <typename V>
  SLUICE_MATH V value(V x) {
    return fma(sigmoid(x + x), constant<V>(2.0F), constant<V>(-1.0F));
  }
  template <typename V>
  SLUICE_MATH V gradient(V x, V dy) {
    const V s = sigmoid(x + x);
    return dy * (4.0F * (s - s * s));
  }
};

struct Sigmoid {
  template <typename V>
  SLUICE_MATH V value(V x) {
    return sigmoid(x);
  }
  template <typename V>
  SLUICE_MATH V gradient(V x, V dy) {
    const V s = sigmoid(x);
    return dy * (s - s * s);
  }
};

template <typename V>
SLUICE_MATH V swiglu(V gate, V up) {
  return gate * sigmoid(gate) * up;
}
template <typename V>
SLUICE_MATH void swiglu_gradient(V gate, V up, V dy, V& dgate, V& dup) {
  const V s = sigmoid(gate);
  dgate = dy * up * fma(gate, s - s * s, s);
  dup = dy * (gate * s);
}

// A pair of rotary positions turned by an angle: (low, high) -> (low c - high s, high c + low s).
template <typename V>
SLUICE_MATH void turn(V& low, V& high, V cosine, V sine) {
  const V a = low, b = high;
  low = a * cosine - b * sine;
  high = b * cosine + a * sine;
}

// --- normalisation ---
template <typename V>
SLUICE_MATH V layer_norm_value(V x, float mean, float rstd, V gamma, V beta) {
  const V normal = (x - mean) * rstd;
  return fma(normal, gamma, beta);
}
template <typename V>
SLUICE_MATH V rms_norm_value(V x, float rstd, V gamma) {
  return x * rstd * gamma;
}
// With g = dy * gamma, n the normalised x and means over the row, dx gains
// rstd (g - mean(g) - n mean(g n)) = rstd g + slope (x - mean) + shift.
struct NormGradient {
  float rstd, mean, slope, shift;
};
// sum: of g; dot: of g (x - mean); inverse: 1 / width.
SLUICE_MATH NormGradient layer_norm_gradient(float mean, float rstd, float sum, float dot,
                                             float inverse) {
  return {rstd, mean, -rstd * rstd * rstd * dot * inverse, -rstd * sum * inverse};
}
template <typename V>
SLUICE_MATH V layer_norm_change(const NormGradient& row, V g, V x) {
  return fma(g, constant<V>(row.rstd),
             fma(x - row.mean, constant<V>(row.slope), constant<V>(row.shift)));
}
// RMSNorm: no mean, no shift. dot: of g x.
SLUICE_MATH NormGradient rms_norm_gradient(float rstd, float dot, float inverse) {
  return {rstd, 0, -rstd * rstd * rstd * dot * inverse, 0};
}
template <typename V>
SLUICE_MATH V rms_norm_change(const NormGradient& row, V g, V x) {
  return fma(g, constant<V>(row.rstd), x * row.slope);
}

// --- softmax ---
// Gradient of a score from the probability p, the gradient dp of p and delta, the row's sum of p
// dp.
template <typename V>
SLUICE_MATH V softmax_gradient(V p, V dp, V delta, V scale) {
  return p * scale * (dp - delta);
}

// --- dropout: Philox4x32-10 (Salmon et al. 2011); <sluice/tensor.hpp> says what the words mean ---
// The halves of a product of words. In vectors of 64-bit lanes a word is the low half, and what is
// above it means nothing; multiply_low() is their product of low halves.
template <typename W>
SLUICE_MATH void multiply_words(W a, uint32_t b, W& high, W& low) {
  low = multiply_low(a, constant<W>(uint64_t{b}));
  high = low >> 32;
}
SLUICE_MATH void multiply_words(uint32_t a, uint32_t b, uint32_t& high, uint32_t& low) {
  const uint64_t product = uint64_t{a} * b;
  low = static_cast<uint32_t>(product);
  high = static_cast<uint32_t>(product >> 32);
}
// Replaces the counter's words 0 to 3 by those of its block under `key`; W: 64-bit lanes, or one
// 32-bit word.
template <typename W>
SLUICE_MATH void philox_rounds(const uint32_t (&key)[2], W& a, W& b, W& c, W& d) {
  uint32_t key0 = key[0], key1 = key[1];
  for (int round = 0; round < 10; ++round) {
    W p, q, high_p, high_q;
    multiply_words(a, 0xD2511F53U, high_p, p);
    multiply_words(c, 0xCD9E8D57U, high_q, q);
    a = high_q ^ b ^ constant<W>(uint64_t{key0});
    b = q;
    c = high_p ^ d ^ constant<W>(uint64_t{key1});
    d = p;
    key0 += 0x9E3779B9U;
    key1 += 0xBB67AE85U;
  }
}
// The key of a RandomKey's stream: the first two words of the block whose counter is the low word
// of site, step, and a constant with the high word of site in it, under the seed. W: one 32-bit
// word.
template <typename W>
SLUICE_MATH void philox_stream_key(uint64_t seed, uint64_t site, uint64_t step,
                                   uint32_t (&key)[2]) {
  const uint32_t under[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
  W a = static_cast<W>(site), b = static_cast<W>(step), c = static_cast<W>(step >> 32);
  W d = 0x536C7563U ^ static_cast<W>(site >> 32);
  philox_rounds(under, a, b, c, d);
  key[0] = a;
  key[1] = b;
}
template <typename V>
SLUICE_MATH V drop(V value, typename Lanes<V>::Word word, const DropoutArguments& dropout) {
  using I = typename Lanes<V>::Int;
  const I drawn = bits_as<I>(word >> 8);  // below 2^24: signed and unsigned order agree
  return drawn >= constant<I>(static_cast<int32_t>(dropout.threshold)) ? value * dropout.factor
                                                                       : V{};
}

// --- optimizers ---
// Decoupled weight decay first, then the step, as in PyTorch. Adam adds it to the gradient instead.
template <typename V>
SLUICE_MATH void adamw_update(const AdamWArguments& a, V grad, V& value, V& first, V& second) {
  const float keep = 1.0F - a.learning_rate * a.decay;
  const float rate = a.learning_rate * a.inverse1;
  V g = grad * a.grad_scale;
  if (a.coupled_decay != 0) g = g + value * a.coupled_decay;
  first = first * a.beta1 + g * (1.0F - a.beta1);
  second = second * a.beta2 + g * g * (1.0F - a.beta2);
  const V step = first * rate * reciprocal(fast_square_root(second * a.inverse2) + a.epsilon);
  value = value * keep - step;
}
template <typename V>
SLUICE_MATH V sgd_direction(const SgdArguments& a, V grad, V value) {
  return grad * a.grad_scale + value * a.decay;
}
template <typename V>
SLUICE_MATH V sgd_momentum(const SgdArguments& a, V direction, V velocity) {
  return velocity * a.momentum + direction;
}
// The direction of the step; `velocity` is the one that sgd_momentum() made.
template <typename V>
SLUICE_MATH V sgd_step(const SgdArguments& a, V direction, V velocity) {
  return a.nesterov ? direction + velocity * a.momentum : velocity;
}
template <typename V>
SLUICE_MATH V sgd_value(const SgdArguments& a, V value, V direction) {
  return value - direction * a.learning_rate;
}

}  // namespace sluice::SLUICE_KERNEL_NAMESPACE
