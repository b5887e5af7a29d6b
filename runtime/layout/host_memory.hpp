// How much memory this process may take at most.
#pragma once

#include <cstddef>
#include <string>

namespace sluice {

struct HostMemory {
  std::size_t bytes = 0;  // of the host, or what a control group allows of it; 0: not known
  // Of the group that allows less than the host has: the same in all of its processes, another in
  // other groups of the machine. Else empty.
  std::string group = {};
};
// Groups of both versions, this process's own and those above it. `root`: of the file system that
// is read.
[[nodiscard]] HostMemory host_memory(const std::string& root = "");

}  // namespace sluice
