// check_gradients() of a layer.
#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <sluice/error.hpp>
#include <sluice/layers.hpp>
#include <sluice/operators.hpp>

#include "comm/base/throw_error.hpp"
#include "stages/compute/context_access.hpp"
#include "stages/compute/thread_team.hpp"
#include "stages/gradient_check/finite_differences.hpp"
#include "stages/gradient_check/guarded_memory.hpp"
#include "stages/network/layer_run.hpp"
#include "stages/network/specs.hpp"
#include "stages/tensor/stale_gradients.hpp"
#include "stages/tensor/unwritten.hpp"

namespace sluice::nn {
namespace {

using Bytes = std::vector<std::byte>;

// A micro-batch: its tensors, and the memory that the layer has for it.
struct MicroBatch {
  int number;
  GuardedTensor x, y, dy, dx;
  GuardedMemory until_input, until_weight, lasting, gradients;
  Bytes x_had, dy_had;
  bool wants_dx;

  MicroBatch(int of, const TensorSpec& in, const TensorSpec& out, const LayerMemory& memory)
      : number(of),
        x("x", in),
        y("y", out),
        dy("dy", out),
        dx("dx", in),
        until_input("LayerMemory::until_input", memory.until_input),
        until_weight("LayerMemory::until_weight", memory.until_weight),
        lasting("LayerMemory::lasting", memory.lasting),
        gradients("LayerMemory::gradients", memory.gradients),
        wants_dx(is_float(in.dtype)) {}

  [[nodiscard]] std::array<const GuardedMemory*, 4> all() const {
    return {&until_input, &until_weight, &lasting, &gradients};
  }
  void soil() const {
    for (const GuardedMemory* each : all()) each->soil();
  }
  void require_intact(const char* call) const {
    for (const GuardedTensor* each : {&x, &y, &dy, &dx}) each->require_intact(call);
    for (const GuardedMemory* each : all()) each->require_intact(call);
    x.require_same(call, x_had);
    dy.require_same(call, dy_had);
  }
};

// What a micro-batch's calls made.
struct Made {
  Bytes y, dx;
  std::vector<float> grads;
};

struct Mode {
  Precision precision = {};  // of the model
  bool rounds = false;       // x and dy are numbers that bf16 holds
};

class LayerCheck {
 public:
  LayerCheck(const LayerSpec& spec, const TensorSpec& input, const GradientCheck& options,
             const Mode& mode = {})
      : options_(options),
        mode_(mode),
        input_(input),
        compute_(Device{}, 1),
        layer_(make_layer(spec, 0)) {
    if (layer_ == nullptr) throw_usage("made nothing");
    if (in_bf16()) take_precision();
    output_ = layer_->output(input_);
    if (!samples_agree(input_, output_)) {
      throw_usage("output() makes {} of {}; legal: as many samples in dimension 0",
                  to_string(output_), to_string(input_));
    }
    if (!is_float(output_.dtype)) {
      throw_usage("the output is {}; legal with a gradient: a type of floats", to_string(output_));
    }
    require_output_type();
    layer_->add_parameters(set_, "");
    if (layer_->overwrites_gradients()) {
      for (Parameter* each : set_.all()) each->asks_next_write = true;
    }
    if (!in_bf16() && set_.bf16_copy_bytes(DeviceKind::kCpu) > 0) {
      throw_usage("its parameters have bf16 copies; legal here: a layer that computes in f32");
    }
    set_.allocate(compute_.memory(), options.seed);
    move_parameters();
    needs_ = layer_->needs(input_, compute_);
    for (int i = 0; i < 2; ++i) batches_.push_back(make_batch(i, input_));
    scratch_ = std::make_unique<GuardedMemory>("LayerMemory::scratch", needs_.memory.scratch);
    rounded_ = compute_.memory().allocate(TensorSpec{DType::kBf16, output_.shape}.bytes());
  }

  void run() {
    const Made made = compare_calls();
    differences(made);
  }

  // In bf16 the layer makes what it makes in f32, within rounding. `values`: they are compared.
  void run_against(LayerCheck& wide, bool values) {
    const Made found = compare_calls();
    if (!values) return;
    if (output_.shape != wide.output_.shape) {
      throw_usage("output() makes {} of {}, and {} of {}; legal: one shape", to_string(output_),
                  to_string(input_), to_string(wide.output_), to_string(wide.input_));
    }
    const Made expected = wide.one_after_the_other(*wide.batches_[0]);
    require_near("y", values_of(output_, found.y), values_of(wide.output_, expected.y));
    const bool has_dx = batches_[0]->wants_dx;
    if (has_dx)
      require_near("dx", values_of(input_, found.dx), values_of(wide.input_, expected.dx));
    std::size_t first = 0;
    for (const Parameter* each : set_.all()) {
      const auto mine = [&](const std::vector<float>& all) {
        const auto begin = all.begin() + static_cast<std::ptrdiff_t>(first);
        return std::vector<double>(begin, begin + each->grad.elements());
      };
      require_near(fmt::format("the gradient of '{}'", each->name), mine(found.grads),
                   mine(expected.grads));
      first += static_cast<std::size_t>(each->grad.elements());
    }
  }

 private:
  [[nodiscard]] bool in_bf16() const { return mode_.precision.operands == DType::kBf16; }

  void take_precision() {
    const Edges edges = layer_->set_precision(mode_.precision);
    operands_ = edges == Edges::kOperands;
    if (!has_numbers(input_)) return;
    input_.dtype = operands_ ? mode_.precision.operands : mode_.precision.stream;
  }

  void require_output_type() const {
    const DType type = output_.dtype, stream = mode_.precision.stream;
    if (!in_bf16() && type != DType::kF32) {
      throw_usage("the output is {}; legal here: f32", to_string(output_));
    }
    if (operands_ && has_numbers(output_) && type != stream) {
      throw_usage("the output is {}; legal with Edges::kOperands: Precision::stream, {}",
                  to_string(output_), name_of(stream));
    }
  }

  static std::vector<double> values_of(const TensorSpec& spec, const Bytes& bytes) {
    std::vector<double> values;
    for (std::size_t at = 0; at < bytes.size(); at += size_of(spec.dtype)) {
      values.push_back(value_in(spec, &bytes[at]));
    }
    return values;
  }

  static void require_near(const std::string& what, const std::vector<double>& found,
                           const std::vector<double>& expected) {
    constexpr double kTolerance = 0.06;  // as a share of the largest number
    double largest = 0;
    for (const double value : expected) largest = std::max(largest, std::abs(value));
    for (std::size_t i = 0; i < expected.size(); ++i) {
      if (std::abs(found[i] - expected[i]) <= kTolerance * largest) continue;
      throw_usage("{} is {:.6g} at element {}, in f32 {:.6g}; legal: within {:.2g}", what, found[i],
                  i, expected[i], kTolerance * largest);
    }
  }

  // The checks that compare calls with calls, to the bit.
  Made compare_calls() {
    outputs_are_written(Phase::kTrain);
    outputs_are_written(Phase::kEvaluate);
    const Made first = one_after_the_other(*batches_[0]);
    const Made second = one_after_the_other(*batches_[1]);
    if (ContextAccess::workspace_peak(compute_) > needs_.operator_bytes) {
      throw_usage("operators take {} bytes of the compute context; needs() says {} operator_bytes",
                  ContextAccess::workspace_peak(compute_), needs_.operator_bytes);
    }
    gradients_are_added(first);
    gradients_are_overwritten(first);
    in_flight(first, second);
    without_input_gradient(first);
    in_one_call(first);
    made_again(first);
    fewer_samples();
    return first;
  }

  static bool samples_agree(const TensorSpec& a, const TensorSpec& b) {
    return a.shape.rank() > 0 && b.shape.rank() > 0 && a.shape[0] == b.shape[0];
  }

  // A weight of 1 or a bias of 0 would hide a factor or a term that is missing.
  void move_parameters() {
    std::uint64_t number = 0;
    for (Parameter* each : set_.all()) {
      const RandomKey key{.seed = options_.seed, .site = ++number};
      for (std::int64_t i = 0; i < each->value.elements(); ++i) {
        each->value.at(i) += to_unit(philox(key, 0, static_cast<std::uint64_t>(i))[0]) - 0.5F;
      }
    }
    set_.mark_values_changed();
    for (const Parameter* each : set_.all()) {
      if (each->bf16_copy.data != nullptr) convert(compute_, each->value, each->bf16_copy);
    }
    values_had_.assign(set_.flat_values().begin(), set_.flat_values().end());
  }

  template <typename Fill>
  void fill(const Tensor& to, const Fill& body) {
    if (!mode_.rounds || !has_numbers(to.spec)) return body(to);
    HostTensor wide{{DType::kF32, to.shape()}, {}}, narrow{{DType::kBf16, to.shape()}, {}};
    for (HostTensor* each : {&wide, &narrow}) each->bytes.resize(each->spec.bytes());
    body(wide.tensor());
    convert(compute_, wide.tensor(), narrow.tensor());
    convert(compute_, narrow.tensor(), to);
  }

  std::unique_ptr<MicroBatch> make_batch(int number, const TensorSpec& input) {
    const TensorSpec output = layer_->output(input);
    const LayerNeeds needs = layer_->needs(input, compute_);
    auto made = std::make_unique<MicroBatch>(number, input, output, needs.memory);
    const std::uint64_t seed = options_.seed + 2 * static_cast<std::uint64_t>(number);
    fill(made->x.tensor(), [&](const Tensor& x) {
      options_.input ? options_.input(number, x) : fill_point(x, 2, seed);
      layer_->check_inputs(x);
    });
    made->x.require_intact("GradientCheck::input");
    fill(made->dy.tensor(), [&](const Tensor& dy) { fill_point(dy, 1, seed + 1); });
    made->x_had = made->x.bytes();
    made->dy_had = made->dy.bytes();
    return made;
  }

  // What a forward that runs again may not use.
  class None : public Collective {
   public:
    void make(const CollectiveCall& /*call*/) override {
      throw_usage("makes a collective where LayerCall::again is set; legal: none");
    }
  };

  // body(the call); then looks at everything that it may not change.
  template <typename Body>
  void call(MicroBatch& batch, Phase phase, const char* name, const Body& body) {
    const Tensor x = batch.x.tensor();
    StageContext ctx{.compute = compute_};
    ctx.micro_batch = ctx.slot = batch.number;
    ctx.micro_batches = 2;
    ctx.phase = phase;
    ctx.step = 1;
    ctx.seed = options_.seed;
    ctx.samples = x.shape()[0];
    ctx.first_sample = batch.number * ctx.samples;
    ctx.inputs = {&x, 1};
    None none;
    if (again_) ctx.collective = ctx.tensor = &none;
    scratch_->soil();
    LayerCall made{.stage = ctx,
                   .x = x,
                   .until_input = batch.until_input.data(),
                   .until_weight = batch.until_weight.data(),
                   .lasting = batch.lasting.data(),
                   .gradients = needs_.memory.gradients > 0 ? batch.gradients.data() : nullptr,
                   .scratch = scratch_->data(),
                   .again = again_};
    if (layer_->promises().reads_rounded && output_.dtype == DType::kF32) {
      made.rounded_dy = {rounded_.data(), {DType::kBf16, batch.dy.tensor().shape()}};
      convert(compute_, batch.dy.tensor(), made.rounded_dy);
    }
    body(made);
    batch.require_intact(name);
    scratch_->require_intact(name);
    const auto values = set_.flat_values();
    if (!std::equal(values.begin(), values.end(), values_had_.begin())) {
      throw_usage("{} changes values of parameters; legal: the optimizer alone does", name);
    }
  }

  // Whatever y and the memory held before, unless it runs again.
  void forward(MicroBatch& batch, Phase phase = Phase::kTrain) {
    if (!again_) batch.soil();
    mark_unwritten(batch.y.tensor());
    call(batch, phase, "forward",
         [&](LayerCall& made) { layer_->forward(made, batch.y.tensor()); });
    naming("forward", [&] { require_written(batch.y.tensor(), "y"); });
    require_finite(batch.y.tensor(), "forward", "y");
  }
  void backward_input(MicroBatch& batch, bool wanted = true) {
    const bool has_dx = wanted && batch.wants_dx;
    if (!has_dx && needs_.memory.gradients == 0) return;
    Tensor dx = batch.dx.tensor();
    if (!has_dx) dx.data = nullptr;
    mark_unwritten(dx);
    call(batch, Phase::kTrain, "backward_input",
         [&](LayerCall& made) { layer_->backward_input(made, batch.dy.tensor(), dx); });
    batch.until_input.soil();
    if (!has_dx) return;
    naming("backward_input", [&] { require_written(dx, "dx"); });
    require_finite(dx, "backward_input", "dx");
  }
  // From gradients of `start`; returns all of them.
  // `stale`: they are those of an earlier step.
  std::vector<float> backward_weight(MicroBatch& batch, float start = 0, bool stale = false) {
    return weight_gradients(batch, start, stale, "backward_weight", [&](LayerCall& made) {
      layer_->backward_weight(made, batch.dy.tensor());
    });
  }
  template <typename Body>
  std::vector<float> weight_gradients(MicroBatch& batch, float start, bool stale, const char* name,
                                      const Body& body) {
    set_.zero_grads(compute_.stream());
    for (const Parameter* each : set_.all())
      std::fill_n(each->grad.as<float>(), each->grad.elements(), start);
    GradientAccess::set_stale(set_, stale);
    call(batch, Phase::kTrain, name, body);
    GradientAccess::zero_stale(set_, compute_.stream());
    std::vector<float> grads;
    double all = 0, of_parameters = 0;
    for (const float g : set_.flat_grads()) all += std::abs(static_cast<double>(g));
    for (const Parameter* each : set_.all()) {
      require_finite(each->grad, name, fmt::format("the gradient of '{}'", each->name));
      for (const float g : each->grad.floats()) {
        grads.push_back(g);
        of_parameters += std::abs(static_cast<double>(g));
      }
    }
    if (std::abs(all - of_parameters) > 1e-9 * of_parameters) {
      throw_usage("{} writes beyond the gradients of its parameters", name);
    }
    return grads;
  }

  // Whatever y and the memory held before.
  void outputs_are_written(Phase phase) {
    MicroBatch& batch = *batches_[0];
    forward(batch, phase);
    const Bytes y = batch.y.bytes();
    forward(batch, phase);
    same_tensor("of the same x again", output_, "y of forward", y, batch.y.bytes());
  }

  Made one_after_the_other(MicroBatch& batch) {
    Made made;
    forward(batch);
    made.y = batch.y.bytes();
    backward_input(batch);
    made.dx = batch.dx.bytes();
    made.grads = backward_weight(batch);
    return made;
  }

  void gradients_are_added(const Made& expected) {
    MicroBatch& batch = *batches_[0];
    forward(batch);
    backward_input(batch);
    constexpr float kStart = 1;
    const std::vector<float> grads = backward_weight(batch, kStart);
    double largest = 1;
    for (const float g : expected.grads)
      largest = std::max(largest, std::abs(static_cast<double>(g)));
    for_gradients([&](const Parameter& parameter, std::int64_t i, std::size_t at) {
      const auto sum = static_cast<double>(kStart) + static_cast<double>(expected.grads[at]);
      if (std::abs(static_cast<double>(grads[at]) - sum) <= 1e-4 * largest) return;
      throw_usage(
          "backward_weight makes {:.6g} of the gradient {} of '{}' at {}, to which it has {:.6g} "
          "to add; legal: {:.6g}",
          grads[at], kStart, parameter.name, place_of(parameter.shape, i), expected.grads[at], sum);
    });
  }

  void gradients_are_overwritten(const Made& expected) {
    if (!layer_->overwrites_gradients()) return;
    MicroBatch& batch = *batches_[0];
    forward(batch);
    backward_input(batch);
    same_gradients(expected, backward_weight(batch, /*start=*/3, /*stale=*/true),
                   "where gradients are stale,",
                   "the first write overwrites, as next_write() says");
  }

  // body(parameter, element, index in Made::grads)
  template <typename Body>
  void for_gradients(const Body& body) {
    std::size_t at = 0;
    for (const Parameter* each : set_.all()) {
      for (std::int64_t i = 0; i < each->grad.elements(); ++i) body(*each, i, at++);
    }
  }

  void in_flight(const Made& first, const Made& second) {
    MicroBatch &a = *batches_[0], &b = *batches_[1];
    const auto when = [](int number) {
      return fmt::format("with two micro-batches in flight, of micro-batch {},", number);
    };
    for (MicroBatch* each : {&a, &b}) forward(*each);
    same_tensor(when(0), output_, "y", first.y, a.y.bytes());
    same_tensor(when(1), output_, "y", second.y, b.y.bytes());
    for (MicroBatch* each : {&a, &b}) backward_input(*each);
    same_tensor(when(0), input_, "dx", first.dx, a.dx.bytes());
    same_tensor(when(1), input_, "dx", second.dx, b.dx.bytes());
    const std::vector<float> grads[] = {backward_weight(a), backward_weight(b)};
    for (int i = 0; i < 2; ++i) {
      same_gradients(i == 0 ? first : second, grads[i], when(i),
                     "all that lasts is in the memory of the call");
    }
  }

  void same_gradients(const Made& expected, const std::vector<float>& grads,
                      const std::string& when, const char* legal) {
    for_gradients([&](const Parameter& parameter, std::int64_t i, std::size_t at) {
      if (grads[at] == expected.grads[at]) return;
      throw_usage(
          "{} the gradient of '{}' is {:.9g} at {}, otherwise {:.9g}; legal: the same, so {}", when,
          parameter.name, grads[at], place_of(parameter.shape, i), expected.grads[at], legal);
    });
  }

  // As the first layer of a model.
  void without_input_gradient(const Made& expected) {
    MicroBatch& batch = *batches_[0];
    forward(batch);
    backward_input(batch, /*wanted=*/false);
    same_gradients(expected, backward_weight(batch), "where nobody needs dx,",
                   "backward_weight needs nothing of backward_input but LayerMemory::gradients");
  }

  void same_tensor(const std::string& when, const TensorSpec& spec, const char* what,
                   const Bytes& expected, const Bytes& found) const {
    const std::int64_t at = first_difference(spec, expected, found);
    if (at < 0) return;
    throw_usage("{} {} is {} at {}, otherwise {}; legal: the same", when, what,
                number_in(spec, found, at), place_of(spec.shape, at),
                number_in(spec, expected, at));
  }

  // backward(), and over the gradient of the output where that is promised.
  void in_one_call(const Made& expected) {
    MicroBatch& batch = *batches_[0];
    for (const bool over : {false, true}) {
      if (over && !(layer_->promises().in_place && input_ == output_)) continue;
      forward(batch);
      Tensor dx = batch.dx.tensor();
      if (!batch.wants_dx) dx.data = nullptr;
      if (over) batch.dx.set_bytes(batch.dy_had);
      const Tensor dy = over ? dx : batch.dy.tensor();
      const char* const when =
          over ? "where dx is dy's memory, as in_place promises," : "of one call of backward";
      const auto grads = weight_gradients(batch, 0, false, "backward",
                                          [&](LayerCall& made) { layer_->backward(made, dy, dx); });
      if (batch.wants_dx) same_tensor(when, input_, "dx", expected.dx, batch.dx.bytes());
      same_gradients(expected, grads, when, "backward equals its two halves");
    }
  }

  // As inside recompute(): all memory is gone but what lasts.
  void made_again(const Made& expected) {
    if (!layer_->promises().recomputes) return;
    constexpr const char* kWhen = "where LayerCall::again is set, as `recomputes` promises,";
    MicroBatch& batch = *batches_[0];
    const auto forget = [&] {
      for (const auto* each : {&batch.until_input, &batch.until_weight, &batch.gradients}) {
        each->soil();
      }
    };
    forward(batch);
    forget();
    const auto buffers = set_.flat_buffers();
    const std::vector<float> had(buffers.begin(), buffers.end());
    again_ = true;
    forward(batch);
    same_tensor(kWhen, output_, "y", expected.y, batch.y.bytes());
    forget();
    Tensor y = batch.y.tensor();
    if (layer_->promises().keeps_alone) y.data = nullptr;
    call(batch, Phase::kTrain, "keep_again", [&](LayerCall& made) { layer_->keep_again(made, y); });
    again_ = false;
    if (!std::equal(had.begin(), had.end(), buffers.begin())) {
      throw_usage("forward moves a buffer where LayerCall::again is set; legal: to leave it alone");
    }
    naming("after keep_again", [&] { backward_input(batch); });
    if (batch.wants_dx) same_tensor(kWhen, input_, "dx", expected.dx, batch.dx.bytes());
    same_gradients(expected, backward_weight(batch), kWhen, "what forward kept is kept again");
  }

  // The last micro-batch of a step may be smaller.
  void fewer_samples() {
    const std::int64_t samples = input_.shape[0] - 1;
    if (samples < 1) return;
    std::vector<std::int64_t> dims = {samples};
    for (int d = 1; d < input_.shape.rank(); ++d) dims.push_back(input_.shape[d]);
    const TensorSpec fewer{input_.dtype, Shape(std::span<const std::int64_t>(dims))};
    const LayerNeeds needs = layer_->needs(fewer, compute_);
    const auto more = [&](std::size_t mine, std::size_t largest, const char* what) {
      if (mine <= largest) return;
      throw_usage(
          "needs() says {} bytes of {} for {}, {} for {}; legal: not more for fewer samples", mine,
          what, to_string(fewer), largest, to_string(input_));
    };
    const LayerMemory &mine = needs.memory, &most = needs_.memory;
    more(mine.until_input, most.until_input, "until_input");
    more(mine.until_weight, most.until_weight, "until_weight");
    more(mine.lasting, most.lasting, "lasting");
    more(mine.gradients, most.gradients, "gradients");
    more(mine.scratch, most.scratch, "scratch");
    more(needs.operator_bytes, needs_.operator_bytes, "operator_bytes");
    scratch_ = std::make_unique<GuardedMemory>("LayerMemory::scratch", mine.scratch);
    try {
      (void)one_after_the_other(*make_batch(0, fewer));
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kData) throw;  // such as a variance of one number
    }
    scratch_ = std::make_unique<GuardedMemory>("LayerMemory::scratch", most.scratch);
  }

  // The sum of dy y, and of what moved of it.
  SummedOutputs weighted_sum(MicroBatch& batch) {
    mark_unwritten(batch.y.tensor());
    call(batch, Phase::kTrain, "forward",
         [&](LayerCall& made) { layer_->forward(made, batch.y.tensor()); });
    SummedOutputs sum;
    const Tensor y = batch.y.tensor(), dy = batch.dy.tensor();
    for (std::int64_t i = 0; i < y.elements(); ++i) {
      const auto before = static_cast<double>(reference_.at(static_cast<std::size_t>(i)));
      const auto value = static_cast<double>(y.at(i)), weight = static_cast<double>(dy.at(i));
      if (value == before) continue;
      constexpr double kHalfUlp = 6e-8;
      sum.value += weight * (value - before);
      sum.noise += std::abs(weight) * (std::abs(value) + std::abs(before)) * kHalfUlp;
    }
    return sum;
  }

  void differences(const Made& made) {
    MicroBatch& batch = *batches_[0];
    forward(batch);
    reference_.assign(batch.y.tensor().floats().begin(), batch.y.tensor().floats().end());
    const auto at = [&] {
      batch.x_had = batch.x.bytes();
      values_had_.assign(set_.flat_values().begin(), set_.flat_values().end());
      set_.mark_values_changed();
      return weighted_sum(batch);
    };
    if (batch.wants_dx) {
      batch.dx.set_bytes(made.dx);
      compare_gradient("backward_input: dx", batch.x.tensor(), batch.dx.tensor().floats(), at,
                       options_);
    }
    std::size_t first = 0;
    for (const Parameter* each : set_.all()) {
      const auto count = static_cast<std::size_t>(each->value.elements());
      compare_gradient(fmt::format("backward_weight: the gradient of '{}'", each->name),
                       each->value, std::span(made.grads).subspan(first, count), at, options_);
      first += count;
    }
  }

  GradientCheck options_;
  Mode mode_;
  bool operands_ = false;  // Edges::kOperands
  TensorSpec input_, output_;
  ComputeContext compute_;
  ThreadTeam team_{compute_};
  std::unique_ptr<Layer> layer_;
  ParameterSet set_;
  LayerNeeds needs_;
  bool again_ = false;  // LayerCall::again
  std::vector<std::unique_ptr<MicroBatch>> batches_;
  std::unique_ptr<GuardedMemory> scratch_;
  Buffer rounded_;  // LayerCall::rounded_dy
  std::vector<float> values_had_, reference_;
};

// A layer that says that it takes bf16.
void check_in_bf16(const LayerSpec& layer, const TensorSpec& input, const GradientCheck& options) {
  for (const DType stream : {DType::kF32, DType::kBf16}) {
    const Precision precision{DType::kBf16, stream};
    const Edges edges = make_layer(layer, 0)->set_precision(precision);
    if (edges == Edges::kF32 || edges == Edges::kWidened) return;
    LayerCheck wide(layer, input, options, {.rounds = true});
    // Of layers in a row, one may round to the other side of a kink: each is checked alone.
    LayerCheck(layer, input, options, {precision, true}).run_against(wide, !layer.composed);
  }
}

}  // namespace

void check_gradients(const LayerSpec& layer, const TensorSpec& input,
                     const GradientCheck& options) {
  if (!layer.make) throw_usage("check_gradients(): {}() is no layer", layer.kind);
  naming(layer.kind, [&] {
    LayerCheck(layer, input, options).run();
    naming("in a model with a precision", [&] { check_in_bf16(layer, input, options); });
  });
}

}  // namespace sluice::nn
