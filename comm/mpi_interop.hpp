// The one public header that names an MPI type: for programs that bring their own communicator.
#pragma once

#include <mpi.h>

#include <memory>

#include "comm/communicator.hpp"

namespace sluice {

// Collective over `comm`, which is duplicated; the caller keeps its own. MPI must be initialised
// with at least MPI_THREAD_FUNNELED, else Error(kUsage) naming the level granted.
[[nodiscard]] std::unique_ptr<Communicator> make_mpi_communicator(MPI_Comm comm);

}  // namespace sluice
