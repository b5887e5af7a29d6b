#include <fmt/core.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>
#include <stdexcept>
#include <string_view>
#include <tuple>
#include <utility>

#include <sluice/device.hpp>
#include <sluice/error.hpp>

#include "comm/base/joined.hpp"
#include "comm/base/throw_error.hpp"
#include "runtime/files/atomic_file.hpp"
#include "runtime/files/json_text.hpp"
#include "runtime/files/mapped_file.hpp"
#include "runtime/weights/weights.hpp"

namespace sluice {
namespace {

static_assert(std::endian::native == std::endian::little, "safetensors files are little-endian");

constexpr std::size_t kLengthBytes = sizeof(std::uint64_t);
constexpr std::size_t kMaxHeaderBytes = 100'000'000;  // the reference reader's bound

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

// What is wrong with a header, without the name of its file.
[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument(what); }

// An object of JSON without a key that comes twice.
template <typename Key, typename Value, typename Compare, typename Allocator>
struct UniqueKeys : std::map<Key, Value, Compare, Allocator> {
  using std::map<Key, Value, Compare, Allocator>::map;
  Value& operator[](const Key& key) {
    const auto [place, is_new] = this->try_emplace(key);
    if (!is_new) refuse(fmt::format("the key '{}' comes twice", key));
    return place->second;
  }
};
using Json = nlohmann::basic_json<UniqueKeys>;

// A file from elsewhere must not take the memory of values that no header has. The library's
// callback could tell, but takes minutes for 100,000 tensors.
void require_shallow(std::string_view text) {
  int depth = 0;
  bool quoted = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (quoted && text[i] == '\\') {
      ++i;
    } else if (text[i] == '"') {
      quoted = !quoted;
    } else if (!quoted && (text[i] == '{' || text[i] == '[')) {
      if (++depth > 4) refuse(fmt::format("is nested too deeply at byte {}", i));
    } else if (!quoted && (text[i] == '}' || text[i] == ']')) {
      --depth;
    }
  }
}

Json parse(std::string_view text) {
  require_shallow(text);
  try {
    return Json::parse(text);
  } catch (const Json::exception& error) {
    const auto* const wrong = dynamic_cast<const Json::parse_error*>(&error);
    refuse(fmt::format("is no JSON: wrong at byte {}", wrong == nullptr ? 0 : wrong->byte));
  }
}

const Json& member(const Json& tensor, const char* key, const std::string& name) {
  const auto found = tensor.find(key);
  if (found != tensor.end()) return *found;
  refuse(fmt::format("tensor '{}' lacks one of dtype, shape, data_offsets", name));
}

std::vector<std::uint64_t> numbers(const Json& tensor, const char* key, const std::string& name) {
  const Json& list = member(tensor, key, name);
  if (list.is_array() && std::all_of(list.begin(), list.end(), [](const Json& number) {
        return number.is_number_unsigned();
      })) {
    return list;
  }
  refuse(fmt::format("{} of tensor '{}' is no list of whole numbers from 0", key, name));
}

struct HeaderEntry {
  std::string name;
  TensorSpec spec;
  std::size_t begin = 0, end = 0;  // bytes, relative to the end of the header
};

Shape checked_shape(const std::vector<std::uint64_t>& shape, const std::string& name) {
  try {
    return Shape(std::vector<std::int64_t>(shape.begin(), shape.end()));
  } catch (const Error& error) {
    refuse(fmt::format("the shape of tensor '{}': {}", name, error.what()));
  }
}

HeaderEntry checked_entry(const std::string& name, const Json& tensor) {
  if (!tensor.is_object()) refuse(fmt::format("tensor '{}' is no object", name));
  for (const auto& [key, value] : tensor.items()) {
    if (key == "dtype" || key == "shape" || key == "data_offsets") continue;
    refuse(fmt::format("'{}' of tensor '{}' is unknown; legal: dtype, shape, data_offsets", key,
                       name));
  }
  const Json& type = member(tensor, "dtype", name);
  const std::vector<std::uint64_t> shape = numbers(tensor, "shape", name);
  const std::vector<std::uint64_t> offsets = numbers(tensor, "data_offsets", name);
  if (!type.is_string()) refuse(fmt::format("dtype of tensor '{}' is no string", name));
  const auto& type_name = type.get_ref<const std::string&>();
  const DType* const dtype = dtype_of_safetensors(type_name);
  if (dtype == nullptr) {
    refuse(fmt::format(
        "dtype '{}' of tensor '{}' is not supported; legal: BF16, F16, F32, F64, I32, I64, U8",
        type_name, name));
  }
  const TensorSpec spec = {*dtype, checked_shape(shape, name)};
  if (offsets.size() != 2 || offsets[0] > offsets[1]) {
    refuse(fmt::format("data_offsets [{}] of tensor '{}' are no begin and end",
                       joined(offsets, ", "), name));
  }
  if (offsets[1] - offsets[0] != spec.bytes()) {
    refuse(fmt::format("data_offsets [{}] of tensor '{}' hold {} bytes, but {} takes {}",
                       joined(offsets, ", "), name, offsets[1] - offsets[0], to_string(spec),
                       spec.bytes()));
  }
  return {name, spec, offsets[0], offsets[1]};
}

void check_layout(const std::vector<HeaderEntry>& entries, std::size_t data_bytes) {
  std::size_t at = 0;
  for (const HeaderEntry& entry : entries) {
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

[[noreturn]] void refuse(ErrorCode code, const std::filesystem::path& path,
                         const std::string& what) {
  throw_error(code, "safetensors file '{}': {}", path.string(), what);
}

// Wider types first, so that every tensor is aligned to its type; then by name. As the reference.
std::vector<const FileTensor*> in_file_order(std::span<const FileTensor> tensors) {
  std::vector<const FileTensor*> order;
  for (const FileTensor& tensor : tensors) order.push_back(&tensor);
  std::sort(order.begin(), order.end(), [](const FileTensor* a, const FileTensor* b) {
    const std::size_t a_size = size_of(a->spec.dtype);
    const std::size_t b_size = size_of(b->spec.dtype);
    return std::tie(b_size, a->name) < std::tie(a_size, b->name);
  });
  return order;
}

std::string header_text(const std::filesystem::path& path,
                        const std::vector<const FileTensor*>& order,
                        const std::map<std::string, std::string>& metadata) {
  // An ordered object looks for a key from its first to its last.
  nlohmann::ordered_json::object_t entries;
  entries.reserve(order.size() + 1);
  std::set<std::string_view> names = {"__metadata__"};
  if (!metadata.empty()) entries.emplace_back("__metadata__", metadata);
  std::size_t at = 0;
  for (const FileTensor* named : order) {
    const TensorSpec& spec = named->spec;
    if (!names.insert(named->name).second) {
      refuse(ErrorCode::kIo, path,
             fmt::format("the name '{}' of a tensor is taken twice or reserved", named->name));
    }
    std::vector<std::int64_t> dims;
    for (int i = 0; i < spec.shape.rank(); ++i) dims.push_back(spec.shape[i]);
    entries.emplace_back(named->name,
                         nlohmann::ordered_json{{"dtype", safetensors_name_of(spec.dtype)},
                                                {"shape", dims},
                                                {"data_offsets", {at, at + spec.bytes()}}});
    at += spec.bytes();
  }
  std::string text;
  try {
    text = dump_json(nlohmann::ordered_json(std::move(entries)));
  } catch (const nlohmann::json::exception&) {
    refuse(ErrorCode::kIo, path, "a name or metadata value is not valid UTF-8");
  }
  text.resize(round_up(text.size(), 8), ' ');
  if (text.size() > kMaxHeaderBytes) {
    refuse(ErrorCode::kIo, path,
           fmt::format("the header would take {} bytes; legal: at most {}", text.size(),
                       kMaxHeaderBytes));
  }
  return text;
}

// Entries by offset. Throws std::invalid_argument naming the fault: JSON, a key twice or unknown, a
// dtype or rank that Tensor lacks, a shape that does not fit its offsets, offsets that leave a gap,
// overlap, or do not end at `data_bytes`.
std::vector<HeaderEntry> parse_header(std::string_view text, std::size_t data_bytes,
                                      std::map<std::string, std::string>& metadata) {
  if (!text.starts_with('{')) refuse("the header does not begin with '{'");
  const Json json = parse(text);
  std::vector<HeaderEntry> entries;
  for (const auto& [name, value] : json.items()) {
    if (name != "__metadata__") {
      entries.push_back(checked_entry(name, value));
      continue;
    }
    if (!value.is_object()) refuse("__metadata__ is no object");
    for (const auto& [key, each] : value.items()) {
      if (!each.is_string()) refuse(fmt::format("metadata key '{}' is no string", key));
      metadata.emplace(key, each.get<std::string>());
    }
  }
  std::sort(entries.begin(), entries.end(), [](const auto& a, const auto& b) {
    return std::tie(a.begin, a.end, a.name) < std::tie(b.begin, b.end, b.name);
  });
  check_layout(entries, data_bytes);
  return entries;
}

}  // namespace

void write_safetensors(const std::filesystem::path& path, std::span<const FileTensor> tensors,
                       const std::map<std::string, std::string>& metadata,
                       const std::function<void(std::span<const std::byte>)>& written) {
  constexpr std::size_t kPiece = std::size_t{1} << 20;  // still cached when `written` reads it
  const std::vector<const FileTensor*> order = in_file_order(tensors);
  const std::string header = header_text(path, order, metadata);
  AtomicFile file(path);
  const auto put = [&](std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
      const auto piece = bytes.first(std::min(bytes.size(), kPiece));
      file.write(piece);
      if (written) written(piece);
      bytes = bytes.subspan(piece.size());
    }
  };
  const std::uint64_t length = header.size();
  put(std::as_bytes(std::span(&length, 1)));
  put(std::as_bytes(std::span(header)));
  std::vector<std::byte> scratch;
  for (const FileTensor* tensor : order) {
    const std::size_t all = tensor->spec.bytes();
    std::size_t done = 0;
    do {
      const std::span<const std::byte> bytes = tensor->bytes(scratch);
      if (bytes.size() > all - done || (bytes.empty() && done < all)) {
        throw_error(ErrorCode::kInternal, "tensor '{}' of {} came as {} bytes", tensor->name,
                    to_string(tensor->spec), done + bytes.size());
      }
      put(bytes);
      done += bytes.size();
    } while (done < all);
  }
  file.commit();
}

struct SafetensorsFile::Impl {
  explicit Impl(const std::filesystem::path& path) : file(path, ErrorCode::kWeights) {
    const std::span<const std::byte> bytes = file.bytes();
    if (bytes.size() < kLengthBytes) {
      refuse(ErrorCode::kWeights, path,
             fmt::format("{} bytes are too few for a header length", bytes.size()));
    }
    std::uint64_t length = 0;
    std::memcpy(&length, bytes.data(), kLengthBytes);
    const std::span<const std::byte> rest = bytes.subspan(kLengthBytes);
    if (length > kMaxHeaderBytes || length > rest.size()) {
      refuse(ErrorCode::kWeights, path,
             fmt::format("the header's length {} exceeds the {}", length,
                         length > kMaxHeaderBytes
                             ? fmt::format("most that is legal, {}", kMaxHeaderBytes)
                             : fmt::format("{} bytes that follow it", rest.size())));
    }
    const std::span<const std::byte> data = rest.subspan(length);
    try {
      const std::string_view header(reinterpret_cast<const char*>(rest.data()), length);
      for (HeaderEntry& entry : parse_header(header, data.size(), metadata)) {
        by_name.emplace(entry.name, entries.size());
        entries.push_back({std::move(entry.name), entry.spec,
                           data.subspan(entry.begin, entry.end - entry.begin)});
      }
    } catch (const std::invalid_argument& error) {
      refuse(ErrorCode::kWeights, path, error.what());
    }
  }

  MappedFile file;
  std::vector<Entry> entries;
  std::map<std::string, std::size_t> by_name;  // of entries
  std::map<std::string, std::string> metadata;
};

SafetensorsFile::SafetensorsFile(const std::filesystem::path& path)
    : impl_(std::make_unique<Impl>(path)) {}
SafetensorsFile::~SafetensorsFile() = default;
SafetensorsFile::SafetensorsFile(SafetensorsFile&&) noexcept = default;

const std::vector<SafetensorsFile::Entry>& SafetensorsFile::entries() const {
  return impl_->entries;
}
const SafetensorsFile::Entry* SafetensorsFile::find(const std::string& name) const {
  const auto found = impl_->by_name.find(name);
  return found == impl_->by_name.end() ? nullptr : &impl_->entries[found->second];
}

void SafetensorsFile::release(const Entry& entry) const { impl_->file.release(entry.bytes); }

const std::map<std::string, std::string>& SafetensorsFile::metadata() const {
  return impl_->metadata;
}

}  // namespace sluice
