// Whose error it is. Internal to stages/.
#pragma once

#include <string>

#include <sluice/error.hpp>

namespace sluice {

// Runs `body`; what it throws names `who`.
template <typename Body>
decltype(auto) naming(const std::string& who, const Body& body) {
  try {
    return body();
  } catch (const OutOfMemory&) {
    throw;
  } catch (const Error& error) {
    throw Error(error.code(), who + ": " + error.what(), error.rank(), error.location());
  }
}

}  // namespace sluice
