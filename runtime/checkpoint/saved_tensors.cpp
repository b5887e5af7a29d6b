#include "runtime/checkpoint/saved_tensors.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <utility>

#include <sluice/error.hpp>

#include "comm/base/throw_error.hpp"
#include "runtime/weights/file_layout.hpp"

namespace sluice {
namespace fs = std::filesystem;
namespace {

FilePart part_of(const SavedTensor& tensor) {
  const Shape& shape = tensor.spec.shape;
  const std::int64_t rows = !tensor.parameter.empty() ? tensor.rows
                            : shape.rank() == 0       ? 1
                                                      : shape[0];
  return {tensor.name, rows, tensor.transposed};
}

bool is_model(const SavedTensor& tensor) { return !tensor.file.starts_with("optimizer"); }

// As read_part() does.
bool is_readable(DType type) { return is_float(type) && type != DType::kF64; }

}  // namespace

SavedTensors::SavedTensors(fs::path directory, const SaveState& state)
    : directory_(std::move(directory)), local_(state.layout.contains("local")) {
  for (const SavedTensor& tensor : state.tensors) {
    if (tensor.file != "user.safetensors") add(tensor);
  }
  put_together();
}

SavedTensors::SavedTensors(fs::path directory, const FileLayout& layout)
    : directory_(std::move(directory)) {
  const WeightsDirectory weights(directory_, "model");
  for (const auto& [parameter, parts] : layout) {
    std::int64_t row = 0;
    for (const FilePart& part : parts) {
      const SafetensorsFile::Entry* entry = weights.find(part.name);
      if (entry == nullptr) {
        throw_error(ErrorCode::kWeights, "weights in '{}' have no tensor '{}'", directory_.string(),
                    part.name);
      }
      add(SavedTensor{.name = part.name,
                      .file = weights.file_of(part.name),
                      .spec = entry->spec,
                      .parameter = parameter,
                      .first_row = row,
                      .rows = part.rows,
                      .transposed = part.transposed});
      row += part.rows;
    }
  }
  put_together();
}

void SavedTensors::add(const SavedTensor& tensor) {
  const std::string& whole = tensor.range               ? tensor.range->whole
                             : tensor.parameter.empty() ? tensor.name
                                                        : tensor.parameter;
  by_name_[whole].parts.push_back(tensor);
}

void SavedTensors::put_together() {
  for (auto& [name, whole] : by_name_) {
    const bool ranges = std::any_of(whole.parts.begin(), whole.parts.end(),
                                    [](const SavedTensor& part) { return !!part.range; });
    if (ranges) {
      join_ranges(name, whole);
    } else {
      join_rows(name, whole);
    }
  }
}

void SavedTensors::join_rows(const std::string& name, Whole& whole) const {
  std::sort(whole.parts.begin(), whole.parts.end(),
            [](const SavedTensor& a, const SavedTensor& b) { return a.first_row < b.first_row; });
  const SavedTensor& first = whole.parts.front();
  std::vector<FilePart> parts;
  std::int64_t row = 0;
  for (const SavedTensor& tensor : whole.parts) {
    parts.push_back(part_of(tensor));
    if (tensor.first_row != row || tensor.transposed != first.transposed) {
      throw_error(ErrorCode::kWeights,
                  "weights in '{}': tensor '{}' holds rows of '{}' from {} on, but {} is next",
                  directory_.string(), tensor.name, name, tensor.first_row, row);
    }
    row += parts.back().rows;
    if (tensor.spec.shape == part_shape(parts.back(), parameter_shape(parts, first.spec.shape)) &&
        (!is_model(tensor) || is_readable(tensor.spec.dtype))) {
      continue;
    }
    throw_error(ErrorCode::kWeights,
                "weights in '{}': tensor '{}' is {}, which does not fit '{}', {}; legal are f32, "
                "bf16 and f16",
                directory_.string(), tensor.name, to_string(tensor.spec), first.name,
                to_string(first.spec));
  }
  whole.spec = {first.spec.dtype, parameter_shape(parts, first.spec.shape)};
}

void SavedTensors::join_ranges(const std::string& name, Whole& whole) const {
  const auto first_of = [](const SavedTensor& part) { return part.range ? part.range->first : 0; };
  std::sort(whole.parts.begin(), whole.parts.end(),
            [&](const SavedTensor& a, const SavedTensor& b) { return first_of(a) < first_of(b); });
  const auto spec_of = [](const SavedTensor& part) {
    return TensorSpec{part.spec.dtype, part.range ? part.range->shape : part.spec.shape};
  };
  whole.spec = spec_of(whole.parts.front());
  std::int64_t next = 0;
  const auto require = [&](bool fine, std::int64_t first, std::int64_t end, const char* what) {
    if (fine) return;
    throw_error(ErrorCode::kWeights, "weights in '{}': elements {} to {} of '{}' {} are {}",
                directory_.string(), first, end - 1, name, to_string(whole.spec), what);
  };
  for (const SavedTensor& part : whole.parts) {
    if (spec_of(part) != whole.spec || is_model(part) || !is_readable(part.spec.dtype)) {
      throw_error(ErrorCode::kWeights,
                  "weights in '{}': tensor '{}' in '{}' is a range of '{}' {}, but '{}' says {}; "
                  "legal are ranges of one f32, bf16 or f16 tensor of an optimizer",
                  directory_.string(), part.name, part.file, name, to_string(spec_of(part)),
                  whole.parts.front().name, to_string(whole.spec));
    }
    const std::int64_t first = first_of(part), end = first + part.spec.shape.elements();
    require(first <= next, next, first, "missing");
    require(first >= next, first, std::min(next, end), "there twice");
    next = end;
  }
  const std::int64_t end = whole.spec.shape.elements();
  require(next == end, next, end, "missing");
}

template <typename Visit>
void SavedTensors::for_parts(const Whole& whole, std::int64_t first, std::int64_t count,
                             const Visit& visit) {
  std::int64_t begin = 0;
  for (const SavedTensor& part : whole.parts) {
    if (begin >= first + count) break;
    const std::int64_t end = begin + part.spec.shape.elements();
    const std::int64_t from = std::max(begin, first), to = std::min(end, first + count);
    if (from < to) visit(part, from - begin, static_cast<std::size_t>(to - from));
    begin = end;
  }
}

const SavedTensors::Whole* SavedTensors::whole(const std::string& name) const {
  if (masters_) {
    const auto master = by_name_.find(fmt::format("{}.{}", kMasterKind, name));
    if (master != by_name_.end()) return &master->second;
  }
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? nullptr : &found->second;
}

std::vector<std::string> SavedTensors::parameters() const {
  std::vector<std::string> names;
  for (const auto& [name, whole] : by_name_) {
    if (is_model(whole.parts.front())) names.push_back(name);
  }
  return names;
}

std::optional<TensorSpec> SavedTensors::find(const std::string& name) const {
  const Whole* found = whole(name);
  return found == nullptr ? std::nullopt : std::optional(found->spec);
}

std::vector<SavedTensor> SavedTensors::tensors_of(const std::string& name, std::int64_t first,
                                                  std::int64_t count) const {
  std::vector<SavedTensor> parts;
  if (const Whole* found = whole(name); found != nullptr) {
    for_parts(*found, first, count,
              [&](const SavedTensor& part, std::int64_t, std::size_t) { parts.push_back(part); });
  }
  return parts;
}

void SavedTensors::read(const std::string& name, std::span<float> into, std::int64_t first) {
  const Whole* found = whole(name);
  const std::int64_t count = std::ssize(into);
  if (found == nullptr || first < 0 || count > found->spec.shape.elements() - first) {
    throw_error(ErrorCode::kInternal, "a read of {} elements of '{}'", count, name);
  }
  for_parts(*found, first, count,
            [&](const SavedTensor& part, std::int64_t from, std::size_t elements) {
              read_tensor(part, from, into.first(elements));
              into = into.subspan(elements);
            });
}

void SavedTensors::read_tensor(const SavedTensor& part, std::int64_t first, std::span<float> into) {
  auto open = files_.find(part.file);
  if (open == files_.end()) {
    open = files_.emplace(part.file, SafetensorsFile(directory_ / part.file)).first;
  }
  const SafetensorsFile::Entry* entry = open->second.find(part.name);
  if (entry == nullptr || entry->spec != part.spec) {
    throw_error(ErrorCode::kWeights, "'{}': tensor '{}' is {}, not {}", directory_.string(),
                part.name, entry == nullptr ? "missing" : to_string(entry->spec),
                to_string(part.spec));
  }
  const auto all = static_cast<std::size_t>(part.spec.shape.elements());
  if (part.transposed && into.size() < all) {  // its bytes are not those of elements in order
    std::vector<float> values(all);
    read_part(part_of(part), entry->bytes, part.spec.dtype, values);
    std::copy_n(values.begin() + first, into.size(), into.begin());
  } else {
    const std::size_t size = size_of(part.spec.dtype);
    read_part(part_of(part),
              entry->bytes.subspan(static_cast<std::size_t>(first) * size, into.size() * size),
              part.spec.dtype, into);
  }
  open->second.release(*entry);
}

}  // namespace sluice
