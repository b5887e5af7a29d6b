// Guard: how an exception on one rank becomes the same Error on all of them.
#pragma once

#include <functional>

#include "comm/control.hpp"

namespace sluice {

// Runs `body`; an exception in it is reported through `control`, and what is thrown here, on every
// rank, is the Error that came first. `rank` is this rank of the job.
void guarded(ControlChannel& control, int rank, const std::function<void()>& body);

}  // namespace sluice
