// Whose error it is. Internal to stages/.
#pragma once

#include <string>

#include <sluice/error.hpp>

namespace sluice {

// Runs `body`; what it throws names `who`: a text, or what has a full_name(), asked for then
// alone.
template <typename Who, typename Body>
decltype(auto) naming(const Who& who, const Body& body) {
  try {
    return body();
  } catch (const OutOfMemory&) {
    throw;
  } catch (const Error& error) {
    std::string name;
    if constexpr (requires { who.full_name(); }) {
      name = who.full_name();
    } else {
      name = who;
    }
    throw Error(error.code(), name + ": " + error.what(), error.rank(), error.location());
  }
}

}  // namespace sluice
