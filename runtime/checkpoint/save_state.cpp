#include "runtime/checkpoint/save_state.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <initializer_list>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>

#include <sluice/error.hpp>

#include "comm/base/joined.hpp"
#include "comm/base/throw_error.hpp"
#include "runtime/files/checksum.hpp"
#include "runtime/files/json_text.hpp"
#include "runtime/files/read_file.hpp"
#include "runtime/layout/division.hpp"
#include "stages/tensor/slice_runs.hpp"

namespace sluice {
namespace {

using Json = nlohmann::ordered_json;

// The last field: the hash of all bytes before it.
constexpr std::string_view kCheck = ",\n \"check\": \"";
constexpr std::size_t kMostBytes = std::size_t{1} << 30;
// The first format with ranges, and the one of a save without.
constexpr std::uint64_t kRangesFormat = 4, kWholesFormat = 3;
// Json::dump() recurses. An ordered object searches its keys from the front.
constexpr int kMostLevels = 100;
constexpr std::size_t kMostKeys = 4'000;

// Throws for one file.
class Reader {
 public:
  explicit Reader(const std::filesystem::path& path) : path_(path) {}

  template <typename... Args>
  [[noreturn]] void refuse(fmt::format_string<Args...> text, Args&&... args) const {
    throw_error(ErrorCode::kWeights, "'{}' is damaged: {}", path_.string(),
                fmt::format(text, std::forward<Args>(args)...));
  }

  const Json& field(const Json& object, const char* name) const {
    if (!object.is_object()) refuse("what should hold '{}' is no object", name);
    const auto found = object.find(name);
    if (found == object.end()) refuse("'{}' is missing", name);
    return *found;
  }
  // A field of the kind that `is` knows.
  const Json& field(const Json& object, const char* name, bool (Json::*is)() const noexcept,
                    const char* kind) const {
    const Json& value = field(object, name);
    if (!(value.*is)()) refuse("'{}' is no {}", name, kind);
    return value;
  }
  std::string text(const Json& object, const char* name) const {
    return field(object, name, &Json::is_string, "string").get<std::string>();
  }
  std::uint64_t number(const Json& object, const char* name) const {
    return field(object, name, &Json::is_number_unsigned, "whole number from 0")
        .get<std::uint64_t>();
  }
  bool flag(const Json& object, const char* name) const {
    return field(object, name, &Json::is_boolean, "truth value: true or false").get<bool>();
  }
  const Json& array(const Json& object, const char* name) const {
    return field(object, name, &Json::is_array, "array");
  }
  const Json& object(const Json& parent, const char* name) const {
    return field(parent, name, &Json::is_object, "object");
  }
  std::string hash(const std::string& text, const char* name) const {
    if (!is_id(text)) refuse("'{}' has a value that is not 32 hexadecimal digits", name);
    return text;
  }
  Facts values(const Json& parent, const char* name) const {
    Facts values;
    for (const auto& [key, value] : object(parent, name).items()) {
      if (!value.is_string()) refuse("'{}' of '{}' is no string", key, name);
      values.emplace_back(key, value.get<std::string>());
    }
    return values;
  }

 private:
  const std::filesystem::path& path_;
};

SavedFile file_from(const Reader& reader, const Json& json) {
  SavedFile file;
  file.name = reader.text(json, "name");
  if (!is_save_file_name(file.name)) {
    reader.refuse("'{}' is no name that a file of a save has", file.name);
  }
  file.bytes = reader.number(json, "bytes");
  file.hash = reader.hash(reader.text(json, "hash"), "hash");
  for (const Json& block : reader.array(json, "blocks")) {
    if (!block.is_string()) reader.refuse("a block's hash of '{}' is no string", file.name);
    file.blocks.push_back(reader.hash(block.get<std::string>(), "blocks"));
  }
  const std::uint64_t expected = file.bytes / kHashBlock + (file.bytes % kHashBlock != 0 ? 1 : 0);
  if (!file.blocks.empty() && file.blocks.size() != expected) {
    reader.refuse("'{}' of {} bytes has {} blocks, not {}", file.name, file.bytes,
                  file.blocks.size(), expected);
  }
  return file;
}

// Of a tensor that is a part of a parameter.
void read_part_of(const Reader& reader, const Json& json, SavedTensor& tensor) {
  tensor.parameter = reader.text(json, "parameter");
  const std::uint64_t first = reader.number(json, "first_row"), rows = reader.number(json, "rows");
  tensor.transposed = reader.flag(json, "transposed");
  const Shape& shape = tensor.spec.shape;
  const int axis = tensor.transposed ? 1 : 0;
  const bool fits = tensor.transposed ? shape.rank() == 2 : shape.rank() > 0;
  constexpr std::uint64_t kMostRows = std::uint64_t{1} << 48;
  if (tensor.parameter.empty() || !fits || first > kMostRows || rows > kMostRows ||
      shape[axis] != static_cast<std::int64_t>(rows)) {
    reader.refuse("tensor '{}' {} is no part of {} rows of '{}'", tensor.name,
                  to_string(tensor.spec), rows, tensor.parameter);
  }
  tensor.first_row = static_cast<std::int64_t>(first);
  tensor.rows = static_cast<std::int64_t>(rows);
}

Shape shape_from(const Reader& reader, const Json& json, const std::string& name) {
  std::vector<std::int64_t> dims;
  std::int64_t elements = 1;
  for (const Json& dim : reader.array(json, "shape")) {
    if (!dim.is_number_unsigned() || dim.get<std::uint64_t>() > (std::uint64_t{1} << 48) ||
        __builtin_mul_overflow(elements, dim.get<std::int64_t>(), &elements) ||
        elements > (std::int64_t{1} << 56)) {
      reader.refuse("tensor '{}' has a shape that is no shape", name);
    }
    dims.push_back(dim.get<std::int64_t>());
  }
  if (dims.size() > Shape::kMaxDims) reader.refuse("tensor '{}' has too many dimensions", name);
  return Shape(dims);
}

Slice slice_from(const Reader& reader, const Json& json, const SavedTensor& tensor,
                 const Shape& shape) {
  const std::uint64_t axis = reader.number(json, "axis"), begin = reader.number(json, "begin"),
                      length = reader.number(json, "length"), whole = reader.number(json, "whole");
  const bool known = axis < static_cast<std::uint64_t>(shape.rank()) &&
                     whole == static_cast<std::uint64_t>(shape[static_cast<int>(axis)]);
  if (!known || begin > whole || length > whole - begin) {
    reader.refuse(
        "tensor '{}' is of {} rows from row {} of {} on along dimension {}, which {} has "
        "not",
        tensor.name, length, begin, whole, axis, to_string(shape));
  }
  const auto number = [](std::uint64_t value) { return static_cast<std::int64_t>(value); };
  return {static_cast<int>(axis), number(begin), number(length), number(whole)};
}

// Of a tensor that is a part of a larger one.
void read_range(const Reader& reader, const Json& json, SavedTensor& tensor) {
  SavedRange range{reader.text(json, "whole"), shape_from(reader, json, tensor.name)};
  if (json.contains("slice")) {
    range.slice = slice_from(reader, reader.object(json, "slice"), tensor, range.shape);
  }
  const Shape holder = slice_shape(range.shape, range.slice);
  const std::uint64_t first = reader.number(json, "first");
  const std::int64_t elements = holder.elements(), count = tensor.spec.shape.elements();
  if (range.whole.empty() || !tensor.parameter.empty() || tensor.spec.shape.rank() != 1 ||
      count == 0 || count > elements || first > static_cast<std::uint64_t>(elements - count)) {
    reader.refuse("tensor '{}' {} from element {} on is no part of '{}' {}", tensor.name,
                  to_string(tensor.spec), first, range.whole, to_string(holder));
  }
  range.first = static_cast<std::int64_t>(first);
  tensor.range = std::move(range);
}

SavedTensor tensor_from(const Reader& reader, const Json& json) {
  SavedTensor tensor;
  tensor.name = reader.text(json, "name");
  tensor.file = reader.text(json, "file");
  const std::string dtype = reader.text(json, "dtype");
  bool known = false;
  for (int number = 0; number < kDTypes; ++number) {
    const auto each = static_cast<DType>(number);
    if (dtype != name_of(each)) continue;
    tensor.spec.dtype = each;
    known = true;
  }
  if (!known) reader.refuse("tensor '{}' is of type '{}'", tensor.name, dtype);
  tensor.spec.shape = shape_from(reader, json, tensor.name);
  if (json.contains("part")) read_part_of(reader, reader.object(json, "part"), tensor);
  if (json.contains("range")) read_range(reader, reader.object(json, "range"), tensor);
  return tensor;
}

Json json_of(const Shape& shape) {
  Json dims = Json::array();
  for (int i = 0; i < shape.rank(); ++i) dims.push_back(shape[i]);
  return dims;
}

void read_lists(const Reader& reader, const Json& json, SaveState& state) {
  std::set<std::string> files;
  for (const Json& each : reader.array(json, "files")) {
    SavedFile file = file_from(reader, each);
    if (!files.insert(file.name).second) reader.refuse("file '{}' comes twice", file.name);
    state.files.push_back(std::move(file));
  }
  std::set<std::string> tensors;
  const std::uint64_t format = reader.number(json, "format");
  for (const Json& each : reader.array(json, "tensors")) {
    SavedTensor tensor = tensor_from(reader, each);
    if (tensor.range && format < kRangesFormat) {
      reader.refuse("tensor '{}' has a 'range', which format {} has not; legal from format {} on",
                    tensor.name, format, kRangesFormat);
    }
    if (!files.contains(tensor.file)) {
      reader.refuse("tensor '{}' is in '{}', which is not listed", tensor.name, tensor.file);
    }
    if (!tensors.insert(tensor.name).second) {
      reader.refuse("tensor '{}' comes twice", tensor.name);
    }
    state.tensors.push_back(std::move(tensor));
  }
}

// What says among how many `holders` the `parts` were divided: where the former are not recorded,
// among `otherwise`; 0: they have to be.
void require_division(const Reader& reader, const std::map<std::string, int>& layout,
                      const char* parts, const char* holders, int otherwise,
                      const DivisionNames& names) {
  const auto of = layout.find(holders), divided = layout.find(parts);
  if (of != layout.end() && of->second == 0) {
    reader.refuse("'{}' of 'layout' is 0; legal are numbers from 1", holders);
  }
  if (divided == layout.end()) return;
  const int count = of != layout.end() ? of->second : otherwise;
  if (count == 0) reader.refuse("'layout' has '{}', but no '{}'", parts, holders);
  if (divided->second > 0 && can_divide(divided->second, count)) return;
  reader.refuse("'{}' of 'layout' is {}, with {} {}{}; {}", parts, divided->second, count,
                names.holder, count == 1 ? "" : "s", legal_parts(divided->second, count, names));
}

// The first of `names` that is recorded.
int recorded(const std::map<std::string, int>& layout, std::initializer_list<const char*> names,
             int otherwise) {
  for (const char* name : names) {
    if (const auto found = layout.find(name); found != layout.end()) return found->second;
  }
  return otherwise;
}

}  // namespace

std::span<const std::string_view> model_file_names() {
  // As transformers and its tokenizers write and read them.
  static constexpr std::array<std::string_view, 11> kNames = {"config.json",
                                                              "generation_config.json",
                                                              "tokenizer.json",
                                                              "tokenizer_config.json",
                                                              "special_tokens_map.json",
                                                              "added_tokens.json",
                                                              "vocab.json",
                                                              "merges.txt",
                                                              "tokenizer.model",
                                                              "chat_template.jinja",
                                                              "chat_template.json"};
  return kNames;
}

bool is_id(std::string_view text) {
  return text.size() == 32 && std::all_of(text.begin(), text.end(), [](char c) {
           return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f');
         });
}

bool is_save_file_name(std::string_view name) {
  if (name == "user.safetensors") return true;
  const std::span<const std::string_view> model_files = model_file_names();
  if (std::find(model_files.begin(), model_files.end(), name) != model_files.end()) return true;
  for (const std::string_view kind : {"model", "optimizer"}) {
    if (!name.starts_with(kind)) continue;
    const std::string_view rest = name.substr(kind.size());
    if (rest == ".safetensors" || rest == ".safetensors.index.json") return true;
    // -00001-of-00002.safetensors, five digits or more each
    const auto digits = [](std::string_view text) {
      return text.size() >= 5 && text.size() <= 10 &&
             text.find_first_not_of("0123456789") == std::string_view::npos;
    };
    const std::size_t of = rest.find("-of-"), end = rest.find(".safetensors");
    if (rest.starts_with("-") && of != std::string_view::npos && end != std::string_view::npos &&
        of < end && rest.substr(end) == ".safetensors" && digits(rest.substr(1, of - 1)) &&
        digits(rest.substr(of + 4, end - of - 4))) {
      return true;
    }
  }
  return false;
}

int SaveState::virtual_replicas() const {
  return recorded(layout, {"virtual_replicas", "replicas"}, 0);
}

GradientOrder SaveState::gradient_order() const {
  return recorded(layout, {kMicroBatchOrder}, 0) > 0 ? GradientOrder::kMicroBatch
                                                     : GradientOrder::kStep;
}

int SaveState::tensor_shards() const { return recorded(layout, {"tensor_shards", "tensor"}, 1); }

std::string arithmetic_change(const std::vector<std::string>& saved,
                              const std::map<std::string, std::vector<int>>& now) {
  std::vector<std::string> ours;
  for (const auto& [text, ranks] : now) ours.push_back(text);
  if (saved.empty() || ours.empty() || saved == ours) return "";
  return fmt::format("arithmetic: {} -> {}; bits may differ", joined(saved, " and "),
                     joined(ours, " and "));
}

bool is_state_json(std::string_view text) {
  return !parse_bounded(text, kMostLevels, kMostKeys).is_discarded();
}

std::string to_json_text(const SaveState& state) {
  const bool ranges = std::any_of(state.tensors.begin(), state.tensors.end(),
                                  [](const SavedTensor& tensor) { return !!tensor.range; });
  Json json;
  json["format"] = ranges ? kRangesFormat : kWholesFormat;
  json["save"] = state.save;
  json["run"] = state.run;
  json["sequence"] = state.sequence;
  json["step"] = state.step;
  json["time"] = state.time;
  json["weights_only"] = state.weights_only;
  json["layout"] = state.layout;
  json["arithmetic"] = state.arithmetic;
  json["options"] = Json::object();
  for (const auto& [name, value] : state.options) json["options"][name] = value;
  json["model"] = state.model.empty() ? Json() : parse_ordered_json(state.model);
  json["data"] = Json::object();
  for (const auto& [name, value] : state.data) json["data"][name] = value;
  json["skipped"] = state.skipped;
  json["user"] = Json::object();
  for (const auto& [name, text] : state.user) json["user"][name] = parse_ordered_json(text);
  json["files"] = Json::array();
  for (const SavedFile& file : state.files) {
    json["files"].push_back(Json{
        {"name", file.name}, {"bytes", file.bytes}, {"hash", file.hash}, {"blocks", file.blocks}});
  }
  json["tensors"] = Json::array();
  for (const SavedTensor& tensor : state.tensors) {
    Json each = {{"name", tensor.name},
                 {"file", tensor.file},
                 {"dtype", name_of(tensor.spec.dtype)},
                 {"shape", json_of(tensor.spec.shape)}};
    if (!tensor.parameter.empty()) {
      each["part"] = {{"parameter", tensor.parameter},
                      {"first_row", tensor.first_row},
                      {"rows", tensor.rows},
                      {"transposed", tensor.transposed}};
    }
    if (tensor.range) {
      const auto& [whole, shape, first, slice] = *tensor.range;
      each["range"] = {{"whole", whole}, {"shape", json_of(shape)}, {"first", first}};
      if (!slice.all()) {
        each["range"]["slice"] = {{"axis", slice.axis},
                                  {"begin", slice.begin},
                                  {"length", slice.length},
                                  {"whole", slice.whole}};
      }
    }
    json["tensors"].push_back(std::move(each));
  }
  std::string text = dump_json(json, 1, InvalidUtf8::replace);
  text.resize(text.rfind('\n'));  // "\n}"
  return text + fmt::format("{}{}\"\n}}\n", kCheck, checksum_hex(std::as_bytes(std::span(text))));
}

SaveState parse_save_state(std::string_view text, const std::filesystem::path& path) {
  const Reader reader(path);
  const std::size_t check = text.rfind(kCheck);
  const Json json = parse_bounded(text, kMostLevels + 2, kMostKeys);
  if (json.is_discarded() || !json.is_object()) {
    reader.refuse("it is no JSON object of at most {} levels and {} keys an object",
                  kMostLevels + 2, kMostKeys);
  }
  const std::uint64_t format = reader.number(json, "format");
  if (format < SaveState::kOldestFormat || format > SaveState::kFormat) {
    throw_error(ErrorCode::kWeights, "'{}' is of format {}; this version reads formats {} to {}{}",
                path.string(), format, SaveState::kOldestFormat, SaveState::kFormat,
                format < SaveState::kFormat ? "; Sluice 0.2 reads older ones and saves them anew"
                                            : ", a newer version of Sluice wrote it");
  }
  const std::string_view checked = text.substr(0, check);
  if (check == std::string_view::npos ||
      text.substr(check + kCheck.size()) !=
          checksum_hex(std::as_bytes(std::span(checked))) + "\"\n}\n") {
    reader.refuse("its text does not have the hash that it ends with");
  }
  SaveState state;
  state.save = reader.hash(reader.text(json, "save"), "save");
  state.run = reader.hash(reader.text(json, "run"), "run");
  state.sequence = reader.number(json, "sequence");
  state.step = reader.number(json, "step");
  state.time = reader.text(json, "time");
  state.weights_only = reader.flag(json, "weights_only");
  for (const auto& [name, value] : reader.object(json, "layout").items()) {
    if (!value.is_number_unsigned() ||
        value.get<std::uint64_t>() > std::numeric_limits<int>::max()) {
      reader.refuse("'{}' of 'layout' is no number of ranks", name);
    }
    state.layout[name] = value.get<int>();
  }
  // Versions before 0.3 have no virtual replicas.
  require_division(reader, state.layout, "virtual_replicas", "replicas", 0, kVirtualReplicas);
  require_division(reader, state.layout, "tensor_shards", "tensor", 1, kTensorShards);
  if (json.contains("arithmetic")) {  // version 0.2 did not record it
    for (const Json& each : reader.array(json, "arithmetic")) {
      if (!each.is_string()) reader.refuse("'arithmetic' holds what is no text");
      state.arithmetic.push_back(each.get<std::string>());
    }
  }
  state.options = reader.values(json, "options");
  const Json& model = reader.field(json, "model");
  if (!model.is_null()) state.model = dump_json(model);
  state.data = reader.values(json, "data");
  for (const Json& step : reader.array(json, "skipped")) {
    if (!step.is_number_unsigned()) reader.refuse("'skipped' holds what is no step");
    state.skipped.push_back(step.get<std::uint64_t>());
  }
  for (const auto& [name, value] : reader.object(json, "user").items()) {
    state.user[name] = dump_json(value);
  }
  read_lists(reader, json, state);
  return state;
}

SaveState read_save_state(const std::filesystem::path& directory) {
  const std::filesystem::path path = directory / "state.json";
  return parse_save_state(read_text(path, kMostBytes, ErrorCode::kWeights), path);
}

}  // namespace sluice
