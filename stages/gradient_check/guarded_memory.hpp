// Memory with guards on both sides, which a check looks at after each call. Internal to stages/.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include <sluice/device.hpp>
#include <sluice/tensor.hpp>

namespace sluice::nn {

class GuardedMemory {
 public:
  // `name` is for messages: "LayerMemory::scratch". Its bytes are soiled.
  GuardedMemory(std::string name, std::size_t bytes);

  // At a multiple of kBufferAlignment; not null.
  [[nodiscard]] std::byte* data() const { return memory_.data() + kBufferAlignment; }
  [[nodiscard]] std::size_t size() const { return bytes_; }
  // Gives every byte a value with which floats are NaN and integers -1.
  void soil() const;
  // Throws Error(kUsage) where a byte next to the memory changed; `call` is "forward".
  void require_intact(const char* call) const;

 private:
  std::string name_;
  std::size_t bytes_;
  Buffer memory_;
};

// A tensor in guarded memory.
class GuardedTensor {
 public:
  GuardedTensor(std::string name, const TensorSpec& spec);

  [[nodiscard]] Tensor tensor() const { return {memory_.data(), spec_}; }
  [[nodiscard]] std::vector<std::byte> bytes() const;
  void set_bytes(const std::vector<std::byte>& bytes) const;
  void require_intact(const char* call) const { memory_.require_intact(call); }
  // Throws Error(kUsage) where it does not have the bytes that it had.
  void require_same(const char* call, const std::vector<std::byte>& had) const;

 private:
  std::string name_;
  TensorSpec spec_;
  GuardedMemory memory_;
};

// The first element in which two tensors of one type and shape differ, to the bit; -1: none.
[[nodiscard]] std::int64_t first_difference(const TensorSpec& spec, const std::vector<std::byte>& a,
                                            const std::vector<std::byte>& b);
// The element whose bytes begin at `at`.
[[nodiscard]] double value_in(const TensorSpec& spec, const std::byte* at);
// Element `index` as text: "0.25".
[[nodiscard]] std::string number_in(const TensorSpec& spec, const std::vector<std::byte>& bytes,
                                    std::int64_t index);
// Throws Error(kUsage) for a number of a float tensor that is not finite; `what` is "y".
void require_finite(const Tensor& tensor, const char* call, const std::string& what);

}  // namespace sluice::nn
