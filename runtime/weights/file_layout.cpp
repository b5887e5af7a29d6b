#include "runtime/weights/file_layout.hpp"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>

#include "comm/base/throw_error.hpp"

namespace sluice {
namespace {

// Elements of a tile that is transposed within the cache.
constexpr std::int64_t kTile = 32;

template <typename T>
T value_at(const std::byte* bytes, std::int64_t index) {
  T value;
  std::memcpy(&value, bytes + index * static_cast<std::int64_t>(sizeof(T)), sizeof(T));
  return value;
}
float widened(float value) { return value; }
float widened(Bf16 value) { return to_float(value); }
float widened(F16 value) { return to_float(value); }

// Calls copy(row, column) for each element of a matrix, by tiles.
template <typename Copy>
void for_tiles(std::int64_t rows, std::int64_t columns, const Copy& copy) {
  for (std::int64_t row = 0; row < rows; row += kTile) {
    for (std::int64_t column = 0; column < columns; column += kTile) {
      for (std::int64_t i = row; i < std::min(row + kTile, rows); ++i) {
        for (std::int64_t j = column; j < std::min(column + kTile, columns); ++j) copy(i, j);
      }
    }
  }
}

template <typename T>
void read_as(const FilePart& part, const std::byte* bytes, std::span<float> rows) {
  const auto elements = static_cast<std::int64_t>(rows.size());
  if (!part.transposed) {
    for (std::int64_t i = 0; i < elements; ++i) {
      rows[static_cast<std::size_t>(i)] = widened(value_at<T>(bytes, i));
    }
    return;
  }
  const std::int64_t columns = elements / std::max<std::int64_t>(part.rows, 1);
  for_tiles(part.rows, columns, [&](std::int64_t row, std::int64_t column) {
    rows[static_cast<std::size_t>(row * columns + column)] =
        widened(value_at<T>(bytes, column * part.rows + row));
  });
}

template <typename T>
T narrowed(float value) {
  if constexpr (std::is_same_v<T, Bf16>) {
    return to_bf16(value);
  } else {
    return value;
  }
}

template <typename T>
void write_as(const FilePart& part, std::span<const float> rows, std::byte* bytes) {
  const auto put = [&](std::int64_t index, float value) {
    const T stored = narrowed<T>(value);
    std::memcpy(bytes + index * static_cast<std::int64_t>(sizeof(T)), &stored, sizeof(T));
  };
  const auto elements = static_cast<std::int64_t>(rows.size());
  if (!part.transposed) {
    for (std::int64_t i = 0; i < elements; ++i) put(i, rows[static_cast<std::size_t>(i)]);
    return;
  }
  const std::int64_t columns = elements / std::max<std::int64_t>(part.rows, 1);
  for_tiles(part.rows, columns, [&](std::int64_t row, std::int64_t column) {
    put(column * part.rows + row, rows[static_cast<std::size_t>(row * columns + column)]);
  });
}

}  // namespace

std::vector<FilePart> parts_of(const FileLayout& layout, const std::string& parameter,
                               const Shape& shape) {
  const std::int64_t rows = shape.rank() == 0 ? 1 : shape[0];
  const auto found = layout.find(parameter);
  if (found == layout.end()) return {{parameter, rows, false}};
  std::int64_t sum = 0;
  for (const FilePart& part : found->second) {
    if (part.rows < 0 || part.rows > rows || (part.transposed && shape.rank() != 2)) {
      throw_usage("the layout of parameter '{}' {} has a part '{}' of {} rows{}", parameter,
                  to_string(shape), part.name, part.rows,
                  part.transposed ? ", transposed; only a matrix can be" : "");
    }
    sum += part.rows;
  }
  if (sum != rows || found->second.empty()) {
    throw_usage("the layout of parameter '{}' has {} rows; legal are the {} of its shape {}",
                parameter, sum, rows, to_string(shape));
  }
  return found->second;
}

void require_own_names(const FileLayout& layout, std::span<const std::string> parameters) {
  std::map<std::string, const std::string*> parameter_of;  // by tensor
  const auto add = [&](const std::string& tensor, const std::string& parameter) {
    const auto [other, is_new] = parameter_of.emplace(tensor, &parameter);
    if (is_new) return;
    throw_usage(
        "the layout has tensor '{}' twice, in parameter '{}' and in '{}'; a name is legal "
        "once",
        tensor, *other->second, parameter);
  };
  for (const std::string& parameter : parameters) {
    const auto found = layout.find(parameter);
    if (found == layout.end()) {
      add(parameter, parameter);
      continue;
    }
    for (const FilePart& part : found->second) {
      if (part.name.empty()) {
        throw_usage("the layout of parameter '{}' has a part without a name", parameter);
      }
      add(part.name, parameter);
    }
  }
}

Shape part_shape(const FilePart& part, const Shape& parameter) {
  if (parameter.rank() == 0) return parameter;
  if (part.transposed) return Shape{parameter[1], part.rows};
  std::vector<std::int64_t> dims = {part.rows};
  for (int i = 1; i < parameter.rank(); ++i) dims.push_back(parameter[i]);
  return Shape(dims);
}

Shape parameter_shape(std::span<const FilePart> parts, const Shape& first) {
  if (first.rank() == 0) return first;
  std::int64_t rows = 0;
  for (const FilePart& part : parts) rows += part.rows;
  if (parts.front().transposed) return Shape{rows, first[0]};
  std::vector<std::int64_t> dims = {rows};
  for (int i = 1; i < first.rank(); ++i) dims.push_back(first[i]);
  return Shape(dims);
}

void read_part(const FilePart& part, std::span<const std::byte> bytes, DType dtype,
               std::span<float> rows) {
  if (bytes.size() != rows.size() * size_of(dtype)) {
    throw_error(ErrorCode::kInternal, "{} bytes of tensor '{}' for {} elements", bytes.size(),
                part.name, rows.size());
  }
  if (bytes.empty()) return;
  if (dtype == DType::kF32 && !part.transposed) {
    std::memcpy(rows.data(), bytes.data(), bytes.size());
  } else if (dtype == DType::kF32) {
    read_as<float>(part, bytes.data(), rows);
  } else if (dtype == DType::kBf16) {
    read_as<Bf16>(part, bytes.data(), rows);
  } else if (dtype == DType::kF16) {
    read_as<F16>(part, bytes.data(), rows);
  } else {
    throw_error(ErrorCode::kInternal, "tensor '{}' of {} as a parameter", part.name,
                name_of(dtype));
  }
}

std::span<const std::byte> write_part(const FilePart& part, std::span<const float> rows,
                                      DType dtype, std::vector<std::byte>& scratch) {
  if (dtype == DType::kF32 && !part.transposed) return std::as_bytes(rows);
  scratch.resize(rows.size() * size_of(dtype));
  if (dtype == DType::kF32) {
    write_as<float>(part, rows, scratch.data());
  } else if (dtype == DType::kBf16) {
    write_as<Bf16>(part, rows, scratch.data());
  } else {
    throw_error(ErrorCode::kInternal, "a parameter in {}", name_of(dtype));
  }
  return scratch;
}

}  // namespace sluice
