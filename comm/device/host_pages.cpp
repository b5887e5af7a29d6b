#include "comm/device/host_pages.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>

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

}  // namespace sluice
