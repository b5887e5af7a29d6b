#include "runtime/pipeline/forward_calls.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "comm/base/index.hpp"
#include "comm/base/sum_tree.hpp"
#include "comm/base/throw_error.hpp"
#include "runtime/data/batch_shape.hpp"
#include "runtime/data/named_calls.hpp"
#include "runtime/data/sample_specs.hpp"
#include "runtime/group/guard.hpp"

namespace sluice {

std::vector<TensorSpec> OutputGather::specs(std::int64_t positions) const {
  const EdgeTable& edges = layout_.wires.edges;
  const UnitShape shape{edges.largest().samples, positions};
  const std::span<const TensorSpec> answers = edges.answers(shape);
  std::vector<TensorSpec> specs(answers.begin(), answers.end());
  if (!specs.empty()) return specs;
  for (const EdgeTensor& output : edges.inputs(shape, layout_.plans.num_stages())) {
    specs.push_back(output.spec);
  }
  return specs;
}

void OutputGather::require_samples() const {
  const std::int64_t samples = layout_.wires.edges.largest().samples;
  const auto outputs = specs(0);
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const TensorSpec& spec = outputs[i];
    if (spec.shape.rank() > 0 && spec.shape[0] > 0 && spec.shape[0] % samples == 0) continue;
    throw_usage(
        "infer(): output {} of the last stage is {} for a micro-batch of {} samples; legal is a "
        "first dimension with equally many rows for each sample",
        i, to_string(spec), samples);
  }
}

void OutputGather::begin(std::int64_t positions) {
  positions_ = positions;
  const auto outputs = specs(positions);
  for (std::vector<Output>* list : {&mine_, &all_}) {
    list->resize(outputs.size());
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      (*list)[i].spec = with_samples(outputs[i], 0);
      (*list)[i].bytes.clear();
    }
  }
  tensors_.clear();
}

void OutputGather::append(Output& to, const TensorSpec& spec, std::span<const std::byte> bytes) {
  if (with_samples(spec, 0) != with_samples(to.spec, 0)) {
    throw_usage("infer(): the last stage's outputs differ between micro-batches: {} and {}",
                to_string(spec), to_string(to.spec));
  }
  to.spec = with_samples(spec, to.spec.shape[0] + spec.shape[0]);
  to.bytes.insert(to.bytes.end(), bytes.begin(), bytes.end());
}

void OutputGather::add(std::span<const Tensor> outputs) {
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    append(mine_[i], outputs[i].spec, {outputs[i].as<const std::byte>(), outputs[i].spec.bytes()});
  }
  show();
}

void OutputGather::show() {
  tensors_.resize(mine_.size());
  for (std::size_t i = 0; i < mine_.size(); ++i) {
    tensors_[i] = {mine_[i].bytes.data(), mine_[i].spec};
  }
}

void OutputGather::gather_to(int rank) {
  Collectives& world = *job_.world.collectives;
  const Topology& topology = layout_.place.topology;
  const int me = job_.world.ranks->rank();
  std::vector<std::byte> received;
  for (int r = 0; r < topology.size.replica; ++r) {
    const int maker = topology.rank_of({.pipeline = layout_.plans.last_rank(), .replica = r});
    for (std::size_t i = 0; i < mine_.size(); ++i) {
      const Output& made = mine_[i];
      std::int64_t rows = made.spec.shape[0];
      if (me == maker && me == rank) {
        append(all_[i], made.spec, made.bytes);
      } else if (me == maker) {
        world.send(rank, object_bytes(rows));
        world.send(rank, made.bytes);
      } else if (me == rank) {
        world.recv(maker, object_bytes(rows));
        const TensorSpec spec = with_samples(made.spec, rows);
        received.resize(spec.bytes());
        world.recv(maker, received);
        append(all_[i], spec, received);
      }
    }
  }
  tensors_.clear();
  if (me != rank) return;
  std::swap(mine_, all_);
  show();
}

void OutputGather::gather_to_all() {
  gather_to(0);
  Collectives& world = *job_.world.collectives;
  if (job_.world.ranks->rank() != 0) begin(positions_);
  for (Output& output : mine_) {
    std::int64_t rows = output.spec.shape[0];
    world.broadcast(object_bytes(rows), 0);
    output.spec = with_samples(output.spec, rows);
    output.bytes.resize(output.spec.bytes());
    world.broadcast(output.bytes, 0);
  }
  show();
}

// The messages of this engine move in waits outside of it, such as those of sums within actions.
class ProgressScope {
 public:
  ProgressScope(JobContext& job, Engine& engine)
      : job_(job), before_(std::exchange(job.waits->engine, &engine)) {}
  ~ProgressScope() { job_.set_progress_engine(before_); }
  ProgressScope(const ProgressScope&) = delete;
  ProgressScope& operator=(const ProgressScope&) = delete;

 private:
  JobContext& job_;
  Interrupt* before_;
};

ForwardCalls::ForwardCalls(PipelineParts& parts, PipelineCalls& calls)
    : parts_(parts),
      calls_(calls),
      read_(parts.layout.owns(0), parts.layout.owns(parts.layout.plans.num_stages() - 1),
            parts.compute->device()),
      outputs_(parts.job, parts.layout) {}

std::int64_t ForwardCalls::round_samples() const {
  return parts_.layout.wires.edges.largest().samples *
         static_cast<std::int64_t>(StepPlans::kRoundMicroBatches);
}

LossResult ForwardCalls::run_rounds(Phase phase, SampleRange samples, std::int64_t most,
                                    std::int64_t positions, const Load& load,
                                    const OnOutputs& on_outputs) {
  LossResult total;
  const std::int64_t size = parts_.layout.wires.edges.largest().samples;
  std::function<void(int, std::span<const Tensor>)> hand_on;
  if (on_outputs) {
    hand_on = [&](int micro_batch, std::span<const Tensor> outputs) {
      on_outputs(ranges_[at(micro_batch)], outputs);
    };
  }
  if (samples.count >= size) parts_.need_size({size, positions});
  if (samples.count % size > 0) parts_.need_size({samples.count % size, positions});
  const auto pieces = [&](std::int64_t count) { return (count + size - 1) / size; };
  for (std::int64_t done = 0; done < most; done += round_samples()) {
    const auto here = [&](std::int64_t all) {
      return std::clamp<std::int64_t>(all - done, 0, round_samples());
    };
    const std::int64_t count = here(samples.count);
    ranges_.clear();
    if (count > 0) cut_samples({samples.first + done, count}, size, pieces(count), ranges_);
    const BatchLoader::Batch& batch = load(ranges_);
    const std::int64_t planned = pieces(parts_.sharded != nullptr ? here(most) : count);
    if (planned == 0) continue;
    run_round(phase, static_cast<int>(planned), positions, batch, hand_on ? &hand_on : nullptr,
              total);
  }
  return total;
}

void ForwardCalls::run_round(Phase phase, int micro_batches, std::int64_t positions,
                             const BatchLoader::Batch& batch,
                             const std::function<void(int, std::span<const Tensor>)>* on_outputs,
                             LossResult& total) {
  parts_.forward.plan(micro_batches);
  const StepRequest request{.phase = phase,
                            .step = 0,
                            .seed = parts_.options.training.seed,
                            .micro_batches = ranges_,
                            .positions = positions,
                            .batch = &batch,
                            .on_outputs = on_outputs};
  Engine& engine = parts_.forward.engine(micro_batches);
  const ProgressScope moves(parts_.job, engine);
  const StepOutcome& outcome = engine.run(request, nullptr);
  if (phase == Phase::kGenerate || outcome.losses.empty()) return;
  for (const LossResult& loss : outcome.losses.first(ranges_.size())) {
    total.sum += loss.sum;
    total.weight += loss.weight;
  }
}

EvaluationReport ForwardCalls::run_evaluation(
    const std::string& who, const std::function<SampleRange(int number)>& share_of,
    const Load& load) {
  EvaluationReport report;
  const auto joined = [](std::vector<LossResult>& losses) {
    add_leaves(losses.size(), [&](std::size_t to, std::size_t from) {
      losses[to].sum += losses[from].sum;
      losses[to].weight += losses[from].weight;
    });
    return losses.front();
  };
  calls_.refusable(who, [&] {
    const RankPlace& place = parts_.layout.place;
    std::vector<LossResult> mine, all(at(parts_.job.world.ranks->size())), replicas;
    for (int i = 0; i < place.shares; ++i) {
      std::int64_t most = 0;
      for (int r = 0; r < place.topology.size.replica; ++r) {
        most = std::max(most, share_of(r * place.shares + i).count);
      }
      const SampleRange share = share_of(place.here.replica * place.shares + i);
      mine.push_back(run_rounds(Phase::kEvaluate, share, most, 0, load, {}));
    }
    parts_.job.world.collectives->all_gather(joined(mine), all);
    for (int r = 0; r < place.topology.size.replica; ++r) {
      const int rank =
          place.topology.rank_of({.pipeline = parts_.layout.plans.last_rank(), .replica = r});
      replicas.push_back(all[at(rank)]);
    }
    const LossResult total = joined(replicas);
    report = {.loss = total.sum / total.weight, .targets = total.weight};
  });
  return report;
}

void ForwardCalls::require_loss() const {
  if (parts_.lacks_loss)
    throw_usage("evaluate() needs a loss, but the last stage is not a LossStage");
}

EvaluationReport ForwardCalls::evaluate(const DataSource& other, std::int64_t samples) {
  calls_.require_open();
  calls_.agree(Call::kEvaluateSource, nullptr, samples, [&] {
    require_loss();
    parts_.feed->require_like(other);
    constexpr std::int64_t kMost = 1'000'000'000'000;
    if (samples >= 1 && samples <= kMost) return;
    throw_usage("an evaluation of {} samples; legal are 1 to {}", samples, kMost);
  });
  // All ranks agree before each round, also those of virtual replicas with fewer.
  const int parts = parts_.layout.place.virtual_replicas();
  return run_evaluation(
      fmt::format("evaluation of {} samples", samples),
      [&](int number) { return share_of(samples, parts, number); },
      [&](std::span<const SampleRange> ranges) -> const BatchLoader::Batch& {
        parts_.feed->agree({.call = Call::kValues}, [&] {
          read_.place(other, ranges);
          read_.read(other, Phase::kEvaluate, 0, ranges, first_read_);
          (void)parts_.check_batch(read_.batch(), ranges, 0, /*targets=*/true);
        });
        first_read_ = false;
        return read_.batch();
      });
}

EvaluationReport ForwardCalls::evaluate(const Batch& batch) {
  calls_.require_open();
  calls_.agree(Call::kEvaluate, &batch, 0, [&] { require_loss(); });
  calls_.guarded("a batch", [&] { parts_.feed->distribute(batch, /*targets=*/true); });
  calls_.agree(Call::kValues, nullptr, 0, [this] { check_share(/*targets=*/true); });
  return run_evaluation(
      "evaluation of a batch", [&](int number) { return parts_.feed->share(number); },
      [&](std::span<const SampleRange> ranges) -> const BatchLoader::Batch& {
        return parts_.feed->cut(ranges, parts_.feed->share().first);
      });
}

void ForwardCalls::check_share(bool targets) {
  const SampleRange share = parts_.feed->share();
  const std::int64_t size = parts_.layout.wires.edges.largest().samples;
  for (std::int64_t done = 0; done < share.count; done += size) {
    const SampleRange range{share.first + done, std::min(size, share.count - done)};
    const std::span<const SampleRange> one(&range, 1);
    (void)parts_.check_batch(parts_.feed->cut(one, share.first), one, 0, targets);
  }
}

void ForwardCalls::require_answers(const InferOptions& how) const {
  if (how.to < InferOptions::kEveryRank || how.to >= parts_.job.world.ranks->size()) {
    throw_usage("infer() to rank {}; legal are 0 to {}, kWhereMade and kEveryRank", how.to,
                parts_.job.world.ranks->size() - 1);
  }
  if (how.on_outputs && how.to != InferOptions::kWhereMade) {
    throw_usage(
        "infer() with on_outputs and with a rank that gets all outputs; one of them is legal");
  }
  if (parts_.bindings.empty() || parts_.bindings.back().loss == nullptr) return;
  const StageBinding& last = parts_.bindings.back();
  const std::string why = calling(fmt::format("stage {}, why_no_answers()", last.index),
                                  [&] { return last.loss->why_no_answers(); });
  if (!why.empty()) throw Error(ErrorCode::kUsage, why);
}

std::span<const Tensor> ForwardCalls::infer(const Batch& batch, const InferOptions& how) {
  calls_.require_open();
  calls_.agree(Call::kInfer, &batch, how.to, [&] { require_answers(how); });
  outputs_.require_samples();
  calls_.guarded("a batch", [&] { parts_.feed->distribute(batch, /*targets=*/false); });
  calls_.agree(Call::kValues, nullptr, 0, [this] { check_share(/*targets=*/false); });
  calls_.guarded("inference", [&] {
    const SampleRange share = parts_.feed->share();
    const std::int64_t positions = parts_.feed->positions();
    // Each replica gathers outputs, also one without samples.
    parts_.need_size({parts_.layout.wires.edges.largest().samples, positions});
    outputs_.begin(positions);
    // The ranks that share the last stage make the same outputs: the first one's are taken.
    OnOutputs take;
    if (parts_.layout.place.here.tensor == 0) {
      take = [&](SampleRange samples, std::span<const Tensor> made) {
        if (!how.on_outputs) return outputs_.add(made);
        calling("on_outputs", [&] { how.on_outputs(samples, made); });
      };
    }
    (void)run_rounds(
        Phase::kGenerate, share, parts_.feed->largest_share(), positions,
        [&](std::span<const SampleRange> ranges) -> const BatchLoader::Batch& {
          return parts_.feed->cut(ranges, share.first);
        },
        take);
    if (how.to == InferOptions::kEveryRank) {
      outputs_.gather_to_all();
    } else if (how.to != InferOptions::kWhereMade) {
      outputs_.gather_to(how.to);
    }
    parts_.job.world.collectives
        ->barrier();  // an error of any rank reaches the others in this call
  });
  return outputs_.tensors();
}

}  // namespace sluice
