#include "runtime/group/guard.hpp"

#include "comm/base/caught_error.hpp"

namespace sluice {

void guarded(ControlChannel& control, int rank, const std::function<void()>& body) {
  try {
    body();
  } catch (...) {
    throw control.report(caught_error("", rank));
  }
}

}  // namespace sluice
