#include "runtime/options/supervisor_events.hpp"

#include <unistd.h>

#include <cstdlib>

namespace sluice {

void tell_supervisor(const std::string& json) noexcept {
  if (std::getenv("SLUICE_SUPERVISED") == nullptr) return;
  try {
    const std::string line = "sluice-event " + json + "\n";
    (void)!::write(STDERR_FILENO, line.data(), line.size());
  } catch (...) {
    return;  // out of memory: the supervisor goes by the exit code
  }
}

}  // namespace sluice
