#include "comm/base/host.hpp"

#include <unistd.h>

#include <array>
#include <cstdlib>
#include <fstream>

namespace sluice {

std::string host_name() {
  std::array<char, 256> name{};
  return ::gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "unknown host";
}

std::string boot_id() {
  std::string id;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> id;
  return id;
}

std::string machine_id() {
  std::string id = boot_id();
  return id.empty() ? host_name() : id;
}

std::string nccl_machine_id() {
  const char* set = std::getenv("NCCL_HOSTID");
  return set != nullptr && *set != '\0' ? set : machine_id();
}

}  // namespace sluice
