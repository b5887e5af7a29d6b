// What a transformer stage says of its gradients while its last backward runs.
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include <sluice/operators.hpp>
#include <sluice/stage.hpp>
#include <sluice/transformer.hpp>

#include "tests/stages/prepared.hpp"
#include "tests/stages/state_slot.hpp"

namespace sluice {
namespace {

struct Told {
  std::size_t begin = 0;
  std::vector<float> gradients;  // from there on, when it was announced
};

class Recorder : public FinalGradients {
 public:
  explicit Recorder(ParameterSet& set) : set_(set) {}
  void from(std::size_t begin) override {
    const std::span<float> flat = set_.flat_grads().subspan(begin);
    told.push_back({begin, {flat.begin(), flat.end()}});
  }
  std::vector<Told> told;

 private:
  ParameterSet& set_;
};

TransformerConfig model(TransformerKind kind, Recompute recompute) {
  return {.kind = kind,
          .layers = 2,
          .heads = 2,
          .width = 24,  // parameters that end between multiples of the alignment
          .context = 5,
          .vocabulary = 13,
          .recompute = recompute};
}

// One micro-batch through stage `index` of two, with arbitrary output gradients.
std::vector<Told> told_by(const TransformerConfig& config, int index, bool split,
                          ParameterSet** set_out, std::unique_ptr<Stage>& stage) {
  ComputeContext compute(Device{}, 1);
  stage = Transformer(config)(index, 2);
  const TensorSpec tokens{DType::kI32, Shape{2, config.context}};
  const TensorSpec stream{DType::kF32, Shape{2, config.context, config.width}};
  const TensorSpec in_spec = index == 0 ? tokens : stream;
  const StageDescription description = stage->describe({&in_spec, 1}, compute);
  const TensorSpec& out_spec = description.outputs[0];
  const testing::StateSlot slot(Device{}, description);
  testing::prepare(*stage, {.compute = &compute,
                            .state = slot.state(),
                            .split_backward = split,
                            .input_sizes = {{in_spec}}});
  Buffer in(Device{}, in_spec.bytes()), out(Device{}, out_spec.bytes()),
      din(Device{}, in_spec.bytes());
  const Tensor input{in.data(), in_spec}, output{out.data(), out_spec}, dinput{din.data(), in_spec};
  if (index == 0) {
    for (int i = 0; i < input.elements(); ++i) input.as<std::int32_t>()[i] = i % config.vocabulary;
  } else {
    for (int i = 0; i < input.elements(); ++i) input.at(i) = static_cast<float>(i % 7) - 3.0F;
  }
  StageContext ctx{.compute = compute, .state = slot.state()};
  ctx.samples = 2;
  ctx.inputs = {&input, 1};
  stage->forward(ctx, ctx.inputs, {&output, 1});
  for (int i = 0; i < output.elements(); ++i) output.at(i) = static_cast<float>(i % 7) - 2.0F;
  *set_out = stage->parameters();
  Recorder recorder(**set_out);
  ctx.final_gradients = &recorder;
  const std::span<const Tensor> dinputs =
      index == 0 ? std::span<const Tensor>() : std::span<const Tensor>(&dinput, 1);
  if (split) {
    auto& halves = dynamic_cast<SplitBackward&>(*stage);
    halves.backward_input(ctx, {&output, 1}, dinputs);
    EXPECT_TRUE(recorder.told.empty()) << "before any weight gradient";
    halves.backward_weight(ctx, {&output, 1});
  } else {
    stage->backward(ctx, {&output, 1}, dinputs);
  }
  return recorder.told;
}

TEST(FinalGradientsTest, AreFinalWhenToldLayerByLayerFromTheLastToTheFirst) {
  for (const TransformerKind kind : {TransformerKind::kGpt2, TransformerKind::kLlama}) {
    for (const Recompute recompute : {Recompute::kNone, Recompute::kBlock}) {
      for (const bool split : {false, true}) {
        for (const int index : {0, 1}) {
          SCOPED_TRACE("kind " + std::to_string(static_cast<int>(kind)) + ", recompute " +
                       std::to_string(static_cast<int>(recompute)) + ", split " +
                       std::to_string(split) + ", stage " + std::to_string(index));
          ParameterSet* set = nullptr;
          std::unique_ptr<Stage> stage;
          const std::vector<Told> told = told_by(model(kind, recompute), index, split, &set, stage);
          ASSERT_EQ(told.size(), 3U) << "a block's attention and MLP, and the embedding or head";
          const std::span<float> flat = set->flat_grads();
          std::size_t before = flat.size();
          for (const Told& each : told) {
            EXPECT_LT(each.begin, before) << "a layer of its own each time";
            before = each.begin;
            EXPECT_EQ(std::memcmp(each.gradients.data(), flat.data() + each.begin,
                                  each.gradients.size() * sizeof(float)),
                      0)
                << "changed afterwards, from " << each.begin;
          }
          EXPECT_EQ(before, 0U);
          for (const Parameter* parameter : set->all()) {
            bool moved = false;
            for (const float value : parameter->grad.floats()) moved = moved || value != 0;
            EXPECT_TRUE(moved) << parameter->name;
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace sluice
