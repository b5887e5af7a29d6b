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
  by_name_[tensor.parameter.empty() ? tensor.name : tensor.parameter].parts.push_back(tensor);
}

void SavedTensors::put_together() {
  for (auto& [name, whole] : by_name_) {
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
          (!is_model(tensor) ||
           (is_float(tensor.spec.dtype) && tensor.spec.dtype != DType::kF64))) {
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

std::vector<SavedTensor> SavedTensors::tensors_of(const std::string& name) const {
  const Whole* found = whole(name);
  return found == nullptr ? std::vector<SavedTensor>() : found->parts;
}

void SavedTensors::read(const std::string& name, std::span<float> into) {
  const Whole* found = whole(name);
  if (found == nullptr || static_cast<std::size_t>(found->spec.shape.elements()) != into.size()) {
    throw_error(ErrorCode::kInternal, "a read of {} elements of '{}'", into.size(), name);
  }
  for (const SavedTensor& part : found->parts) {
    const auto elements = static_cast<std::size_t>(part.spec.shape.elements());
    read_tensor(part, into.first(elements));
    into = into.subspan(elements);
  }
}

void SavedTensors::read_tensor(const SavedTensor& part, std::span<float> rows) {
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
  read_part(part_of(part), entry->bytes, part.spec.dtype, rows);
  open->second.release(*entry);
}

}  // namespace sluice
