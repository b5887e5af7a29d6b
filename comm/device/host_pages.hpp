// Pages of host memory that are there for a while only.
#pragma once

#include <cstddef>
#include <span>

namespace sluice {

// Gives the pages that lie wholly within `memory` back to the system; each has zeros after that, or
// what it had. The addresses stay valid: what is written brings pages back. `memory` is private, as
// of a Buffer on a CPU, and no message has it. Open MPI and UCX watch these calls, so their caches
// of registered memory stay right.
void give_back_pages(std::span<std::byte> memory) noexcept;

}  // namespace sluice
