#include "comm/device/host_pages.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <string>

#include <sluice/device.hpp>

namespace sluice {

void give_back_pages(std::span<std::byte> memory) noexcept {
  static const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<std::uintptr_t>(memory.data());
  const std::uintptr_t first = (begin + page - 1) / page * page;
  const std::uintptr_t end = (begin + memory.size()) / page * page;
  if (first >= end) return;
  // Where it fails the pages stay, and so does their content.
  static_cast<void>(madvise(memory.data() + (first - begin), end - first, MADV_DONTNEED));
}

AbsentMemory::AbsentMemory(std::size_t bytes) : bytes_(bytes) {
  if (bytes == 0) return;
  void* const data = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                          /*fd=*/-1, /*offset=*/0);
  if (data == MAP_FAILED) {
    throw OutOfMemory("cannot take " + std::to_string(bytes) + " addresses (ulimit -v)");
  }
  data_ = static_cast<std::byte*>(data);
}

AbsentMemory::~AbsentMemory() {
  if (data_ != nullptr) munmap(data_, bytes_);
}

}  // namespace sluice
