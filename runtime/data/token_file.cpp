#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
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
constexpr std::int32_t kLlmCMagic = 20240520;
constexpr std::int32_t kLlmCMagicWide = 20240801;  // uint32 tokens

[[noreturn]] void refuse(const std::filesystem::path& path, const std::string& what) {
  throw_error(ErrorCode::kData, "data file '{}' {}", path.string(), what);
}

std::int32_t header_word(std::span<const std::byte> bytes, std::size_t index) {
  std::int32_t word = 0;
  std::memcpy(&word, bytes.data() + index * sizeof(word), sizeof(word));
  return word;
}

TokenFormat format_of(std::span<const std::byte> bytes, const std::filesystem::path& path) {
  const bool binary = path.extension() == ".bin";
  const std::int32_t magic = bytes.size() >= 4 ? header_word(bytes, 0) : 0;
  // The magic's first byte cannot begin a text in UTF-8.
  if (magic == kLlmCMagic) return TokenFormat::kLlmC;
  if (binary && magic == kLlmCMagicWide) {
    refuse(path, fmt::format("has llm.c's magic {} (uint32 tokens); legal: magic {} version 1 "
                             "(uint16 tokens), nanoGPT's .bin, or text",
                             kLlmCMagicWide, kLlmCMagic));
  }
  return binary ? TokenFormat::kNanoGpt : TokenFormat::kText;
}

// The tokens after llm.c's header. Checks every number in it against the file.
std::span<const std::byte> llm_c_tokens(std::span<const std::byte> bytes,
                                        const std::filesystem::path& path) {
  if (bytes.size() < kLlmCHeaderBytes) {
    refuse(path, fmt::format("ends within llm.c's header: {} bytes, {} are needed", bytes.size(),
                             kLlmCHeaderBytes));
  }
  if (const std::int32_t version = header_word(bytes, 1); version != 1) {
    refuse(path, fmt::format("has llm.c's header version {}; legal: 1", version));
  }
  const std::int32_t count = header_word(bytes, 2);
  const std::span<const std::byte> tokens = bytes.subspan(kLlmCHeaderBytes);
  if (count < 0 || static_cast<std::size_t>(count) * 2 != tokens.size()) {
    refuse(path, fmt::format("says {} tokens in llm.c's header, but {} bytes follow it; legal: two "
                             "bytes a token",
                             count, tokens.size()));
  }
  return tokens;
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
    format = format_of(file.bytes(), path);
    tokens = format == TokenFormat::kLlmC ? llm_c_tokens(file.bytes(), path) : file.bytes();
    wide = format != TokenFormat::kText;
    if (wide && tokens.size() % 2 != 0) {
      refuse(path,
             fmt::format("has {} bytes; a .bin holds two bytes a token, so its length is even "
                         "(raw text needs another suffix, such as .txt)",
                         tokens.size()));
    }
    size = static_cast<std::int64_t>(wide ? tokens.size() / 2 : tokens.size());
    if (size == 0) refuse(path, "holds no tokens");
    train_size = size - std::llround(static_cast<double>(size) * validation_share);
  }

  [[nodiscard]] std::int32_t token(std::int64_t index) const {
    const auto i = static_cast<std::size_t>(index);
    if (!wide) return std::to_integer<std::int32_t>(tokens[i]);
    return std::to_integer<std::int32_t>(tokens[2 * i]) |
           std::to_integer<std::int32_t>(tokens[2 * i + 1]) << 8;
  }

  std::filesystem::path path;
  MappedFile file;
  TokenFormat format = TokenFormat::kText;
  std::span<const std::byte> tokens;
  bool wide = false;  // two bytes a token
  std::int64_t size = 0, train_size = 0;
  int largest = -1;  // -1: not scanned yet
};

TokenFile::TokenFile(const std::filesystem::path& path, double validation_share)
    : impl_(std::make_unique<Impl>(path, validation_share)) {}
TokenFile::~TokenFile() = default;
TokenFile::TokenFile(TokenFile&&) noexcept = default;

const std::filesystem::path& TokenFile::path() const { return impl_->path; }
TokenFormat TokenFile::format() const { return impl_->format; }
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

std::vector<std::pair<std::string, std::string>> TokenFile::identity(
    const std::string& option) const {
  const std::string given = fmt::format("{} {}", option, impl_->path.string());
  const bool whole = impl_->tokens.size() <= kWhole;
  return {{"tokens in " + given, fmt::format("{}", impl_->size)},
          {fmt::format("SHA-256 of {}{}", whole ? "" : "a sample of ", given),
           whole ? sha256_hex(impl_->tokens) : sha256_hex(sample_of(impl_->tokens))}};
}

}  // namespace sluice
