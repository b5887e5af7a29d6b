#include "stages/gradient_check/check_precision.hpp"

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include <sluice/operators.hpp>

#include "comm/base/throw_error.hpp"
#include "stages/gradient_check/finite_differences.hpp"
#include "stages/gradient_check/guarded_memory.hpp"
#include "stages/network/layer_run.hpp"
#include "stages/network/specs.hpp"
#include "stages/tensor/unwritten.hpp"

namespace sluice {
namespace {

// What results in bf16 may be off, as a share of the tensor's largest number.
constexpr double kTolerance = 0.06;

std::vector<float> floats_of(ComputeContext& compute, const Tensor& from) {
  std::vector<float> made(static_cast<std::size_t>(from.elements()));
  convert(compute, from, {made.data(), {DType::kF32, from.shape()}});
  return made;
}

// What `fill` writes; of f32, rounded to what bf16 holds, in the tensor's type.
template <typename Fill>
void fill_rounded(ComputeContext& compute, const Tensor& to, const Fill& fill) {
  if (!has_numbers(to.spec)) return fill(to);
  const GuardedTensor wide("", {DType::kF32, to.shape()}), narrow("", {DType::kBf16, to.shape()});
  fill(wide.tensor());
  convert(compute, wide.tensor(), narrow.tensor());
  convert(compute, narrow.tensor(), to);
}

struct Results {
  Shape output;
  std::vector<float> y, dx, grads;
};

// A micro-batch of a layer: its tensors, and its memory.
struct OneBatch {
  GuardedMemory until_input, until_weight, lasting, gradients, scratch;
  GuardedTensor x, y, dy, dx, rounded;

  OneBatch(const TensorSpec& input, const TensorSpec& output, const LayerMemory& memory)
      : until_input("LayerMemory::until_input", memory.until_input),
        until_weight("LayerMemory::until_weight", memory.until_weight),
        lasting("LayerMemory::lasting", memory.lasting),
        gradients("LayerMemory::gradients", memory.gradients),
        scratch("LayerMemory::scratch", memory.scratch),
        x("x", input),
        y("y", output),
        dy("dy", output),
        dx("dx", input),
        rounded("rounded_dy", {DType::kBf16, output.shape}) {}

  void fill(ComputeContext& compute, const GradientCheck& options) const {
    fill_rounded(compute, x.tensor(), [&](const Tensor& to) {
      options.input ? options.input(0, to) : fill_point(to, 2, options.seed);
    });
    fill_rounded(compute, dy.tensor(),
                 [&](const Tensor& to) { fill_point(to, 1, options.seed + 1); });
    convert(compute, dy.tensor(), rounded.tensor());
  }
  [[nodiscard]] LayerCall call(StageContext& ctx) const {
    return {.stage = ctx,
            .x = x.tensor(),
            .until_input = until_input.data(),
            .until_weight = until_weight.data(),
            .lasting = lasting.data(),
            .gradients = gradients.size() > 0 ? gradients.data() : nullptr,
            .scratch = scratch.data()};
  }
  void require_intact(const char* name) const {
    for (const auto* each : {&x, &y, &dy, &dx, &rounded}) each->require_intact(name);
    for (const auto* each : {&until_input, &until_weight, &lasting, &gradients, &scratch}) {
      each->require_intact(name);
    }
  }
};

// Both passes of the batch.
void run(Layer& layer, const OneBatch& batch, LayerCall call) {
  const Tensor y = batch.y.tensor(), dy = batch.dy.tensor();
  Tensor dx = batch.dx.tensor();
  mark_unwritten(y);
  layer.forward(call, y);
  batch.require_intact("forward");
  require_written(y, "y");
  if (layer.promises().reads_rounded && y.spec.dtype == DType::kF32) {
    call.rounded_dy = batch.rounded.tensor();
  }
  if (!is_float(dx.spec.dtype)) dx.data = nullptr;
  if (dx.data != nullptr || call.gradients != nullptr) {
    mark_unwritten(dx);
    layer.backward_input(call, dy, dx);
    batch.require_intact("backward_input");
    require_written(dx, "dx");
  }
  layer.backward_weight(call, dy);
  batch.require_intact("backward_weight");
}

Results results_of(Layer& layer, const TensorSpec& input, const GradientCheck& options) {
  ComputeContext compute({}, 1);
  ParameterSet set;
  const TensorSpec output = layer.output(input);
  layer.add_parameters(set, "");
  set.allocate(compute.memory(), options.seed);
  for (Parameter* each : set.all()) {
    if (each->rounded.data != nullptr) convert(compute, each->value, each->rounded);
  }
  set.zero_grads(compute.stream());
  const OneBatch batch(input, output, layer.needs(input, compute).memory);
  batch.fill(compute, options);
  const Tensor in = batch.x.tensor();
  StageContext ctx{.compute = compute};
  ctx.micro_batches = 1;
  ctx.phase = Phase::kTrain;
  ctx.step = 1;
  ctx.seed = options.seed;
  ctx.samples = input.shape[0];
  ctx.inputs = {&in, 1};
  run(layer, batch, batch.call(ctx));
  Results results;
  results.output = output.shape;
  results.y = floats_of(compute, batch.y.tensor());
  if (is_float(input.dtype)) results.dx = floats_of(compute, batch.dx.tensor());
  for (const Parameter* each : set.all()) {
    results.grads.insert(results.grads.end(), each->grad.floats().begin(),
                         each->grad.floats().end());
  }
  return results;
}

void require_near(const char* what, const std::vector<float>& found,
                  const std::vector<float>& expected) {
  double largest = 0;
  for (const float value : expected) largest = std::max(largest, std::abs(double{value}));
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const double off = std::abs(double{found[i]} - double{expected[i]});
    if (off <= kTolerance * largest) continue;
    throw_usage("{} is {:.6g} at element {}, in f32 {:.6g}; legal: within {:.2g}", what, found[i],
                i, expected[i], kTolerance * largest);
  }
}

}  // namespace

void check_precision(const LayerSpec& spec, const TensorSpec& input, const GradientCheck& options) {
  constexpr DType kWide = DType::kF32, kNarrow = DType::kBf16;
  for (const DType stream : {kWide, kNarrow}) {
    const std::unique_ptr<Layer> narrow = make_layer(spec, 0), wide = make_layer(spec, 0);
    const Edges edges = narrow->set_precision({kNarrow, stream});
    if (edges != Edges::kOperands && edges != Edges::kStream) return;
    TensorSpec taken = input;
    if (has_numbers(input)) taken.dtype = edges == Edges::kOperands ? kNarrow : stream;
    const TensorSpec made = narrow->output(taken);
    if (edges == Edges::kOperands && has_numbers(made) && made.dtype != stream) {
      throw_usage("output() makes {}; legal with Edges::kOperands: Precision::stream, {}",
                  to_string(made), name_of(stream));
    }
    const Results expected = results_of(*wide, input, options),
                  found = results_of(*narrow, taken, options);
    if (found.output != expected.output) {
      throw_usage("output() makes {} of {}, and {} of {}; legal: one shape",
                  to_string(found.output), to_string(taken), to_string(expected.output),
                  to_string(input));
    }
    // Of layers in a row, one may round to the other side of a kink: each is checked alone.
    if (spec.composed) continue;
    require_near("y", found.y, expected.y);
    require_near("dx", found.dx, expected.dx);
    require_near("the gradient of the parameters", found.grads, expected.grads);
  }
}

}  // namespace sluice
