#include "runtime/engine/stage_binding.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <exception>
#include <optional>
#include <vector>

#include <sluice/error.hpp>

#include "comm/base/throw_error.hpp"
#include "runtime/data/sample_specs.hpp"
#include "runtime/files/checksum.hpp"
#include "runtime/group/guard.hpp"
#include "stages/tensor/stale_gradients.hpp"
#include "stages/tensor/unwritten.hpp"

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

// The outputs as forward() wrote them.
class Outputs {
 public:
  explicit Outputs(std::span<const Tensor> outputs) : outputs_(outputs) {
    for (const Tensor& output : outputs) {
      const auto* const data = output.as<const std::byte>();
      had_.emplace_back(data, data + output.spec.bytes());
    }
  }
  void restore() const {
    for (std::size_t i = 0; i < had_.size(); ++i) {
      std::copy(had_[i].begin(), had_[i].end(), outputs_[i].as<std::byte>());
    }
  }
  // The first output that is as it was, and shows it: half of it would be something else.
  [[nodiscard]] std::optional<std::size_t> find_same() const {
    for (std::size_t i = 0; i < had_.size(); ++i) {
      const Tensor& now = outputs_[i];
      if (had_[i].empty() || !shows(now)) continue;
      if (std::memcmp(now.data, had_[i].data(), had_[i].size()) == 0) return i;
    }
    return std::nullopt;
  }

 private:
  [[nodiscard]] static bool shows(const Tensor& tensor) {
    for (std::int64_t i = 0; i < tensor.elements(); ++i) {
      if (tensor.spec.dtype == DType::kF32 && std::isnormal(tensor.at(i))) return true;
      if (tensor.spec.dtype == DType::kBf16 && std::isnormal(to_float(tensor.as<Bf16>()[i]))) {
        return true;
      }
    }
    return false;
  }

  std::span<const Tensor> outputs_;
  std::vector<std::vector<std::byte>> had_;  // [output]
};

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

void watch_loss(const StageBinding& last, StageContext& ctx, std::span<const Tensor> outputs,
                std::span<const Tensor> targets, bool first, double* sum) {
  const Tensor written{sum, {DType::kF64, {1}}};
  const auto call = [&] {
    mark_unwritten(written);
    last.loss->loss(ctx, outputs, targets, sum);
    if (find_unwritten(written).count > 0) throw_usage("loss() leaves *sum unwritten");
  };
  if (!first) return call();
  const Outputs before(outputs);
  call();
  if (!before.find_same()) return;
  // The gradient of y^2 / 2 is y. Half the scale halves it, where the loss has written it.
  std::optional<GradientsAside> aside;
  if (last.parameters != nullptr) aside.emplace(*last.parameters, ctx.compute.memory());
  const StepValue<double> scale = ctx.loss_scale;
  const auto call_again = [&](const StepValue<double>& with) {
    before.restore();
    ctx.loss_scale = with;
    call();
  };
  call_again(static_cast<double>(scale) / 2);
  const std::optional<std::size_t> same = before.find_same();
  call_again(scale);
  if (!same) return;
  throw_usage(
      "loss() leaves output {}, {}, as forward() wrote it; legal in training: its gradient times "
      "ctx.loss_scale",
      *same, to_string(outputs[*same].spec));
}

void watch_gradients(const StageBinding& stage, StreamView stream, bool forward,
                     const std::function<void()>& pass) {
  std::vector<const Parameter*> others;
  std::vector<std::string> before;
  const auto digest = [](const Parameter& each) {
    return checksum_hex({each.grad.as<const std::byte>(), each.grad.spec.bytes()});
  };
  for (Parameter* each :
       stage.parameters == nullptr ? std::vector<Parameter*>() : stage.parameters->all()) {
    if (each->written_by_loss == forward || each->grad.data == nullptr) continue;
    // What a stale gradient holds is of no use, and zeros are what a pass may leave in it.
    if (each->is_stale()) fill_zero_async(each->grad.data, each->grad.spec.bytes(), stream);
    others.push_back(each);
    before.push_back(digest(*each));
  }
  pass();
  for (std::size_t i = 0; i < others.size(); ++i) {
    if (digest(*others[i]) == before[i]) continue;
    throw_usage(
        "{} writes the gradient of parameter '{}', while a rank computes several virtual replicas; "
        "legal: gradients of parameters with{} Parameter::written_by_loss",
        forward ? "forward() or loss()" : "backward", others[i]->name, forward ? "" : "out");
  }
}

}  // namespace sluice
