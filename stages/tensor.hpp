// Tensors: non-owning views of device memory with dtype and shape. Dense, row-major.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>

namespace sluice {

// Numbers travel in message headers and must not change.
enum class DType : std::uint8_t { kF32 = 0, kBf16 = 1, kI32 = 2, kU8 = 3, kF64 = 4 };

[[nodiscard]] std::size_t size_of(DType dtype);  // bytes per element
[[nodiscard]] const char* name_of(DType dtype);  // "f32", "bf16", ...

// bfloat16: the upper half of an fp32. Conversion from fp32 rounds to nearest even; any NaN
// becomes 0x7FC0.
struct Bf16 {
  std::uint16_t bits = 0;
};
[[nodiscard]] float to_float(Bf16 value);
[[nodiscard]] Bf16 to_bf16(float value);

// Up to four dimensions, each >= 0.
class Shape {
 public:
  static constexpr int kMaxDims = 4;
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

}  // namespace sluice
