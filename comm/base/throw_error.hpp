// Throws an Error with a formatted message.
#pragma once

#include <fmt/core.h>

#include <utility>

#include <sluice/error.hpp>

namespace sluice {

template <typename... Args>
[[noreturn]] void throw_error(ErrorCode code, fmt::format_string<Args...> format, Args&&... args) {
  throw Error(code, fmt::format(format, std::forward<Args>(args)...));
}

// The same with ErrorCode::kUsage.
template <typename... Args>
[[noreturn]] void throw_usage(fmt::format_string<Args...> format, Args&&... args) {
  throw Error(ErrorCode::kUsage, fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace sluice
