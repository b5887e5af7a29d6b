// Builds the text of messages.
#pragma once

#include <string>
#include <type_traits>

#include <sluice/error.hpp>
#include <sluice/schedule.hpp>

namespace sluice {

// Joins the parts: texts and characters as they are, others as to_string() writes them.
template <class... Parts>
[[nodiscard]] std::string concat(const Parts&... parts) {
  std::string text;
  const auto add = [&text](const auto& part) {
    using Part = std::decay_t<decltype(part)>;
    if constexpr (std::is_arithmetic_v<Part> && !std::is_same_v<Part, char>) {
      text += std::to_string(part);
    } else if constexpr (requires { to_string(part); }) {
      text += to_string(part);
    } else {
      text += part;
    }
  };
  (add(parts), ...);
  return text;
}

// Throws Error(kUsage) with that text.
template <class... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  throw Error(ErrorCode::kUsage, concat(parts...));
}

}  // namespace sluice
