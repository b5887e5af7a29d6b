// A tokenizer.json of Hugging Face's `tokenizers`, as far as turning ids into text needs it, and
// whether tokens of a file mean to a model what they meant when it was trained. Reading it needs no
// MPI.
#pragma once

#include <cstddef>
#include <filesystem>
#include <string>
#include <unordered_map>
#include <vector>

#include <sluice/data.hpp>

namespace sluice {

struct DecodeStep {
  enum class Kind {
    kByteLevel,     // each letter stands for a byte (GPT-2's table); joins all tokens
    kReplace,       // `from` by `to` within each token
    kByteFallback,  // "<0x0A>" is a byte
    kFuse,          // joins all tokens
    kStrip,         // up to `most` times `from`, one letter, at the front of each token
    kMetaspace,     // `from`, one letter, is a space; within the first token nothing if `most` is 1
  };
  Kind kind = Kind::kByteLevel;
  std::string from = {}, to = {};
  int most = 0;
};

struct TokenizerFile {
  struct Token {
    std::string text;
    bool special = false;
  };
  std::unordered_map<int, Token> tokens;  // by id; ids may have holes
  std::vector<DecodeStep> steps;

  static constexpr std::size_t kMostBytes = std::size_t{256} << 20;
};

// Reads the file and checks what it takes from it. Takes: model types BPE, decoder types of
// DecodeStep alone or in a Sequence. Memory is a small multiple of the file's vocabulary.
// Throws Error(kWeights), one line that names the file, the field and what would be legal: not
// readable, above kMostBytes, no JSON or not UTF-8, an id that two tokens have, a token that has
// two ids, an id that is no number of 0 to 2^31 - 2, another model or decoder type.
[[nodiscard]] TokenizerFile read_tokenizer_file(const std::filesystem::path& path);

// Compares the tokenizer.json in `directory`, a model's, with the one that made `data`. Throws
// Error(kData) naming both files where they differ, where the data is text, and where
// tokenizer.json cannot be read. Nothing where the directory has none, or where tokens do not say
// which one made them.
void require_same_tokenizer(const TokenFile& data, const std::filesystem::path& directory);

// The text of the tokenizer.json beside `data`, if it made the tokens; else empty.
[[nodiscard]] std::string tokenizer_beside(const TokenFile& data);

}  // namespace sluice
