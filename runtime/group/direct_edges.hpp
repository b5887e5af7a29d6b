// A test message over every edge whose messages MPI takes from a GPU's memory.
#pragma once

#include <sluice/compute.hpp>

#include "runtime/group/job_context.hpp"
#include "runtime/layout/job_layout.hpp"

namespace sluice {

// Collective over the pipeline, before its first message: one in each direction between two ranks
// that a direct edge joins, of the size of the largest tensor between them, but at most a piece.
// What MPI sends a rank to itself says nothing of another process, of a network, or of large
// messages. Throws Error(kDevice) on the rank that gets other bytes than were sent: one line with
// both ends and a remedy. A library that takes a GPU's memory for the host's may end the process
// here, before training.
void probe_direct_edges(JobContext& job, const JobLayout& layout, ComputeContext& compute);

}  // namespace sluice
