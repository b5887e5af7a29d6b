#include "runtime/gradients/step_state.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string>

#include "comm/base/index.hpp"

namespace sluice {

Error StepState::refusal(const ParameterTable& parameters) const {
  if (totals.other_rate_rank >= 0) {
    return {ErrorCode::kMismatch,
            fmt::format("ranks disagree about the learning rate of step {}: rank 0 has {}, rank {} "
                        "has {}; no parameter was changed",
                        number, totals.rate, totals.other_rate_rank, totals.other_rate),
            static_cast<int>(totals.other_rate_rank)};
  }
  if (totals.finite != 0) {
    return {ErrorCode::kData, fmt::format("step {} has no target that counts", number), 0};
  }
  auto index = static_cast<std::size_t>(std::max(totals.first_nonfinite_index, 0.0));
  std::string what;
  if (totals.first_nonfinite_index < 0) {
    what = fmt::format("the {} of step {} over {} targets is not finite",
                       totals.nonfinite_is_loss != 0 ? "mean loss" : "norm of the mean gradient",
                       number, totals.targets);
  } else if (totals.nonfinite_is_loss != 0) {
    what = fmt::format("the loss of step {} is not finite, first in micro-batch {} of replica {}",
                       number, index % at(micro_batches), index / at(micro_batches));
  } else {
    auto stage = parameters.stages.begin();
    for (; index >= stage->parameters.size(); ++stage) index -= stage->parameters.size();
    what = fmt::format("the gradient of step {} is not finite, first in parameter '{}'", number,
                       stage->parameters[index].name);
  }
  return {ErrorCode::kNumeric,
          what +
              "; no parameter was changed (a smaller learning rate or a bound on the "
              "gradient's norm may help, where the data has no such number)",
          0};
}

}  // namespace sluice
