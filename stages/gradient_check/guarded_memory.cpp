#include "stages/gradient_check/guarded_memory.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "comm/base/throw_error.hpp"
#include "stages/tensor/unwritten.hpp"

namespace sluice::nn {
namespace {

constexpr std::byte kGuard{0xA7}, kSoil{0xFF};

}  // namespace

double value_in(const TensorSpec& spec, const std::byte* from) {
  const auto read = [&](auto value) {
    std::memcpy(&value, from, sizeof value);
    return value;
  };
  switch (spec.dtype) {
    case DType::kF32:
      return static_cast<double>(read(float{}));
    case DType::kF64:
      return read(double{});
    case DType::kBf16:
      return static_cast<double>(to_float(read(Bf16{})));
    case DType::kF16:
      return static_cast<double>(to_float(read(F16{})));
    case DType::kI32:
      return read(std::int32_t{});
    case DType::kI64:
      return static_cast<double>(read(std::int64_t{}));
    case DType::kU8:
      return read(std::uint8_t{});
  }
  return 0;
}

GuardedMemory::GuardedMemory(std::string name, std::size_t bytes)
    : name_(std::move(name)),
      bytes_(bytes),
      memory_(DeviceMemory().allocate(bytes + 2 * kBufferAlignment)) {
  std::fill_n(memory_.data(), memory_.size(), kGuard);
  soil();
}

void GuardedMemory::soil() const { std::fill_n(data(), bytes_, kSoil); }

void GuardedMemory::require_intact(const char* call) const {
  const auto intact = [](const std::byte* from) {
    return std::all_of(from, from + kBufferAlignment, [](std::byte b) { return b == kGuard; });
  };
  if (!intact(memory_.data())) throw_usage("{} writes before the begin of {}", call, name_);
  if (intact(data() + bytes_)) return;
  throw_usage("{} writes beyond the end of {}, of {} bytes", call, name_, bytes_);
}

GuardedTensor::GuardedTensor(std::string name, const TensorSpec& spec)
    : name_(std::move(name)), spec_(spec), memory_(name_, spec.bytes()) {}

std::vector<std::byte> GuardedTensor::bytes() const {
  return {memory_.data(), memory_.data() + memory_.size()};
}

void GuardedTensor::set_bytes(const std::vector<std::byte>& bytes) const {
  std::copy(bytes.begin(), bytes.end(), memory_.data());
}

void GuardedTensor::require_same(const char* call, const std::vector<std::byte>& had) const {
  const std::int64_t at = first_difference(spec_, had, bytes());
  if (at < 0) return;
  throw_usage("{} changes {} at {} from {} to {}; legal: it only reads it", call, name_,
              place_of(spec_.shape, at), number_in(spec_, had, at), number_in(spec_, bytes(), at));
}

std::int64_t first_difference(const TensorSpec& spec, const std::vector<std::byte>& a,
                              const std::vector<std::byte>& b) {
  const auto [place, other] = std::mismatch(a.begin(), a.end(), b.begin());
  if (place == a.end()) return -1;
  return (place - a.begin()) / static_cast<std::ptrdiff_t>(size_of(spec.dtype));
}

std::string number_in(const TensorSpec& spec, const std::vector<std::byte>& bytes,
                      std::int64_t index) {
  const std::size_t at = static_cast<std::size_t>(index) * size_of(spec.dtype);
  return fmt::format("{:.9g}", value_in(spec, bytes.data() + at));
}

void require_finite(const Tensor& tensor, const char* call, const std::string& what) {
  if (!is_float(tensor.spec.dtype)) return;
  const std::size_t size = size_of(tensor.spec.dtype);
  for (std::int64_t i = 0; i < tensor.elements(); ++i) {
    const double value =
        value_in(tensor.spec, tensor.as<std::byte>() + static_cast<std::size_t>(i) * size);
    if (std::isfinite(value)) continue;
    throw_usage(
        "{} makes {} {} at {} from finite numbers; memory that it reads before it writes it has "
        "NaNs here",
        call, what, std::isnan(value) ? "NaN" : "infinite", place_of(tensor.shape(), i));
  }
}

}  // namespace sluice::nn
