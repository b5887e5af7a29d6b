#include "runtime/gradients/replica_state.hpp"

#include <array>
#include <cstddef>
#include <cstring>
#include <functional>
#include <numeric>
#include <string>

#include <sluice/error.hpp>

#include "comm/base/index.hpp"
#include "comm/base/throw_error.hpp"
#include "runtime/files/sha256.hpp"

namespace sluice {
namespace {

using Digest = std::array<char, 64>;

Digest digest_of(const Tensor& values, HostMirror& mirror) {
  const std::string hex = sha256_hex(mirror.read_back(values));
  Digest digest = {};
  std::memcpy(digest.data(), hex.data(), digest.size());
  return digest;
}

// Collective over `group`, of which these are the replicas or tensor ranks. `mine`: of the
// parameter, after `step`.
void require_same(const RankGroup& group, const char* name, const std::vector<int>& numbers,
                  const Digest& mine, const Parameter& parameter, int stage, std::uint64_t step) {
  std::vector<Digest> all(numbers.size());
  group.collectives->all_gather(mine, all);
  for (std::size_t other = 1; other < all.size(); ++other) {
    if (all[other] == all[0]) continue;
    throw_error(ErrorCode::kMismatch,
                "after step {0} parameter '{1}' of stage {2} differs between {3} {4} and {3} {5}",
                step, parameter.name, stage, name, numbers.front(), numbers[other]);
  }
}

std::vector<int> numbers_to(int end) {
  std::vector<int> numbers(at(end));
  std::iota(numbers.begin(), numbers.end(), 0);
  return numbers;
}

}  // namespace

StageBuffers::StageBuffers(JobContext& job, ComputeContext& compute, HostMirror& mirror,
                           std::span<const StageBinding> stages)
    : job_(job), compute_(compute), mirror_(mirror) {
  for (const StageBinding& binding : stages) {
    ParameterSet* set = binding.parameters;
    if (set == nullptr || set->flat_buffers().empty()) continue;
    const std::span<float> now = set->flat_buffers();
    kept_.push_back({binding.index, set, compute.memory().allocate(now.size_bytes()),
                     TreeSum(compute, now.size(), job.place.shares)});
  }
}

void StageBuffers::keep() {
  for (const Kept& kept : kept_) {
    const std::span<float> now = kept.set->flat_buffers();
    copy_async(kept.copy.data(), now.data(), now.size_bytes(), compute_.stream());
  }
}

// The number of leaves is a power of two, or join() does nothing: so the mean of all virtual
// replicas is rounded once.
void StageBuffers::fold(int stage, int leaf) {
  for (Kept& kept : kept_) {
    if (kept.stage != stage) continue;
    const std::span<float> now = kept.set->flat_buffers();
    if (!kept.sum.add(now, leaf)) {
      copy_async(now.data(), kept.copy.data(), now.size_bytes(), compute_.stream());
      continue;
    }
    for (float& value : mirror_.read_back(now)) value /= static_cast<float>(job_.place.shares);
    mirror_.write_back();
  }
}

void StageBuffers::restore() {
  for (const Kept& kept : kept_) {
    const std::span<float> now = kept.set->flat_buffers();
    copy_async(now.data(), kept.copy.data(), now.size_bytes(), compute_.stream());
  }
}

Tensor StageBuffers::kept(const Tensor& value) const {
  const auto* const data = value.as<const std::byte>();
  for (const Kept& kept : kept_) {
    const std::span<const std::byte> now = std::as_bytes(kept.set->flat_buffers());
    if (std::less<>()(data, now.data()) || !std::less<>()(data, now.data() + now.size())) continue;
    Tensor copy = value;
    copy.data = static_cast<std::byte*>(kept.copy.data()) + (data - now.data());
    return copy;
  }
  return value;
}

void StageBuffers::join() {
  Collectives& replicas = *job_.group(Axis::kReplica).collectives;
  const int count = job_.place.topology.size.replica;
  if (count == 1) return;
  for (const Kept& kept : kept_) {
    for (Parameter* buffer : kept.set->buffers()) {
      if (buffer->across == ReplicaRule::kNothing) continue;
      const std::span<float> values = mirror_.read_back(buffer->value.floats());
      if (buffer->across == ReplicaRule::kFirst) {
        replicas.broadcast(std::as_writable_bytes(values), 0);
      } else {
        replicas.ordered_sum(values, mirror_.owner(buffer->memory));
        for (float& value : values) value /= static_cast<float>(count);
      }
      mirror_.write_back();
    }
  }
}

void check_replicas(JobContext& job, const ParameterTable& table, const TiedUses& tied,
                    std::span<const StageBinding> stages, HostMirror& mirror, std::uint64_t step) {
  const int replica = job.place.here.replica;
  const std::vector<int> replicas = numbers_to(job.place.topology.size.replica),
                         copies = job.place.shard_groups.copies_of(replica),
                         tensors = numbers_to(job.place.topology.size.tensor);
  for (const StageBinding& binding : stages) {
    ParameterSet* set = binding.parameters;
    if (set == nullptr) continue;
    const auto compare = [&](const Parameter& parameter, const Tensor& here, bool divided) {
      const Digest mine = digest_of(here, mirror);
      const auto require = [&](const RankGroup& group, const char* name,
                               const std::vector<int>& numbers) {
        require_same(group, name, numbers, mine, parameter, binding.index, step);
      };
      if (!divided) require(job.group(Axis::kReplica), "replica", replicas);
      if (divided && copies.size() > 1) require(job.copies(), "replica", copies);
      if (parameter.slice.all()) require(job.group(Axis::kTensor), "tensor rank", tensors);
    };
    const std::vector<Parameter*> all = set->all();
    for (std::size_t i = 0; i < all.size(); ++i) {
      const int index = static_cast<int>(i);
      const bool divided = table.gather != Gather::kNever &&
                           !table.stages[at(binding.index)].parameters[i].ends.empty();
      compare(*all[i], elements_of(all[i]->value, table.at_rest(binding.index, index, replica)),
              divided);
    }
    for (const Parameter* buffer : set->buffers()) {
      if (buffer->across != ReplicaRule::kNothing) compare(*buffer, buffer->value, false);
    }
  }
  for (std::size_t group = 0; group < tied.ties().size(); ++group) {
    const TiedParameter& tie = tied.ties()[group];
    const int owner = tied.rank_of(group, 0);
    const ElementRange here =
        table.at_rest(tie.uses.front().stage, tie.uses.front().index, replica);
    const auto digest = [&](std::size_t use) {
      return digest_of(elements_of(tied.parameter(group, use)->value, here), mirror);
    };
    for (std::size_t use = 1; use < tie.uses.size(); ++use) {
      const int holder = tied.rank_of(group, use);
      Digest theirs = {};
      if (job.place.here.pipeline == holder) theirs = digest(use);
      if (job.place.here.pipeline == holder && holder != owner) {
        job.group(Axis::kPipeline).collectives->send(owner, object_bytes(theirs));
      }
      if (job.place.here.pipeline != owner) continue;
      if (holder != owner) {
        job.group(Axis::kPipeline).collectives->recv(holder, object_bytes(theirs));
      }
      if (theirs == digest(0)) continue;
      throw_error(ErrorCode::kMismatch,
                  "after step {} the copies of tied parameter '{}' on stages {} and {} differ",
                  step, tie.name, tie.uses.front().stage, tie.uses[use].stage);
    }
  }
  job.world.collectives->barrier();
}

}  // namespace sluice
