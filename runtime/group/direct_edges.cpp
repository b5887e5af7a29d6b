#include "runtime/group/direct_edges.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include <sluice/error.hpp>

#include "comm/base/index.hpp"
#include "comm/base/throw_error.hpp"
#include "comm/group/edge_probe.hpp"

namespace sluice {
namespace {

std::vector<ProbedEdge> direct_edges(const JobLayout& layout, std::size_t most) {
  std::map<std::pair<int, int>, std::size_t> bytes;
  for (int s = 1; s < layout.plans.num_stages(); ++s) {
    if (layout.wires.routes[at(s)].kind != RouteKind::kDirect) continue;
    const int from = layout.plans.placement().rank_of(s - 1);
    const int to = layout.plans.placement().rank_of(s);
    for (const EdgeTensor& tensor : layout.wires.edges.inputs(layout.wires.edges.largest(), s)) {
      std::size_t& forward = bytes[{from, to}];
      forward = std::max(forward, std::min(most, tensor.spec.bytes()));
      if (!tensor.wants_gradient) continue;
      std::size_t& backward = bytes[{to, from}];
      backward = std::max(backward, std::min(most, tensor.spec.bytes()));
    }
  }
  std::vector<ProbedEdge> edges;
  for (const auto& [ends, size] : bytes) edges.push_back({ends.first, ends.second, size});
  return edges;
}

}  // namespace

void probe_direct_edges(JobContext& job, const JobLayout& layout, ComputeContext& compute) {
  const std::vector<ProbedEdge> edges = direct_edges(layout, job.piece_bytes());
  if (edges.empty() || job.planned) return;
  const auto comm = job.pipeline.ranks->duplicate();
  const auto broken = probe_edges(*comm, compute.memory(), edges, job.pipeline_watch.get());
  if (!broken) return;
  const auto name = [&](int rank) {
    const RankDevice& end = job.place.devices[at(rank)];
    return fmt::format("rank {} on {} ({})", job.place.topology.rank_of(job.place.replica, rank),
                       end.host, to_string(end.device));
  };
  throw_error(ErrorCode::kDevice,
              "MPI delivers other bytes than were sent from {} to {}, in a message of {} bytes "
              "between the memories of GPUs; with OMPI_MCA_opal_cuda_support=0 in the environment "
              "messages go through host memory",
              name(broken->from), name(broken->to), broken->bytes);
}

}  // namespace sluice
