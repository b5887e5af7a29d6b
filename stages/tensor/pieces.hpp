// Cuts the workspace of one operator call into pieces at multiples of kBufferAlignment. Made twice:
// over nothing, to add up what the pieces take, then over that much memory, to hand it out.
#pragma once

#include <cstddef>
#include <cstdint>

#include <sluice/device.hpp>
#include <sluice/tensor.hpp>

namespace sluice {

class Pieces {
 public:
  // base: null, or at least as many bytes as used() will be, at a multiple of kBufferAlignment.
  explicit Pieces(std::byte* base) : base_(base) {}

  // Null where base is.
  [[nodiscard]] std::byte* take(std::int64_t elements, DType dtype) {
    return take_bytes(static_cast<std::size_t>(elements) * size_of(dtype));
  }
  template <typename T>
  [[nodiscard]] T* take(std::int64_t elements) {
    return reinterpret_cast<T*>(take_bytes(static_cast<std::size_t>(elements) * sizeof(T)));
  }
  [[nodiscard]] std::size_t used() const { return used_; }

 private:
  std::byte* take_bytes(std::size_t bytes) {
    std::byte* piece = base_ == nullptr ? nullptr : base_ + used_;
    used_ += round_up(bytes, kBufferAlignment);
    return piece;
  }

  std::byte* base_;
  std::size_t used_ = 0;
};

}  // namespace sluice
