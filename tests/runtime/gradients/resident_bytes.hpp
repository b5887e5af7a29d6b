// How much of a process's memory is there.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace sluice::testing {

// Bytes of the pages wholly within `memory` that are there.
inline std::size_t resident_bytes(std::span<float> memory) {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  const std::span<std::byte> bytes = std::as_writable_bytes(memory);
  const std::size_t before = (page - reinterpret_cast<std::uintptr_t>(bytes.data()) % page) % page;
  if (bytes.size() < before + page) return 0;
  std::vector<unsigned char> pages((bytes.size() - before) / page);
  if (mincore(bytes.data() + before, pages.size() * page, pages.data()) != 0) return SIZE_MAX;
  return page * static_cast<std::size_t>(std::ranges::count_if(
                    pages, [](unsigned char each) { return (each & 1) != 0; }));
}

}  // namespace sluice::testing
