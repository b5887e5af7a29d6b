#include "runtime/layout/host_memory.hpp"

#include <fmt/core.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>

namespace sluice {
namespace {

// Takes each limit in `folder` where it is no larger than those below it. Above memory.high the
// system takes pages away and holds processes back, so a training would only crawl.
void take_limits(const std::string& folder, bool unified, HostMemory& memory) {
  for (const char* file : {unified ? "memory.max" : "memory.limit_in_bytes", "memory.high"}) {
    std::size_t limit = 0;
    struct stat facts {};
    const std::size_t least = memory.group.empty() ? memory.bytes - 1 : memory.allowed;
    if (!(std::ifstream(folder + file) >> limit) || limit > least) continue;  // "max": none
    if (::stat(folder.c_str(), &facts) != 0) continue;
    memory.allowed = limit;
    memory.group = fmt::format("{}:{}", facts.st_dev, facts.st_ino);
  }
}

}  // namespace

HostMemory host_memory(const std::string& root) {
  const auto pages = ::sysconf(_SC_PHYS_PAGES), page = ::sysconf(_SC_PAGESIZE);
  if (pages <= 0 || page <= 0) return {};
  HostMemory memory{static_cast<std::size_t>(pages) * static_cast<std::size_t>(page)};
  std::ifstream groups(root + "/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    const bool unified = line.starts_with("0::");
    const std::size_t path = line.find(unified ? "::" : ":memory:");
    if (path == std::string::npos) continue;
    const std::string mount = root + (unified ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory");
    std::string group = line.substr(path + (unified ? 2 : 8));
    for (;;) {
      take_limits(mount + group + "/", unified, memory);
      const std::size_t slash = group.rfind('/');
      if (group.size() <= 1 || slash == std::string::npos) break;
      group.resize(slash);
    }
    take_limits(mount + "/", unified, memory);
  }
  return memory;
}

}  // namespace sluice
