// The optimizers of a rank's parameters: one for those with equal settings. Internal to the
// pipeline.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <sluice/compute.hpp>
#include <sluice/options.hpp>

#include "runtime/gradients/offloaded_state.hpp"
#include "runtime/group/job_context.hpp"
#include "runtime/layout/job_layout.hpp"
#include "stages/operators/optimizer.hpp"

namespace sluice {

struct OwnedParameter {
  int stage = 0;
  Parameter* parameter = nullptr;
  ElementRange part = {};  // that this rank updates
};

class StageOptimizers {
 public:
  // `owners` in global order, also those of which this rank has no part; all that is named outlives
  // this. What a factory of the program's throws, and what of it cannot be saved, is an Error that
  // names the parameters.
  StageOptimizers(JobContext& job, const PipelineOptions& options,
                  std::span<const OwnedParameter> owners, const ParameterTable& model,
                  ComputeContext& compute);

  // Gradients count times `factor`.
  void update(std::uint64_t step, double rate, double factor);
  [[nodiscard]] std::vector<OptimizerState> state() const;
  // What has the tensors of state(); null: memory.
  [[nodiscard]] OffloadedState* offloaded() const { return offloaded_.get(); }

 private:
  // Parameters with equal settings.
  struct Updated {
    double rate_scale = 1;
    std::optional<float> weight_decay;  // in place of the configuration's
    int first_stage = 0, last_stage = 0;
    std::vector<ParameterSlice> slices;
    std::unique_ptr<Optimizer> optimizer;
    // "the optimizer of stage 1 (2 parameters, the first 'w1')".
    [[nodiscard]] std::string name() const;
  };
  void add(const PipelineOptions::Training& training, const OwnedParameter& owner);
  void make_offloaded(JobContext& job, const PipelineOptions& options);
  [[nodiscard]] std::vector<OptimizerState> state_of(const Updated& each) const;

  ComputeContext& compute_;
  const ParameterTable& model_;
  bool own_;  // optimizers of the program's factory
  std::unique_ptr<OffloadedState> offloaded_;
  std::vector<Updated> updated_;
};

}  // namespace sluice
