// Loopback: ranks as threads of one process, for tests and benchmarks.
#pragma once

#include <functional>

#include "comm/group/communicator.hpp"

namespace sluice {

// Runs `body(comm)` on `ranks` threads, each with its own communicator of one group, and joins
// them. Rethrows the exception of the lowest rank that threw. A rank that waits while another has
// thrown gets Error(kPeer) after two seconds; such an error is rethrown only if there is no other.
//
// A send of at most 4 KiB is copied and done at once while the receiver has room for it: 64
// messages per group and rank. Any other send is done once its receive has copied the bytes. A
// communicator belongs to the thread of its rank.
void run_loopback(int ranks, const std::function<void(Communicator&)>& body);

}  // namespace sluice
