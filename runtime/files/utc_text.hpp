// A time as text.
#pragma once

#include <array>
#include <ctime>
#include <string>

namespace sluice {

// `format` as strftime() reads it, in Coordinated Universal Time; up to 63 characters.
[[nodiscard]] inline std::string utc_text(std::time_t time, const char* format) {
  std::tm parts = {};
  ::gmtime_r(&time, &parts);
  std::array<char, 64> text;
  return {text.data(), std::strftime(text.data(), text.size(), format, &parts)};
}

}  // namespace sluice
