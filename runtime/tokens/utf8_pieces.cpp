#include "runtime/tokens/utf8_pieces.hpp"

#include <cstddef>
#include <utility>

namespace sluice {
namespace {

// Bytes of the letter that `lead` begins; 0: none does.
std::size_t length_of(unsigned char lead) {
  if (lead < 0x80) return 1;
  if (lead >= 0xC2 && lead <= 0xDF) return 2;
  if (lead >= 0xE0 && lead <= 0xEF) return 3;
  return lead >= 0xF0 && lead <= 0xF4 ? 4 : 0;
}

// Whether `byte` may follow as the byte number `place`, from 1, of the letter that `lead` begins.
bool continues(unsigned char lead, std::size_t place, unsigned char byte) {
  unsigned char low = 0x80, high = 0xBF;
  if (place == 1) {
    if (lead == 0xE0) low = 0xA0;   // overlong
    if (lead == 0xED) high = 0x9F;  // surrogates
    if (lead == 0xF0) low = 0x90;
    if (lead == 0xF4) high = 0x8F;  // beyond U+10FFFF
  }
  return byte >= low && byte <= high;
}

}  // namespace

std::string Utf8Pieces::add(std::string_view bytes) {
  std::string text;
  for (const char letter : bytes) {
    const auto byte = static_cast<unsigned char>(letter);
    if (!held_.empty() && !continues(static_cast<unsigned char>(held_[0]), held_.size(), byte)) {
      text += kReplacement;
      held_.clear();
    }
    const std::size_t length =
        length_of(held_.empty() ? byte : static_cast<unsigned char>(held_[0]));
    if (length == 0) {
      text += kReplacement;
      continue;
    }
    held_ += letter;
    if (held_.size() == length) text += std::exchange(held_, {});
  }
  return text;
}

std::string Utf8Pieces::finish() {
  const bool cut = !std::exchange(held_, {}).empty();
  return cut ? kReplacement : "";
}

bool is_utf8(std::string_view bytes) {
  Utf8Pieces pieces;
  return pieces.add(bytes) + pieces.finish() == bytes;
}

}  // namespace sluice
