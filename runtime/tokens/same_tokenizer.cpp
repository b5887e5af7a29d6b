#include "runtime/tokens/same_tokenizer.hpp"

#include <string>

#include <sluice/error.hpp>

#include "comm/base/throw_error.hpp"
#include "runtime/files/mapped_file.hpp"
#include "runtime/files/sha256.hpp"

namespace sluice {

void require_same_tokenizer(const TokenFile& data, const std::filesystem::path& directory) {
  const std::filesystem::path path = directory / "tokenizer.json";
  std::error_code ignored;
  const bool there = std::filesystem::exists(std::filesystem::symlink_status(path, ignored));
  if (!there) return;
  if (data.format() == TokenFormat::kText) {
    throw_error(ErrorCode::kData,
                "data file '{0}' is text, whose bytes are no tokens of the model's '{1}'; "
                "examples/prepare_tokens.py --tokenizer {1} {0} --output tokens/{2}.bin makes them",
                data.path().string(), path.string(), data.path().stem().string());
  }
  if (data.tokenizer_sha256().empty()) return;
  const std::string hash = sha256_hex(MappedFile(path, ErrorCode::kData).bytes());
  if (hash == data.tokenizer_sha256()) return;
  throw_error(ErrorCode::kData,
              "data file '{}' was made by a tokenizer.json with SHA-256 {}, but the model's '{}' "
              "has {}; legal is data that prepare_tokens.py made with --tokenizer and the model's "
              "file",
              data.path().string(), data.tokenizer_sha256(), path.string(), hash);
}

std::string tokenizer_beside(const TokenFile& data) {
  const std::filesystem::path path = data.path().parent_path() / "tokenizer.json";
  std::error_code error;
  if (data.tokenizer_sha256().empty() || !std::filesystem::is_regular_file(path, error)) return "";
  const MappedFile file(path, ErrorCode::kData);
  if (sha256_hex(file.bytes()) != data.tokenizer_sha256()) return "";
  return {reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size()};
}

}  // namespace sluice
