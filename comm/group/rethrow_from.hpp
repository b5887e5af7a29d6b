// What a function of the program throws becomes an Error that says which function it was.
#pragma once

#include <string>
#include <type_traits>

namespace sluice {

inline constexpr const char* kNoStdException = "an exception that is not a std::exception";

// Called in a handler: throws its exception again, as an Error whose message starts with
// "<where>: ". OutOfMemory keeps its type. An Error that names a rank is not changed.
[[noreturn]] void rethrow_from(const std::string& where);

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
