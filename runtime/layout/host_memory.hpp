// How much memory this process may take at most.
#pragma once

#include <cstddef>
#include <string>

namespace sluice {

struct HostMemory {
  std::size_t bytes = 0;  // of the host; 0: not known
  // By the control group that allows least: its limit, or from where on the system slows its
  // processes. Without `group`: 0.
  std::size_t allowed = 0;
  // Of that group, where it allows less than the host has: the same in all of its processes,
  // another in other groups of the machine. Else empty.
  std::string group = {};
};
// Groups of both versions, this process's own and those above it. `root`: of the file system that
// is read.
[[nodiscard]] HostMemory host_memory(const std::string& root = "");

}  // namespace sluice
