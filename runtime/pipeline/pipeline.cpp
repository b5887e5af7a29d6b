#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <functional>
#include <optional>
#include <utility>

#include <sluice/error.hpp>
#include <sluice/pipeline.hpp>

#include "comm/base/index.hpp"
#include "comm/base/throw_error.hpp"
#include "runtime/data/batch_shape.hpp"
#include "runtime/data/named_calls.hpp"
#include "runtime/engine/device_batch.hpp"
#include "runtime/engine/slots.hpp"
#include "runtime/engine/steady_seconds.hpp"
#include "runtime/gradients/bucketed_sums.hpp"
#include "runtime/gradients/gradients.hpp"
#include "runtime/gradients/replica_check.hpp"
#include "runtime/gradients/stage_buffers.hpp"
#include "runtime/job/direct_edges.hpp"
#include "runtime/job/guard.hpp"
#include "runtime/job/host_mirror.hpp"
#include "runtime/job/job_context.hpp"
#include "runtime/job/nccl_routes.hpp"
#include "runtime/job/polled_device_wait.hpp"
#include "runtime/job/sensible_options.hpp"
#include "runtime/pipeline/batch_feed.hpp"
#include "runtime/pipeline/build_layout.hpp"
#include "runtime/pipeline/forward_rounds.hpp"
#include "runtime/pipeline/output_gather.hpp"
#include "runtime/pipeline/pipeline_access.hpp"
#include "runtime/pipeline/programs.hpp"
#include "runtime/pipeline/refusal.hpp"
#include "runtime/pipeline/stage_report.hpp"
#include "runtime/pipeline/transport_plan.hpp"
#include "runtime/watch/watchdog.hpp"
#include "stages/compute/thread_team.hpp"

namespace sluice {
namespace {

Doing doing_of(Call call) {
  switch (call) {
    case Call::kSave:
    case Call::kState:
      return Doing::kSaving;
    case Call::kLoad:
    case Call::kSetState:
      return Doing::kRestoring;
    case Call::kClose:
      return Doing::kClosing;
    default:
      return Doing::kCalling;
  }
}

// A call that runs functions of the caller's.
class InCall {
 public:
  explicit InCall(std::atomic<bool>& busy) : busy_(busy), before_(busy.exchange(true)) {}
  ~InCall() { busy_ = before_; }
  InCall(const InCall&) = delete;
  InCall& operator=(const InCall&) = delete;

 private:
  std::atomic<bool>& busy_;
  const bool before_;
};

// Sums a stage's batch statistics over its replicas.
class ReplicaSum : public Collective {
 public:
  explicit ReplicaSum(Collectives& replicas) : replicas_(replicas) {}
  void sum(std::span<double> values) override {
    const auto count = values.size();
    const auto replicas = at(replicas_.communicator().size());
    all_.resize(count * replicas);
    replicas_.all_gather(std::as_bytes(values), std::as_writable_bytes(std::span(all_)));
    for (std::size_t i = 0; i < count; ++i) {
      values[i] = all_[i];
      for (std::size_t r = 1; r < replicas; ++r) values[i] += all_[r * count + i];
    }
  }

 private:
  Collectives& replicas_;
  std::vector<double> all_;  // [replica][value]
};

}  // namespace

struct Pipeline::Impl {
  // Where batches of train_step() come from.
  struct Batches {
    std::unique_ptr<const DataSource> own;  // shapes alone; null where the caller has a source
    const DataSource* source = nullptr;     // shapes, and batches unless `own`
    Feed feed = Feed::kWhereUsed;
  };
  Impl(Communicator& world, const PipelineOptions& options_in, const StageFactory& make_stage,
       Batches batches_in);

  // NCCL is destroyed first. After an error its kernels may wait for messages that never come, and
  // freeing a GPU's memory waits for kernels.
  ~Impl() {
    watchdog.reset();  // its thread looks at what goes now
    job.set_progress_engine(nullptr);
    nccl.reset();
  }

  // Runs `body`. Where the memory of the device, or of the host, is not enough, the Error names
  // `who` and the plan's table.
  template <typename Body>
  void rethrow_oom_with_plan(const std::string& who, const Body& body) const;
  // The same for every error of this rank's device: libraries do not say that memory was the
  // reason. Errors of other ranks are not changed.
  template <typename Body>
  void rethrow_device_error_with_plan(const std::string& who, const Body& body) const;
  [[noreturn]] void throw_with_plan(const std::string& who, const Error& error) const;
  void take_memory();
  void prepare_stages();
  void make_nccl();
  [[nodiscard]] DeviceBatch::Capacity batch_capacity() const;
  void prepare_training();
  // Only a training engine records traces and CUDA graphs.
  std::unique_ptr<Engine> make_engine(const Plan& plan, bool trains);
  void start_watchdog();
  // The plan of a step that is smaller than the largest.
  Plan plan_smaller(int micro_batches) const;
  void need_size(std::int64_t samples);

  // Collective. Runs `body`; what any rank throws ends the pipeline.
  template <typename Body>
  void guarded(const Body& body);
  // The same, with a device that is set and errors of memory that name `who`.
  template <typename Body>
  void guarded(const std::string& who, const Body& body);
  // Throws what all ranks refuse; as BatchFeed::agree().
  void agree(Call call, const Batch* batch, std::int64_t argument = 0,
             const std::function<void()>& check = {});
  // guarded(), where `body` may throw what all ranks refuse.
  void refusable(const std::string& who, const std::function<void()>& body);
  // As PipelineAccess::run_call().
  void run_call(Call call, const std::string& who, const std::function<void()>& body);
  void require_training() const;
  void require_no_gradients() const;
  // Divides the shares of a step's batch into micro-batches. All ranks throw the same.
  void cut_step();
  double count_targets();
  // Throws what this rank's stages find in a batch before its first message. `before`: samples of
  // the step's earlier batches. Returns how many targets count here.
  double check_batch(const BatchLoader::Batch& batch, std::span<const SampleRange> ranges,
                     std::int64_t before, bool targets) const;
  // The same of this replica's share of the feed's batch.
  void check_share(bool targets);
  StepReport train_step();
  StepReport train_on(Call call, const Batch& batch);
  // Runs this rank's part of a batch, of step.ranges.
  StepReport run_batch(const BatchLoader::Batch& batch, BatchEnd end);
  StepReport end_batch(BatchEnd end, double started);
  StepReport optimizer_step();
  void drop_gradients();
  void set_learning_rate(const LearningRate& rate);
  // Of the next step.
  void require_rate() const;
  EvaluationReport evaluate(const Batch& batch);
  EvaluationReport evaluate(const DataSource& other, std::int64_t samples);
  EvaluationReport run_evaluation(const std::string& who, SampleRange samples,
                                  std::int64_t least_rounds, const ForwardRounds::Load& load);
  void require_loss() const;
  void require_answers(const InferOptions& how) const;
  std::span<const Tensor> infer(const Batch& batch, const InferOptions& how);
  DataLoader make_loader(std::shared_ptr<const Dataset> data, LoaderOptions how);
  void close();
  void require_idle() const;
  void require_open() const;
  StepReport report_of(double seconds) const;

  PipelineOptions options;
  JobContext job;
  PolledDeviceWait device_wait{*job.watch};
  JobLayout layout;
  std::vector<std::unique_ptr<Stage>> stages;
  bool lacks_loss = false;  // the last stage is here, and is not a LossStage
  std::vector<StageBinding> bindings;
  std::unique_ptr<ComputeContext> compute;
  std::unique_ptr<HostMirror> mirror;
  std::unique_ptr<ReplicaSum> replica_sum;
  std::unique_ptr<NcclRoutes> nccl;
  std::shared_ptr<SlotStore> slots = std::make_shared<SlotStore>();
  std::unique_ptr<DeviceBatch> device_batch;
  Batches batches;
  Programs training{job.place.rank, [this](int n) { return plan_smaller(n); },
                    [this](const Plan& plan) { return make_engine(plan, /*trains=*/true); }};
  Programs forward{job.place.rank, [this](int n) { return plan_forward(layout, n); },
                   [this](const Plan& plan) { return make_engine(plan, /*trains=*/false); }};
  Engine* engine = nullptr;  // of the last training step, at first of the largest
  std::unique_ptr<BatchLoader> loader;
  std::unique_ptr<BatchFeed> feed;
  std::unique_ptr<ForwardRounds> rounds;
  std::unique_ptr<SourceRounds> source_rounds;
  std::unique_ptr<OutputGather> outputs;
  std::unique_ptr<TiedUses> tied;
  std::unique_ptr<GradientSync> gradients;
  std::unique_ptr<StageBuffers> stage_buffers;
  StepState step;
  bool closed = false;
  std::optional<Error> failed;
  std::atomic<bool> busy = false;       // in a call; a source may ask from its own thread
  std::vector<double> replica_targets;  // [replica]
  std::unique_ptr<Watchdog> watchdog;   // null: options.watch is off
};

Pipeline::Impl::Impl(Communicator& world, const PipelineOptions& options_in,
                     const StageFactory& make_stage, Batches batches_in)
    : options(options_in), job(world, options), batches(std::move(batches_in)) {
  const ActivityScope setting_up(*job.activity, Doing::kSettingUp);
  job.guarded([&] { start_watchdog(); });
  job.guarded([&] {
    rethrow_device_error_with_plan("the libraries", [&] {
      compute = std::make_unique<ComputeContext>(job.place.device(), options.devices.threads);
    });
    const ThreadTeam team(*compute);
    compute->set_device_wait(&device_wait);
    compute->set_tf32(options.devices.tf32);
    BuiltLayout built;
    // Libraries may take memory when they plan what the stages will ask of them.
    rethrow_oom_with_plan("the layout", [&] {
      built = build_layout(job, options, *compute, make_stage, *batches.source,
                           /*any_size=*/batches.own != nullptr);
    });
    layout = std::move(built.layout);
    stages = std::move(built.stages);
    take_memory();
    mirror = std::make_unique<HostMirror>(*compute);
    replica_sum = std::make_unique<ReplicaSum>(*job.replicas.collectives);
    replica_targets.resize(at(layout.place.topology.replicas));
    prepare_stages();
    // All ranks make new communicators, or those that do wait for ever: no rank may have failed.
    job.world.collectives->barrier();
    rethrow_device_error_with_plan("NCCL's communicators", [&] { make_nccl(); });
    rethrow_oom_with_plan("test messages", [&] { probe_direct_edges(job, layout, *compute); });
    rethrow_oom_with_plan("tied parameters", [&] {
      tied = std::make_unique<TiedUses>(job, layout.plans, layout.parameters, *compute, nccl.get(),
                                        *mirror, bindings);
    });
    rethrow_oom_with_plan("messages", [&] {
      device_batch = std::make_unique<DeviceBatch>(*compute, batch_capacity());
      if (!options.training.inference) engine = &training.add(layout.plans.train);
      if (options.training.inference) forward.add(layout.plans.train);
      if (!layout.plans.forward.ranks.empty()) forward.add(layout.plans.forward);
    });
    if (nccl != nullptr) {
      for (const std::span<std::byte> memory : slots->device_memory()) {
        nccl->register_messages(memory);
      }
    }
    job.set_progress_engine(engine);
    feed = std::make_unique<BatchFeed>(job, layout, *batches.source, batches.feed);
    rounds = std::make_unique<ForwardRounds>(layout, forward,
                                             [this](std::int64_t samples) { need_size(samples); });
    source_rounds = std::make_unique<SourceRounds>(layout, compute->device());
    outputs = std::make_unique<OutputGather>(job, layout);
    if (!options.training.inference) prepare_training();
  });
}

void Pipeline::Impl::start_watchdog() {
  if (!options.watch.on) return;
  WatchedJob watched{.activity = job.activity.get(), .abort = {}, .ranks = {}};
  for (int rank = 0; rank < job.world.ranks->size(); ++rank) {
    const Topology& topology = job.place.topology;
    watched.ranks.push_back({.host = job.hosts[at(rank)],
                             .stages = job.stage_places.stages_of(topology.pipeline_rank(rank)),
                             .replica = topology.replica(rank)});
  }
  // On this thread, within a wait.
  watched.abort = [this](int code) {
    if (nccl != nullptr) nccl->abort();
    job.world.ranks->abort(code);
  };
  watchdog = std::make_unique<Watchdog>(*job.world.collectives, std::move(watched), options.watch);
}

DeviceBatch::Capacity Pipeline::Impl::batch_capacity() const {
  DeviceBatch::Capacity capacity;
  const std::int64_t largest = layout.wires.edges.largest();
  for (const TensorSpec& spec : batches.source->input_specs(largest)) {
    capacity.inputs.push_back(spec.bytes());
  }
  for (const TensorSpec& spec : batches.source->target_specs(largest)) {
    capacity.targets.push_back(spec.bytes());
  }
  return capacity;
}

void Pipeline::Impl::prepare_training() {
  if (batches.own == nullptr) {
    rethrow_oom_with_plan("the batches", [&] {
      loader = std::make_unique<BatchLoader>(
          *batches.source, Phase::kTrain, layout.plans.micro_batches, layout.owns(0),
          layout.owns(layout.plans.num_stages() - 1), compute->device());
    });
  }
  rethrow_oom_with_plan("the optimizer", [&] {
    gradients = std::make_unique<GradientSync>(job, layout, options, *compute, nccl.get(), *tied,
                                               bindings, step);
  });
  rethrow_oom_with_plan("the buffers of stages", [&] {
    stage_buffers = std::make_unique<StageBuffers>(job, *compute, *mirror, bindings);
  });
  gradients->clear();
  compute->wait();
  job.world.collectives->barrier();
}

template <typename Body>
void Pipeline::Impl::rethrow_oom_with_plan(const std::string& who, const Body& body) const {
  try {
    body();
  } catch (const OutOfMemory& error) {
    throw_with_plan(who, error);
  }
}

template <typename Body>
void Pipeline::Impl::rethrow_device_error_with_plan(const std::string& who,
                                                    const Body& body) const {
  try {
    body();
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kDevice || error.rank() >= 0) throw;
    throw_with_plan(who, error);
  }
}

void Pipeline::Impl::throw_with_plan(const std::string& who, const Error& error) const {
  std::string plan = "not made yet";
  if (!layout.memory.ranks.empty()) plan = to_string(layout.memory.ranks[at(layout.place.rank)]);
  throw_error(ErrorCode::kDevice, "{} on {} of {}: {}; the plan of this rank: {}", who,
              to_string(job.place.device()), job.devices.ranks[at(job.world.ranks->rank())].host,
              error.what(), plan);
}

void Pipeline::Impl::take_memory() {
  rethrow_oom_with_plan("the plan", [&] {
    compute->memory().reserve(layout.memory.ranks[at(layout.place.rank)].arena());
    compute->reserve_workspace(layout.memory.operator_bytes);
    compute->free_outgrown();
  });
}

// A communicator takes hundreds of megabytes of a GPU: training and evaluations share one set.
void Pipeline::Impl::make_nccl() {
  if (!NcclRoutes::wanted(layout)) return;
  std::size_t open = 8 + TiedUses::most_open(layout.parameters);
  layout.plans.for_each_plan([&](const Plan& plan) {
    for (const BufferPool& pool : plan.ranks[at(layout.place.rank)].pools) open += at(pool.count);
  });
  const SumLoad sums = layout.wires.sums_by_nccl(layout.place.rank)
                           ? BucketedSums::load_of(bindings, options.devices.bucket_bytes)
                           : SumLoad{};
  nccl =
      std::make_unique<NcclRoutes>(job, layout, *compute, sums, open, options.devices.all_reduce);
}

void Pipeline::Impl::prepare_stages() {
  const std::vector<int>& mine = layout.plans.placement().stages_of(layout.place.rank);
  const bool splits = layout.plans.splits_backward();
  for (std::size_t i = 0; i < stages.size(); ++i) {
    const int index = mine[i];
    StageBinding binding{.index = index,
                         .stage = stages[i].get(),
                         .split = dynamic_cast<SplitBackward*>(stages[i].get()),
                         .loss = nullptr,
                         .parameters = nullptr};
    if (splits && binding.split == nullptr) {
      throw_usage("schedule '{}' splits the backward pass, but stage {} is not a SplitBackward",
                  options.order.schedule, index);
    }
    if (index + 1 == layout.plans.num_stages()) {
      binding.loss = dynamic_cast<LossStage*>(stages[i].get());
      lacks_loss = binding.loss == nullptr;
      if (lacks_loss && !options.training.inference) {
        throw_usage(
            "stage {} is the last one, but is not a LossStage; legal for infer() alone, with "
            "options.training.inference",
            index);
      }
    }
    StageSetup setup{.compute = compute.get(),
                     .slots = layout.plans.slots_of(index),
                     .split_backward = splits,
                     .trains = !options.training.inference,
                     .seed = options.training.seed,
                     .input_sizes = {}};
    for (const std::int64_t size : layout.wires.edges.sizes()) {
      std::vector<TensorSpec>& specs = setup.input_sizes.emplace_back();
      for (const EdgeTensor& tensor : layout.wires.edges.inputs(size, index))
        specs.push_back(tensor.spec);
    }
    rethrow_device_error_with_plan("the stages", [&] {
      try {
        stages[i]->prepare(setup);
      } catch (...) {
        rethrow_from(fmt::format("stage {}, prepare()", index));
      }
    });
    try {
      binding.parameters = stages[i]->parameters();
    } catch (...) {
      rethrow_from(fmt::format("stage {}, parameters()", index));
    }
    require_prepared(binding, layout.parameters.stages[at(index)], setup.trains);
    bindings.push_back(binding);
  }
}

std::unique_ptr<Engine> Pipeline::Impl::make_engine(const Plan& plan, bool trains) {
  const RankPlan& mine = plan.ranks[at(layout.place.rank)];
  return std::make_unique<Engine>(
      EngineConfig{.plan = &plan,
                   .rank = layout.place.rank,
                   .edges = &layout.wires.edges,
                   .stages = bindings,
                   .compute = compute.get(),
                   .communicator = job.messages.get(),
                   .interrupt = job.engine_watch.get(),
                   .activity = job.activity.get(),
                   .piece_bytes = job.piece_bytes(),
                   .nccl = nccl != nullptr ? nccl->messages() : nullptr,
                   .routes = layout.wires.routes,
                   .collective = plan.forward_only ? nullptr : replica_sum.get(),
                   .progress_in_actions = options.devices.progress_in_actions,
                   .slots = slots,
                   .batch = device_batch.get(),
                   .cuda_graphs = trains && options.devices.cuda_graphs,
                   .trace_events = trains && options.checks.trace ? mine.ops.size() : 0});
}

Plan Pipeline::Impl::plan_smaller(int micro_batches) const {
  Plan plan = plan_step(layout, options, micro_batches);
  for (int stage = 0; stage < layout.plans.num_stages(); ++stage) {
    const int needed = StepPlans::slots_of(plan, stage), there = layout.plans.slots_of(stage);
    if (needed <= there) continue;
    throw_usage(
        "schedule '{}' keeps {} micro-batches of stage {} in flight for a step of {}, but {} for "
        "the largest, of {}; take another number of micro-batches, or another schedule",
        plan.schedule_name, needed, stage, micro_batches, there, layout.plans.train.micro_batches);
  }
  return plan;
}

void Pipeline::Impl::need_size(std::int64_t samples) {
  if (layout.wires.edges.has(samples)) return;
  add_size(job, *compute, *batches.source, stages, samples, layout);
}

template <typename Body>
void Pipeline::Impl::guarded(const Body& body) {
  require_open();
  const ThreadTeam team(*compute);
  const ActivityScope calling(*job.activity, Doing::kCalling);
  const InCall in_call(busy);
  try {
    job.guarded(std::cref(body));
  } catch (const Error& error) {
    failed = error;
    throw;
  }
}

template <typename Body>
void Pipeline::Impl::guarded(const std::string& who, const Body& body) {
  guarded([&] {
    use_device(compute->device());
    rethrow_oom_with_plan(who, body);
  });
}

void Pipeline::Impl::agree(Call call, const Batch* batch, std::int64_t argument,
                           const std::function<void()>& check) {
  std::optional<Error> refusal;
  const BatchFeed::Asked asked{
      .call = call, .step = step.done, .argument = argument, .batch = batch};
  guarded([&] { refusal = feed->agree(asked, check); });
  // Not guarded: all ranks throw it, and the control channel keeps what it reports for good.
  if (refusal) throw Error(*refusal);
}

void Pipeline::Impl::run_call(Call call, const std::string& who,
                              const std::function<void()>& body) {
  require_open();
  agree(call, nullptr);
  if (step.open() && (call == Call::kLoad || call == Call::kSetState)) {
    throw_usage(
        "other values in the middle of a step: optimizer_step() or drop_gradients() comes before "
        "set_state() and before loading");
  }
  refusable(who, [&] {
    const ActivityScope doing(*job.activity, doing_of(call));
    body();
  });
}

void Pipeline::Impl::refusable(const std::string& who, const std::function<void()>& body) {
  std::optional<Error> refusal;
  guarded(who, [&] {
    try {
      body();
    } catch (const Refused& refused) {
      refusal = refused.error;
    }
  });
  if (refusal) throw Error(*refusal);
}

void Pipeline::Impl::require_training() const {
  require_open();
  if (options.training.inference) throw_usage("an inference pipeline does not train");
}

// All ranks throw it: they made the same calls before.
void Pipeline::Impl::require_no_gradients() const {
  if (!step.gradients_ready) return;
  throw_usage(
      "a step is complete: optimizer_step() or drop_gradients() comes before other batches");
}

void Pipeline::Impl::cut_step() {
  const std::span<const std::int64_t> shares = feed->shares();
  const std::int64_t size = layout.wires.edges.largest();
  const std::int64_t most = *std::max_element(shares.begin(), shares.end());
  const std::int64_t pieces = (most + size - 1) / size;
  if (pieces > layout.plans.train.micro_batches) {
    throw_usage(
        "a batch of {} samples for a replica; this pipeline was made for at most {}: {} "
        "micro-batches of {} (PipelineOptions::Shape); accumulate() takes several batches a step",
        most, layout.plans.train.micro_batches * size, layout.plans.train.micro_batches, size);
  }
  const auto least = std::min_element(shares.begin(), shares.end());
  if (*least < pieces) {
    throw_usage(
        "replica {} has {} samples, but another replica's {} make {} micro-batches of {}; all "
        "replicas need the same number of micro-batches",
        least - shares.begin(), *least, most, pieces, size);
  }
  const SampleRange share = feed->share();
  cut_samples({step.earlier.samples + share.first, share.count}, size, pieces, step.ranges);
  training.plan(static_cast<int>(pieces));
}

// The number of targets in the global batch, which the mean loss is taken over. On the last stage's
// ranks, with one exchange between replicas; elsewhere 1.
double Pipeline::Impl::count_targets() {
  if (!layout.owns(layout.plans.num_stages() - 1)) return 1;
  job.replicas.collectives->all_gather(std::as_bytes(std::span(&step.targets_here, 1)),
                                       std::as_writable_bytes(std::span(replica_targets)));
  double total = 0;
  for (const double count : replica_targets) total += count;
  return total;
}

double Pipeline::Impl::check_batch(const BatchLoader::Batch& batch,
                                   std::span<const SampleRange> ranges, std::int64_t before,
                                   bool targets) const {
  double counted = 0;
  for (std::size_t m = 0; m < ranges.size(); ++m) {
    const SampleRange samples{ranges[m].first - before, ranges[m].count};
    if (layout.owns(0)) check_inputs(bindings.front(), batch.inputs[m], samples);
    if (targets && layout.owns(layout.plans.num_stages() - 1)) {
      counted += check_targets(bindings.back(), batch.targets[m], samples);
    }
  }
  return counted;
}

void Pipeline::Impl::check_share(bool targets) {
  const SampleRange share = feed->share();
  const std::int64_t size = layout.wires.edges.largest();
  for (std::int64_t done = 0; done < share.count; done += size) {
    const SampleRange range{share.first + done, std::min(size, share.count - done)};
    const std::span<const SampleRange> one(&range, 1);
    (void)check_batch(feed->cut(one, share.first), one, 0, targets);
  }
}

StepReport Pipeline::Impl::train_step() {
  require_training();
  if (loader == nullptr) {
    throw_usage("this pipeline was made from a BatchSpec and has no source: pass a batch");
  }
  require_no_gradients();
  const BatchLoader::Batch* batch = nullptr;
  guarded([&] {
    const ActivityScope loading(*job.activity, Doing::kLoading);
    batch = &loader->load(step.done + 1, job.watch.get());
  });
  step.ranges.assign(layout.plans.micro_batches.begin(), layout.plans.micro_batches.end());
  for (SampleRange& range : step.ranges) range.first += step.earlier.samples;
  agree(Call::kTrainSource, nullptr, 0, [this, batch] {
    require_rate();
    step.targets_here = check_batch(*batch, step.ranges, step.earlier.samples, /*targets=*/true);
  });
  return run_batch(*batch, BatchEnd::kUpdate);
}

StepReport Pipeline::Impl::train_on(Call call, const Batch& batch) {
  require_training();
  require_no_gradients();
  agree(call, &batch, 0, [&] { require_rate(); });
  cut_step();
  const BatchLoader::Batch* mine = nullptr;
  guarded("a batch", [&] {
    for (const SampleRange& range : step.ranges) need_size(range.count);
    feed->distribute(batch, /*targets=*/true);
    mine = &feed->cut(step.ranges, step.ranges.front().first);
  });
  agree(Call::kValues, nullptr, 0, [this, mine] {
    step.targets_here = check_batch(*mine, step.ranges, step.earlier.samples, /*targets=*/true);
  });
  const BatchEnd end = call == Call::kTrain        ? BatchEnd::kUpdate
                       : call == Call::kAccumulate ? BatchEnd::kAccumulate
                                                   : BatchEnd::kGradients;
  return run_batch(*mine, end);
}

StepReport Pipeline::Impl::run_batch(const BatchLoader::Batch& batch, BatchEnd end) {
  StepReport report;
  guarded([&] {
    use_device(compute->device());
    const double started = steady_seconds();
    const int micro_batches = static_cast<int>(step.ranges.size());
    rethrow_oom_with_plan("messages", [&] { engine = &training.engine(micro_batches); });
    job.set_progress_engine(engine);
    const double targets = count_targets();
    step.begin_batch(started, micro_batches, end);
    const StepRequest request{.phase = Phase::kTrain,
                              .step = step.number,
                              .seed = options.training.seed,
                              .loss_scale = 1 / step.divisor(targets),
                              .first_batch = step.earlier.samples == 0,
                              .last_batch = end != BatchEnd::kAccumulate,
                              .micro_batches = step.ranges,
                              .batch = &batch};
    if (step.earlier.samples == 0) stage_buffers->keep();
    gradients->expect(engine->outcome());
    rethrow_oom_with_plan(fmt::format("step {}", step.number),
                          [&] { engine->run(request, gradients.get()); });
    report = end_batch(end, started);
  });
  if (step.refused() && !report.skipped) throw step.refusal(layout.parameters);
  return report;
}

// In a guarded body.
StepReport Pipeline::Impl::end_batch(BatchEnd end, double started) {
  const bool refused = step.refused();
  const bool skips = refused && step.totals.finite == 0 && step.totals.other_rate_rank < 0 &&
                     options.training.skip_nonfinite;
  const bool ends = refused || end == BatchEnd::kUpdate;
  step.gradients_ready = !refused && end == BatchEnd::kGradients;
  if (!ends) {
    for (const std::int64_t share : feed->shares()) step.earlier.samples += share;
    StepReport report = report_of(steady_seconds() - started);
    report.step = step.number;
    return report;
  }
  if (refused) {
    stage_buffers->restore();
  } else {
    stage_buffers->join();
  }
  gradients->clear();
  if (refused && !skips) return {};
  ++step.done;
  StepReport report = report_of(steady_seconds() - started);
  job.activity->step_ended(report.seconds);
  if (options.checks.replicas_every > 0 && step.done % options.checks.replicas_every == 0) {
    const ActivityScope comparing(*job.activity, Doing::kComparing);
    rethrow_oom_with_plan(fmt::format("the comparison of replicas after step {}", step.done),
                          [&] { check_replicas(job, *tied, bindings, *mirror, step.done); });
  }
  return report;
}

StepReport Pipeline::Impl::optimizer_step() {
  require_training();
  if (!step.gradients_ready) throw_usage("optimizer_step() needs a forward_backward() before it");
  agree(Call::kUpdate, nullptr, 0, [&] { require_rate(); });
  StepReport report;
  guarded("the update", [&] {
    const double started = steady_seconds();
    gradients->update(started);
    report = end_batch(BatchEnd::kUpdate, started);
  });
  if (step.refused() && !report.skipped) throw step.refusal(layout.parameters);
  return report;
}

void Pipeline::Impl::drop_gradients() {
  require_training();
  agree(Call::kDrop, nullptr);
  guarded([&] {
    use_device(compute->device());
    if (step.open()) stage_buffers->restore();
    gradients->clear();
  });
}

void Pipeline::Impl::require_rate() const {
  require_sensible_at(step.done + 1, options.training.learning_rate, options.training.groups);
}

void Pipeline::Impl::set_learning_rate(const LearningRate& rate) {
  require_idle();
  require_sensible(rate, options.training.groups);
  options.training.learning_rate = rate;
}

DataLoader Pipeline::Impl::make_loader(std::shared_ptr<const Dataset> data, LoaderOptions how) {
  std::optional<DataLoader> made;
  run_call(Call::kLoader, "a loader", [&] {
    Collectives& world = *job.world.collectives;
    on_all_ranks(world, [&] {
      if (data != nullptr) feed->require_items(spec_of(*data));
      how.share = feed->passed();
      made.emplace(data, how);
    });
    require_same_or_refuse(world, {{"size of the data set", fmt::format("{}", size_of(*data))},
                                   {"LoaderOptions::batch_size", fmt::format("{}", how.batch_size)},
                                   {"LoaderOptions::shuffle", fmt::format("{}", how.shuffle)},
                                   {"LoaderOptions::seed", fmt::format("{}", how.seed)},
                                   {"LoaderOptions::drop_last", fmt::format("{}", how.drop_last)}});
  });
  return std::move(*made);
}

void Pipeline::Impl::close() {
  if (closed) return;
  run_call(Call::kClose, "the end", [&] {
    job.set_progress_engine(nullptr);
    if (nccl != nullptr) nccl->finalize();
    job.world.collectives->barrier();
  });
  closed = true;
}

// Not guarded: the callback throws it on, and its caller is.
void Pipeline::Impl::require_idle() const {
  if (!busy) return;
  throw_usage(
      "a pipeline is called from a callback of its own, in the middle of another call; legal "
      "there are functions that only read, such as step() and parameters()");
}

// Not guarded: the answer is the same on all ranks, and some may still be closing.
void Pipeline::Impl::require_open() const {
  require_idle();
  job.world.ranks->require_this_thread();
  if (closed) throw_usage("the pipeline is closed");
  if (!failed) return;
  throw Error(failed->code(),
              fmt::format("the pipeline is unusable since an earlier error: {}", failed->what()),
              failed->rank());
}

StepReport Pipeline::Impl::report_of(double seconds) const {
  const StepTotals& totals = step.totals;
  StepReport report;
  report.step = step.done;
  report.loss = totals.loss;
  report.targets = totals.targets;
  report.skipped = totals.finite == 0;
  report.grad_norm = totals.grad_norm;
  report.learning_rate = options.training.learning_rate.at(step.done);
  report.seconds = seconds;
  report.pipeline_seconds = totals.window_seconds;
  // The two times come from different clocks: a bubble near 0 may come out negative.
  report.bubble_measured = std::max(
      0.0, 1 - totals.busy_seconds / (totals.window_seconds * layout.place.topology.ranks()));
  if (job.world.ranks->rank() == 0) {
    report.peak_in_flight = gradients->record().peaks();
    report.peak_bytes.reserve(layout.memory.ranks.size());
    for (const RankMemory& memory : layout.memory.ranks) {
      report.peak_bytes.push_back(static_cast<std::int64_t>(memory.total()));
    }
  }
  return report;
}

EvaluationReport Pipeline::Impl::run_evaluation(const std::string& who, SampleRange samples,
                                                std::int64_t least_rounds,
                                                const ForwardRounds::Load& load) {
  EvaluationReport report;
  refusable(who, [&] {
    const LossResult loss =
        rounds->run(Phase::kEvaluate, options.training.seed, samples, load, {}, least_rounds);
    const std::array<double, 2> mine = {loss.sum, loss.weight};
    std::vector<double> all(2 * at(job.world.ranks->size()));
    job.world.collectives->all_gather(std::as_bytes(std::span(mine)),
                                      std::as_writable_bytes(std::span(all)));
    std::array<double, 2> total = {0, 0};
    for (int r = 0; r < layout.place.topology.replicas; ++r) {
      const std::size_t rank = at(layout.place.topology.rank_of(r, layout.plans.last_rank()));
      total[0] += all[2 * rank];
      total[1] += all[2 * rank + 1];
    }
    report = {.loss = total[0] / total[1], .targets = total[1]};
  });
  return report;
}

void Pipeline::Impl::require_loss() const {
  if (lacks_loss) throw_usage("evaluate() needs a loss, but the last stage is not a LossStage");
}

EvaluationReport Pipeline::Impl::evaluate(const DataSource& other, std::int64_t samples) {
  require_open();
  agree(Call::kEvaluateSource, nullptr, samples, [&] {
    require_loss();
    if (&other == batches.own.get()) {
      throw_usage(
          "this pipeline was made from a BatchSpec and has no source: pass a batch or a source");
    }
    feed->require_like(other);
    constexpr std::int64_t kMost = 1'000'000'000'000;
    if (samples >= 1 && samples <= kMost) return;
    throw_usage("an evaluation of {} samples; legal are 1 to {}", samples, kMost);
  });
  // All ranks agree before each round, also those of replicas with fewer.
  const int replicas = layout.place.topology.replicas;
  return run_evaluation(fmt::format("evaluation of {} samples", samples),
                        share_of(samples, replicas, layout.place.replica),
                        rounds->rounds_of(share_of(samples, replicas, 0).count),
                        [&](std::span<const SampleRange> ranges) -> const BatchLoader::Batch& {
                          const BatchLoader::Batch* batch = nullptr;
                          const std::optional<Error> refusal =
                              feed->agree({.call = Call::kValues}, [&] {
                                batch = &source_rounds->load(other, ranges);
                                (void)check_batch(*batch, ranges, 0, /*targets=*/true);
                              });
                          if (refusal) throw Refused{*refusal};
                          return *batch;
                        });
}

EvaluationReport Pipeline::Impl::evaluate(const Batch& batch) {
  require_open();
  agree(Call::kEvaluate, &batch, 0, [&] { require_loss(); });
  guarded("a batch", [&] { feed->distribute(batch, /*targets=*/true); });
  agree(Call::kValues, nullptr, 0, [this] { check_share(/*targets=*/true); });
  const SampleRange share = feed->share();
  return run_evaluation("evaluation of a batch", share, 0,
                        [&](std::span<const SampleRange> ranges) -> const BatchLoader::Batch& {
                          return feed->cut(ranges, share.first);
                        });
}

void Pipeline::Impl::require_answers(const InferOptions& how) const {
  if (how.to < InferOptions::kEveryRank || how.to >= job.world.ranks->size()) {
    throw_usage("infer() to rank {}; legal are 0 to {}, kWhereMade and kEveryRank", how.to,
                job.world.ranks->size() - 1);
  }
  if (how.on_outputs && how.to != InferOptions::kWhereMade) {
    throw_usage(
        "infer() with on_outputs and with a rank that gets all outputs; one of them is legal");
  }
  if (bindings.empty() || bindings.back().loss == nullptr) return;
  std::string why;
  try {
    why = bindings.back().loss->why_no_answers();
  } catch (...) {
    rethrow_from(fmt::format("stage {}, why_no_answers()", bindings.back().index));
  }
  if (!why.empty()) throw Error(ErrorCode::kUsage, why);
}

std::span<const Tensor> Pipeline::Impl::infer(const Batch& batch, const InferOptions& how) {
  require_open();
  agree(Call::kInfer, &batch, how.to, [&] { require_answers(how); });
  outputs->require_samples();
  guarded("a batch", [&] { feed->distribute(batch, /*targets=*/false); });
  agree(Call::kValues, nullptr, 0, [this] { check_share(/*targets=*/false); });
  guarded("inference", [&] {
    outputs->begin();
    const SampleRange share = feed->share();
    ForwardRounds::OnOutputs take = [&](SampleRange samples, std::span<const Tensor> made) {
      if (!how.on_outputs) return outputs->add(made);
      calling("on_outputs", [&] { how.on_outputs(samples, made); });
    };
    (void)rounds->run(
        Phase::kGenerate, options.training.seed, share,
        [&](std::span<const SampleRange> ranges) -> const BatchLoader::Batch& {
          return feed->cut(ranges, share.first);
        },
        take);
    if (how.to == InferOptions::kEveryRank) {
      outputs->gather_to_all();
    } else if (how.to != InferOptions::kWhereMade) {
      outputs->gather_to(how.to);
    }
    job.world.collectives->barrier();  // an error of any rank reaches the others in this call
  });
  return outputs->tensors();
}

Pipeline::Pipeline(Communicator& world, const PipelineOptions& options,
                   const StageFactory& make_stage, const DataSource& source)
    : impl_(std::make_unique<Impl>(world, options, make_stage, Impl::Batches{nullptr, &source})) {}
Pipeline::Pipeline(Communicator& world, const PipelineOptions& options,
                   const StageFactory& make_stage, const BatchSpec& batches) {
  Impl::Batches from{.own = make_batch_shapes(batches), .source = nullptr, .feed = batches.feed};
  from.source = from.own.get();
  PipelineOptions compared = options;
  compared.checks.configuration.emplace_back("BatchSpec", to_text(batches));
  impl_ = std::make_unique<Impl>(world, compared, make_stage, std::move(from));
}
Pipeline::~Pipeline() = default;

JobLayout PipelineAccess::plan_layout(Communicator& world, const PipelineOptions& options,
                                      const StageFactory& make_stage, const DataSource& source) {
  const bool planned =
      world.size() == 1 && (options.shape.pipeline > 1 || options.shape.replicas > 1);
  JobContext job(world, options, planned ? JobSize::kPlanned : JobSize::kStarted);
  JobLayout layout;
  job.guarded([&] {
    ComputeContext compute(job.place.device(), options.devices.threads);
    const ThreadTeam team(compute);
    compute.set_tf32(options.devices.tf32);
    layout = build_layout(job, options, compute, make_stage, source, /*any_size=*/false).layout;
  });
  return layout;
}

StepReport Pipeline::train_step() { return impl_->train_step(); }
StepReport Pipeline::train_step(const Batch& batch) { return impl_->train_on(Call::kTrain, batch); }
StepReport Pipeline::accumulate(const Batch& batch) {
  return impl_->train_on(Call::kAccumulate, batch);
}
StepReport Pipeline::forward_backward(const Batch& batch) {
  return impl_->train_on(Call::kGradients, batch);
}
StepReport Pipeline::optimizer_step() { return impl_->optimizer_step(); }
void Pipeline::drop_gradients() { impl_->drop_gradients(); }
EvaluationReport Pipeline::evaluate(const Batch& batch) { return impl_->evaluate(batch); }
EvaluationReport Pipeline::evaluate(const DataSource& source, std::int64_t samples) {
  return impl_->evaluate(source, samples);
}
double Pipeline::evaluate_own(std::int64_t samples) {
  return impl_->evaluate(*impl_->batches.source, samples).loss;
}
std::span<const Tensor> Pipeline::infer(std::span<const Tensor> inputs,
                                        const InferOptions& options) {
  return impl_->infer({.inputs = {inputs.begin(), inputs.end()}, .targets = {}}, options);
}
BatchShare Pipeline::share() const { return impl_->feed->passed(); }
bool Pipeline::usable() const { return !impl_->closed && !impl_->failed; }
const Error* Pipeline::failure() const { return impl_->failed ? &*impl_->failed : nullptr; }
void Pipeline::set_learning_rate(double rate) { impl_->set_learning_rate({.peak = rate}); }
void Pipeline::set_learning_rate(const LearningRate& rate) { impl_->set_learning_rate(rate); }
void Pipeline::close() { impl_->close(); }
std::uint64_t Pipeline::step() const { return impl_->step.done; }
void Pipeline::set_step(std::uint64_t step) {
  impl_->require_idle();
  if (step > kMostSteps) throw_usage("set_step({}); legal are 0 to {}", step, kMostSteps);
  if (impl_->step.open()) {
    throw_usage(
        "set_step() in the middle of a step: optimizer_step() or drop_gradients() comes before");
  }
  impl_->step.done = step;
}
const JobLayout& PipelineAccess::layout(const Pipeline& pipeline) { return pipeline.impl_->layout; }

std::vector<Pipeline::Owned> Pipeline::parameters() {
  std::vector<Owned> owned;
  for (const StageBinding& binding : impl_->bindings) {
    ParameterSet* set = binding.parameters;
    if (set == nullptr) continue;
    int index = 0;
    for (Parameter* parameter : set->all()) {
      owned.push_back({.stage = binding.index,
                       .owner = impl_->layout.parameters.is_owner(binding.index, index++),
                       .parameter = parameter});
    }
  }
  return owned;
}

DataLoader Pipeline::loader(std::shared_ptr<const Dataset> data, LoaderOptions options) {
  return impl_->make_loader(std::move(data), options);
}

std::vector<Pipeline::Owned> Pipeline::buffers() {
  std::vector<Owned> owned;
  for (const StageBinding& binding : impl_->bindings) {
    ParameterSet* set = binding.parameters;
    if (set == nullptr) continue;
    for (Parameter* buffer : set->buffers()) {
      owned.push_back({.stage = binding.index, .owner = true, .parameter = buffer});
    }
  }
  return owned;
}

void Pipeline::values_changed() {
  impl_->run_call(Call::kValuesChanged, "tied parameters", [&] {
    impl_->tied->mark_values_changed();
    impl_->tied->broadcast_tied_values();
  });
}

std::vector<OptimizerState> Pipeline::optimizer_state() {
  if (impl_->gradients == nullptr) return {};
  const InCall in_call(impl_->busy);
  return impl_->gradients->optimizer_state();
}

void PipelineAccess::require_idle(const Pipeline& pipeline) { pipeline.impl_->require_idle(); }
Collectives& PipelineAccess::world(Pipeline& pipeline) {
  return *pipeline.impl_->job.world.collectives;
}
void PipelineAccess::guarded(Pipeline& pipeline, const std::function<void()>& body) {
  pipeline.impl_->guarded(body);
}
void PipelineAccess::guarded(Pipeline& pipeline, const std::string& who,
                             const std::function<void()>& body) {
  pipeline.impl_->guarded(who, body);
}

void PipelineAccess::run_call(Pipeline& pipeline, Call call, const std::string& who,
                              const std::function<void()>& body) {
  pipeline.impl_->run_call(call, who, body);
}

Tensor PipelineAccess::before_open_step(const Pipeline& pipeline, const Tensor& value) {
  return pipeline.impl_->step.open() ? pipeline.impl_->stage_buffers->kept(value) : value;
}

void PipelineAccess::saved(Pipeline& pipeline, std::uint64_t step) {
  pipeline.impl_->job.activity->saved(step);
}
const std::vector<std::string>& PipelineAccess::hosts(const Pipeline& pipeline) {
  return pipeline.impl_->job.hosts;
}
std::span<const double> PipelineAccess::busy_seconds(const Pipeline& pipeline) {
  if (pipeline.impl_->gradients == nullptr) return {};
  return pipeline.impl_->gradients->record().busy_seconds();
}

void PipelineAccess::set_step_flags(Pipeline& pipeline, std::function<std::uint32_t()> mine) {
  if (pipeline.impl_->gradients != nullptr) {
    pipeline.impl_->gradients->record().set_flags(std::move(mine));
  }
}
std::uint32_t PipelineAccess::step_flags(const Pipeline& pipeline) {
  return static_cast<std::uint32_t>(pipeline.impl_->step.totals.flags);
}

std::vector<TraceEvent> PipelineAccess::trace(const Pipeline& pipeline) {
  if (pipeline.impl_->engine == nullptr) return {};
  const auto events = pipeline.impl_->engine->trace();
  return {events.begin(), events.end()};
}

ComputeContext& Pipeline::compute() { return *impl_->compute; }
const StepOutcome& PipelineAccess::last_outcome(const Pipeline& pipeline) {
  return pipeline.impl_->engine->outcome();
}

}  // namespace sluice
