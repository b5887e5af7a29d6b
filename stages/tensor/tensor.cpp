#include <fmt/core.h>

#include <bit>
#include <limits>

#include <sluice/error.hpp>
#include <sluice/tensor.hpp>

#include "comm/base/joined.hpp"
#include "comm/base/throw_error.hpp"
#define SLUICE_KERNEL_NAMESPACE scalar
#include "stages/tensor/kernel_lane.hpp"
#include "stages/tensor/kernel_math.hpp"

namespace sluice {

namespace {

struct ElementType {
  std::size_t bytes;
  bool is_float;
};
constexpr std::array<ElementType, kDTypes> kTypes = {
    {{4, true}, {2, true}, {4, false}, {1, false}, {8, true}, {2, true}, {8, false}}};
const ElementType& type_of(DType dtype) { return kTypes.at(static_cast<std::size_t>(dtype)); }

}  // namespace

std::size_t size_of(DType dtype) { return type_of(dtype).bytes; }
bool is_float(DType dtype) { return type_of(dtype).is_float; }

float to_float(F16 value) {
  const std::uint32_t sign = static_cast<std::uint32_t>(value.bits & 0x8000U) << 16;
  const std::uint32_t exponent = value.bits >> 10 & 0x1FU, fraction = value.bits & 0x3FFU;
  if (exponent == 0x1F) return std::bit_cast<float>(sign | 0x7F800000U | fraction << 13);
  if (exponent > 0) return std::bit_cast<float>(sign | (exponent + 112) << 23 | fraction << 13);
  const float magnitude = static_cast<float>(fraction) * 0x1.0p-24F;  // zero or subnormal
  return sign != 0 ? -magnitude : magnitude;
}

F16 to_f16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const auto sign = static_cast<std::uint16_t>(bits >> 16 & 0x8000U);
  const std::uint32_t magnitude = bits & 0x7FFFFFFFU;
  const auto with_sign = [sign](std::uint32_t half) {
    return F16{static_cast<std::uint16_t>(sign | half)};
  };
  if (magnitude > 0x7F800000U) return with_sign(0x7E00);
  if (magnitude >= 0x477FF000U) return with_sign(0x7C00);  // 65520, halfway to the next power
  if (magnitude >= 0x38800000U) {                          // 2^-14, the smallest normal number
    const std::uint32_t rounded = magnitude + 0xFFFU + (magnitude >> 13 & 1U);
    return with_sign((rounded - 0x38000000U) >> 13);
  }
  // Adding 2^-1 to a number below 2^-14 rounds it to a multiple of 2^-24, to nearest even.
  const float sum = std::bit_cast<float>(magnitude) + 0.5F;
  return with_sign(std::bit_cast<std::uint32_t>(sum) - 0x3F000000U);
}

float to_float(Bf16 value) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(value.bits) << 16);
}

Bf16 to_bf16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if (value != value) return {0x7FC0};
  return {static_cast<std::uint16_t>((bits + 0x7FFFU + (bits >> 16 & 1U)) >> 16)};
}

Shape::Shape(std::initializer_list<std::int64_t> dims)
    : Shape(std::span<const std::int64_t>(dims.begin(), dims.size())) {}

Shape::Shape(std::span<const std::int64_t> dims) {
  if (dims.size() > kMaxDims) {
    throw_usage("a shape of {} dimensions; at most {} are legal", dims.size(), int{kMaxDims});
  }
  std::int64_t elements = 1;
  for (const std::int64_t dim : dims) {
    if (dim < 0) {
      throw_usage("a dimension of {}; at least 0 is legal", dim);
    }
    if (dim > 0 && elements > std::numeric_limits<std::int64_t>::max() / 8 / dim) {
      throw_usage("a shape of more than 2^60 elements ([{}])", joined(dims, ", "));
    }
    elements *= dim;
    dims_[static_cast<std::size_t>(rank_++)] = dim;
  }
}

std::int64_t Shape::elements() const {
  std::int64_t elements = 1;
  for (int i = 0; i < rank_; ++i) elements *= (*this)[i];
  return elements;
}

std::string to_string(const Shape& shape) {
  std::string text = "[";
  for (int i = 0; i < shape.rank(); ++i) {
    text += fmt::format("{}{}", i == 0 ? "" : ", ", shape[i]);
  }
  return text + "]";
}

std::size_t TensorSpec::bytes() const {
  return static_cast<std::size_t>(shape.elements()) * size_of(dtype);
}

Tensor view(const void* data, std::size_t elements, const TensorSpec& spec) {
  if (static_cast<std::int64_t>(elements) != spec.shape.elements()) {
    throw_usage("{} values are no {}", elements, to_string(spec));
  }
  return {const_cast<void*>(data), spec};  // a batch is only read
}

std::string to_string(const TensorSpec& spec) {
  return fmt::format("{} {}", name_of(spec.dtype), to_string(spec.shape));
}

std::array<std::uint32_t, 4> philox_block(std::array<std::uint32_t, 4> counter,
                                          std::array<std::uint32_t, 2> key) {
  auto [a, b, c, d] = counter;
  scalar::philox_rounds({key[0], key[1]}, a, b, c, d);
  return {a, b, c, d};
}

std::array<std::uint32_t, 2> philox_key(const RandomKey& key) {
  std::uint32_t words[2];  // NOLINT(modernize-avoid-c-arrays): also compiled for devices
  scalar::philox_stream_key<std::uint32_t>(key.seed, key.site, key.step, words);
  return {words[0], words[1]};
}

std::array<std::uint32_t, 4> philox(const RandomKey& key, std::uint64_t hi, std::uint64_t lo) {
  return philox_block({static_cast<std::uint32_t>(lo), static_cast<std::uint32_t>(lo >> 32),
                       static_cast<std::uint32_t>(hi), static_cast<std::uint32_t>(hi >> 32)},
                      philox_key(key));
}

std::uint64_t hash_name(std::string_view name) {
  std::uint64_t hash = 0xCBF29CE484222325U;
  for (const char letter : name) {
    hash = (hash ^ static_cast<unsigned char>(letter)) * 0x00000100000001B3U;
  }
  return hash;
}

}  // namespace sluice
