#include "runtime/gradients/replica_check.hpp"

#include <fmt/format.h>

#include <array>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include <sluice/error.hpp>

#include "runtime/files/sha256.hpp"

namespace sluice {
namespace {

std::size_t at(int index) { return static_cast<std::size_t>(index); }

using Digest = std::array<char, 64>;

Digest digest_of(const Parameter& parameter, HostMirror& mirror) {
  const std::string hex = sha256_hex(mirror.read_back(parameter.value));
  Digest digest = {};
  std::memcpy(digest.data(), hex.data(), digest.size());
  return digest;
}

}  // namespace

void check_replicas(JobContext& job, const JobLayout& layout, const TiedUses& tied,
                    std::span<const StageBinding> stages, HostMirror& mirror, std::uint64_t step) {
  std::vector<Digest> all(at(layout.place.topology.replicas));
  for (const StageBinding& binding : stages) {
    ParameterSet* set = binding.stage->parameters();
    if (set == nullptr) continue;
    for (const Parameter* parameter : set->all()) {
      const Digest mine = digest_of(*parameter, mirror);
      job.replicas.collectives->all_gather(std::as_bytes(std::span(&mine, 1)),
                                           std::as_writable_bytes(std::span(all)));
      for (int r = 1; r < layout.place.topology.replicas; ++r) {
        if (all[at(r)] == all[0]) continue;
        throw Error(
            ErrorCode::kMismatch,
            fmt::format("after step {} parameter '{}' of stage {} differs between replica 0 "
                        "and replica {}",
                        step, parameter->name, binding.index, r));
      }
    }
  }
  const Placement& placement = layout.plans.placement();
  for (std::size_t group = 0; group < layout.parameters.tied.size(); ++group) {
    const TiedParameter& tie = layout.parameters.tied[group];
    for (std::size_t u = 1; u < tie.uses.size(); ++u) {
      const int owner = placement.rank_of(tie.uses.front().stage);
      const int holder = placement.rank_of(tie.uses[u].stage);
      Digest theirs = {};
      if (layout.place.rank == holder && holder != owner) {
        const Digest mine = digest_of(*tied.parameter(group, u), mirror);
        job.pipeline.collectives->send(owner, std::as_bytes(std::span(&mine, 1)));
      }
      if (layout.place.rank != owner) continue;
      if (holder == owner) {
        theirs = digest_of(*tied.parameter(group, u), mirror);
      } else {
        job.pipeline.collectives->recv(holder, std::as_writable_bytes(std::span(&theirs, 1)));
      }
      if (theirs != digest_of(*tied.parameter(group, 0), mirror)) {
        throw Error(
            ErrorCode::kMismatch,
            fmt::format("after step {} the copies of tied parameter '{}' on stages {} and {} "
                        "differ",
                        step, tie.name, tie.uses.front().stage, tie.uses[u].stage));
      }
    }
  }
  job.world.collectives->barrier();
}

}  // namespace sluice
