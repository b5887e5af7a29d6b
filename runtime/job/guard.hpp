// Makes an exception on one rank the same Error on all ranks, with a message that says where it
// came from.
#pragma once

#include <functional>
#include <string>

#include "comm/group/control.hpp"

namespace sluice {

// Collective over the ranks of `control`. Runs `body`, and reports an exception of any type. Then
// every rank throws the Error that came first. `rank`: this rank of the job.
void guarded(ControlChannel& control, int rank, const std::function<void()>& body);

// Called in a handler: throws its exception again, as an Error whose message starts with
// "<where>: ". OutOfMemory keeps its type. An Error that names a rank is not changed.
[[noreturn]] void rethrow_from(const std::string& where);

}  // namespace sluice
