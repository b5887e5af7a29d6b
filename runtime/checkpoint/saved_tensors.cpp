#include "runtime/checkpoint/saved_tensors.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <tuple>
#include <utility>

#include <sluice/error.hpp>

#include "comm/base/throw_error.hpp"
#include "runtime/layout/job_layout.hpp"
#include "runtime/weights/file_layout.hpp"
#include "stages/tensor/slice_runs.hpp"

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

// Elements of one row along the slice's axis.
std::int64_t row_elements(const Shape& shape, const Slice& slice) {
  std::int64_t elements = 1;
  for (int d = slice.axis + 1; d < shape.rank(); ++d) elements *= shape[d];
  return elements;
}

// A wanted slice comes from a model that may have other shapes.
bool lies_in(const Slice& slice, const Shape& shape) {
  return slice.all() || (slice.axis < shape.rank() && slice.whole == shape[slice.axis]);
}

// Elements of a slice, or of all of a whole, from `first` on.
struct Elements {
  Slice slice = {};
  std::int64_t first = 0;
};

// A slice whose elements follow each other in the whole is a range of it.
Elements simplified(const Shape& shape, const Slice& slice, std::int64_t first) {
  std::int64_t outer = 1;
  for (int d = 0; d < slice.axis; ++d) outer *= shape[d];
  if (slice.all() || (outer > 1 && slice.length < slice.whole)) return {slice, first};
  return {{}, slice.begin * row_elements(shape, slice) + first};
}

Elements elements_of(const SavedTensor& part) {
  return part.range ? simplified(part.range->shape, part.range->slice, part.range->first)
                    : Elements{};
}

TensorSpec spec_of_whole(const SavedTensor& part) {
  return {part.spec.dtype, part.range ? part.range->shape : part.spec.shape};
}

// Where an element of a slice lies in the whole.
std::int64_t place_of(const Shape& shape, const Slice& slice, std::int64_t element) {
  std::int64_t place = 0;
  for_runs(slice_shape(shape, slice), slice, element, 1,
           [&](std::int64_t, std::int64_t in_whole, std::int64_t) { place = in_whole; });
  return place;
}

// How many elements of a slice lie before a place of the whole, which has elements.
std::int64_t elements_before(const Shape& shape, const Slice& slice, std::int64_t place) {
  if (slice.all()) return place;
  const std::int64_t row = row_elements(shape, slice), length = slice.length * row;
  const std::int64_t block = slice.whole * row;
  return place / block * length +
         std::clamp<std::int64_t>(place % block - slice.begin * row, 0, length);
}

// The range of the whole from the first to the last of these elements, at least one.
ElementRange range_in_whole(const Shape& shape, const Slice& slice, const ElementRange& elements) {
  const std::int64_t first = place_of(shape, slice, elements.first);
  return {first, place_of(shape, slice, elements.end() - 1) + 1 - first};
}

// for_runs() of elements of a slice, whose places count from the first of them, and those in the
// whole from `whole_first` on.
template <typename Visit>
void for_offsets(const Shape& shape, const Slice& slice, const ElementRange& elements,
                 std::int64_t whole_first, const Visit& visit) {
  for_runs(slice_shape(shape, slice), slice, elements.first, elements.count,
           [&](std::int64_t here, std::int64_t in_whole, std::int64_t count) {
             visit(here - elements.first, in_whole - whole_first, count);
           });
}

// What is wrong with ranges, by their first element, that are to hold each of [0, all) once.
struct Fault {
  std::int64_t first = 0, last = 0;
  const char* what = nullptr;
};
std::optional<Fault> fault_of(std::span<const ElementRange> ranges, std::int64_t all) {
  std::int64_t next = 0;
  for (const ElementRange& range : ranges) {
    if (range.first > next) return Fault{next, range.first - 1, "missing"};
    if (range.first < next) {
      return Fault{range.first, std::min(next, range.end()) - 1, "there twice"};
    }
    next = range.end();
  }
  if (next < all) return Fault{next, all - 1, "missing"};
  return std::nullopt;
}

}  // namespace

// Elements of a saved slice.
struct SavedTensors::Piece {
  const SavedSlice* saved = nullptr;
  ElementRange elements;
};

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
  whole.slices = {{Slice{}, whole.parts}};
}

void SavedTensors::join_ranges(const std::string& name, Whole& whole) const {
  const auto order_of = [](const SavedTensor& part) {
    const auto [slice, first] = elements_of(part);
    return std::tuple(slice.axis, slice.begin, slice.length, first);
  };
  std::sort(whole.parts.begin(), whole.parts.end(),
            [&](const SavedTensor& a, const SavedTensor& b) { return order_of(a) < order_of(b); });
  whole.spec = spec_of_whole(whole.parts.front());
  for (const SavedTensor& part : whole.parts) {
    const TensorSpec spec = spec_of_whole(part);
    if (spec == whole.spec && !is_model(part) && is_readable(part.spec.dtype)) continue;
    throw_error(ErrorCode::kWeights,
                "weights in '{}': tensor '{}' in '{}' is a range of '{}' {}, but '{}' says {}; "
                "legal are ranges of one f32, bf16 or f16 tensor of an optimizer",
                directory_.string(), part.name, part.file, name, to_string(spec),
                whole.parts.front().name, to_string(whole.spec));
  }
  find_slices(name, whole);
  require_ranges(name, whole);
}

void SavedTensors::find_slices(const std::string& name, Whole& whole) const {
  const std::span<const SavedTensor> parts = whole.parts;
  for (std::size_t begin = 0, end = 0; begin < parts.size(); begin = end) {
    const Slice slice = elements_of(parts[begin]).slice;
    while (end < parts.size() && elements_of(parts[end]).slice == slice) ++end;
    whole.slices.push_back({slice, parts.subspan(begin, end - begin)});
  }
  if (whole.slices.front().slice.axis == whole.slices.back().slice.axis) return;
  throw_error(ErrorCode::kWeights,
              "weights in '{}': tensors '{}' and '{}' divide '{}' {} in different ways; legal are "
              "slices along one dimension, or ranges of the whole",
              directory_.string(), parts.front().name, parts.back().name, name,
              to_string(whole.spec));
}

// Of the slices and of each one's ranges.
void SavedTensors::require_ranges(const std::string& name, const Whole& whole) const {
  const auto require = [&](const std::vector<ElementRange>& ranges, std::int64_t all,
                           const char* of, const std::string& slice) {
    const std::optional<Fault> fault = fault_of(ranges, all);
    if (!fault) return;
    throw_error(ErrorCode::kWeights, "weights in '{}': {} {} to {} {}of '{}' {} are {}",
                directory_.string(), of, fault->first, fault->last, slice, name,
                to_string(whole.spec), fault->what);
  };
  std::vector<ElementRange> rows;
  for (const auto& [slice, parts] : whole.slices) {
    std::vector<ElementRange> ranges;
    for (const SavedTensor& part : parts) {
      ranges.push_back({elements_of(part).first, part.spec.shape.elements()});
    }
    rows.push_back({slice.begin, slice.length});
    require(ranges, slice_shape(whole.spec.shape, slice).elements(), "elements",
            slice.all() ? ""
                        : fmt::format("of rows {} to {} along dimension {} ", slice.begin,
                                      slice.begin + slice.length - 1, slice.axis));
  }
  const Slice& last = whole.slices.back().slice;
  if (!last.all()) {
    require(rows, last.whole, "rows", fmt::format("along dimension {} ", last.axis));
  }
}

std::vector<SavedTensors::Piece> SavedTensors::pieces_of(const Whole& whole, const Slice& slice,
                                                         const ElementRange& elements) {
  const Shape& shape = whole.spec.shape;
  if (elements.count == 0 || shape.elements() == 0) return {};
  for (const SavedSlice& saved : whole.slices) {
    if (saved.slice == slice) return {{&saved, elements}};
  }
  const ElementRange range = range_in_whole(shape, slice, elements);
  std::vector<Piece> pieces;
  for (const SavedSlice& saved : whole.slices) {
    const std::int64_t first = elements_before(shape, saved.slice, range.first);
    const std::int64_t end = elements_before(shape, saved.slice, range.end());
    if (first < end) pieces.push_back({&saved, {first, end - first}});
  }
  return pieces;
}

template <typename Visit>
void SavedTensors::for_parts(const Piece& piece, const Visit& visit) {
  std::int64_t begin = 0;
  for (const SavedTensor& part : piece.saved->parts) {
    if (begin >= piece.elements.end()) break;
    const std::int64_t end = begin + part.spec.shape.elements();
    const std::int64_t from = std::max(begin, piece.elements.first);
    const std::int64_t to = std::min(end, piece.elements.end());
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
                                                  std::int64_t count, const Slice& slice) const {
  std::vector<SavedTensor> parts;
  const Whole* found = whole(name);
  if (found == nullptr || !lies_in(slice, found->spec.shape)) return parts;
  const Elements wanted = simplified(found->spec.shape, slice, first);
  for (const Piece& piece : pieces_of(*found, wanted.slice, {wanted.first, count})) {
    for_parts(piece,
              [&](const SavedTensor& part, std::int64_t, std::size_t) { parts.push_back(part); });
  }
  return parts;
}

void SavedTensors::read(const std::string& name, std::span<const Share> shares) {
  const Whole* found = whole(name);
  std::vector<Share> scattered;
  for (const Share& share : shares) {
    const std::int64_t count = std::ssize(share.into);
    if (found == nullptr || !lies_in(share.slice, found->spec.shape) || share.first < 0 ||
        count > slice_shape(found->spec.shape, share.slice).elements() - share.first) {
      throw_error(ErrorCode::kInternal, "a read of {} elements of '{}'", count, name);
    }
    const auto [slice, first] = simplified(found->spec.shape, share.slice, share.first);
    const std::vector<Piece> pieces = pieces_of(*found, slice, {first, count});
    if (pieces.empty()) continue;
    if (pieces.size() == 1 && pieces.front().elements.count == count) {
      read_piece(pieces.front(), share.into);  // just these, in their order
    } else {
      scattered.push_back({share.into, first, slice});
    }
  }
  if (!scattered.empty()) read_by_pieces(*found, scattered);
}

void SavedTensors::read_by_pieces(const Whole& whole, std::span<const Share> shares) {
  const Shape& shape = whole.spec.shape;
  ElementRange all{shape.elements(), 0};
  std::int64_t end = 0;
  for (const Share& share : shares) {
    const ElementRange range =
        range_in_whole(shape, share.slice, {share.first, std::ssize(share.into)});
    all.first = std::min(all.first, range.first);
    end = std::max(end, range.end());
  }
  all.count = end - all.first;
  // A part that is transposed is read as a whole each time.
  const bool transposed = std::ranges::any_of(whole.parts, &SavedTensor::transposed);
  std::vector<float> values(
      static_cast<std::size_t>(transposed ? all.count : std::min(all.count, kPieceElements)));
  for (std::int64_t first = all.first; first < all.end(); first += std::ssize(values)) {
    const std::int64_t count = std::min(std::ssize(values), all.end() - first);
    read_range(whole, first, std::span(values).first(static_cast<std::size_t>(count)));
    for (const Share& share : shares) {
      const std::int64_t from = std::max(share.first, elements_before(shape, share.slice, first));
      const std::int64_t to = std::min(share.first + std::ssize(share.into),
                                       elements_before(shape, share.slice, first + count));
      if (from >= to) continue;
      for_offsets(shape, share.slice, {from, to - from}, first,
                  [&](auto here, auto in_whole, auto elements) {
                    std::copy_n(values.begin() + in_whole, elements,
                                share.into.begin() + (from - share.first) + here);
                  });
    }
  }
}

void SavedTensors::read_range(const Whole& whole, std::int64_t first, std::span<float> into) {
  const std::vector<Piece> pieces = pieces_of(whole, {}, {first, std::ssize(into)});
  if (pieces.size() == 1 && pieces.front().saved->slice.all()) {
    return read_piece(pieces.front(), into);
  }
  std::vector<float> values;
  for (const Piece& piece : pieces) {
    values.resize(static_cast<std::size_t>(piece.elements.count));
    read_piece(piece, values);
    for_offsets(whole.spec.shape, piece.saved->slice, piece.elements, first,
                [&](auto here, auto in_whole, auto count) {
                  std::copy_n(values.begin() + here, count, into.begin() + in_whole);
                });
  }
}

void SavedTensors::read_piece(const Piece& piece, std::span<float> into) {
  for_parts(piece, [&](const SavedTensor& part, std::int64_t from, std::size_t elements) {
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
