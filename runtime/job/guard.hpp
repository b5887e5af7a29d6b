// Guard: how an exception on one rank says where it came from, and becomes the same Error on all.
#pragma once

#include <functional>
#include <string>

#include "comm/group/control.hpp"

namespace sluice {

// Runs `body`; an exception in it, of any type, is reported through `control`, and what is thrown
// here, on every rank, is the Error that came first. `rank` is this rank of the job.
void guarded(ControlChannel& control, int rank, const std::function<void()>& body);

// Within a handler: throws what it handles again, as an Error whose message has "<where>: " in
// front of it. OutOfMemory stays one; an Error that names a rank stays as it is.
[[noreturn]] void rethrow_from(const std::string& where);

}  // namespace sluice
