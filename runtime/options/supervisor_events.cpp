#include "runtime/options/supervisor_events.hpp"

#include <unistd.h>

#include <cstdlib>

namespace sluice {

bool is_supervised() noexcept {
  return std::getenv(kSupervised) != nullptr || std::getenv(kSupervisedByMpi) != nullptr;
}

void tell_supervisor(const std::string& json) noexcept {
  if (!is_supervised()) return;
  try {
    const std::string line = "sluice-event " + json + "\n";
    (void)!::write(STDERR_FILENO, line.data(), line.size());
  } catch (...) {
    return;  // out of memory: the supervisor goes by the exit code
  }
}

}  // namespace sluice
