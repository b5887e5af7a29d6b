// Cuts one memory area into aligned parts, in order. A layout is computed twice by the same calls:
// without a base to measure used(), then over that much memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include <sluice/device.hpp>
#include <sluice/tensor.hpp>

#include "comm/base/byte_sums.hpp"

namespace sluice {

// Every part starts at a multiple of kBufferAlignment. Owns nothing.
class BumpAllocator {
 public:
  BumpAllocator() = default;
  // base: null, or at least as many bytes as used() will be, at a multiple of kBufferAlignment.
  explicit BumpAllocator(std::byte* base) : base_(base) {}

  // Null where base is null; likewise below.
  [[nodiscard]] std::byte* bytes(std::size_t count) {
    std::byte* const here = base_ == nullptr ? nullptr : base_ + used_;
    add_bytes(used_, round_up(count, kBufferAlignment));
    return here;
  }
  [[nodiscard]] std::byte* take(std::int64_t elements, DType dtype) {
    return bytes(static_cast<std::size_t>(elements) * size_of(dtype));
  }
  template <typename T>
  [[nodiscard]] T* take(std::int64_t elements) {
    return reinterpret_cast<T*>(bytes(static_cast<std::size_t>(elements) * sizeof(T)));
  }
  [[nodiscard]] Tensor tensor(DType dtype, std::int64_t rows, std::int64_t columns) {
    const TensorSpec spec{dtype, Shape{rows, columns}};
    return Tensor{bytes(spec.bytes()), spec};
  }
  [[nodiscard]] std::size_t used() const { return used_; }

 private:
  std::byte* base_ = nullptr;
  std::size_t used_ = 0;
};

}  // namespace sluice
