// MPI calls that several sources share. Internal to comm/; names no MPI type.
#pragma once

#include <memory>

#include "comm/group/communicator.hpp"

namespace sluice {

// Turns MPI's return codes into errors: throws Error(kMpi) with the call's name and MPI's own text
// unless `result` is MPI_SUCCESS.
void check_mpi(int result, const char* call);

// MPI_COMM_WORLD itself, which stays the program's. Not collective: for messages before all ranks
// are known to be there.
[[nodiscard]] std::unique_ptr<Communicator> borrow_world();

}  // namespace sluice
