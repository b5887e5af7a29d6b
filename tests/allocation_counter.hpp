// Counts heap allocations: linking allocation_counter.cpp replaces operator new of the program.
#pragma once

#include <cstddef>

namespace sluice::testing {

// By operator new, on the calling thread, since it started.
[[nodiscard]] std::size_t allocations_of_this_thread();

}  // namespace sluice::testing
