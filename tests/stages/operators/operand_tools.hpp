// Tools of the tests of what operators refuse: operands between canaries, and a refusal's message.
#pragma once

#include <gmock/gmock.h>

#include <algorithm>
#include <cstddef>
#include <functional>
#include <vector>

#include <sluice/error.hpp>
#include <sluice/operators.hpp>

namespace sluice {

constexpr DType kF32 = DType::kF32, kBf16 = DType::kBf16, kI32 = DType::kI32;

using Tensors = std::vector<Tensor>;

inline constexpr AttentionShape kAttention = {
    .samples = 2, .sequence = 3, .heads = 4, .kv_heads = 2, .head_dim = 5};

// Memory of operands, full of NaN but for i32, which are zeros; canaries on either side of each.
class Operands {
 public:
  explicit Operands(const std::vector<TensorSpec>& specs) {
    for (const TensorSpec& spec : specs) {
      std::vector<std::byte>& memory =
          memory_.emplace_back(spec.bytes() + 2 * kCanary, std::byte{0xFF});
      if (spec.dtype == DType::kI32)
        std::fill_n(memory.begin() + kCanary, spec.bytes(), std::byte{0});
      tensors_.push_back({memory.data() + kCanary, spec});
    }
    before_ = memory_;
  }
  [[nodiscard]] const Tensors& tensors() const { return tensors_; }
  [[nodiscard]] Tensors with(std::size_t operand, const Tensor& other) const {
    Tensors tensors = tensors_;
    tensors[operand] = other;
    return tensors;
  }
  [[nodiscard]] bool untouched() const { return memory_ == before_; }
  [[nodiscard]] bool canaries_untouched() const {
    for (const std::vector<std::byte>& memory : memory_) {
      for (std::size_t i = 0; i < kCanary; ++i) {
        if (memory[i] != std::byte{0xFF} || memory[memory.size() - 1 - i] != std::byte{0xFF}) {
          return false;
        }
      }
    }
    return true;
  }

 private:
  static constexpr std::ptrdiff_t kCanary = 64;
  std::vector<std::vector<std::byte>> memory_, before_;
  Tensors tensors_;
};

inline void expect_usage(const ::testing::Matcher<const char*>& message,
                         const std::function<void()>& body) {
  try {
    body();
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_STREQ(name_of(error.code()), "usage") << error.what();
    EXPECT_THAT(error.what(), message);
  }
}

}  // namespace sluice
