// The one public header that names an MPI type: for programs that bring their own communicator.
#pragma once

#include <mpi.h>

#include <memory>

#include <sluice/world.hpp>

#pragma GCC visibility push(default)
namespace sluice {

// Collective over `comm`, which is duplicated; the caller keeps its own. An inter-communicator is
// Error(kUsage). MPI must be initialised with at least MPI_THREAD_FUNNELED. At that level this must
// be the thread that initialised it, also for split(), else Error(kUsage) naming
// the level. Under MPI_THREAD_SERIALIZED the callers ensure that no two threads use worlds at
// once.
[[nodiscard]] std::unique_ptr<World> make_world(MPI_Comm comm);

}  // namespace sluice
#pragma GCC visibility pop
