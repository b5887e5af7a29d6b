// Index casts: ranks, stages, micro-batches and channels are `int`, containers count in size_t.
#pragma once

#include <cstddef>

namespace sluice {

// `index`, an integer of at least 0 or an enumerator, as a subscript: values[at(rank)].
template <class Index>
[[nodiscard]] constexpr std::size_t at(Index index) {
  return static_cast<std::size_t>(index);
}

}  // namespace sluice
