// Values of arrays in another type.
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include <sluice/data.hpp>

#include "comm/base/throw_error.hpp"

namespace sluice {
namespace {

template <typename T>
double to_double(T value) {
  if constexpr (std::is_same_v<T, Bf16> || std::is_same_v<T, F16>) {
    return static_cast<double>(to_float(value));
  } else {
    return static_cast<double>(value);
  }
}

// The float next to `value` towards zero, with its last bit set where that is another number. A
// type with at least two bits less gets the nearest number from it, as if it were rounded once:
// Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008.
float to_odd(double value) {
  const auto near = static_cast<float>(value);
  if (!(std::abs(value) <= std::numeric_limits<double>::max())) return near;  // NaN, infinity
  if (static_cast<double>(near) == value) return near;
  auto bits = std::bit_cast<std::uint32_t>(near);
  if (std::abs(static_cast<double>(near)) > std::abs(value)) --bits;
  return std::bit_cast<float>(bits | 1U);
}

template <typename T>
T from_double(double value, std::size_t index) {
  if constexpr (std::is_same_v<T, Bf16>) {
    return to_bf16(to_odd(value));
  } else if constexpr (std::is_same_v<T, F16>) {
    return to_f16(to_odd(value));
  } else if constexpr (std::is_floating_point_v<T>) {
    return static_cast<T>(value);
  } else {
    const double rounded = std::nearbyint(value);
    const double low = static_cast<double>(std::numeric_limits<T>::min());
    const double end = std::ldexp(1.0, std::numeric_limits<T>::digits);
    if (!(rounded >= low && rounded < end)) {
      throw_usage("value {} at index {} does not fit the type {}", value, index,
                  name_of(dtype_of<T>()));
    }
    return static_cast<T>(rounded);
  }
}

// Calls `body` with a value of the type.
template <typename Body>
void with_type(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kF32:
      return body(float{});
    case DType::kBf16:
      return body(Bf16{});
    case DType::kI32:
      return body(std::int32_t{});
    case DType::kU8:
      return body(std::uint8_t{});
    case DType::kF64:
      return body(double{});
    case DType::kF16:
      return body(F16{});
    case DType::kI64:
      return body(std::int64_t{});
  }
  throw_usage("a tensor's type is number {}; legal: 0 to {}", static_cast<int>(dtype), kDTypes - 1);
}

}  // namespace

HostTensor converted(const HostTensor& from, DType to, double scale, double offset) {
  if (from.bytes.size() != from.spec.bytes()) {
    throw_usage("tensor {} has {} bytes; legal: {}", to_string(from.spec), from.bytes.size(),
                from.spec.bytes());
  }
  HostTensor result{.spec = {to, from.spec.shape}, .bytes = {}};
  if (from.spec.dtype == to && scale == 1 && offset == 0) return from;
  result.bytes.resize(result.spec.bytes());
  const auto elements = static_cast<std::size_t>(from.spec.shape.elements());
  with_type(from.spec.dtype, [&]<typename From>(From) {
    with_type(to, [&]<typename To>(To) {
      for (std::size_t i = 0; i < elements; ++i) {
        From value;
        std::memcpy(&value, from.bytes.data() + i * sizeof(From), sizeof(From));
        const To made = from_double<To>(to_double(value) * scale + offset, i);
        std::memcpy(result.bytes.data() + i * sizeof(To), &made, sizeof(To));
      }
    });
  });
  return result;
}

}  // namespace sluice
