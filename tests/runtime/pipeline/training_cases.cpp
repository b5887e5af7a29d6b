#include "tests/runtime/pipeline/training_cases.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <span>

#include <sluice/data.hpp>
#include <sluice/tensor.hpp>

#include "runtime/files/sha256.hpp"
#include "runtime/group/host_mirror.hpp"
#include "runtime/layout/job_layout.hpp"
#include "runtime/pipeline/pipeline_access.hpp"
#include "runtime/weights/weights.hpp"
#include "tests/loopback/loopback.hpp"
#ifdef SLUICE_UNDER_MPI
#include "tests/comm/mpi/mpi_main.hpp"
#endif

namespace sluice::testing {
namespace {

class SyntheticTokens : public DataSource {
 public:
  explicit SyntheticTokens(const TransformerConfig& model)
      : context_(model.context), vocabulary_(model.vocabulary) {}
  std::vector<TensorSpec> input_specs(std::int64_t samples) const override {
    return {{DType::kI32, Shape{samples, context_}}};
  }
  std::vector<TensorSpec> target_specs(std::int64_t samples) const override {
    return input_specs(samples);
  }
  void inputs(Phase phase, std::uint64_t step, SampleRange range,
              std::span<const Tensor> into) const override {
    fill(phase, step, range, 0, into[0]);
  }
  // The next token; every seventh target of a sample does not count.
  void targets(Phase phase, std::uint64_t step, SampleRange range,
               std::span<const Tensor> into) const override {
    fill(phase, step, range, 1, into[0]);
    for (std::int64_t i = 0; i < into[0].elements(); ++i) {
      if (i % context_ % 7 == 6) into[0].as<std::int32_t>()[i] = -1;
    }
  }

 private:
  void fill(Phase phase, std::uint64_t step, SampleRange range, std::int64_t shift,
            const Tensor& into) const {
    const RandomKey key{.seed = 5, .site = phase == Phase::kTrain ? 1U : 2U, .step = step};
    for (std::int64_t i = 0; i < range.count; ++i) {
      for (std::int64_t t = 0; t < context_; ++t) {
        const auto word = philox(key, static_cast<std::uint64_t>(range.first + i),
                                 static_cast<std::uint64_t>(t + shift))[0];
        into.as<std::int32_t>()[i * context_ + t] =
            static_cast<std::int32_t>(word % static_cast<std::uint32_t>(vocabulary_));
      }
    }
  }
  std::int64_t context_;
  int vocabulary_;
};

}  // namespace

TrainingCase named(const std::string& name) {
  TrainingCase result;
  result.name = name;
  result.model = small_model();
  return result;
}

TransformerConfig small_model() {
  return {.layers = 2, .heads = 2, .width = 32, .context = 16, .vocabulary = 48, .kv_heads = 2};
}

std::unique_ptr<DataSource> synthetic_tokens(const TransformerConfig& model) {
  return std::make_unique<SyntheticTokens>(model);
}

std::size_t spoil_old_gradients(Pipeline& pipeline) {
  std::size_t old = 0;
  pipeline.compute().wait();
  HostMirror mirror(pipeline.compute());
  for (const Pipeline::Owned& owned : pipeline.parameters()) {
    const Tensor& grad = owned.parameter->grad;
    if (!owned.parameter->is_stale()) {
      for (const float g : mirror.read_back(grad.floats()))
        EXPECT_EQ(g, 0) << owned.parameter->name;
      continue;
    }
    const std::vector<float> nan(grad.floats().size(), std::nanf(""));
    copy_now(pipeline.compute().device(), grad.data, nan.data(), grad.spec.bytes());
    ++old;
  }
  return old;
}

std::string digest_of(Pipeline& pipeline) {
  std::string mine;
  HostMirror mirror(pipeline.compute());
  for (const Pipeline::Owned& owned : pipeline.parameters()) {
    if (!owned.owner) continue;
    PipelineAccess::lend(pipeline, *owned.parameter);
    mine +=
        owned.parameter->name + " " + sha256_hex(mirror.read_back(owned.parameter->value)) + "\n";
    PipelineAccess::give_back(pipeline, *owned.parameter);
  }
  std::string lines;
  std::vector<std::string> all;
  const auto& topology = PipelineAccess::layout(pipeline).place.topology;
  const auto texts = PipelineAccess::world(pipeline).all_gather_strings(mine);
  for (int rank = 0; rank < topology.size.pipeline; ++rank) {
    lines += texts[static_cast<std::size_t>(topology.rank_of({.pipeline = rank}))];
  }
  for (std::size_t start = 0; start < lines.size();) {
    const std::size_t end = lines.find('\n', start);
    all.push_back(lines.substr(start, end - start));
    start = end + 1;
  }
  std::sort(all.begin(), all.end());
  std::string sorted;
  for (const std::string& line : all) sorted += line + "\n";
  return sha256_hex(std::as_bytes(std::span<const char>(sorted)));
}

TrainingOutcome train(Communicator& comm, const TrainingCase& what, const Layout& layout) {
  PipelineOptions options;
  options.shape.pipeline = layout.pipeline;
  options.shape.replicas = layout.replicas;
  options.shape.virtual_replicas = layout.virtual_replicas;
  options.shape.tensor_shards = layout.tensor_shards;
  options.shape.rank_order = layout.order;
  options.order.schedule = layout.schedule;
  options.order.chunks = layout.chunks;
  options.order.given = layout.own;
  options.devices.choices = parse_devices(layout.devices);
  options.devices.threads = what.threads;
  options.devices.transport = layout.transport;
  options.devices.all_reduce = layout.all_reduce;
  options.devices.cuda_graphs = layout.cuda_graphs;
  options.offload = layout.offload;
  options.expert.bucket_bytes = layout.bucket_bytes;
  options.shape.micro_batches = what.micro_batches;
  options.shape.micro_batch_size = what.micro_batch_size;
  options.shape.batch_size = what.batch_size;
  options.training.optimizer.weight_decay = 0.1F;
  options.training.optimizer.moments = what.moments;
  options.training.learning_rate = {.peak = 1e-2, .warmup = 1, .steps = 10};
  options.training.clip = what.clip;
  options.expert.evaluations = {5};
  options.checks.replicas_every = 1;
  const auto source = synthetic_tokens(what.model);
  const StageFactory factory = Transformer(what.model);
  Pipeline pipeline(comm, factory, *source, options);
  TrainingOutcome outcome;
  for (int step = 0; step < what.steps; ++step) {
    if (what.before_step) what.before_step(pipeline);
    const StepReport report = pipeline.train_step();
    outcome.losses.push_back(report.loss);
    outcome.norms.push_back(report.grad_norm);
    outcome.peaks = report.peak_in_flight;
    if (step == 0) outcome.validation = pipeline.evaluate(*source, 5).loss;
  }
  pipeline.close();
  outcome.digest = digest_of(pipeline);
  return outcome;
}

void train_on_some(Communicator& world, const TrainingCase& what, const Layout& layout,
                   const std::function<void(const TrainingOutcome&)>& check) {
  const bool takes_part = world.rank() < layout.pipeline * layout.replicas;
  const auto part = world.split(takes_part ? 0 : 1, world.rank());
  if (takes_part) check(train(*part, what, layout));
}

void with_ranks(int ranks, const std::function<void(Communicator&)>& body) {
#ifdef SLUICE_UNDER_MPI
  if (world().size() != ranks) return;
  const auto comm = world().duplicate();
  body(*comm);
#else
  run_loopback(ranks, body);
#endif
}

TrainingOutcome alone(Communicator& comm, const TrainingCase& what, const Layout& layout) {
  TrainingOutcome outcome;
  if (comm.rank() == 0) {
    run_loopback(1, [&](Communicator& single) { outcome = train(single, what, layout); });
    EXPECT_GT(outcome.losses.front(), 1) << what.name;
  }
  return outcome;
}

void expect_same(Communicator& comm, const std::string& where, const TrainingOutcome& expected,
                 const TrainingOutcome& actual) {
  if (comm.rank() != 0) return;
  EXPECT_EQ(expected.losses, actual.losses) << where;
  EXPECT_EQ(expected.norms, actual.norms) << where;
  EXPECT_EQ(expected.validation, actual.validation) << where;
  EXPECT_EQ(expected.digest, actual.digest) << where;
}

}  // namespace sluice::testing
