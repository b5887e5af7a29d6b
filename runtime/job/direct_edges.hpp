// A test message over every edge whose messages MPI takes from a GPU's memory.
#pragma once

#include <vector>

#include <sluice/compute.hpp>

#include "comm/group/edge_probe.hpp"
#include "runtime/job/job_context.hpp"
#include "runtime/layout/job_layout.hpp"

namespace sluice {

// One test message for each direction between two ranks of the pipeline that a direct edge joins:
// the size of the largest tensor between them, but at most `most` bytes.
[[nodiscard]] std::vector<ProbedEdge> direct_edges(const JobLayout& layout, std::size_t most);

// Collective over the pipeline, before its first message. What MPI sends a rank to itself says
// nothing of another process, of a network, or of large messages. Throws Error(kDevice) on the rank
// that gets other bytes than were sent: one line with both ends and a remedy. A library that takes
// a GPU's memory for the host's may end the process here, before training.
void probe_direct_edges(JobContext& job, const JobLayout& layout, ComputeContext& compute);

}  // namespace sluice
