// Values: tensors (non-owning views of device memory with dtype and shape, dense, row-major),
// values that change with the step, and counter-based random numbers.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <sluice/detail/planned_collective.hpp>

#pragma GCC visibility push(default)
namespace sluice {

[[nodiscard]] std::size_t size_of(DType dtype);  // bytes per element
[[nodiscard]] bool is_float(DType dtype);

// bfloat16: the upper half of an fp32. Conversion from fp32 rounds to nearest even; any NaN
// becomes 0x7FC0.
struct Bf16 {
  std::uint16_t bits = 0;
};
[[nodiscard]] float to_float(Bf16 value);
[[nodiscard]] Bf16 to_bf16(float value);

// IEEE 754 binary16. Conversion from fp32 rounds to nearest even, to infinity from 65520 on; any
// NaN becomes 0x7E00 with its sign.
struct F16 {
  std::uint16_t bits = 0;
};
[[nodiscard]] float to_float(F16 value);
[[nodiscard]] F16 to_f16(float value);

// What an operator does with what its result holds.
enum class Write : std::uint8_t { kAdd, kOverwrite };

// Up to six dimensions, each >= 0.
class Shape {
 public:
  static constexpr int kMaxDims = 6;
  Shape() = default;
  Shape(std::initializer_list<std::int64_t> dims);
  explicit Shape(std::span<const std::int64_t> dims);

  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] std::int64_t operator[](int dim) const { return dims_[static_cast<size_t>(dim)]; }
  [[nodiscard]] std::int64_t elements() const;  // 1 for rank 0
  friend bool operator==(const Shape&, const Shape&) = default;

 private:
  std::array<std::int64_t, kMaxDims> dims_ = {};
  int rank_ = 0;
};

[[nodiscard]] std::string to_string(const Shape& shape);  // "[4, 256, 64]"

// A part of a whole: rows of dimension `axis`, `length` of `whole` from `begin` on, such as what
// one of several ranks has of a parameter.
struct Slice {
  int axis = -1;  // -1: all of it
  std::int64_t begin = 0, length = 0, whole = 0;
  [[nodiscard]] bool all() const { return axis < 0; }
  friend bool operator==(const Slice&, const Slice&) = default;
};

// One of the parts that a rank has of a parameter in a model of shards (Shards). Each lies by
// itself in the order of its slice. Parts of one shard follow each other in memory.
struct SlicePart {
  Slice slice;
  int shard = 0;  // of the model's
  friend bool operator==(const SlicePart&, const SlicePart&) = default;
};

struct TensorSpec {
  DType dtype = DType::kF32;
  Shape shape;
  [[nodiscard]] std::size_t bytes() const;
  friend bool operator==(const TensorSpec&, const TensorSpec&) = default;
};

[[nodiscard]] std::string to_string(const TensorSpec& spec);  // "f32 [4, 16]"

struct Tensor {
  void* data = nullptr;
  TensorSpec spec;

  [[nodiscard]] const Shape& shape() const { return spec.shape; }
  [[nodiscard]] std::int64_t elements() const { return spec.shape.elements(); }
  template <typename T>
  [[nodiscard]] T* as() const {
    return static_cast<T*>(data);
  }
  // Element i of an f32 tensor, row-major.
  [[nodiscard]] float& at(std::int64_t i) const { return as<float>()[i]; }
  [[nodiscard]] std::span<float> floats() const {
    return {as<float>(), static_cast<size_t>(elements())};
  }
};

// The type of the elements of a T; T is float, double, Bf16 or an integer type that DType has.
template <typename T>
[[nodiscard]] constexpr DType dtype_of();
template <>
constexpr DType dtype_of<float>() {
  return DType::kF32;
}
template <>
constexpr DType dtype_of<double>() {
  return DType::kF64;
}
template <>
constexpr DType dtype_of<Bf16>() {
  return DType::kBf16;
}
template <>
constexpr DType dtype_of<std::int32_t>() {
  return DType::kI32;
}
template <>
constexpr DType dtype_of<F16>() {
  return DType::kF16;
}
template <>
constexpr DType dtype_of<std::int64_t>() {
  return DType::kI64;
}
template <>
constexpr DType dtype_of<std::uint8_t>() {
  return DType::kU8;
}

// Values that the caller has, as a tensor: it has no copy. Throws Error(kUsage) where the shape has
// another number of elements.
[[nodiscard]] Tensor view(const void* data, std::size_t elements, const TensorSpec& spec);
template <typename T>  // const or not
[[nodiscard]] Tensor view(std::span<T> values, const Shape& shape) {
  return view(values.data(), values.size(), {dtype_of<std::remove_const_t<T>>(), shape});
}
template <typename T>
[[nodiscard]] Tensor view(const std::vector<T>& values, const Shape& shape) {
  return view(std::span<const T>(values), shape);
}

// A tensor with its own host memory.
struct HostTensor {
  TensorSpec spec;
  std::vector<std::byte> bytes;  // spec.bytes() of them
  [[nodiscard]] Tensor tensor() { return {bytes.data(), spec}; }
};

// Names and their values, in an order that matters.
using Facts = std::vector<std::pair<std::string, std::string>>;

// A value that changes with the step. The host reads `value` while it issues the step's work.
// Recorded work that is replayed in later steps (Graph in <sluice/device.hpp>) reads `on_device`.
template <typename T>
struct StepValue {
  constexpr StepValue(T of_this_step = T{}, const T* kernels_read = nullptr)  // NOLINT: a T is one
      : value(of_this_step), on_device(kernels_read) {}
  constexpr operator T() const { return value; }  // NOLINT: and it is a T

  T value;
  // Device memory that holds `value` when work on the stream runs. Null: `value` is constant while
  // the work may run.
  const T* on_device;
};

// --- randomness ---
// Counter-based randomness: Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as
// 1, 2, 3", SC 2011). A number is a function of its purpose, not of the rank or the time, so
// results do not depend on the pipeline's layout. Host and device code share these functions.

// What a random stream is for. Two streams with different keys are independent.
struct RandomKey {
  std::uint64_t seed = 0;
  std::uint64_t site = 0;  // layer and place in it (see random_site), or a hash of a name
  std::uint64_t step = 0;  // training step; 0 for initial values
};

// Philox4x32-10 itself, words in the paper's order.
[[nodiscard]] std::array<std::uint32_t, 4> philox_block(std::array<std::uint32_t, 4> counter,
                                                        std::array<std::uint32_t, 2> key);
// The 64-bit key that stands for a RandomKey: the first two words of the block whose counter is the
// low word of site, step, and a constant with the high word of site in it, under the seed.
[[nodiscard]] std::array<std::uint32_t, 2> philox_key(const RandomKey& key);
// Four 32-bit words for counter (hi, lo) under `key`: the block at lo, hi (low word first) under
// philox_key(key).
[[nodiscard]] std::array<std::uint32_t, 4> philox(const RandomKey& key, std::uint64_t hi,
                                                  std::uint64_t lo);
// In [0, 1), 24 bits.
[[nodiscard]] inline float to_unit(std::uint32_t word) {
  return static_cast<float>(word >> 8) * 0x1.0p-24f;
}
// layer: global index of the layer in the model; place: which use within the layer (< 256).
[[nodiscard]] constexpr std::uint32_t random_site(std::uint32_t layer, std::uint32_t place) {
  return layer << 8 | place;
}
// FNV-1a of 64 bits, for streams named by a parameter. Two of a million names collide with a
// probability of 3e-8.
[[nodiscard]] std::uint64_t hash_name(std::string_view name);

}  // namespace sluice
#pragma GCC visibility pop
