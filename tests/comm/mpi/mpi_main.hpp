// What a test under mpirun gets from its main(): the job's communicator. Link sluice_mpi_test_main,
// which sluice_mpi_test() does. A failure on any rank fails the job; rank 0 prints GoogleTest's
// report, the others only their failures, each line with its rank in front. A job whose cases were
// skipped ends with SLUICE_TEST_SKIP_CODE, where that is set.
#pragma once

#include "comm/group/communicator.hpp"

namespace sluice::testing {

// All ranks of the job; valid while tests run. Every test makes its messages on a duplicate, so
// that a failed one does not disturb the next.
[[nodiscard]] Communicator& world();

}  // namespace sluice::testing
