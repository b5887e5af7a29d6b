// Loopback: ranks as threads of one process, for tests and for p ranks without MPI.
#pragma once

#include <functional>

#include <sluice/communicator.hpp>

namespace sluice {

// Runs `body(comm)` on `ranks` threads, each with its own communicator of one group, joins them,
// and rethrows the exception of the lowest rank that threw. Messages up to 4 KiB go through a ring
// of 64 KiB per ordered pair of ranks; a send of one is done once the ring has taken it. Longer
// ones are copied once, from the sender's memory into the receiver's, by the receiver while it
// waits for anything; a send of one is done after that. A communicator belongs to the thread of its
// rank.
void run_loopback(int ranks, const std::function<void(Communicator&)>& body);

}  // namespace sluice
