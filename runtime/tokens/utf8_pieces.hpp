// Bytes that come in pieces, as text in UTF-8.
#pragma once

#include <string>
#include <string_view>

namespace sluice {

// Whatever is no UTF-8 becomes U+FFFD, one for each maximal part of a letter (Unicode 15, section
// 3.9), as Rust's String::from_utf8_lossy and Python's errors="replace" do.
class Utf8Pieces {
 public:
  // The text that is complete with these bytes. Up to three bytes are held back.
  [[nodiscard]] std::string add(std::string_view bytes);
  // U+FFFD where bytes are held back, else nothing. A new text begins.
  [[nodiscard]] std::string finish();

 private:
  std::string held_;  // the valid beginning of a letter
};

inline constexpr const char* kReplacement = "\xEF\xBF\xBD";  // U+FFFD

// Whether all of it is UTF-8.
[[nodiscard]] bool is_utf8(std::string_view bytes);

}  // namespace sluice
