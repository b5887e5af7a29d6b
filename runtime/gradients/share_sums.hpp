// The sums of shares of gradients (Parameter::shares) over the shards of the model. Internal to the
// pipeline. One thread; in order of the compute stream.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include <sluice/compute.hpp>

#include "runtime/engine/stage_binding.hpp"
#include "runtime/group/host_mirror.hpp"
#include "runtime/group/job_context.hpp"

namespace sluice {

class ShareSums {
 public:
  // `stages` have parameters, and all that is named outlives this.
  ShareSums(JobContext& job, ComputeContext& compute, HostMirror& mirror,
            std::span<const StageBinding> stages);

  // Where a virtual replica's gradients end. Collective over the tensor ranks where the stage has
  // shares: adds their sum over all shards to the gradients, and zeroes the shares.
  void join(int stage);

 private:
  struct Joined {
    int stage = 0;
    ParameterSet* set = nullptr;
    std::vector<Parameter*> parameters;  // those that have shares
  };
  void sum_shards(const Joined& joined);

  Collectives* sharers_;  // null: one rank
  ComputeContext& compute_;
  HostMirror& mirror_;
  std::vector<Joined> stages_;
};

}  // namespace sluice
