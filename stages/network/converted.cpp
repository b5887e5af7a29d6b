#include "stages/network/converted.hpp"

#include <fmt/core.h>

#include <utility>

#include <sluice/error.hpp>
#include <sluice/operators.hpp>

#include "comm/base/byte_sums.hpp"
#include "comm/base/throw_error.hpp"
#include "stages/network/specs.hpp"
#include "stages/tensor/bump_allocator.hpp"

namespace sluice::nn {
namespace {

// The same numbers in another type; integers stay.
TensorSpec in_type(const TensorSpec& spec, DType type) {
  return {has_numbers(spec) ? type : spec.dtype, spec.shape};
}

// A copy of `tensor` as `spec` in scratch, or itself where it has that type or no data.
Tensor copy_in(BumpAllocator& scratch, const Tensor& tensor, const TensorSpec& spec) {
  if (tensor.spec == spec) return tensor;
  std::byte* const memory = scratch.bytes(spec.bytes());
  return {tensor.data == nullptr ? nullptr : memory, spec};
}

void convert_if_copied(ComputeContext& compute, const Tensor& from, const Tensor& to) {
  if (from.data != to.data) convert(compute, from, to);
}

class ConvertedLayer final : public Layer {
 public:
  ConvertedLayer(std::unique_ptr<Layer> inner, DType takes, DType gives, bool watched)
      : inner_(std::move(inner)),
        takes_(takes),
        gives_(gives),
        forward_watched_(watched),
        backward_watched_(watched) {}

  [[nodiscard]] TensorSpec output(const TensorSpec& input) const override {
    const TensorSpec taken = in_type(input, takes_);
    try {
      const TensorSpec made = inner_->output(taken);
      makes_ = made.dtype;
      return in_type(made, gives_);
    } catch (const Error& error) {
      if (taken == input) throw;
      throw Error(error.code(),
                  fmt::format("{} (converted from {})", error.what(), name_of(input.dtype)));
    }
  }
  void add_parameters(ParameterSet& set, const std::string& name) override {
    inner_->add_parameters(set, name);
  }
  [[nodiscard]] LayerNeeds needs(const TensorSpec& input, ComputeContext& compute) const override {
    LayerNeeds needs = inner_->needs(in_type(input, takes_), compute);
    BumpAllocator scratch;
    (void)copies(scratch, {{}, input}, {{}, output(input)}, {{}, input});
    needs.memory.scratch = sum_of_bytes({scratch.used(), needs.memory.scratch});
    return needs;
  }
  [[nodiscard]] bool overwrites_gradients() const override {
    return inner_->overwrites_gradients();
  }
  [[nodiscard]] bool runs_on_gpu() const override { return inner_->runs_on_gpu(); }
  [[nodiscard]] LayerPromises promises() const override {
    LayerPromises promises = inner_->promises();
    // Between neighbours of one type both gradients are copies; LayerRun asks for f32 or bf16.
    promises.in_place = promises.in_place || takes_ != gives_;
    promises.writes_rounded = false;
    return promises;
  }
  [[nodiscard]] double cost(const TensorSpec& input) const override {
    return inner_->cost(in_type(input, takes_));
  }
  void check_inputs(const Tensor& x) const override { inner_->check_inputs(x); }

  void forward(LayerCall& call, const Tensor& y) override {
    Inner inner(*this, call, y, {});
    watched(forward_watched_, inner.call, "its output", inner.y,
            [&] { inner_->forward(inner.call, inner.y); });
    convert_if_copied(call.compute(), inner.y, y);
  }
  void keep_again(LayerCall& call, const Tensor& y) override {
    Inner inner(*this, call, y, {});
    inner_->keep_again(inner.call, inner.y);
  }
  void backward_input(LayerCall& call, const Tensor& dy, const Tensor& dx) override {
    Inner inner(*this, call, dy, dx);
    convert_if_copied(call.compute(), dy, inner.y);
    watched(backward_watched_, inner.call, "its input's gradient", inner.dx,
            [&] { inner_->backward_input(inner.call, inner.y, inner.dx); });
    convert_if_copied(call.compute(), inner.dx, dx);
  }
  void backward_weight(LayerCall& call, const Tensor& dy) override {
    Inner inner(*this, call, dy, {});
    convert_if_copied(call.compute(), dy, inner.y);
    inner_->backward_weight(inner.call, inner.y);
  }
  void backward(LayerCall& call, const Tensor& dy, const Tensor& dx) override {
    Inner inner(*this, call, dy, dx);
    convert_if_copied(call.compute(), dy, inner.y);
    const bool apart = inner.dx.data != nullptr && inner.dx.data != inner.y.data;
    if (apart && !backward_watched_ && call.compute().device().kind == DeviceKind::kCpu) {
      watched(backward_watched_, inner.call, "its input's gradient", inner.dx,
              [&] { inner_->backward_input(inner.call, inner.y, inner.dx); });
      inner_->backward_weight(inner.call, inner.y);
    } else {
      inner_->backward(inner.call, inner.y, inner.dx);
    }
    convert_if_copied(call.compute(), inner.dx, dx);
  }

 private:
  struct Copies {
    Tensor x, y, dx;  // y: or its gradient
  };
  Copies copies(BumpAllocator& scratch, const Tensor& x, const Tensor& y, const Tensor& dx) const {
    const TensorSpec taken = in_type(x.spec, takes_);
    return {copy_in(scratch, x, taken), copy_in(scratch, y, {makes_, y.spec.shape}),
            copy_in(scratch, dx, taken)};
  }
  // The layer's own call: its x is converted.
  struct Inner {
    Inner(const ConvertedLayer& layer, const LayerCall& outer, const Tensor& y_or_dy,
          const Tensor& dx_or_none)
        : call(outer) {
      BumpAllocator scratch(outer.scratch);
      // What nobody needs has its place as well: that of later scratch stays.
      const Tensor no_dx{nullptr, outer.x.spec};
      const Tensor no_y{nullptr,
                        y_or_dy.data != nullptr ? y_or_dy.spec : layer.output(outer.x.spec)};
      const Copies made = layer.copies(scratch, outer.x, y_or_dy.data == nullptr ? no_y : y_or_dy,
                                       dx_or_none.data == nullptr ? no_dx : dx_or_none);
      convert_if_copied(call.compute(), outer.x, made.x);
      call.x = made.x;
      y = made.y;
      dx = made.dx;
      call.scratch = outer.scratch == nullptr ? nullptr : outer.scratch + scratch.used();
      // A neighbour's dy in bf16 is the copy that the layer may have asked for.
      if (y.spec.dtype != y_or_dy.spec.dtype) {
        call.rounded_dy = y.spec.dtype == DType::kF32 ? y_or_dy : Tensor{};
      }
      call.rounded_dx = {};
    }
    LayerCall call;
    Tensor y, dx;
  };

  std::unique_ptr<Layer> inner_;
  DType takes_, gives_;
  bool forward_watched_, backward_watched_;
  mutable DType makes_ = DType::kF32;  // before it becomes gives_; output() finds out
};

class WidenedLoss final : public Loss {
 public:
  explicit WidenedLoss(std::unique_ptr<Loss> inner) : inner_(std::move(inner)) {}

  [[nodiscard]] TensorSpec targets(const TensorSpec& outputs) const override {
    return inner_->targets(wide(outputs));
  }
  [[nodiscard]] bool runs_on_gpu() const override { return inner_->runs_on_gpu(); }
  [[nodiscard]] bool capturable() const override { return inner_->capturable(); }
  [[nodiscard]] LayerNeeds needs(const TensorSpec& outputs,
                                 ComputeContext& compute) const override {
    LayerNeeds needs = inner_->needs(wide(outputs), compute);
    BumpAllocator scratch;
    (void)copy_in(scratch, {{}, outputs}, wide(outputs));
    needs.memory.scratch = sum_of_bytes({scratch.used(), needs.memory.scratch});
    return needs;
  }
  void add_parameters(ParameterSet& set) override { inner_->add_parameters(set); }
  [[nodiscard]] double weight(const TensorSpec& outputs, const Tensor& targets) const override {
    return inner_->weight(wide(outputs), targets);
  }
  [[nodiscard]] bool leaves_gradients() const override { return inner_->leaves_gradients(); }
  void compute(StageContext& /*ctx*/, const Tensor& /*outputs*/, const Tensor& /*targets*/,
               double* /*sum*/) override {
    throw_error(ErrorCode::kInternal, "a stage calls compute_in()");
  }
  void compute_in(std::byte* scratch, StageContext& ctx, const Tensor& outputs,
                  const Tensor& targets, double* sum) override {
    BumpAllocator memory(scratch);
    const Tensor copy = copy_in(memory, outputs, wide(outputs.spec));
    convert_if_copied(ctx.compute, outputs, copy);
    inner_->compute_in(scratch == nullptr ? nullptr : scratch + memory.used(), ctx, copy, targets,
                       sum);
    if (ctx.phase == Phase::kTrain) convert_if_copied(ctx.compute, copy, outputs);
  }
  [[nodiscard]] std::string why_no_answers() const override { return inner_->why_no_answers(); }
  [[nodiscard]] std::optional<TensorSpec> answer_spec(const TensorSpec& outputs) const override {
    return inner_->answer_spec(wide(outputs));
  }
  void answer(StageContext& ctx, const Tensor& outputs, const Tensor& answer) override {
    const TensorSpec spec = wide(outputs.spec);
    const Buffer memory =
        ctx.compute.memory().allocate(spec.bytes(), DeviceMemory::Use::kTemporary);
    convert(ctx.compute, outputs, {memory.data(), spec});
    inner_->answer(ctx, {memory.data(), spec}, answer);
    ctx.compute.wait();  // before the copy is freed
  }

 private:
  static TensorSpec wide(const TensorSpec& outputs) { return in_type(outputs, DType::kF32); }

  std::unique_ptr<Loss> inner_;
};

}  // namespace

std::unique_ptr<Layer> converted(std::unique_ptr<Layer> layer, DType takes, DType gives,
                                 bool watched) {
  return std::make_unique<ConvertedLayer>(std::move(layer), takes, gives, watched);
}

std::unique_ptr<Loss> widened(std::unique_ptr<Loss> loss) {
  return std::make_unique<WidenedLoss>(std::move(loss));
}

}  // namespace sluice::nn
