// check_gradients() of a loss.
#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include <sluice/error.hpp>
#include <sluice/layers.hpp>

#include "comm/base/throw_error.hpp"
#include "stages/compute/context_access.hpp"
#include "stages/compute/thread_team.hpp"
#include "stages/gradient_check/finite_differences.hpp"
#include "stages/gradient_check/guarded_memory.hpp"
#include "stages/network/specs.hpp"
#include "stages/tensor/unwritten.hpp"

namespace sluice::nn {
namespace {

using Bytes = std::vector<std::byte>;

class LossCheck {
 public:
  LossCheck(const LossSpec& spec, const TensorSpec& outputs, const GradientCheck& options)
      : options_(options),
        compute_(Device{}, 1),
        loss_(spec.make()),
        point_("the outputs", outputs),
        given_("the outputs", outputs) {
    if (loss_ == nullptr) throw_usage("made nothing");
    if (outputs.dtype != DType::kF32 || outputs.shape.rank() < 1) {
      throw_usage("the outputs are {}; legal here: f32 [samples, ...]", to_string(outputs));
    }
    const auto fill = [&](const auto& own, const GuardedTensor& into, float low, const char* name) {
      if (!own) return fill_point(into.tensor(), low, options.seed);
      own(0, into.tensor());
      into.require_intact(name);
    };
    targets_ = std::make_unique<GuardedTensor>("the targets", loss_->targets(outputs));
    fill(options.input, point_, 2, "GradientCheck::input");
    fill(options.targets, *targets_, 1.5F, "GradientCheck::targets");
    targets_had_ = targets_->bytes();
    const double weight = loss_->weight(outputs, targets_->tensor());
    if (!(weight >= 0 && std::isfinite(weight))) {
      throw_usage("weight() is {}; legal: at least 0", weight);
    }
  }

  void run() {
    const double evaluated = sum_of(Phase::kEvaluate, kScale);
    const double sum = sum_of(Phase::kTrain, kScale);
    const Bytes gradient = given_.bytes();
    require_finite(given_.tensor(), "compute", "the gradient of the outputs");
    if (std::abs(sum - evaluated) > 1e-6 * std::abs(evaluated)) {
      throw_usage("compute makes the sum {:.9g} in training and {:.9g} in evaluation; legal: one",
                  sum, evaluated);
    }
    const std::size_t needs = loss_->operator_bytes(given_.tensor().spec);
    if (ContextAccess::workspace_peak(compute_) > needs) {
      throw_usage("compute takes {} bytes of the compute context; operator_bytes() says {}",
                  ContextAccess::workspace_peak(compute_), needs);
    }
    (void)sum_of(Phase::kTrain, kScale);
    same(gradient, 1, "again, the gradient is");
    (void)sum_of(Phase::kTrain, 2 * kScale);
    same(gradient, 2, "with twice the loss_scale, the gradient is");
    given_.set_bytes(gradient);
    const auto values = given_.tensor().floats();
    const std::vector<float> mine(values.begin(), values.end());
    const auto at = [&] {
      constexpr double kHalfUlp = 6e-8;
      const double value = kScale * sum_of(Phase::kEvaluate, kScale);
      return SummedOutputs{.value = value, .noise = std::abs(value) * kHalfUlp};
    };
    compare_gradient("compute: the gradient of the outputs", point_.tensor(), mine, at, options_);
  }

 private:
  static constexpr double kScale = 0.5;

  // Of the loss at `point_`; leaves in given_ what compute() made of the outputs.
  double sum_of(Phase phase, double scale) {
    StageContext ctx{.compute = compute_};
    ctx.phase = phase;
    ctx.step = 1;
    ctx.seed = options_.seed;
    ctx.samples = given_.tensor().shape()[0];
    ctx.loss_scale = scale;
    given_.set_bytes(point_.bytes());
    double sum = std::numeric_limits<double>::quiet_NaN();
    loss_->compute(ctx, given_.tensor(), targets_->tensor(), &sum);
    given_.require_intact("compute");
    targets_->require_intact("compute");
    targets_->require_same("compute", targets_had_);
    if (!std::isfinite(sum)) {
      throw_usage("compute makes the sum {}, or does not write it; legal: a finite number", sum);
    }
    return sum;
  }

  void same(const Bytes& gradient, float factor, const char* when) {
    const TensorSpec& spec = given_.tensor().spec;
    const Bytes found = given_.bytes();
    GuardedTensor expected("", spec);
    expected.set_bytes(gradient);
    double largest = 0;
    for (float& each : expected.tensor().floats()) {
      each *= factor;
      largest = std::max(largest, std::abs(static_cast<double>(each)));
    }
    for (std::int64_t i = 0; i < expected.tensor().elements(); ++i) {
      const auto wanted = static_cast<double>(expected.tensor().at(i));
      if (std::abs(static_cast<double>(given_.tensor().at(i)) - wanted) <= 1e-5 * largest) continue;
      throw_usage("compute: {} {} at {}; legal: {:.9g}", when, number_in(spec, found, i),
                  place_of(spec.shape, i), wanted);
    }
  }

  GradientCheck options_;
  ComputeContext compute_;
  ThreadTeam team_{compute_};
  std::unique_ptr<Loss> loss_;
  GuardedTensor point_, given_;
  std::unique_ptr<GuardedTensor> targets_;
  Bytes targets_had_;
};

}  // namespace

void check_gradients(const LossSpec& loss, const TensorSpec& outputs,
                     const GradientCheck& options) {
  if (!loss.make) throw_usage("check_gradients(): there is no loss");
  naming(loss.kind, [&] { LossCheck(loss, outputs, options).run(); });
}

}  // namespace sluice::nn
