// Loopback: ranks as threads of one process, for tests and for p ranks without MPI.
#pragma once

#include <functional>

#include "comm/communicator.hpp"

namespace sluice {

// Runs `body(comm)` on `ranks` threads, each with its own communicator of one group, joins them,
// and rethrows the exception of the lowest rank that threw. Messages are copied once, from the
// sender's memory into the receiver's; a send is done when that has happened, or, where no receive
// is posted, when a bounded buffer took it.
void run_loopback(int ranks, const std::function<void(Communicator&)>& body);

}  // namespace sluice
