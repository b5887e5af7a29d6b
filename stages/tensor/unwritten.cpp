#include "stages/tensor/unwritten.hpp"

#include <algorithm>
#include <cstring>
#include <vector>

#include "comm/base/throw_error.hpp"

namespace sluice {
namespace {

// Quiet NaNs. Conversions and library functions make those with payload 0.
constexpr std::uint32_t kMark32 = 0x7FD51C3EU;
constexpr std::uint64_t kMark64 = 0x7FFD51C3E51C3E51U;
constexpr std::uint16_t kMarkBf16 = 0x7FD5U, kMarkF16 = 0x7ED5U;

// body(words, mark) with the tensor's numbers as words; nothing for integers and null data.
template <typename Body>
void with_words(const Tensor& tensor, const Body& body) {
  if (tensor.data == nullptr) return;
  switch (tensor.spec.dtype) {
    case DType::kF32:
      return body(tensor.as<std::uint32_t>(), kMark32);
    case DType::kF64:
      return body(tensor.as<std::uint64_t>(), kMark64);
    case DType::kBf16:
      return body(tensor.as<std::uint16_t>(), kMarkBf16);
    case DType::kF16:
      return body(tensor.as<std::uint16_t>(), kMarkF16);
    case DType::kI32:
    case DType::kI64:
    case DType::kU8:
      return;
  }
}

}  // namespace

void mark_unwritten(const Tensor& tensor) {
  with_words(tensor, [&](auto* words, auto mark) { std::fill_n(words, tensor.elements(), mark); });
}

Unwritten find_unwritten(const Tensor& tensor) {
  Unwritten found;
  with_words(tensor, [&](const auto* words, auto mark) {
    for (std::int64_t i = 0; i < tensor.elements(); ++i) {
      if (words[i] != mark) continue;
      if (found.count++ == 0) found.first = i;
    }
  });
  return found;
}

void require_written(const Tensor& tensor, const std::string& what) {
  const Unwritten found = find_unwritten(tensor);
  if (found.count == 0) return;
  throw_usage("leaves {} of the {} numbers of {}, {}, unwritten, the first at {}", found.count,
              tensor.elements(), what, to_string(tensor.spec),
              place_of(tensor.shape(), found.first));
}

Unchanged::Unchanged(std::span<const Tensor> tensors) : tensors_(tensors.begin(), tensors.end()) {
  for (const Tensor& tensor : tensors_) {
    const auto* const data = tensor.as<const std::byte>();
    const std::size_t bytes = data == nullptr ? 0 : tensor.spec.bytes();
    had_.emplace_back(data, data + bytes);
  }
}

void Unchanged::require(const char* what) const {
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    const std::vector<std::byte>& had = had_[i];
    if (had.empty() || std::memcmp(had.data(), tensors_[i].data, had.size()) == 0) continue;
    throw_usage("changes {} {}, {}; legal: to read it alone", what, i, to_string(tensors_[i].spec));
  }
}

std::string place_of(const Shape& shape, std::int64_t index) {
  std::vector<std::int64_t> place(static_cast<std::size_t>(shape.rank()));
  for (int d = shape.rank(); d-- > 0;) {
    place[static_cast<std::size_t>(d)] = index % shape[d];
    index /= shape[d];
  }
  return to_string(Shape(std::span<const std::int64_t>(place)));
}

}  // namespace sluice
