// Whether messages may lie in a GPU's memory: what MPI reports, and the result of a test message.
// Internal to comm/.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include <sluice/device.hpp>

#include "comm/group/communicator.hpp"

namespace sluice {

// Whether a list of memory kinds as MPI 4.1 writes it ("mpi_memory_alloc_kinds": "system,mpi,
// cuda:device:host") holds the memory of a CUDA device. A kind without restrictors means all of it.
[[nodiscard]] bool names_cuda_device(std::string_view memory_kinds);

// Sends a message of this rank to itself with tag 0: from the device to the host, to the device,
// and within the device. Returns an empty text where all bytes arrive, else one line with the
// fault. Blocks the host. A library that reads device memory as host memory crashes the process
// here, before any training. The device becomes the calling thread's current one. `comm` has no
// other open request and is destroyed here, before the memory of its messages.
[[nodiscard]] std::string device_message_fault(std::unique_ptr<Communicator> comm, Device device);

// Communicator::device_memory_unsupported_reason() for MPI. The library reports support by Open
// MPI's query (in 4.1 whether it was built for CUDA, in 5 whether it also runs with it), unless the
// parameter that turns support off in 4.1 is set, or by the memory kinds of the MPI standard 4.1.
// If it does, sends a test message.
[[nodiscard]] std::string mpi_device_memory_unsupported_reason(Device device);

}  // namespace sluice
