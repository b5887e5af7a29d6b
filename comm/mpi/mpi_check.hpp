// Turns MPI's return codes into errors. Internal to comm/; names no MPI type.
#pragma once

namespace sluice {

// Throws Error(kMpi) with the call's name and MPI's own text unless `result` is MPI_SUCCESS.
void check_mpi(int result, const char* call);

}  // namespace sluice
