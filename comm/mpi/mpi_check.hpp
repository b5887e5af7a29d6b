// How MPI's return codes become errors. Internal to comm/; names no MPI type.
#pragma once

#include <string>

#include <sluice/device.hpp>

namespace sluice {

// Throws Error(kMpi) with the call's name and MPI's own text unless `result` is MPI_SUCCESS.
void check_mpi(int result, const char* call);

// Communicator::why_no_device_memory() of MPI's: asks the library, and tries it where it says yes.
[[nodiscard]] std::string why_mpi_takes_no_device_memory(Device device);

}  // namespace sluice
