// Index casts: ranks, stages, slots and layers are `int`, containers count in std::size_t.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sluice {

// `index`, at least 0, as a subscript: values[at(rank)].
[[nodiscard]] constexpr std::size_t at(std::int32_t index) {
  return static_cast<std::size_t>(index);
}

}  // namespace sluice
