#include "runtime/weights/safetensors_header.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <span>
#include <stdexcept>
#include <tuple>
#include <utility>

namespace sluice {
namespace {

struct NamedDType {
  const char* name;
  DType dtype;
};
constexpr std::array<NamedDType, 7> kNamedDTypes = {{{"F32", DType::kF32},
                                                     {"BF16", DType::kBf16},
                                                     {"I32", DType::kI32},
                                                     {"U8", DType::kU8},
                                                     {"F64", DType::kF64},
                                                     {"F16", DType::kF16},
                                                     {"I64", DType::kI64}}};

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument(what); }

// One tensor as the SAX reader collects it, unchecked.
struct RawEntry {
  std::string name;
  std::string dtype;
  std::vector<std::uint64_t> shape, offsets;
  std::set<std::string> seen;  // keys
};

// One state per place in the grammar. It refuses anything else at once, so the format bounds depth
// and memory.
class HeaderReader final : public nlohmann::json_sax<nlohmann::json> {
 public:
  bool start_object(std::size_t) override {
    switch (place_) {
      case Place::kOutside:
        place_ = Place::kTop;
        return true;
      case Place::kTop:
        place_ = key_ == "__metadata__" ? Place::kMetadata : Place::kTensor;
        if (place_ == Place::kTensor) raw_.emplace_back().name = key_;
        return true;
      default:
        unexpected("an object");
    }
  }
  bool key(string_t& key) override {
    key_ = key;
    const bool is_new = place_ == Place::kTop        ? names_.insert(key).second
                        : place_ == Place::kMetadata ? !metadata_.contains(key)
                                                     : raw_.back().seen.insert(key).second;
    if (!is_new) refuse(fmt::format("{} comes twice", here()));
    if (place_ == Place::kTensor && key != "dtype" && key != "shape" && key != "data_offsets") {
      refuse(fmt::format("{} is unknown; legal: dtype, shape, data_offsets", here()));
    }
    return true;
  }
  bool end_object() override {
    if (place_ == Place::kTensor && raw_.back().seen.size() != 3) {
      refuse(fmt::format("tensor '{}' lacks one of dtype, shape, data_offsets", raw_.back().name));
    }
    place_ = place_ == Place::kTop ? Place::kOutside : Place::kTop;
    return true;
  }
  bool start_array(std::size_t) override {
    if (place_ != Place::kTensor || key_ == "dtype") unexpected("an array");
    place_ = Place::kNumbers;
    return true;
  }
  bool end_array() override {
    place_ = Place::kTensor;
    return true;
  }
  bool string(string_t& value) override {
    if (place_ == Place::kMetadata) {
      metadata_.emplace(key_, value);
    } else if (place_ == Place::kTensor && key_ == "dtype") {
      raw_.back().dtype = value;
    } else {
      unexpected("a string");
    }
    return true;
  }
  bool number_unsigned(number_unsigned_t value) override {
    if (place_ != Place::kNumbers) unexpected("a number");
    (key_ == "shape" ? raw_.back().shape : raw_.back().offsets).push_back(value);
    return true;
  }
  bool number_integer(number_integer_t value) override {
    unexpected(fmt::format("the negative number {}", value));
  }
  bool number_float(number_float_t, const string_t& text) override {
    unexpected(fmt::format("the number {}, which is no integer of 64 bits,", text));
  }
  bool null() override { unexpected("null"); }
  bool boolean(bool) override { unexpected("a boolean"); }
  bool binary(binary_t&) override { unexpected("binary data"); }
  bool parse_error(std::size_t position, const std::string&,
                   const nlohmann::json::exception&) override {
    refuse(fmt::format("is no JSON: wrong at byte {}", position));
  }

  std::vector<RawEntry> take_raw() { return std::move(raw_); }
  std::map<std::string, std::string> take_metadata() { return std::move(metadata_); }

 private:
  enum class Place : std::uint8_t { kOutside, kTop, kMetadata, kTensor, kNumbers };

  [[nodiscard]] std::string here() const {
    if (place_ == Place::kOutside) return "the top";
    if (place_ == Place::kTop) return fmt::format("'{}'", key_);
    if (place_ == Place::kMetadata) return fmt::format("metadata key '{}'", key_);
    return fmt::format("'{}' of tensor '{}'", key_, raw_.back().name);
  }
  [[noreturn]] void unexpected(const std::string& what) const {
    refuse(fmt::format("{} has {} where none belongs", here(), what));
  }

  Place place_ = Place::kOutside;
  std::string key_;
  std::set<std::string> names_;
  std::vector<RawEntry> raw_;
  std::map<std::string, std::string> metadata_;
};

Shape checked_shape(const RawEntry& raw) {
  if (raw.shape.size() > Shape::kMaxDims) {
    refuse(fmt::format("tensor '{}' has {} dimensions; legal: at most {}", raw.name,
                       raw.shape.size(), Shape::kMaxDims));
  }
  std::vector<std::int64_t> dims;
  // Of the widest type, as a Shape demands. Zeros count as ones here, so that no order of
  // multiplication overflows either.
  std::int64_t bytes = sizeof(double);
  for (const std::uint64_t dim : raw.shape) {
    if (dim > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()) ||
        __builtin_mul_overflow(bytes, static_cast<std::int64_t>(std::max<std::uint64_t>(dim, 1)),
                               &bytes)) {
      refuse(fmt::format("the shape [{}] of tensor '{}' overflows 64 bits",
                         fmt::join(raw.shape, ", "), raw.name));
    }
    dims.push_back(static_cast<std::int64_t>(dim));
  }
  return Shape(std::span<const std::int64_t>(dims));
}

SafetensorsHeader::Entry checked_entry(RawEntry raw) {
  const DType* dtype = dtype_of_safetensors(raw.dtype);
  if (dtype == nullptr) {
    refuse(fmt::format(
        "dtype '{}' of tensor '{}' is not supported; legal: BF16, F16, F32, F64, I32, I64, U8",
        raw.dtype, raw.name));
  }
  SafetensorsHeader::Entry entry;
  entry.spec = {*dtype, checked_shape(raw)};
  if (raw.offsets.size() != 2) {
    refuse(fmt::format("data_offsets of tensor '{}' are no begin and end but {} numbers", raw.name,
                       raw.offsets.size()));
  }
  if (raw.offsets[0] > raw.offsets[1]) {
    refuse(fmt::format("data_offsets [{}] of tensor '{}' are no begin and end",
                       fmt::join(raw.offsets, ", "), raw.name));
  }
  if (raw.offsets[1] - raw.offsets[0] != entry.spec.bytes()) {
    refuse(fmt::format("data_offsets [{}] of tensor '{}' hold {} bytes, but {} takes {}",
                       fmt::join(raw.offsets, ", "), raw.name, raw.offsets[1] - raw.offsets[0],
                       to_string(entry.spec), entry.spec.bytes()));
  }
  entry.name = std::move(raw.name);
  entry.begin = raw.offsets[0];
  entry.end = raw.offsets[1];
  return entry;
}

void check_layout(const std::vector<SafetensorsHeader::Entry>& entries, std::size_t data_bytes) {
  std::size_t at = 0;
  for (const SafetensorsHeader::Entry& entry : entries) {
    if (entry.begin != at) {
      refuse(fmt::format("tensor '{}' begins at byte {} of the data, which leaves {} byte {}",
                         entry.name, entry.begin,
                         entry.begin < at ? "an overlap before" : "a gap at", at));
    }
    at = entry.end;
  }
  if (at != data_bytes) {
    refuse(fmt::format("the tensors take {} bytes, but {} follow the header: the file is {}", at,
                       data_bytes, at > data_bytes ? "truncated" : "too long"));
  }
}

}  // namespace

const char* safetensors_name_of(DType dtype) {
  for (const NamedDType& known : kNamedDTypes) {
    if (known.dtype == dtype) return known.name;
  }
  return nullptr;
}

const DType* dtype_of_safetensors(std::string_view name) {
  for (const NamedDType& known : kNamedDTypes) {
    if (known.name == name) return &known.dtype;
  }
  return nullptr;
}

SafetensorsHeader parse_safetensors_header(std::string_view text, std::size_t data_bytes) {
  if (!text.starts_with('{')) refuse("the header does not begin with '{'");
  HeaderReader reader;
  nlohmann::json::sax_parse(text.begin(), text.end(), &reader);
  SafetensorsHeader header;
  header.metadata = reader.take_metadata();
  for (RawEntry& raw : reader.take_raw()) header.entries.push_back(checked_entry(std::move(raw)));
  std::sort(header.entries.begin(), header.entries.end(), [](const auto& a, const auto& b) {
    return std::tie(a.begin, a.end, a.name) < std::tie(b.begin, b.end, b.name);
  });
  check_layout(header.entries, data_bytes);
  return header;
}

}  // namespace sluice
