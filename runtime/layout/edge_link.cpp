#include "runtime/layout/edge_link.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <map>
#include <utility>

#include <sluice/error.hpp>
#if SLUICE_WITH_NCCL
#include "comm/nccl/nccl.hpp"
#endif

namespace sluice {
namespace {

constexpr std::array<const char*, 3> kChoices = {"auto", "mpi", "nccl"};

std::size_t at(int index) { return static_cast<std::size_t>(index); }

bool is_gpu(const RankDevice& rank) { return rank.device.kind != DeviceKind::kCpu; }

// Two ranks of one GPU: NCCL refuses them.
bool share_gpu(const RankDevice& a, const RankDevice& b) {
  return is_gpu(a) && is_gpu(b) && a.host == b.host && a.identity == b.identity;
}

// The ranks' one reason, or the first rank's that has any; empty where none has.
std::string common_reason(const std::vector<std::string>& reasons) {
  for (std::size_t rank = 0; rank < reasons.size(); ++rank) {
    if (reasons[rank].empty()) continue;
    const bool all = std::count(reasons.begin(), reasons.end(), reasons[rank]) ==
                     static_cast<std::ptrdiff_t>(reasons.size());
    return all ? reasons[rank] : fmt::format("rank {}: {}", rank, reasons[rank]);
  }
  return {};
}

bool has_several_gpus(const std::vector<RankDevice>& job) {
  return std::count_if(job.begin(), job.end(), is_gpu) > 1;
}

// Whether MPI may have to carry messages from one GPU to another.
bool may_send_device_memory(const std::vector<RankDevice>& job, TransportChoice wanted,
                            const std::string& no_nccl, int depth) {
  return depth > 1 && has_several_gpus(job) && wanted != TransportChoice::kNccl &&
         (wanted == TransportChoice::kMpi || !no_nccl.empty());
}

// What is decided, in words.
struct Wording {
  std::string task;  // "transport nccl cannot <task>"
  const char* needs_gpus;
  const char* on_cpus;
  const char* by_nccl;
};

// The one rule of what carries tensors between two devices: NCCL where it can and nobody objects.
EdgeLink choose(const RankDevice& a, const RankDevice& b, const LinkQuestion& question,
                const Wording& wording) {
  const bool gpus = is_gpu(a) && is_gpu(b);
  const std::string why_not = gpus ? question.nccl_refusal : wording.needs_gpus;
  if (question.wanted == TransportChoice::kNccl && !why_not.empty()) {
    throw Error(ErrorCode::kUsage, fmt::format("transport nccl cannot {}: {}; legal: auto, mpi",
                                               wording.task, why_not));
  }
  if (!is_gpu(a) && !is_gpu(b)) return {LinkKind::kHost, wording.on_cpus};
  if (!gpus) return {LinkKind::kStaged, "a GPU's neighbour is a CPU"};
  if (question.wanted == TransportChoice::kMpi) {
    return {LinkKind::kStaged, "asked for by --transport mpi"};
  }
  if (!why_not.empty()) return {LinkKind::kStaged, why_not};
  return {LinkKind::kNccl, wording.by_nccl};
}

}  // namespace

std::string why_no_nccl(const std::vector<RankDevice>& job) {
  if (SLUICE_WITH_NCCL == 0) return "this build has no NCCL";
  for (std::size_t a = 0; a < job.size(); ++a) {
    for (std::size_t b = a + 1; b < job.size(); ++b) {
      if (!share_gpu(job[a], job[b])) continue;
      return fmt::format("ranks {} and {} share {} on {}, which NCCL refuses", a, b,
                         to_string(job[a].device), job[a].host);
    }
  }
  return {};
}

std::string find_why_no_nccl(Collectives& world, const std::vector<RankDevice>& job,
                             TransportChoice wanted) {
  std::string why = why_no_nccl(job);
  if (!why.empty() || wanted == TransportChoice::kMpi || !has_several_gpus(job)) return why;
#if SLUICE_WITH_NCCL
  const int rank = world.communicator().rank();
  const auto refused = nccl_refusal(world, job[at(rank)].device, {"this job", rank});
  if (refused) return refused->what();
#else
  static_cast<void>(world);
#endif
  return {};
}

std::string why_no_device_messages(Collectives& world, const std::vector<RankDevice>& job,
                                   TransportChoice wanted, const std::string& no_nccl, int depth) {
  if (!may_send_device_memory(job, wanted, no_nccl, depth)) return kDeviceMessagesNotTried;
  const Communicator& comm = world.communicator();
  return common_reason(
      world.all_gather_strings(comm.device_memory_unsupported_reason(job[at(comm.rank())].device)));
}

TransportChoice parse_transport(std::string_view text) {
  const auto found = std::find(kChoices.begin(), kChoices.end(), text);
  if (found != kChoices.end()) return static_cast<TransportChoice>(found - kChoices.begin());
  throw Error(ErrorCode::kUsage,
              fmt::format("unknown transport '{}'; legal: {}", text, fmt::join(kChoices, ", ")));
}

const char* name_of(TransportChoice choice) { return kChoices[static_cast<std::size_t>(choice)]; }

EdgeLink choose_sum(int rank, int replicas, const LinkQuestion& question) {
  if (replicas == 1) return {};
  const RankDevice& mine = question.devices[at(rank)];
  return choose(mine, mine, question,
                {.task = fmt::format("sum over the {} replicas of pipeline rank {} ({})", replicas,
                                     rank, to_string(mine.device)),
                 .needs_gpus = "it needs GPUs",
                 .on_cpus = "computed on the CPU",
                 .by_nccl = "a GPU of its own for every replica"});
}

EdgeLink choose_link(int from, int to, const LinkQuestion& question) {
  if (from == to) return {};
  const RankDevice &a = question.devices[at(from)], &b = question.devices[at(to)];
  return choose(a, b, question,
                {.task = fmt::format("join pipeline ranks {} ({}) and {} ({})", from,
                                     to_string(a.device), to, to_string(b.device)),
                 .needs_gpus = "it needs a GPU at both ends",
                 .on_cpus = "both ends compute on the CPU",
                 .by_nccl = "a GPU of its own at both ends"});
}

std::vector<EdgeLink> choose_links(const Placement& placement, const LinkQuestion& question) {
  std::vector<EdgeLink> links(at(placement.stages()));
  for (int s = 1; s < placement.stages(); ++s) {
    links[at(s)] = choose_link(placement.rank_of(s - 1), placement.rank_of(s), question);
  }
  if (uses_nccl(links)) return links;
  for (int s = 1; s < placement.stages(); ++s) {
    const int from = placement.rank_of(s - 1), to = placement.rank_of(s);
    if (links[at(s)].kind == LinkKind::kStaged && is_gpu(question.devices[at(from)]) &&
        is_gpu(question.devices[at(to)])) {
      const std::string& why_not = question.no_device_messages;
      links[at(s)].reason += "; " + (why_not.empty() ? "MPI takes a GPU's memory" : why_not);
      if (why_not.empty()) links[at(s)].kind = LinkKind::kDirect;
    }
  }
  return links;
}

bool uses_nccl(const std::vector<EdgeLink>& links) {
  return std::any_of(links.begin(), links.end(),
                     [](const EdgeLink& link) { return link.kind == LinkKind::kNccl; });
}

std::string describe_link(const EdgeLink& link) {
  constexpr std::array<const char*, 5> kNames = {"on the rank", "messages of host memory",
                                                 "through page-locked host memory",
                                                 "MPI from GPU to GPU", "NCCL"};
  return fmt::format("{} ({})", kNames[static_cast<std::size_t>(link.kind)], link.reason);
}

std::string describe_links(const std::vector<EdgeLink>& links) {
  std::map<std::pair<LinkKind, std::string>, std::vector<std::string>> groups;
  for (std::size_t s = 1; s < links.size(); ++s) {
    if (links[s].kind == LinkKind::kLocal) continue;
    groups[{links[s].kind, links[s].reason}].push_back(fmt::format("{}-{}", s - 1, s));
  }
  std::string text;
  for (const auto& [what, edges] : groups) {
    text += fmt::format("  stages {}: {}\n", fmt::join(edges, ", "),
                        describe_link({what.first, what.second}));
  }
  return text;
}

std::string describe_sums(const std::vector<EdgeLink>& sums, bool all_reduce) {
  std::map<std::pair<LinkKind, std::string>, std::vector<std::size_t>> groups;
  for (std::size_t rank = 0; rank < sums.size(); ++rank) {
    if (sums[rank].kind != LinkKind::kLocal) {
      groups[{sums[rank].kind, sums[rank].reason}].push_back(rank);
    }
  }
  std::string text;
  for (const auto& [what, ranks] : groups) {
    const bool whole = ranks.size() == sums.size();
    const std::string where =
        whole ? "" : fmt::format(" of pipeline ranks {}", fmt::join(ranks, ", "));
    const std::string how =
        all_reduce && what.first == LinkKind::kNccl
            ? fmt::format("NCCL's all-reduce: not depth-invariant ({})", what.second)
            : "in the order of replicas, " + describe_link({what.first, what.second});
    text += fmt::format("  sums over replicas{}: {}\n", where, how);
  }
  return text;
}

}  // namespace sluice
