// `sluice doctor --self-test`: whether this installation trains the right bits.
#pragma once

#include <string>
#include <vector>

#include <sluice/communicator.hpp>
#include <sluice/options.hpp>

namespace sluice {

// Collective over at least 2 ranks, else Error(kUsage). Each rank trains one step of a small model
// alone. Then all ranks train the same step as one pipeline. Every digest of the parameters must be
// the same. Rank 0 prints it, in the form of `sluice digest`. Else Error(kMismatch) names what
// differs. `devices` as of PipelineOptions; ranks on different kinds of devices do differ.
void run_self_test(Communicator& world, const std::vector<DeviceChoice>& devices);

// For a process started alone: becomes `mpirun -n 2` of this program with `arguments` after its
// name, on this host, and does not return. Returns where this process comes from such a start, but
// its launcher gave it no rank. Throws Error(kMpi) where mpirun cannot be started.
void become_two_ranks(const std::vector<std::string>& arguments);

}  // namespace sluice
