#include "runtime/engine/stage_binding.hpp"

#include <fmt/format.h>

#include <cmath>
#include <exception>
#include <vector>

#include <sluice/error.hpp>

#include "comm/base/throw_error.hpp"
#include "runtime/data/sample_specs.hpp"
#include "runtime/job/guard.hpp"

namespace sluice {
namespace {

// Sample `index` of tensors with as many samples each; else nothing.
std::vector<Tensor> sample_of(std::span<const Tensor> tensors, std::int64_t index,
                              std::int64_t samples) {
  std::vector<Tensor> one;
  for (const Tensor& tensor : tensors) {
    if (tensor.shape().rank() == 0 || tensor.shape()[0] != samples) return {};
    const TensorSpec spec = with_samples(tensor.spec, 1);
    one.push_back({tensor.as<std::byte>() + static_cast<std::size_t>(index) * spec.bytes(), spec});
  }
  return one;
}

// Runs `check`, which is `call` of the stage, on the tensors of a micro-batch.
template <typename Check>
auto checked(const StageBinding& stage, const char* call, std::span<const Tensor> tensors,
             SampleRange samples, const Check& check) {
  const auto refuse = [&](SampleRange some) {
    rethrow_from(
        some.count == 1
            ? fmt::format("stage {}, {}() of sample {} of the batch", stage.index, call, some.first)
            : fmt::format("stage {}, {}() of samples {} to {} of the batch", stage.index, call,
                          some.first, some.first + some.count - 1));
  };
  try {
    return check(tensors);
  } catch (const Error& error) {
    for (std::int64_t i = 0; error.code() == ErrorCode::kData && i < samples.count; ++i) {
      const std::vector<Tensor> one = sample_of(tensors, i, samples.count);
      if (one.empty()) break;
      try {
        (void)check(one);
      } catch (...) {
        refuse({samples.first + i, 1});
      }
    }
    refuse(samples);
  } catch (...) {
    refuse(samples);
  }
  std::terminate();  // not reached: refuse() throws
}

}  // namespace

double target_weight(const StageBinding& last, std::span<const Tensor> targets) {
  const double weight = last.loss->target_weight(targets);
  if (std::isfinite(weight) && weight >= 0) return weight;
  throw_usage("the weight of the targets is {}; legal are numbers from 0", weight);
}

void check_inputs(const StageBinding& first, std::span<const Tensor> inputs, SampleRange samples) {
  (void)checked(first, "check_inputs", inputs, samples, [&](std::span<const Tensor> some) {
    first.stage->check_inputs(some);
    return true;
  });
}

double check_targets(const StageBinding& last, std::span<const Tensor> targets,
                     SampleRange samples) {
  return checked(last, "target_weight", targets, samples,
                 [&](std::span<const Tensor> some) { return target_weight(last, some); });
}

}  // namespace sluice
