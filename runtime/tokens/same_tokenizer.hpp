// Whether tokens of a file mean to a model what they meant when it was trained.
#pragma once

#include <filesystem>
#include <string>

#include <sluice/data.hpp>

namespace sluice {

// Compares the tokenizer.json in `directory`, a model's, with the one that made `data`. Throws
// Error(kData) naming both files where they differ, where the data is text, and where
// tokenizer.json cannot be read. Nothing where the directory has none, or where tokens do not say
// which one made them.
void require_same_tokenizer(const TokenFile& data, const std::filesystem::path& directory);

// The text of the tokenizer.json beside `data`, if it made the tokens; else empty.
[[nodiscard]] std::string tokenizer_beside(const TokenFile& data);

}  // namespace sluice
