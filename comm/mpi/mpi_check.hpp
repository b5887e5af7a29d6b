// How MPI's return codes become errors. Internal to comm/; names no MPI type.
#pragma once

#include <string>

#include <sluice/device.hpp>

namespace sluice {

// Throws Error(kMpi) with the call's name and MPI's own text unless `result` is MPI_SUCCESS.
void check_mpi(int result, const char* call);

// Communicator::device_memory_unsupported_reason() of MPI's: asks the library, and tries it where
// it says yes.
[[nodiscard]] std::string mpi_device_memory_unsupported_reason(Device device);

}  // namespace sluice
