// How MPI's return codes become errors. Internal to comm/; names no MPI type.
#pragma once

namespace sluice {

// Throws Error(kMpi) with the call's name and MPI's own text unless `result` is MPI_SUCCESS.
void check_mpi(int result, const char* call);

// Whether this MPI library sends and receives a GPU's memory, by its own word.
[[nodiscard]] bool mpi_takes_device_memory();

}  // namespace sluice
