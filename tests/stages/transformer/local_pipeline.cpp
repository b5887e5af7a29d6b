#include "tests/stages/transformer/local_pipeline.hpp"

#include <algorithm>
#include <cstring>

#include "tests/stages/prepared.hpp"

namespace sluice::testing {

namespace {

SplitBackward& split(Stage& stage) { return dynamic_cast<SplitBackward&>(stage); }

}  // namespace

MicroBatch make_micro_batch(const TransformerConfig& config, std::int64_t first_sample,
                            std::int64_t samples, std::int64_t sequence) {
  MicroBatch batch{first_sample, samples, sequence, {}, {}};
  for (std::int64_t sample = first_sample; sample < first_sample + samples; ++sample) {
    for (std::int64_t t = 0; t < sequence; ++t) {
      const std::int64_t mixed = (sample * 7919 + t * t * 31 + t * 17 + 5) % 10007;
      batch.tokens.push_back(static_cast<std::int32_t>(mixed % config.vocabulary));
      const bool counts = (sample + t) % 7 != 3;
      batch.targets.push_back(counts ? static_cast<std::int32_t>(mixed * 3 % config.vocabulary)
                                     : -1);
    }
  }
  return batch;
}

LocalPipeline::Edge::Edge(Device device, const TensorSpec& spec_in, const void* values)
    : memory(device, spec_in.bytes()), spec(spec_in) {
  if (values != nullptr) copy_now(device, memory.data(), values, spec.bytes());
}

void LocalPipeline::Edge::poison() {
  const std::vector<std::byte> nan(spec.bytes(), std::byte{0xFF});  // in every floating type
  copy_now(memory.device(), memory.data(), nan.data(), nan.size());
}

LocalPipeline::LocalPipeline(const TransformerConfig& config, const Partition& partition,
                             std::vector<MicroBatch> micro_batches, const Options& options)
    : options_(options),
      micro_batches_(std::move(micro_batches)),
      compute_(options.device, options.threads),
      losses_(micro_batches_.size()),
      logits_(micro_batches_.size()) {
  for (int s = 0; s < partition.stages(); ++s) {
    stages_.push_back(Transformer(config).stage_of(partition, s));
  }
  for (const MicroBatch& batch : micro_batches_) {
    make_edges(batch, flights_.emplace_back());
  }
  for (size_t s = 0; s < stages_.size(); ++s) {
    StageSetup setup;
    setup.compute = &compute_;
    setup.split_backward = options_.split_backward;
    setup.seed = 1234;
    for (const InFlight& flight : flights_) {
      setup.input_sizes.push_back({flight.activations[s].spec});
    }
    const auto largest = std::max_element(flights_.begin(), flights_.end(),
                                          [s](const InFlight& a, const InFlight& b) {
                                            return a.states[s].size() < b.states[s].size();
                                          });
    setup.state = largest->states[s].state();
    prepare(*stages_[s], setup);
  }
}

void LocalPipeline::make_edges(const MicroBatch& batch, InFlight& flight) {
  const Device device = compute_.device();
  const TensorSpec tokens{DType::kI32, Shape{batch.samples, batch.sequence}};
  flight.activations.emplace_back(device, tokens, batch.tokens.data());
  flight.targets = Edge(device, tokens, batch.targets.data());
  flight.sum = HostBuffer(device, sizeof(double));
  for (const auto& stage : stages_) {
    const TensorSpec input = flight.activations.back().spec;
    flight.gradients.emplace_back(device, input);
    const StageDescription description = stage->describe({&input, 1}, compute_);
    flight.activations.emplace_back(device, description.outputs.at(0));
    flight.states.emplace_back(device, description);
  }
}

StageContext LocalPipeline::context(int stage, int micro_batch) {
  const MicroBatch& batch = micro_batches_[static_cast<size_t>(micro_batch)];
  InFlight& flight = flights_[static_cast<size_t>(micro_batch)];
  StageContext ctx{.compute = compute_};
  ctx.stage = stage;
  ctx.micro_batch = micro_batch;
  ctx.state = flight.states[static_cast<size_t>(stage)].state();
  ctx.phase = options_.phase;
  ctx.step = 3;
  ctx.seed = 99;
  ctx.first_sample = batch.first_sample;
  ctx.samples = batch.samples;
  ctx.loss_scale = options_.loss_scale;
  flight.input = flight.activations[static_cast<size_t>(stage)].tensor();
  ctx.inputs = {&flight.input, 1};
  return ctx;
}

void LocalPipeline::forward(int micro_batch) {
  const auto at = static_cast<size_t>(micro_batch);
  InFlight& flight = flights_[at];
  for (size_t s = 0; s < stages_.size(); ++s) {
    StageContext ctx = context(static_cast<int>(s), micro_batch);
    flight.activations[s + 1].poison();
    const Tensor output = flight.activations[s + 1].tensor();
    if (s == 0) {
      Tensor tokens = ctx.inputs[0];
      tokens.data = micro_batches_[at].tokens.data();
      stages_[s]->check_inputs({&tokens, 1});
    }
    stages_[s]->begin_step(ctx.compute);
    stages_[s]->forward(ctx, ctx.inputs, {&output, 1});
  }
  const Tensor output = flight.activations.back().tensor();
  logits_[at] = floats_of(output);
  StageContext ctx = context(static_cast<int>(stages_.size()) - 1, micro_batch);
  const Tensor targets = flight.targets.tensor();
  auto& last = dynamic_cast<LossStage&>(*stages_.back());
  last.loss(ctx, {&output, 1}, {&targets, 1}, reinterpret_cast<double*>(flight.sum.data()));
  compute_.wait();
  std::memcpy(&losses_[at].sum, flight.sum.data(), sizeof(double));
  Tensor on_host = targets;
  on_host.data = micro_batches_[at].targets.data();
  losses_[at].weight = last.target_weight({&on_host, 1});
}

std::vector<float> LocalPipeline::floats_of(const Tensor& tensor) const {
  std::vector<std::byte> bytes(tensor.spec.bytes());
  compute_.stream().synchronize();
  copy_now(compute_.device(), bytes.data(), tensor.data, bytes.size());
  std::vector<float> floats(static_cast<size_t>(tensor.spec.shape.elements()));
  for (size_t i = 0; i < floats.size(); ++i) {
    floats[i] = tensor.spec.dtype == DType::kBf16
                    ? to_float(reinterpret_cast<const Bf16*>(bytes.data())[i])
                    : reinterpret_cast<const float*>(bytes.data())[i];
  }
  return floats;
}

void LocalPipeline::each_stage_back(
    int micro_batch,
    const std::function<void(Stage&, StageContext&, std::span<const Tensor>,
                             std::span<const Tensor>)>& call,
    bool begins) {
  InFlight& flight = flights_[static_cast<size_t>(micro_batch)];
  for (size_t s = stages_.size(); s-- > 0;) {
    StageContext ctx = context(static_cast<int>(s), micro_batch);
    const TensorSpec& input = flight.activations[s].spec;
    ctx.recomputed = options_.recomputes_first && begins &&
                     stages_[s]->describe({&input, 1}, compute_).recomputes;
    if (ctx.recomputed) stages_[s]->recompute(ctx);
    // The last stage's outputs have become their gradients.
    const Tensor grad_output = s + 1 == stages_.size() ? flight.activations.back().tensor()
                                                       : flight.gradients[s + 1].tensor();
    const Tensor grad_input = flight.gradients[s].tensor();
    call(*stages_[s], ctx, {&grad_output, 1},
         s == 0 ? std::span<const Tensor>{} : std::span<const Tensor>{&grad_input, 1});
  }
}

void LocalPipeline::backward(int micro_batch) {
  for (Edge& edge : flights_[static_cast<size_t>(micro_batch)].gradients) {
    edge.poison();
  }
  each_stage_back(micro_batch,
                  [](Stage& stage, StageContext& ctx, auto grad_outputs, auto grad_inputs) {
                    stage.backward(ctx, grad_outputs, grad_inputs);
                  });
}

void LocalPipeline::backward_input(int micro_batch) {
  for (Edge& edge : flights_[static_cast<size_t>(micro_batch)].gradients) {
    edge.poison();
  }
  each_stage_back(micro_batch,
                  [](Stage& stage, StageContext& ctx, auto grad_outputs, auto grad_inputs) {
                    split(stage).backward_input(ctx, grad_outputs, grad_inputs);
                  });
}

void LocalPipeline::backward_weight(int micro_batch) {
  each_stage_back(
      micro_batch,
      [](Stage& stage, StageContext& ctx, auto grad_outputs, auto /*grad_inputs*/) {
        split(stage).backward_weight(ctx, grad_outputs);
      },
      /*begins=*/false);
}

void LocalPipeline::step() {
  for (int i = 0; i < static_cast<int>(micro_batches_.size()); ++i) {
    forward(i);
    backward(i);
  }
}

double LocalPipeline::loss_sum() const {
  double sum = 0;
  for (const LocalLoss& loss : losses_) {
    sum += loss.sum;
  }
  return sum;
}

std::map<std::string, std::vector<float>> LocalPipeline::grads() const {
  std::map<std::string, std::vector<float>> result;
  for (const auto& stage : stages_) {
    ParameterSet* const set = stage->parameters();
    for (Parameter* parameter : set == nullptr ? std::vector<Parameter*>{} : set->all()) {
      std::vector<float>& sum = result[parameter->name];
      sum.resize(static_cast<size_t>(parameter->shape.elements()));
      const std::vector<float> grad = floats_of(parameter->grad);
      std::transform(sum.begin(), sum.end(), grad.begin(), sum.begin(), std::plus<>());
    }
  }
  return result;
}

void LocalPipeline::for_each_parameter(const std::function<void(Parameter&)>& visit) {
  for (const auto& stage : stages_) {
    ParameterSet* const set = stage->parameters();
    for (Parameter* parameter : set == nullptr ? std::vector<Parameter*>{} : set->all()) {
      visit(*parameter);
    }
  }
}

void LocalPipeline::mark_values_changed() {
  for (const auto& stage : stages_) {
    if (stage->parameters() != nullptr) {
      stage->parameters()->mark_values_changed();
    }
  }
}

}  // namespace sluice::testing
