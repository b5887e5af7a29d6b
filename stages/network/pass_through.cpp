#include <memory>
#include <utility>
#include <vector>

#include <sluice/device.hpp>
#include <sluice/error.hpp>
#include <sluice/stage.hpp>

#include "comm/base/throw_error.hpp"

namespace sluice {
namespace {

using Tensors = std::span<const Tensor>;

void copy_all(ComputeContext& compute, Tensors from, Tensors to) {
  for (std::size_t i = 0; i < from.size(); ++i) {
    if (from[i].data == nullptr || to[i].data == nullptr) continue;  // needs no gradient
    copy_async(to[i].data, from[i].data, from[i].spec.bytes(), compute.stream());
  }
}

class OfOne : public Collective {
 public:
  void make(const CollectiveCall& call) override {
    if (call.out.data() == call.in.data()) return;
    const std::size_t bytes = std::min(call.in.size(), call.out.size());
    if (call.compute != nullptr) {
      return copy_async(call.out.data(), call.in.data(), bytes, call.compute->stream());
    }
    std::copy_n(call.in.begin(), bytes, call.out.begin());
  }
};

class CarryingBase : public Stage {
 public:
  CarryingBase(std::unique_ptr<Stage> inner, std::size_t inputs)
      : inner_(std::move(inner)), inputs_(inputs) {}

  [[nodiscard]] StageDescription describe(std::span<const TensorSpec> inputs,
                                          ComputeContext& compute) const override {
    if (inputs.size() < inputs_) {
      throw_usage("a stage that carries tensors hands {} inputs to the one in it, but gets {}",
                  inputs_, inputs.size());
    }
    StageDescription description = inner_->describe(inputs.first(inputs_), compute);
    const auto carried = inputs.subspan(inputs_);
    for (auto* list : {&description.outputs, &description.answers}) {
      if (!list->empty()) list->insert(list->end(), carried.begin(), carried.end());
    }
    if (description.input_gradients.empty()) return description;
    for (const TensorSpec& spec : carried) {
      description.input_gradients.push_back(is_float(spec.dtype));
    }
    return description;
  }
  void prepare(const StageSetup& setup) override {
    StageSetup mine = setup;
    for (std::vector<TensorSpec>& inputs : mine.input_sizes) inputs.resize(inputs_);
    inner_->prepare(mine);
  }
  void prepare_size(ComputeContext& compute, std::span<const TensorSpec> inputs) override {
    inner_->prepare_size(compute, inputs.first(inputs_));
  }
  void begin_step(ComputeContext& compute) override { inner_->begin_step(compute); }
  [[nodiscard]] bool graph_capturable() const override { return inner_->graph_capturable(); }
  [[nodiscard]] bool overwrites_gradients() const override {
    return inner_->overwrites_gradients();
  }
  void forward(StageContext& ctx, Tensors inputs, Tensors outputs) override {
    StageContext mine = inner_context(ctx);
    const std::size_t made = outputs.size() - (inputs.size() - inputs_);
    copy_all(ctx.compute, inputs.subspan(inputs_), outputs.subspan(made));
    inner_->forward(mine, inputs.first(inputs_), outputs.first(made));
  }
  void recompute(StageContext& ctx) override {
    StageContext mine = inner_context(ctx);
    inner_->recompute(mine);
  }
  void backward(StageContext& ctx, Tensors grad_outputs, Tensors grad_inputs) override {
    StageContext mine = inner_context(ctx);
    hand_back(ctx, grad_outputs, grad_inputs);
    inner_->backward(mine, made_of(ctx, grad_outputs), inner_inputs(grad_inputs));
  }
  [[nodiscard]] ParameterSet* parameters() override { return inner_->parameters(); }
  void check_inputs(Tensors inputs) const override { inner_->check_inputs(inputs.first(inputs_)); }

 protected:
  template <typename Interface>
  [[nodiscard]] Interface& inner_as() const {
    return dynamic_cast<Interface&>(*inner_);
  }
  [[nodiscard]] StageContext inner_context(const StageContext& ctx) const {
    StageContext mine = ctx;
    mine.inputs = ctx.inputs.first(inputs_);
    return mine;
  }
  // What the stage inside made of all outputs.
  [[nodiscard]] Tensors made_of(const StageContext& ctx, Tensors outputs) const {
    return outputs.first(outputs.size() - (ctx.inputs.size() - inputs_));
  }
  [[nodiscard]] Tensors inner_inputs(Tensors all) const {
    return all.empty() ? all : all.first(inputs_);
  }
  void hand_back(StageContext& ctx, Tensors grad_outputs, Tensors grad_inputs) const {
    if (grad_inputs.empty()) return;  // stage 0
    copy_all(ctx.compute, grad_outputs.subspan(made_of(ctx, grad_outputs).size()),
             grad_inputs.subspan(inputs_));
  }

 private:
  std::unique_ptr<Stage> inner_;
  std::size_t inputs_;
};

template <typename Base>
class WithSplit : public Base, public SplitBackward {
 public:
  using Base::Base;
  void backward_input(StageContext& ctx, Tensors grad_outputs, Tensors grad_inputs) override {
    StageContext mine = this->inner_context(ctx);
    this->hand_back(ctx, grad_outputs, grad_inputs);
    this->template inner_as<SplitBackward>().backward_input(mine, this->made_of(ctx, grad_outputs),
                                                            this->inner_inputs(grad_inputs));
  }
  void backward_weight(StageContext& ctx, Tensors grad_outputs) override {
    StageContext mine = this->inner_context(ctx);
    this->template inner_as<SplitBackward>().backward_weight(mine,
                                                             this->made_of(ctx, grad_outputs));
  }
};

// The carried outputs of a last stage have no loss: their gradient is zero.
template <typename Base>
class WithLoss : public Base, public LossStage {
 public:
  using Base::Base;
  void loss(StageContext& ctx, Tensors outputs, Tensors targets, double* sum) override {
    StageContext mine = this->inner_context(ctx);
    const Tensors made = this->made_of(ctx, outputs);
    this->template inner_as<LossStage>().loss(mine, made, targets, sum);
    if (ctx.phase != Phase::kTrain) return;
    for (const Tensor& carried : outputs.subspan(made.size())) {
      if (!is_float(carried.spec.dtype)) continue;
      fill_zero_async(carried.data, carried.spec.bytes(), ctx.compute.stream());
    }
  }
  [[nodiscard]] std::string why_no_answers() const override {
    return this->template inner_as<LossStage>().why_no_answers();
  }
  void answer(StageContext& ctx, Tensors outputs, Tensors answers) override {
    StageContext mine = this->inner_context(ctx);
    const Tensors made = this->made_of(ctx, outputs), carried = outputs.subspan(made.size());
    const std::size_t own = answers.size() - carried.size();
    copy_all(ctx.compute, carried, answers.subspan(own));
    this->template inner_as<LossStage>().answer(mine, made, answers.first(own));
  }
  [[nodiscard]] double target_weight(Tensors targets) const override {
    return this->template inner_as<LossStage>().target_weight(targets);
  }
};

}  // namespace

Collective& Collective::alone() {
  static OfOne one;
  return one;
}

std::unique_ptr<Stage> pass_through(std::unique_ptr<Stage> inner, int inputs) {
  if (inner == nullptr || inputs < 1) {
    throw_usage(
        "a stage that carries tensors needs another one in it, and at least one input for "
        "it; it gets {} and {}",
        inner == nullptr ? "none" : "one", inputs);
  }
  const bool splits = dynamic_cast<SplitBackward*>(inner.get()) != nullptr;
  const bool has_loss = dynamic_cast<LossStage*>(inner.get()) != nullptr;
  const auto count = static_cast<std::size_t>(inputs);
  if (splits && has_loss) {
    return std::make_unique<WithLoss<WithSplit<CarryingBase>>>(std::move(inner), count);
  }
  if (splits) return std::make_unique<WithSplit<CarryingBase>>(std::move(inner), count);
  if (has_loss) return std::make_unique<WithLoss<CarryingBase>>(std::move(inner), count);
  return std::make_unique<CarryingBase>(std::move(inner), count);
}

}  // namespace sluice
