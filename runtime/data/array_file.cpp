// Files of arrays: IDX, as described on the page of the MNIST data set (LeCun, Cortes, Burges), and
// NumPy's .npy (numpy.lib.format, versions 1.0 to 3.0).
#include <fmt/core.h>
#include <unistd.h>
#include <zlib.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>
#include <new>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>
#include <string_view>

#include <sluice/data.hpp>
#include <sluice/error.hpp>

#include "comm/base/throw_error.hpp"
#include "runtime/files/json_text.hpp"
#include "runtime/files/read_file.hpp"

namespace sluice {
namespace {

static_assert(std::endian::native == std::endian::little, ".npy files are read as they lie");

// What is wrong with a file, without its name.
struct Fault {
  std::string what;
};
template <typename... Args>
[[noreturn]] void refuse(fmt::format_string<Args...> format, Args&&... args) {
  throw Fault{fmt::format(format, std::forward<Args>(args)...)};
}

// The bytes of a file one after the other; those of a gzip file are decompressed.
class ByteStream {
 public:
  explicit ByteStream(const std::filesystem::path& path) : file_(path) {
    const int descriptor = dup(file_.descriptor());  // gzclose() closes it
    stream_ = descriptor < 0 ? nullptr : gzdopen(descriptor, "rb");
    if (stream_ == nullptr) {
      if (descriptor >= 0) close(descriptor);
      refuse("cannot be read: {}", std::strerror(errno));
    }
  }
  ~ByteStream() { gzclose(stream_); }

  // Bytes that the file has, where it is not compressed; call it after the first read.
  [[nodiscard]] std::optional<std::uint64_t> size() const {
    if (gzdirect(stream_) == 0) return std::nullopt;
    return file_.bytes();
  }

  // The number of bytes read: fewer than wanted at the end.
  std::size_t read(std::span<std::byte> into) {
    std::size_t done = 0;
    while (done < into.size()) {
      constexpr std::size_t kMost = std::size_t{1} << 30;
      const std::size_t want = std::min(into.size() - done, kMost);
      const int got = gzread(stream_, into.data() + done, static_cast<unsigned>(want));
      if (got < 0) fail();
      if (got == 0) break;
      done += static_cast<std::size_t>(got);
    }
    if (done < into.size()) fail();
    return done;
  }
  void read_all(std::span<std::byte> into, const char* part) {
    if (const std::size_t got = read(into); got < into.size()) {
      refuse("ends within its {}: {} of {} bytes are there", part, got, into.size());
    }
  }

  // `bytes` bytes, in pieces: memory is taken as they come, whatever a header says.
  std::vector<std::byte> read_values(std::uint64_t bytes) {
    if (const auto there = size(); there && bytes > *there) {
      refuse("has {} bytes, but its header says {} bytes of values", *there, bytes);
    }
    std::vector<std::byte> values;
    constexpr std::uint64_t kPiece = std::uint64_t{64} << 20;
    while (values.size() < bytes) {
      const std::size_t begin = values.size();
      values.resize(begin + std::min(kPiece, bytes - begin));
      const std::size_t got = read(std::span(values).subspan(begin));
      if (begin + got < values.size()) {
        refuse("ends after {} of the {} bytes of values that its header says", begin + got, bytes);
      }
    }
    std::byte more{};
    if (read({&more, 1}) != 0) refuse("goes on after the {} bytes of values", bytes);
    return values;
  }

 private:
  void fail() {
    int code = Z_OK;
    const char* const text = gzerror(stream_, &code);
    if (code == Z_OK || code == Z_STREAM_END) return;
    if (code == Z_BUF_ERROR) refuse("is cut off within its compressed data");
    if (code == Z_ERRNO) refuse("cannot be read: {}", std::strerror(errno));
    const std::string_view message = text;  // "<fd:3>: incorrect data check"
    const std::size_t name = message.find(">: ");
    refuse("cannot be decompressed: {}",
           name == std::string_view::npos ? message : message.substr(name + 3));
  }

  ReadFile file_;
  gzFile stream_ = nullptr;
};

// Throws Error(kData) that names the file.
template <typename Read>
HostTensor read_named(const char* kind, const std::filesystem::path& path, const Read& read) {
  std::string what;
  try {
    ByteStream stream(path);
    return read(stream);
  } catch (const Fault& fault) {
    what = fault.what;
  } catch (const ReadProblem& problem) {
    what = fmt::format("cannot be read: {}", problem.what());
  } catch (const std::bad_alloc&) {
    what = "does not fit into memory";
  } catch (const std::length_error&) {
    what = "does not fit into memory";
  } catch (const Error& error) {
    what = fmt::format("cannot be a tensor: {}", error.what());
  }
  throw_error(ErrorCode::kData, "{} file '{}' {}", kind, path.string(), what);
}

std::uint64_t bytes_of(std::span<const std::int64_t> dims, std::size_t element) {
  std::uint64_t bytes = element;
  const bool empty = std::find(dims.begin(), dims.end(), 0) != dims.end();
  for (const std::int64_t dim : dims) {
    // Below 2^62, so that the number of elements fits an int64 too.
    if (!empty && (__builtin_mul_overflow(bytes, static_cast<std::uint64_t>(dim), &bytes) ||
                   bytes >> 62 != 0)) {
      refuse("says more values than any memory holds");
    }
  }
  return empty ? 0 : bytes;
}

// --- IDX ---
template <typename T>
T big_endian(const std::byte* from) {
  std::array<std::byte, sizeof(T)> bytes;
  std::reverse_copy(from, from + sizeof(T), bytes.begin());
  return std::bit_cast<T>(bytes);
}

template <typename From, typename To>
HostTensor decode(const std::vector<std::byte>& values, const Shape& shape) {
  HostTensor tensor{.spec = {dtype_of<To>(), shape}, .bytes = {}};
  const std::size_t count = values.size() / sizeof(From);
  tensor.bytes.resize(count * sizeof(To));
  for (std::size_t i = 0; i < count; ++i) {
    // NOLINTNEXTLINE(bugprone-signed-char-misuse): bytes with a sign are numbers.
    const auto value = static_cast<To>(big_endian<From>(values.data() + i * sizeof(From)));
    std::memcpy(tensor.bytes.data() + i * sizeof(To), &value, sizeof(To));
  }
  return tensor;
}

struct IdxType {
  unsigned code;
  std::size_t bytes;
  HostTensor (*decode)(const std::vector<std::byte>& values, const Shape& shape);
};
constexpr std::array<IdxType, 6> kIdxTypes = {{{0x08, 1, decode<std::uint8_t, std::uint8_t>},
                                               {0x09, 1, decode<std::int8_t, std::int32_t>},
                                               {0x0B, 2, decode<std::int16_t, std::int32_t>},
                                               {0x0C, 4, decode<std::int32_t, std::int32_t>},
                                               {0x0D, 4, decode<float, float>},
                                               {0x0E, 8, decode<double, double>}}};

HostTensor read_idx_stream(ByteStream& stream) {
  std::array<std::byte, 4> magic{};
  stream.read_all(magic, "header");
  const auto code = std::to_integer<unsigned>(magic[2]);
  const auto rank = std::to_integer<std::size_t>(magic[3]);
  const auto* const type = std::find_if(kIdxTypes.begin(), kIdxTypes.end(),
                                        [&](const IdxType& each) { return each.code == code; });
  if (magic[0] != std::byte{0} || magic[1] != std::byte{0} || type == kIdxTypes.end()) {
    refuse(
        "begins with bytes {:02x} {:02x} {:02x} {:02x}, which IDX does not know; legal: 00 00, "
        "a type (08, 09, 0b to 0e), the number of dimensions",
        std::to_integer<unsigned>(magic[0]), std::to_integer<unsigned>(magic[1]), code, rank);
  }
  if (rank < 1 || rank > Shape::kMaxDims) {
    refuse("has {} dimensions; legal: 1 to {}", rank, Shape::kMaxDims);
  }
  std::vector<std::int64_t> dims(rank);
  for (std::int64_t& dim : dims) {
    std::array<std::byte, 4> word{};
    stream.read_all(word, "header");
    dim = big_endian<std::uint32_t>(word.data());
  }
  const std::vector<std::byte> values = stream.read_values(bytes_of(dims, type->bytes));
  return type->decode(values, Shape{std::span<const std::int64_t>(dims)});
}

// --- .npy ---
// A Python dictionary as JSON: other quotes, brackets and words, and no comma before a bracket.
std::string json_of(std::string_view python) {
  constexpr std::string_view kPython = "()TF", kJson = "[]tf";
  std::string json;
  bool quoted = false;
  for (const char c : python) {
    const bool quote = c == '\'' || c == '"';
    if (quote) quoted = !quoted;
    const std::size_t other = quoted ? std::string_view::npos : kPython.find(c);
    json += quote ? '"' : other == std::string_view::npos ? c : kJson[other];
    if (quoted || (json.back() != ']' && json.back() != '}')) continue;
    const std::size_t before = json.find_last_not_of(" \t\r\n", json.size() - 2);
    if (before < json.size() - 1 && json[before] == ',') json[before] = ' ';
  }
  return json;
}

struct NpyHeader {
  std::string type;
  bool fortran = false;
  std::vector<std::int64_t> shape;
};

// {'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }
NpyHeader read_npy_header(std::string_view text) {
  const nlohmann::json json = parse_json(json_of(text), NoJson::kDiscard);
  const auto require = [](bool legal) {
    if (!legal) refuse("has a header that is no Python dictionary");
  };
  require(json.is_object());
  for (const auto& [key, value] : json.items()) {
    if (key == "descr" || key == "fortran_order" || key == "shape") continue;
    refuse("has the key '{}' in its header; legal: descr, fortran_order, shape", key);
  }
  if (json.size() < 3) refuse("lacks a key in its header; legal: descr, fortran_order and shape");
  if (json["descr"].is_array()) refuse("has several fields; legal: one type");
  const nlohmann::json& shape = json["shape"];
  require(json["descr"].is_string() && json["fortran_order"].is_boolean() && shape.is_array());
  if (shape.size() > Shape::kMaxDims) refuse("has more dimensions than {}", Shape::kMaxDims);
  for (const nlohmann::json& dim : shape) {
    require(dim.is_number_unsigned() && dim.get<std::uint64_t>() <= INT64_MAX);
  }
  return {json["descr"], json["fortran_order"], shape};
}

DType npy_type(std::string_view name) {
  for (const auto& [legal, dtype] :
       {std::pair{"<f4", DType::kF32}, std::pair{"<f8", DType::kF64}, std::pair{"<f2", DType::kF16},
        std::pair{"<i4", DType::kI32}, std::pair{"<i8", DType::kI64}, std::pair{"|u1", DType::kU8},
        std::pair{"<u1", DType::kU8}}) {
    if (name == legal) return dtype;
  }
  refuse("has values of type '{}'; legal: <f2, <f4, <f8, <i4, <i8, |u1", name);
}

HostTensor read_npy_stream(ByteStream& stream) {
  constexpr std::string_view kMagic = "\x93NUMPY";
  std::array<std::byte, 8> start{};
  stream.read_all(start, "header");
  if (std::memcmp(start.data(), kMagic.data(), kMagic.size()) != 0) {
    refuse("does not begin with \\x93NUMPY");
  }
  const auto version = std::to_integer<int>(start[6]);
  if (version < 1 || version > 3) refuse("is of version {}; legal: 1 to 3", version);
  std::uint32_t length = 0;
  const std::size_t width = version == 1 ? 2 : 4;
  stream.read_all(std::as_writable_bytes(std::span(&length, 1)).first(width), "header");
  constexpr std::uint32_t kMostHeader = 1 << 20;
  if (length > kMostHeader) refuse("has a header of {} bytes; legal: {}", length, kMostHeader);
  std::string text(length, ' ');
  stream.read_all(std::as_writable_bytes(std::span(text)), "header");
  const NpyHeader header = read_npy_header(text);
  const DType dtype = npy_type(header.type);
  if (header.fortran && header.shape.size() > 1) {
    refuse("is in Fortran's order; legal: C's (numpy.ascontiguousarray)");
  }
  std::vector<std::byte> values = stream.read_values(bytes_of(header.shape, size_of(dtype)));
  return {.spec = {dtype, Shape(std::span<const std::int64_t>(header.shape))},
          .bytes = std::move(values)};
}

}  // namespace

HostTensor read_idx(const std::filesystem::path& path) {
  return read_named("IDX", path, read_idx_stream);
}

HostTensor read_npy(const std::filesystem::path& path) {
  return read_named(".npy", path, read_npy_stream);
}

}  // namespace sluice
