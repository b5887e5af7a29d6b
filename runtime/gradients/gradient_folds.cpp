#include "runtime/gradients/gradient_folds.hpp"

#include <algorithm>
#include <bit>
#include <cstdint>

#include <sluice/operators.hpp>
#include <sluice/tensor.hpp>

#include "comm/base/index.hpp"
#include "comm/base/sum_tree.hpp"
#include "stages/tensor/stale_gradients.hpp"

namespace sluice {

int TreeSum::levels(int leaves) {
  return static_cast<int>(std::bit_width(static_cast<unsigned>(leaves - 1)));
}

TreeSum::TreeSum(ComputeContext& compute, std::size_t floats, int leaves)
    : compute_(compute), leaves_(leaves) {
  for (int level = 0; level < levels(leaves); ++level) {
    levels_.push_back(compute.memory().allocate(floats * sizeof(float)));
  }
}

bool TreeSum::add(std::span<float> values, int leaf) {
  const Tensor sum = {values.data(), {DType::kF32, Shape{std::ssize(values)}}};
  // The subtree at `into` has as many leaves as are before the one at `from`.
  add_leaf(at(leaf), at(leaves_), [&](std::size_t into, std::size_t from) {
    Buffer& level = levels_[at(std::countr_zero(from - into))];
    sluice::add(compute_, {level.data(), sum.spec}, sum);
  });
  if (leaf + 1 == leaves_) return true;
  Buffer& level = levels_[at(std::countr_one(static_cast<unsigned>(leaf)))];
  copy_async(level.data(), values.data(), values.size_bytes(), compute_.stream());
  return false;
}

GradientFolds::GradientFolds(ComputeContext& compute, std::span<const StageBinding> stages,
                             int leaves)
    : compute_(compute) {
  for (const StageBinding& stage : stages) {
    const std::vector<Parameter*> all = stage.parameters->all();
    for (auto begin = all.begin(); leaves > 1 && begin != all.end();) {
      const auto end = std::find_if(begin, all.end(), [&](const Parameter* each) {
        return each->written_by_loss != (*begin)->written_by_loss;
      });
      add_run(stage, {begin, end}, leaves);
      begin = end;
    }
  }
}

void GradientFolds::add_run(const StageBinding& stage, std::span<Parameter* const> parameters,
                            int leaves) {
  const Parameter &first = *parameters.front(), &last = *parameters.back();
  auto* const begin = first.grad.as<float>();
  const std::span gradients(begin, last.grad.as<float>() + last.grad.elements());
  if (gradients.empty()) return;
  runs_.push_back({.stage = stage.index,
                   .by_loss = first.written_by_loss,
                   .overwritten = stage.stage->overwrites_gradients(),
                   .parameters = {parameters.begin(), parameters.end()},
                   .gradients = gradients,
                   .sum = TreeSum(compute_, gradients.size(), leaves)});
}

void GradientFolds::fold(int stage, int leaf, bool by_loss) {
  for (Run& run : runs_) {
    if (run.stage != stage || run.by_loss != by_loss) continue;
    for (Parameter* each : run.parameters) zero_if_stale(*each, compute_.stream());
    if (run.sum.add(run.gradients, leaf)) continue;
    for (Parameter* each : run.parameters) {
      GradientAccess::set_stale(*each, run.overwritten);
      if (each->is_stale()) continue;
      fill_zero_async(each->grad.data, each->grad.spec.bytes(), compute_.stream());
    }
  }
}

}  // namespace sluice
