// Turns MPI's return codes into errors. Internal to comm/; names no MPI type.
#pragma once

#include <string>

#include <sluice/device.hpp>

namespace sluice {

// Throws Error(kMpi) with the call's name and MPI's own text unless `result` is MPI_SUCCESS.
void check_mpi(int result, const char* call);

// Communicator::device_memory_unsupported_reason() for MPI: queries the library, then sends a test
// message.
[[nodiscard]] std::string mpi_device_memory_unsupported_reason(Device device);

}  // namespace sluice
