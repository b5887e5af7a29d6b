// Pages of host memory that are there for a while only, or never.
#pragma once

#include <cstddef>
#include <span>
#include <utility>

namespace sluice {

// Gives the pages that lie wholly within `memory` back to the system; each has zeros after that, or
// what it had. The addresses stay valid: what is written brings pages back. `memory` is private, as
// of a Buffer on a CPU, and no message has it. Open MPI and UCX watch these calls, so their caches
// of registered memory stay right.
void give_back_pages(std::span<std::byte> memory) noexcept;

// Addresses of bytes that are elsewhere: no memory is ever there, and a read or write of one ends
// the process. Throws OutOfMemory where the process may have no more addresses.
class AbsentMemory {
 public:
  AbsentMemory() = default;
  explicit AbsentMemory(std::size_t bytes);
  AbsentMemory(AbsentMemory&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  AbsentMemory& operator=(AbsentMemory&&) = delete;
  ~AbsentMemory();
  [[nodiscard]] std::byte* data() const { return data_; }
  [[nodiscard]] bool has(const void* address) const {
    return address >= data_ && address < data_ + bytes_;
  }

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace sluice
