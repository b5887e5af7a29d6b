#include "stages/compute/matmul_spec.hpp"

#include <fmt/core.h>

namespace sluice {

std::string to_string(const MatmulSpec& spec) {
  const auto layout = [](const MatmulLayout& l) {
    return fmt::format("({}, {}, {})", l.batch, l.row, l.column);
  };
  return fmt::format("{} x {} [{}, {}] x [{}, {}] -> {}, strides {} {} {}{}{}", spec.batches,
                     name_of(spec.operands), spec.m, spec.k, spec.k, spec.n, name_of(spec.result),
                     layout(spec.a), layout(spec.b), layout(spec.c), spec.bias ? ", bias" : "",
                     spec.accumulate ? ", accumulated" : "");
}

Tensor rows_from(const Tensor& all, std::int64_t first, std::int64_t rows) {
  if (all.data == nullptr) return {};
  const std::int64_t width = all.shape()[all.shape().rank() - 1];
  return {all.as<std::byte>() + first * width * static_cast<std::int64_t>(size_of(all.spec.dtype)),
          {all.spec.dtype, Shape{rows, width}}};
}

MatmulSpec linear_matmul(const LinearShape& shape) {
  return {.m = shape.rows,
          .n = shape.out,
          .k = shape.in,
          .a = {.row = shape.in},
          .b = {.row = 1, .column = shape.in},
          .c = {.row = shape.out},
          .operands = shape.operands,
          .result = shape.result,
          .bias = shape.bias};
}

MatmulSpec linear_input_matmul(const LinearShape& shape) {
  return {.m = shape.rows,
          .n = shape.in,
          .k = shape.out,
          .a = {.row = shape.out},
          .b = {.row = shape.in},
          .c = {.row = shape.in},
          .operands = shape.operands,
          .result = shape.operands};
}

MatmulSpec linear_weight_matmul(const LinearShape& shape, Write write) {
  return {.m = shape.out,
          .n = shape.in,
          .k = shape.rows,
          .a = {.row = 1, .column = shape.out},
          .b = {.row = shape.in},
          .c = {.row = shape.in},
          .operands = shape.operands,
          .accumulate = write == Write::kAdd};
}

std::size_t MatmulSpecHash::operator()(const MatmulSpec& spec) const {
  std::uint64_t hash = 0xCBF29CE484222325U;
  const auto mix = [&hash](std::int64_t value) {
    hash = (hash ^ static_cast<std::uint64_t>(value)) * 0x9E3779B97F4A7C15U;
    hash ^= hash >> 29;
  };
  for (const std::int64_t value : {spec.batches, spec.m, spec.n, spec.k}) mix(value);
  for (const MatmulLayout& layout : {spec.a, spec.b, spec.c}) {
    mix(layout.row);
    mix(layout.column);
    mix(layout.batch);
  }
  mix(static_cast<std::int64_t>(spec.operands) | static_cast<std::int64_t>(spec.result) << 8 |
      static_cast<std::int64_t>(spec.bias) << 16 |
      static_cast<std::int64_t>(spec.accumulate) << 17);
  return static_cast<std::size_t>(hash);
}

}  // namespace sluice
