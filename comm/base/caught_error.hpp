// What a handler caught, as an Error.
#pragma once

#include <string>

#include <sluice/error.hpp>

namespace sluice {

// Call from a catch clause. An Error keeps its code, place and, where it has one, rank and message;
// of others the message begins with `prefix`. std::bad_alloc is kDevice,
// std::filesystem::filesystem_error, whose what() names paths and cause, kIo, everything else
// kUser.
[[nodiscard]] Error caught_error(const std::string& prefix = "", int rank = -1);

}  // namespace sluice
