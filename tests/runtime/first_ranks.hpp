// Jobs of fewer ranks within one under mpirun.
#pragma once

#include <memory>
#include <utility>

#include "comm/group/collectives.hpp"
#include "tests/comm/mpi/mpi_main.hpp"

namespace sluice::testing {

// Collective over the job: a communicator of its first `ranks` ranks, null elsewhere. Ranks wait
// for each other without taking a core from those that still compute, which MPI's own split does.
inline std::unique_ptr<Communicator> first_ranks(int ranks) {
  Collectives(world(), 0, nullptr).barrier();
  const bool takes_part = world().rank() < ranks;
  auto part = world().split(takes_part ? 0 : 1, world().rank());
  return takes_part ? std::move(part) : nullptr;
}

}  // namespace sluice::testing
