// A GPU runs streams side by side only as far as they have hardware queues of their own. Streams
// that share one run in the order in which work was put on any of them: then a kernel may stand
// behind a receive that waits, over other ranks, for that kernel. CUDA has 8 by default, and reads
// their number from the environment when a process first calls it. A rank needs one for compute,
// two for copies, one for each NCCL communicator, and those of NCCL itself.
#pragma once

#include <string>

namespace sluice::cuda {

// Asks for as many hardware queues as CUDA has, unless the user has set a number. To be called
// before CUDA is: later it has no effect, so a program that calls CUDA before Sluice sets
// CUDA_DEVICE_MAX_CONNECTIONS itself. Writes the environment of the process, once.
void ask_for_hardware_queues();

// Why the user's number of hardware queues is too small for kernels that wait for other ranks, in
// one line with what is legal; empty where it is not.
[[nodiscard]] std::string too_few_hardware_queues();

}  // namespace sluice::cuda
