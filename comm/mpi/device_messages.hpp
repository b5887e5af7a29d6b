// Whether messages may lie in a GPU's memory: what MPI says of itself, and what comes of trying.
// Internal to comm/.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include <sluice/communicator.hpp>
#include <sluice/device.hpp>

namespace sluice {

// Whether a list of memory kinds as MPI 4.1 writes it ("mpi_memory_alloc_kinds": "system,mpi,
// cuda:device:host") holds the memory of a CUDA device. A kind without restrictors means all of it.
[[nodiscard]] bool names_cuda_device(std::string_view memory_kinds);

// Sends one message of `comm`'s own rank from the device to the host, from there to the device, and
// on within it, with tag 0. Empty where all bytes arrive; else one line on what went wrong. Blocks
// the host. A library that reads a device's memory as the host's ends the process here, before any
// training. The device becomes the calling thread's. `comm`, of which nothing else is open, ends
// here, and with it, before the memory goes, what an error has left open.
[[nodiscard]] std::string device_message_fault(std::unique_ptr<Communicator> comm, Device device);

}  // namespace sluice
