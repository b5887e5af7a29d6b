// Turns ids into text, one after the other, as decode() of Hugging Face's `tokenizers` does with
// the whole list: the same bytes, whatever the ids.
//
// Text comes out as soon as no later id can change it. What is held back is the part of a letter,
// or a run of tokens such as <0x0A>. A thread at a time.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "runtime/models/tokenizer_file.hpp"

namespace sluice {

enum class SpecialTokens { kSkip, kShow };

class TokenDecoder {
 public:
  explicit TokenDecoder(TokenizerFile file, SpecialTokens special = SpecialTokens::kSkip);
  ~TokenDecoder();

  // The text, in UTF-8, that this id completes; may be empty. An id without a token has no text.
  [[nodiscard]] std::string add(int id);
  // What is held back: bytes that are no UTF-8 become U+FFFD. A new text begins.
  [[nodiscard]] std::string finish();

  // One step of a decoder. Texts go through one after the other.
  class Step;

 private:
  TokenizerFile file_;
  SpecialTokens special_;
  std::unique_ptr<Step> steps_;  // the first; each has the next one
  std::string out_;
};

// Bytes that come in pieces, as text in UTF-8. Whatever is no UTF-8 becomes U+FFFD, one for each
// maximal part of a letter (Unicode 15, section 3.9), as Rust's String::from_utf8_lossy and
// Python's errors="replace" do.
class Utf8Pieces {
 public:
  // The text that is complete with these bytes. Up to three bytes are held back.
  [[nodiscard]] std::string add(std::string_view bytes);
  // U+FFFD where bytes are held back, else nothing. A new text begins.
  [[nodiscard]] std::string finish();

 private:
  std::string held_;  // the valid beginning of a letter
};

// Whether all of it is UTF-8.
[[nodiscard]] bool is_utf8(std::string_view bytes);

}  // namespace sluice
