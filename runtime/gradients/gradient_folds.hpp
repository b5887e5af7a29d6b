// Sums over the virtual replicas that a rank computes one after the other: of gradients, and of
// what else a step sums over them. Internal to the pipeline. One thread; in order of the compute
// stream.
//
// The sum over leaves is the tree of comm/base/sum_tree.hpp. It is made as they come, by a binary
// counter: each level keeps the sum of a complete subtree until its other half is there.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include <sluice/compute.hpp>
#include <sluice/device.hpp>

#include "runtime/engine/stage_binding.hpp"

namespace sluice {

class TreeSum {
 public:
  // The arrays that a sum over `leaves` keeps at most, besides the leaf that comes.
  [[nodiscard]] static int levels(int leaves);

  // Takes the memory of these arrays. `compute` outlives it. leaves >= 1.
  TreeSum(ComputeContext& compute, std::size_t floats, int leaves);

  // `values`: [floats], of the device, of leaf number `leaf`; they come in order from 0 on. After
  // the last one `values` are the sum over all leaves, after others they have any content. Returns
  // whether it was the last.
  bool add(std::span<float> values, int leaf);

 private:
  ComputeContext& compute_;
  int leaves_;
  std::vector<Buffer> levels_;  // [level] the sum of 2^level leaves
};

class GradientFolds {
 public:
  // `stages` have parameters with gradients, and outlive this like `compute`. Takes memory unless
  // `leaves` is 1.
  GradientFolds(ComputeContext& compute, std::span<const StageBinding> stages, int leaves);

  // After all forwards of the stage's leaf, of the gradients that are written by the loss, or after
  // all backwards, of the others. They start anew, or are the sum over the leaves.
  void fold(int stage, int leaf, bool by_loss);

 private:
  // Parameters that are adjacent in memory.
  struct Run {
    int stage;
    bool by_loss, overwritten;
    std::vector<Parameter*> parameters;
    std::span<float> gradients;
    TreeSum sum;
  };
  void add_run(const StageBinding& stage, std::span<Parameter* const> parameters, int leaves);

  ComputeContext& compute_;
  std::vector<Run> runs_;
};

}  // namespace sluice
