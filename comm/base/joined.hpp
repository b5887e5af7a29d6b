// Text of several values.
#pragma once

#include <fmt/core.h>

#include <string>
#include <string_view>

namespace sluice {

// The elements of a range as "{}" writes them. fmt::join() does the same, but generates the code of
// fmt's numbers anew in each source that calls it.
template <typename Range>
[[nodiscard]] std::string joined(const Range& range, std::string_view separator) {
  std::string text;
  bool first = true;
  for (const auto& each : range) {
    if (!first) text += separator;
    first = false;
    text += fmt::format("{}", each);
  }
  return text;
}

}  // namespace sluice
