// A GPU runs streams side by side only as far as they have hardware queues of their own. Streams
// that share one run in the order in which work was put on any of them: then a kernel may stand
// behind a receive that waits, over other ranks, for that kernel. CUDA has 8 by default, and reads
// their number from the environment when a process first calls it.
#pragma once

#include <string>

namespace sluice {

// Ranks with which a GPU's rank may exchange messages over NCCL and have a hardware queue for every
// stream: compute, two for copies, the default stream, one that NCCL has for all communicators, and
// three for each communicator, of which there are two for each of these ranks, and one for sums.
// One of tensor ranks takes the place of one of these ranks.
inline constexpr int kMostNcclPartners = 4;

}  // namespace sluice

namespace sluice::cuda {

// Asks for as many hardware queues as CUDA has, unless the user has set a number. To be called
// before CUDA is: later it has no effect, so a program that calls CUDA before Sluice sets
// CUDA_DEVICE_MAX_CONNECTIONS itself. Writes the environment of the process, once.
void ask_for_hardware_queues();

// Why the user's number of hardware queues is too small for kernels that wait for other ranks, in
// one line with what is legal; empty where it is not.
[[nodiscard]] std::string too_few_hardware_queues();

}  // namespace sluice::cuda
