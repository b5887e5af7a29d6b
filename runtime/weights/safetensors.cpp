#include <fmt/format.h>

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

#include "comm/base/throw_error.hpp"
#include "runtime/files/atomic_file.hpp"
#include "runtime/files/mapped_file.hpp"
#include "runtime/weights/safetensors_header.hpp"
#include "runtime/weights/weights.hpp"

namespace sluice {
namespace {

static_assert(std::endian::native == std::endian::little, "safetensors files are little-endian");

constexpr std::size_t kLengthBytes = sizeof(std::uint64_t);
constexpr std::size_t kMaxHeaderBytes = 100'000'000;  // the reference reader's bound

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
    text = nlohmann::ordered_json(std::move(entries)).dump();
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

}  // namespace

FileTensor file_tensor(const NamedTensor& named) {
  const Tensor tensor = named.tensor;
  return {named.name, tensor.spec, [tensor](std::vector<std::byte>&) {
            return std::span(static_cast<const std::byte*>(tensor.data), tensor.spec.bytes());
          }};
}

void write_safetensors(const std::filesystem::path& path, std::span<const NamedTensor> tensors,
                       const std::map<std::string, std::string>& metadata,
                       const std::function<void(std::span<const std::byte>)>& written) {
  std::vector<FileTensor> files;
  for (const NamedTensor& named : tensors) files.push_back(file_tensor(named));
  write_safetensors(path, files, metadata, written);
}

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
    const std::span<const std::byte> bytes = tensor->bytes(scratch);
    if (bytes.size() != tensor->spec.bytes()) {
      throw_error(ErrorCode::kInternal, "tensor '{}' of {} came as {} bytes", tensor->name,
                  to_string(tensor->spec), bytes.size());
    }
    put(bytes);
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
    SafetensorsHeader header;
    try {
      header = parse_safetensors_header(
          std::string_view(reinterpret_cast<const char*>(rest.data()), length), data.size());
    } catch (const std::invalid_argument& error) {
      refuse(ErrorCode::kWeights, path, error.what());
    }
    metadata = std::move(header.metadata);
    for (SafetensorsHeader::Entry& entry : header.entries) {
      by_name.emplace(entry.name, entries.size());
      entries.push_back(
          {std::move(entry.name), entry.spec, data.subspan(entry.begin, entry.end - entry.begin)});
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
