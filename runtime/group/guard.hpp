// Makes an exception on one rank the same Error on all ranks.
#pragma once

#include <functional>

#include "comm/base/caught_error.hpp"
#include "comm/group/control.hpp"
#include "comm/group/rethrow_from.hpp"

namespace sluice {

// Collective over the ranks of `control`. Runs `body`, and reports an exception of any type. Then
// every rank throws the Error that came first. `rank`: this rank of the job.
inline void guarded(ControlChannel& control, int rank, const std::function<void()>& body) {
  try {
    body();
  } catch (...) {
    throw control.report(caught_error("", rank));
  }
}

}  // namespace sluice
