// What a test may do to the emulated NCCL that no program can do to the real one.
#pragma once

#include <nccl.h>

namespace sluice::emulated {

// From now on ncclCommGetAsyncError reports `failure` for this communicator, as after the death of
// a peer; what it waits for stays blocked until ncclCommAbort. Programs that cannot be reached this
// way fail by SLUICE_EMULATED_NCCL_FAILURE=RANK:GROUP: the communicators of that rank report
// ncclRemoteError in place of starting their group of that number, counted from 0.
void fail_communicator(ncclComm_t communicator, ncclResult_t failure);

}  // namespace sluice::emulated
