// Of what function of the program an exception came.
#pragma once

#include <string>
#include <type_traits>

#include <sluice/device.hpp>

#include "comm/base/caught_error.hpp"

namespace sluice {

// Called in a handler: throws its exception again, as caught_error() with "<where>: ". OutOfMemory
// keeps its type.
[[noreturn]] inline void rethrow_from(const std::string& where) {
  try {
    throw;
  } catch (const OutOfMemory& error) {
    throw OutOfMemory(where + ": " + error.what(), error.location());
  } catch (...) {
    throw caught_error(where + ": ");
  }
}

// The result of body(); what it throws comes out of rethrow_from(). `where` is a text, or a
// function that makes one.
template <typename Where, typename Body>
auto calling(const Where& where, const Body& body) {
  try {
    return body();
  } catch (...) {
    if constexpr (std::is_invocable_v<const Where&>) {
      rethrow_from(where());
    } else {
      rethrow_from(where);
    }
  }
}

}  // namespace sluice
