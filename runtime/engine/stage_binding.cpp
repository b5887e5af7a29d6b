#include "runtime/engine/stage_binding.hpp"

#include <cmath>

#include "comm/base/throw_error.hpp"

namespace sluice {

double target_weight(const StageBinding& last, std::span<const Tensor> targets) {
  const double weight = last.loss->target_weight(targets);
  if (std::isfinite(weight) && weight >= 0) return weight;
  throw_usage("the weight of the targets is {}; legal are numbers from 0", weight);
}

}  // namespace sluice
