#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include <sluice/data.hpp>
#include <sluice/error.hpp>

#include "comm/base/throw_error.hpp"
#include "runtime/files/mapped_file.hpp"
#include "runtime/files/sha256.hpp"

namespace sluice {
namespace {

static_assert(std::endian::native == std::endian::little, "token files are little-endian");

// llm.c's dev/data/data_common.py: 256 int32 (magic, version, number of tokens, zeros), tokens.
constexpr std::size_t kLlmCHeaderBytes = 256 * sizeof(std::int32_t);
struct LlmCKind {
  std::int32_t magic, version;
  std::size_t width;
};
constexpr LlmCKind kLlmCKinds[] = {{20240520, 1, 2}, {20240801, 7, 4}};

// examples/prepare_tokens.py's header; <sluice/data.hpp> describes it.
constexpr std::size_t kOwnHeaderBytes = 256, kOwnUsedBytes = 64, kHashBytes = 32;
constexpr std::array<unsigned char, 8> kOwnMagic = {0xff, 'S', 'L', 'T', 'O', 'K', 'E', 'N'};
constexpr std::uint32_t kOwnVersion = 1, kNoToken = 0xFFFFFFFF;

// What a file's beginning says.
struct Layout {
  TokenFormat format = TokenFormat::kText;
  std::size_t header = 0, width = 1;  // bytes
  int vocabulary = 0;                 // 0: the file does not say
  int end_of_text = -1;
  std::string tokenizer;
};

[[noreturn]] void refuse(const std::filesystem::path& path, const std::string& what) {
  throw_error(ErrorCode::kData, "data file '{}' {}", path.string(), what);
}

// `offset + sizeof(Word)` is within the bytes.
template <typename Word>
Word word_at(std::span<const std::byte> bytes, std::size_t offset) {
  Word word = 0;
  std::memcpy(&word, bytes.data() + offset, sizeof(word));
  return word;
}

// Checks every number of llm.c's header against the file.
Layout llm_c_layout(const LlmCKind& kind, std::span<const std::byte> bytes,
                    const std::filesystem::path& path) {
  if (bytes.size() < kLlmCHeaderBytes) {
    refuse(path, fmt::format("ends within llm.c's header: {} bytes, {} are needed", bytes.size(),
                             kLlmCHeaderBytes));
  }
  if (const auto version = word_at<std::int32_t>(bytes, 4); version != kind.version) {
    refuse(path, fmt::format("has llm.c's header version {}; legal: {}", version, kind.version));
  }
  const auto count = word_at<std::int32_t>(bytes, 8);
  const std::size_t follow = bytes.size() - kLlmCHeaderBytes;
  if (count < 0 || static_cast<std::size_t>(count) * kind.width != follow) {
    refuse(path, fmt::format("says {} tokens in llm.c's header, but {} bytes follow it; legal: {} "
                             "bytes a token",
                             count, follow, kind.width));
  }
  return {.format = TokenFormat::kLlmC,
          .header = kLlmCHeaderBytes,
          .width = kind.width,
          .tokenizer = {}};
}

std::string hash_of(std::span<const std::byte> bytes) {
  std::string text;
  for (const std::byte byte : bytes) {
    text += fmt::format("{:02x}", std::to_integer<unsigned>(byte));
  }
  return text.find_first_not_of('0') == std::string::npos ? "" : text;
}

// Checks every field of the header against the others and the file.
Layout own_layout(std::span<const std::byte> bytes, const std::filesystem::path& path) {
  const auto field = [&](const char* name, auto value, const std::string& legal) {
    refuse(path, fmt::format("has {} {} in its header; legal: {}", name, value, legal));
  };
  if (bytes.size() < kOwnHeaderBytes) {
    refuse(path, fmt::format("ends within its header: {} bytes, {} are needed", bytes.size(),
                             kOwnHeaderBytes));
  }
  const auto version = word_at<std::uint32_t>(bytes, 8);
  if (version != kOwnVersion) field("version", version, "1");
  const auto width = word_at<std::uint32_t>(bytes, 12);
  if (width != 2 && width != 4) field("bytes per token", width, "2 and 4");
  const auto count = word_at<std::uint64_t>(bytes, 16);
  const std::uint64_t follow = bytes.size() - kOwnHeaderBytes;
  if (follow % width != 0 || count != follow / width) {
    field("number of tokens", count,
          fmt::format("{}, for {} bytes follow the header, {} a token", follow / width, follow,
                      width));
  }
  const auto vocabulary = word_at<std::uint32_t>(bytes, 24);
  const std::uint32_t most = width == 2 ? 65536 : std::numeric_limits<std::int32_t>::max();
  if (vocabulary < 1 || vocabulary > most) {
    field("vocabulary", vocabulary, fmt::format("1 to {} with {} bytes a token", most, width));
  }
  const auto end = word_at<std::uint32_t>(bytes, 28);
  if (end != kNoToken && end >= vocabulary) {
    field("end-of-text token", end,
          fmt::format("0 to {}, and {} for none", vocabulary - 1, kNoToken));
  }
  for (std::size_t i = kOwnUsedBytes; i < kOwnHeaderBytes; ++i) {
    const auto value = std::to_integer<unsigned>(bytes[i]);
    if (value != 0) field("byte", fmt::format("{} at {}", value, i), "0 there");
  }
  return {.format = TokenFormat::kSluice,
          .header = kOwnHeaderBytes,
          .width = width,
          .vocabulary = static_cast<int>(vocabulary),
          .end_of_text = end == kNoToken ? -1 : static_cast<int>(end),
          .tokenizer = hash_of(bytes.subspan(kOwnUsedBytes - kHashBytes, kHashBytes))};
}

// The first byte of each magic cannot begin a text in UTF-8.
Layout layout_of(std::span<const std::byte> bytes, const std::filesystem::path& path) {
  const auto magic = std::as_bytes(std::span(kOwnMagic));
  if (bytes.size() >= magic.size() && std::equal(magic.begin(), magic.end(), bytes.begin())) {
    return own_layout(bytes, path);
  }
  for (const LlmCKind& kind : kLlmCKinds) {
    if (bytes.size() >= sizeof(kind.magic) && word_at<std::int32_t>(bytes, 0) == kind.magic) {
      return llm_c_layout(kind, bytes, path);
    }
  }
  if (path.extension() == ".jsonl" || path.extension() == ".json") {
    refuse(path,
           "is JSON, whose names and braces would be trained as text; legal is text, which jq "
           "-r .text takes out of the field 'text', or tokens; JSON as text needs another "
           "suffix, such as .txt");
  }
  if (path.extension() != ".bin") return {};
  if (bytes.size() % 2 != 0) {
    refuse(path, fmt::format("has {} bytes; a .bin holds two bytes a token, so its length is even "
                             "(raw text needs another suffix, such as .txt)",
                             bytes.size()));
  }
  return {.format = TokenFormat::kNanoGpt, .width = 2, .tokenizer = {}};
}

// Up to kWhole bytes the digest is of the whole file, beyond of kBlocks blocks of it.
constexpr std::size_t kWhole = std::size_t{1} << 20;
constexpr std::size_t kBlock = 4096, kBlocks = 66;

std::vector<std::byte> sample_of(std::span<const std::byte> bytes) {
  std::vector<std::byte> sample;
  sample.reserve(kBlocks * kBlock);
  for (std::size_t i = 0; i < kBlocks; ++i) {
    const std::size_t start = (bytes.size() - kBlock) * i / (kBlocks - 1);
    const auto block = bytes.subspan(start, kBlock);
    sample.insert(sample.end(), block.begin(), block.end());
  }
  return sample;
}

}  // namespace

struct TokenFile::Impl {
  Impl(const std::filesystem::path& file_path, double validation_share)
      : path(file_path), file(file_path, ErrorCode::kData) {
    if (!(validation_share >= 0 && validation_share < 1)) {
      throw_usage("the validation share is {}; legal: at least 0 and less than 1",
                  validation_share);
    }
    if (file.bytes().empty()) refuse(path, "is empty");
    layout = layout_of(file.bytes(), path);
    tokens = file.bytes().subspan(layout.header);
    size = static_cast<std::int64_t>(tokens.size() / layout.width);
    if (size == 0) refuse(path, "holds no tokens");
    train_size = size - std::llround(static_cast<double>(size) * validation_share);
  }

  [[nodiscard]] std::int32_t token(std::int64_t index) const {
    const std::size_t offset = static_cast<std::size_t>(index) * layout.width;
    if (layout.width == 1) return std::to_integer<std::int32_t>(tokens[offset]);
    if (layout.width == 2) return word_at<std::uint16_t>(tokens, offset);
    constexpr std::uint32_t kMost = std::numeric_limits<std::int32_t>::max();
    return static_cast<std::int32_t>(std::min(word_at<std::uint32_t>(tokens, offset), kMost));
  }

  std::filesystem::path path;
  MappedFile file;
  Layout layout;
  std::span<const std::byte> tokens;
  std::int64_t size = 0, train_size = 0;
  int largest = -1;  // -1: not scanned yet
};

TokenFile::TokenFile(const std::filesystem::path& path, double validation_share)
    : impl_(std::make_unique<Impl>(path, validation_share)) {}
TokenFile::~TokenFile() = default;
TokenFile::TokenFile(TokenFile&&) noexcept = default;

const std::filesystem::path& TokenFile::path() const { return impl_->path; }
TokenFormat TokenFile::format() const { return impl_->layout.format; }
int TokenFile::token_bytes() const { return static_cast<int>(impl_->layout.width); }
int TokenFile::vocabulary() const { return impl_->layout.vocabulary; }
int TokenFile::end_of_text() const { return impl_->layout.end_of_text; }
const std::string& TokenFile::tokenizer_sha256() const { return impl_->layout.tokenizer; }
std::int64_t TokenFile::size() const { return impl_->size; }
std::int64_t TokenFile::train_size() const { return impl_->train_size; }
int TokenFile::token(std::int64_t index) const { return impl_->token(index); }

int TokenFile::largest_token() const {
  if (impl_->largest < 0) {
    std::int32_t largest = 0;
    for (std::int64_t i = 0; i < impl_->size; ++i) largest = std::max(largest, impl_->token(i));
    impl_->largest = largest;
  }
  return impl_->largest;
}

void TokenFile::copy(std::int64_t first, std::span<std::int32_t> into) const {
  for (std::int32_t& token : into) token = impl_->token(first++);
}

Facts TokenFile::identity(const std::string& option) const {
  const std::string given = fmt::format("{} {}", option, impl_->path.string());
  const bool whole = impl_->tokens.size() <= kWhole;
  return {{"tokens in " + given, fmt::format("{}", impl_->size)},
          {fmt::format("SHA-256 of {}{}", whole ? "" : "a sample of ", given),
           whole ? sha256_hex(impl_->tokens) : sha256_hex(sample_of(impl_->tokens))}};
}

}  // namespace sluice
