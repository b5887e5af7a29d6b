#include "runtime/engine/engine.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <deque>
#include <new>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include <sluice/error.hpp>

#include "comm/base/host.hpp"
#include "comm/base/index.hpp"
#include "comm/base/steady_seconds.hpp"
#include "comm/base/throw_error.hpp"
#include "comm/device/profiler_range.hpp"
#include "runtime/engine/device_batch.hpp"
#include "runtime/engine/message_progress.hpp"
#include "runtime/engine/planned_collectives.hpp"
#include "runtime/engine/recorded_calls.hpp"
#include "runtime/engine/slots.hpp"
#include "runtime/engine/stage_table.hpp"
#include "runtime/engine/state_store.hpp"
#include "runtime/engine/unit_walk.hpp"
#include "runtime/group/activity.hpp"
#include "runtime/group/guard.hpp"
#include "runtime/group/host_mirror.hpp"
#include "stages/compute/context_access.hpp"
#include "stages/tensor/stale_gradients.hpp"
#include "stages/tensor/unwritten.hpp"

namespace sluice {
namespace {

// "1F7" as schedules print actions; what moves data has its operation's text.
std::string range_name(const PlanOp& op) {
  if (op.kind != OpKind::kCompute) return to_string(op);
  return to_string(Action{.kind = op.action, .stage = op.stage, .micro_batch = op.micro_batch});
}

// Bytes of payload up to which a host's send counts as bookkeeping: copying them takes below 1 us.
constexpr std::size_t kShortMessage = 4096;

// Measures when a GPU ran each compute op of a step, by timed events on its stream. Does nothing on
// a CPU, where the engine reads its own clock.
class DeviceTimer {
 public:
  // `most`: ops of a step, at most.
  DeviceTimer(Device device, std::size_t most) {
    if (device.kind == DeviceKind::kCpu) return;
    origin_ = Event(device, /*timed=*/true);
    spans_.reserve(most);
    for (std::size_t i = 0; i < most; ++i) {
      spans_.push_back(
          {nullptr, false, Event(device, /*timed=*/true), Event(device, /*timed=*/true)});
    }
  }
  void begin(StreamView stream) {
    used_ = 0;
    if (!spans_.empty()) origin_.record(stream);
  }
  // `op` keeps its address until read(). `follows`: since the last stop(), nothing was put on the
  // stream that it may wait for. Then the end of the last op is the start of this one, which saves
  // an event; the time in which the GPU waits for the host counts as this op's.
  void start(StreamView stream, const PlanOp& op, bool follows = false) {
    if (spans_.empty()) return;
    spans_[used_].op = &op;
    spans_[used_].follows = follows && used_ > 0;
    if (!spans_[used_].follows) spans_[used_].start.record(stream);
  }
  void stop(StreamView stream) {
    if (!spans_.empty()) spans_[used_++].end.record(stream);
  }
  // Requires that all events are done. Calls `take(op, start, end)` for each op in order, with
  // times as steady_seconds().
  template <typename Take>
  void read(const Take& take) {
    if (used_ == 0) return;
    // The two clocks are matched at the end of the last op, which the host has just seen.
    const double now = steady_seconds();
    const double length = spans_[used_ - 1].end.seconds_since(origin_);
    double end = 0;
    for (std::size_t i = 0; i < used_; ++i) {
      const double start = spans_[i].follows ? end : spans_[i].start.seconds_since(origin_);
      end = spans_[i].end.seconds_since(origin_);
      take(*spans_[i].op, now - length + start, now - length + end);
    }
    used_ = 0;
  }

 private:
  struct Span {
    const PlanOp* op = nullptr;
    bool follows = false;
    Event start, end;
  };
  Event origin_;
  std::vector<Span> spans_;
  std::size_t used_ = 0;
};

// Where calls are recorded: gradients that a fold after `pass` leaves to be overwritten.
void mark_folded(const StageBinding& stage, ActionKind pass) {
  if (stage.parameters == nullptr || !stage.stage->overwrites_gradients()) return;
  for (Parameter* each : stage.parameters->all()) {
    if (each->written_by_loss == (pass == ActionKind::kForward)) {
      GradientAccess::set_stale(*each, true);
    }
  }
}

// For its life the compute context waits as an engine does.
class WaitsHere {
 public:
  WaitsHere(ComputeContext& compute, DeviceWait& how)
      : compute_(compute), before_(ContextAccess::set_device_wait(compute, &how)) {}
  ~WaitsHere() { ContextAccess::set_device_wait(compute_, before_); }
  WaitsHere(const WaitsHere&) = delete;
  WaitsHere& operator=(const WaitsHere&) = delete;

 private:
  ComputeContext& compute_;
  DeviceWait* before_;
};

}  // namespace

struct Engine::Impl final : DeviceWait {
  explicit Impl(const EngineConfig& config_in);

  const StepOutcome& run(const StepRequest& request_in, StepActions* actions);
  void execute(const PlanOp& op, StepActions* actions);
  // In place of an op of a micro-batch that this replica does not have and others do: it takes part
  // in their gathers.
  void idle(const PlanOp& op);
  void post_recv(const PlanOp& op);
  void wait_recv(const PlanOp& op);
  void start_send(const PlanOp& op);
  void wait_send(const PlanOp& op);
  // Posts or starts the slot's tensors, in one group with the ops that belong to it; `ticket_of`
  // does so with tensor i.
  template <typename TicketOf>
  void issue(const PlanOp& op, Slot& slot, const TicketOf& ticket_of) {
    Transport& over = transport_of(slot);
    over.hold();
    slot.tickets.assign(slot.tensors.size(), kDoneTicket);
    for (std::size_t i = 0; i < slot.tensors.size(); ++i) {
      if (slot.tensors[i].data != nullptr) slot.tickets[i] = ticket_of(over, i);
    }
    const PlanOp* const next = &op + 1;
    if (next == mine.ops.data() + mine.ops.size() || !next->with_previous) over.flush();
  }
  void start_move(const PlanOp& op);
  void wait_move(const PlanOp& op);
  void release(const PlanOp& op);
  [[nodiscard]] StageContext context_of(const PlanOp& op);
  void compute(const PlanOp& op, StepActions* actions);
  // Once the device has done all work of a step, and no kernel of it waits for another rank: takes
  // and gives back the device's memory.
  void at_rest(StepActions* actions);
  void record_calls(StepActions* actions);
  void forward(LocalStage& local, const PlanOp& op, StageContext& ctx);
  void backward(LocalStage& local, const PlanOp& op, StageContext& ctx);
  void recompute(LocalStage& local, const PlanOp& op, StageContext& ctx);
  // Whether the stage has recomputed what `op` needs. Refuses an op that would overwrite that.
  [[nodiscard]] bool take_recomputed(LocalStage& stage, const PlanOp& op) const;
  // What the stage itself does. `result`: of the loss, on the last stage; else null.
  void call_forward(LocalStage& stage, const PlanOp& op, StageContext& ctx, const Slot& output,
                    LossResult* result);
  void call_backward(LocalStage& stage, const PlanOp& op, StageContext& ctx, const Slot& gradient,
                     std::span<const Tensor> grad_inputs);
  // The slot of an action's result, or of its gradient: a last stage has the loss's in its output.
  static BufferKind gradient_of(const LocalStage& stage) {
    return stage.binding.loss != nullptr ? BufferKind::kOutput : BufferKind::kGradOutput;
  }
  [[nodiscard]] LossResult* result_of(const LocalStage& stage, const PlanOp& op) const {
    if (stage.binding.loss == nullptr || request.phase == Phase::kGenerate) return nullptr;
    return &reinterpret_cast<LossResult*>(losses.data())[op.micro_batch];
  }
  // Runs `body`, which writes `tensors` and reads `inputs`. The first time on a CPU, numbers that
  // it leaves unwritten, and inputs that it changes, are Error(kUsage), which names them: "output
  // 0".
  template <typename Body>
  void watched(bool& was, const char* what, std::span<const Tensor> tensors,
               std::span<const Tensor> inputs, const Body& body) {
    if (was || on_gpu) return body();
    const Unchanged read(inputs);
    for (const Tensor& tensor : tensors) mark_unwritten(tensor);
    body();
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      require_written(tensors[i], fmt::format("{} {}", what, i));
    }
    read.require("input");
    was = true;
  }
  // Runs `body`, the stage's own part of `op`; where a rank computes several virtual replicas, the
  // first F, and the first B or W, on a CPU are held to the gradients that they may write.
  template <typename Body>
  void in_pass(LocalStage& stage, const PlanOp& op, const Body& body) {
    const bool forward = op.action == ActionKind::kForward;
    if (config.plan->fold_every == 0 || on_gpu || op.action == ActionKind::kBackwardInput ||
        op.action == ActionKind::kRecompute ||
        std::exchange(stage.gradients_watched[forward ? 0 : 1], true)) {
      return body();
    }
    watch_gradients(stage.binding, stream(), forward, body);
  }
  // Of the last stage, in inference: sets `outputs` to what infer() gives, on the device.
  void answer(const LocalStage& stage, const PlanOp& op, StageContext& ctx, const Slot& output);
  // Gives `outputs` to whoever asked for them.
  void hand_out(const PlanOp& op);
  // Runs `body`, the stage's own part of `op`; what it throws names the action.
  template <typename Body>
  void in_stage(const LocalStage& stage, const PlanOp& op, StageContext& ctx, const Body& body) {
    const auto where = [&] {
      const bool folds = config.plan->fold_every > 0;
      return fmt::format(
          "stage {}, {} of micro-batch {}{}", op.stage, in_words(op.action),
          folds ? op.micro_batch % config.plan->fold_every : op.micro_batch,
          folds ? fmt::format(" of virtual replica {}", virtual_replica_of(op)) : "");
    };
    try {
      collectives.begin(stage.binding, op, shape_of(op), result_of(stage, op) != nullptr);
      if (units) ctx.units = units->begin(op);
      body();
      if (units) units->end();
      collectives.end();
    } catch (const std::bad_alloc&) {
      throw_error(ErrorCode::kDevice, "{} of step {} on {}: out of host memory", where(),
                  request.step, host_name());
    } catch (...) {
      rethrow_from(where());
    }
  }

  // Where the plan has folds.
  [[nodiscard]] int virtual_replica_of(const PlanOp& op) const {
    return config.first_virtual_replica + op.micro_batch / config.plan->fold_every;
  }
  // As the board of activities has it: a fold is of a virtual replica.
  [[nodiscard]] PlanOp shown(const PlanOp& op) const {
    PlanOp shown = op;
    if (op.kind == OpKind::kFold) shown.micro_batch = virtual_replica_of(op);
    return shown;
  }

  void progress() {
    transport->progress();
    if (config.nccl != nullptr) config.nccl->progress();
    if (config.sums != nullptr) config.sums->progress();
    if (config.sharded != nullptr) config.sharded->progress();
  }
  Transport& transport_of(const Slot& slot) {
    return slot.route == RouteKind::kNccl ? *config.nccl : *transport;
  }
  // Blocks until `done()`, which drives the transport. Polls the interrupt.
  template <typename Done>
  void wait_until(const WaitSubject& subject, const Done& done) {
    if (done()) return;
    computed_until = 0;
    sluice::wait_until(waiter, config.interrupt, subject, [&] {
      progress();
      return done();
    });
  }
  void wait(const PlanOp& op, const Slot& slot);  // for the slot's messages
  void until(const Event& event) override;        // how the compute context waits during a run
  void record_moves();
  // Blocks until the device has done all its work; completes the outcome.
  void drain();
  void fold(const PlanOp& op, StepActions& actions) const;
  void reduce_grad(const PlanOp& op, StepActions& actions);
  void end_sums(const PlanOp& place, StepActions& actions);
  void tally(const PlanOp& op, double start, double end);

  LocalStage& local(const PlanOp& op) {
    LocalStage* const stage = table.stage_of(op);
    if (stage == nullptr) refuse(op, "the stage is not on this rank");
    return *stage;
  }
  const StageTable::Message& message(const PlanOp& op) const {
    const StageTable::Message& message = table.message(op);
    if (message.slot == nullptr) refuse(op, "it names no channel or no slot of a message");
    return message;
  }
  // The slot `kind` of `op`, which must be in state `needed`.
  Slot& expect(const PlanOp& op, BufferKind kind, SlotState needed) const {
    Slot* const slot = table.slot(op, kind);
    if (slot == nullptr) refuse(op, "it names no slot");
    if (slot->state != needed) refuse(op, needed, slot->state);
    return *slot;
  }
  [[noreturn]] void refuse(const PlanOp& op, std::string_view why) const;
  [[noreturn]] void refuse(const PlanOp& op, SlotState needed, SlotState state) const;
  void record(TraceTrack track, const PlanOp& op, double start, double end);
  [[nodiscard]] std::size_t index_in_plan(const PlanOp& op) const {
    return static_cast<std::size_t>(&op - mine.ops.data());
  }
  // Shows that the rank is at `op`, or at `place` in its plan doing what `what` is.
  void now_at(const PlanOp& op) { now_at(op, op); }
  void now_at(const PlanOp& place, const PlanOp& what) {
    if (config.activity == nullptr) return;
    config.activity->at(shown(what), static_cast<std::int32_t>(index_in_plan(place)));
  }
  [[nodiscard]] bool host_takes_part(const PlanOp& op, const StageContext& ctx) const {
    return op.collectives > 0 || ctx.final_gradients != nullptr ||
           (units && config.sharded->units_of(op.stage) > 0);
  }
  // Whether its gradients are added over replicas before the next one's.
  [[nodiscard]] bool sums_after(const PlanOp& op) const {
    return config.sums_each_micro_batch &&
           (op.action == ActionKind::kBackward || op.action == ActionKind::kBackwardWeight);
  }
  UnitShape shape_of(const PlanOp& op) const {
    return {request.micro_batches[at(op.micro_batch)].count, request.positions};
  }
  [[nodiscard]] StreamView stream() const { return config.compute->stream(); }

  EngineConfig config;
  const bool on_gpu;
  const RankPlan& mine;
  StageTable table;
  std::unique_ptr<Transport> transport;
  MessageProgress messages;
  Waiter waiter;
  std::optional<DeviceBatch> own_batch;
  DeviceBatch& batch;  // of the step, where the stages compute
  DeviceTimer timer;   // of a GPU's compute ops
  RecordedCalls calls;
  PlannedCollectives collectives;
  std::optional<UnitWalk> units;  // none: parameters are whole
  HostBuffer losses;              // LossResult per micro-batch, written by the device
  Event drained;
  StepRequest request;
  StepOutcome outcome;
  std::vector<TraceEvent> events;
  std::deque<HostMirror> mirrors;  // [output] of the last stage
  std::vector<Tensor> outputs;     // of a micro-batch; for `on_outputs` in host memory
  std::vector<Buffer> answers_memory;
  int in_flight = 0;
  std::vector<std::string> range_names;  // [op] for a profiler; empty where none listens
  // When the last compute ended, while only bookkeeping follows, else 0; on a GPU any other number.
  double computed_until = 0;
};

Engine::Impl::Impl(const EngineConfig& config_in)
    : config(config_in),
      on_gpu(config.compute->stream().native() != nullptr),
      mine(config_in.plan->ranks[at(config_in.rank)]),
      table(config_in),
      transport(make_message_transport(
          *config.communicator, table.tensors() + 1, config.piece_bytes,
          table.has_staged() ? config.compute->device() : Device{}, table.memory(), stream())),
      messages(*config_in.compute, *transport, config_in.sums, config_in.sharded),
      waiter(config_in.communicator->local_size()),
      batch(config_in.batch != nullptr ? *config_in.batch : own_batch.emplace(*config_in.compute)),
      timer(config_in.compute->device(), mine.ops.size()),
      calls(*config_in.compute, mine.ops.size(), config_in.cuda_graphs),
      collectives(config),
      drained(config_in.compute->device()) {
  if (config.sharded != nullptr) units.emplace(*config.sharded, mine.ops);
  outcome.actions.resize(table.stages().size());
  if (!config.stages.empty() && config.stages.back().loss != nullptr) {
    const std::size_t count = at(config.plan->micro_batches);
    losses = HostBuffer(config.compute->device(), count * sizeof(LossResult));
    outcome.losses = {reinterpret_cast<const LossResult*>(losses.data()), count};
  }
  events.reserve(config.trace_events);
  if (!profiler_listens()) return;
  for (const PlanOp& op : mine.ops) range_names.push_back(range_name(op));
}

const StepOutcome& Engine::Impl::run(const StepRequest& request_in, StepActions* actions) {
  request = request_in;
  const PlanOp* const beyond = table.first_op_out_of_range(request.micro_batches.size());
  if (beyond != nullptr && !(units && config.plan->forward_only)) {
    refuse(*beyond, "it names no micro-batch of the step");
  }
  outcome.busy_seconds = 0;
  outcome.peak_in_flight = 0;
  in_flight = 0;
  computed_until = 0;
  events.clear();
  if (units) units->begin_run();
  for (LocalStage& stage : table.stages()) {
    stage.seconds = ActionSeconds{};
    stage.seconds.stage = stage.binding.index;
    stage.recomputed = -1;
    calling([&] { return fmt::format("stage {}, before its first action", stage.binding.index); },
            [&] {
              if (units) units->lend(stage.binding.index);
              stage.binding.stage->begin_step(*config.compute);
              if (units) units->take_back(stage.binding.index);
            });
  }
  calls.begin_step(request.step, request.loss_scale);
  timer.begin(stream());
  batch.load(*request.batch, request.micro_batches.size());
  const WaitsHere waits(*config.compute, *this);
  ActivityBoard* const activity = config.activity;
  if (activity != nullptr) activity->begin_run(request.phase, request.step);
  {
    std::optional<MessageProgress::Scope> progressing;
    if (config.progress_in_actions && !on_gpu) progressing.emplace(messages);
    for (const PlanOp& op : mine.ops) {
      now_at(op);
      if (op.micro_batch >= std::ssize(request.micro_batches)) {
        idle(op);
      } else {
        execute(op, actions);
      }
      messages.rethrow();  // a receive that failed in an operator is not taken as complete
    }
  }
  if (config.plan->forward_only || actions == nullptr) {
    drain();
    at_rest(actions);
  }
  if (activity != nullptr) activity->enter(Doing::kCalling);
  return outcome;
}

void Engine::Impl::idle(const PlanOp& op) {
  if (op.kind != OpKind::kCompute) return;
  (void)units->begin(op);
  units->end();
}

void Engine::Impl::execute(const PlanOp& op, StepActions* actions) {
  const ProfilerRange range(range_names.empty() ? nullptr : range_names[index_in_plan(op)].c_str());
  const bool reduces = op.kind == OpKind::kFold || op.kind == OpKind::kReduceGrad ||
                       op.kind == OpKind::kReduceTied || op.kind == OpKind::kOptimizer;
  if (reduces && actions == nullptr) refuse(op, "nothing can reduce it");
  if (reduces || (on_gpu && op.kind == OpKind::kStartSend)) computed_until = 0;
  switch (op.kind) {
    case OpKind::kPostRecv:
      return post_recv(op);
    case OpKind::kWaitRecv:
      return wait_recv(op);
    case OpKind::kStartSend:
      return start_send(op);
    case OpKind::kWaitSend:
      return wait_send(op);
    case OpKind::kCompute:
      return compute(op, actions);
    case OpKind::kRelease:
      return release(op);
    case OpKind::kStartMove:
      return start_move(op);
    case OpKind::kWaitMove:
      return wait_move(op);
    case OpKind::kUnshard:
    case OpKind::kReshard:
      if (!units) refuse(op, "this replica has all parameters");
      return op.kind == OpKind::kUnshard ? units->unshard(op) : units->reshard(op);
    case OpKind::kFold:
      return fold(op, *actions);
    case OpKind::kReduceGrad:
      return reduce_grad(op, *actions);
    case OpKind::kReduceTied:
      end_sums(op, *actions);
      return actions->reduce_tied(op.channel);
    case OpKind::kOptimizer:
      end_sums(op, *actions);
      actions->measure();
      drain();
      at_rest(actions);
      return actions->optimizer();
  }
}

void Engine::Impl::post_recv(const PlanOp& op) {
  const auto& [slot_place, peer, tag] = message(op);
  Slot& slot = *slot_place;
  if (slot.state != SlotState::kFree) refuse(op, SlotState::kFree, slot.state);
  slot.pool->shape(slot, shape_of(op));
  if (config.trace_events > 0) slot.started = steady_seconds();
  issue(op, slot, [&, peer = peer, tag = tag](Transport& over, std::size_t i) {
    // What arrived last has left host memory; what read it is on the stream already.
    if (const DeviceSide* side = slot.buffers[i].device) until(side->arrived);
    return over.post_recv(peer, tag, slot.buffers[i],
                          header_of(op, slot, i, request.phase, request.step));
  });
  slot.state = SlotState::kPosted;
}

void Engine::Impl::wait_recv(const PlanOp& op) {
  Slot& slot = *message(op).slot;
  if (slot.state != SlotState::kPosted) {
    refuse(op, fmt::format("it waits for a receive that was never posted (the slot is {})",
                           describe(slot.state)));
  }
  wait(op, slot);
  for (std::size_t i = 0; i < slot.tensors.size(); ++i) {
    if (slot.tensors[i].data != nullptr) take_shape(slot, i);
  }
  slot.state = SlotState::kFilled;
  if (config.trace_events > 0) {
    record(TraceTrack::kReceives, op, slot.started, steady_seconds());
  }
}

void Engine::Impl::start_send(const PlanOp& op) {
  const auto& [slot_place, peer, tag] = message(op);
  Slot& slot = *slot_place;
  if (slot.state != SlotState::kFilled) refuse(op, SlotState::kFilled, slot.state);
  if (config.trace_events > 0) slot.started = steady_seconds();
  issue(op, slot, [&, peer = peer, tag = tag](Transport& over, std::size_t i) {
    slot.buffers[i].header() = header_of(op, slot, i, request.phase, request.step);
    if (slot.headers[i].bytes > kShortMessage) computed_until = 0;
    return over.start_send(peer, tag, slot.buffers[i]);
  });
  slot.state = SlotState::kSending;
}

void Engine::Impl::wait_send(const PlanOp& op) {
  Slot& slot = *message(op).slot;
  if (slot.state != SlotState::kSending) refuse(op, SlotState::kSending, slot.state);
  wait(op, slot);
  slot.state = SlotState::kFree;
  if (config.trace_events > 0) record(TraceTrack::kSends, op, slot.started, steady_seconds());
}

// Moves are made in this order: a state may come into the slot that another one leaves, from a
// place that it has yet to reach.
void Engine::Impl::start_move(const PlanOp& op) {
  if (config.store == nullptr) refuse(op, "there is no store");
  const bool leaves = op.action == ActionKind::kOffload;
  Slot& stored = expect(op, BufferKind::kStored, leaves ? SlotState::kFree : SlotState::kFilled);
  Slot* const slot = table.slot(op, BufferKind::kState);
  if (slot == nullptr) refuse(op, "it names no slot of a state");
  const bool open = slot->state == SlotState::kFree || slot->state == SlotState::kSending;
  if (leaves ? slot->state != SlotState::kFilled : !open) {
    refuse(op, leaves ? SlotState::kFilled : SlotState::kFree, slot->state);
  }
  slot->move = config.store->start({.leaves = leaves,
                                    .stage = op.stage,
                                    .micro_batch = op.micro_batch,
                                    .place = op.slot(BufferKind::kStored),
                                    .state = slot->whole});
  slot->state = leaves ? SlotState::kSending : SlotState::kPosted;
  stored.state = leaves ? SlotState::kFilled : SlotState::kFree;
}

void Engine::Impl::wait_move(const PlanOp& op) {
  const bool leaves = op.action == ActionKind::kOffload;
  Slot& slot = expect(op, BufferKind::kState, leaves ? SlotState::kSending : SlotState::kPosted);
  if (on_gpu) computed_until = 0;  // the stream may wait
  wait_until({.what = WaitSubject::What::kStore}, [&] { return config.store->done(slot.move); });
  slot.state = leaves ? SlotState::kFree : SlotState::kFilled;
}

void Engine::Impl::release(const PlanOp& op) {
  for (int k = 0; k < kBufferKinds; ++k) {
    const auto kind = static_cast<BufferKind>(k);
    if (op.slot(kind) < 0) continue;
    expect(op, kind, SlotState::kFilled).state = SlotState::kFree;
  }
}

StageContext Engine::Impl::context_of(const PlanOp& op) {
  const SampleRange& range = request.micro_batches[at(op.micro_batch)];
  const int all = static_cast<int>(request.micro_batches.size());
  const int group = config.plan->fold_every > 0 ? config.plan->fold_every : all;
  const Slot* const state = table.slot(op, BufferKind::kState);  // null: expect() refuses the op
  return {.compute = *config.compute,
          .stage = op.stage,
          .micro_batch = op.micro_batch % group,
          .micro_batches = group,
          .state = state != nullptr ? state->memory : StageContext::State{},
          .slot = op.slot(BufferKind::kState),
          .phase = request.phase,
          .step = calls.step(),
          .seed = request.seed,
          .first_sample = range.first,
          .samples = range.count,
          .positions = request.positions,
          .loss_scale = calls.loss_scale(),
          .inputs = op.stage == 0 ? batch.inputs(op.micro_batch) : std::span<const Tensor>(),
          .collective =
              config.plan->forward_only ? nullptr : &collectives.over(CollectiveAxis::kReplica),
          .tensor = &collectives.over(CollectiveAxis::kTensor),
          .first_batch = request.first_batch,
          .last_batch = request.last_batch};
}

void Engine::Impl::compute(const PlanOp& op, StepActions* actions) {
  if (on_gpu) progress();  // issuing an action takes a while
  LocalStage& stage = local(op);
  StageContext ctx = context_of(op);
  if (op.stage > 0) ctx.inputs = expect(op, BufferKind::kInput, SlotState::kFilled).tensors;
  if (&op == stage.first_gradient && config.gradients_in_parts && actions != nullptr) {
    end_sums(op, *actions);
    computed_until = 0;
  }
  const bool sums = sums_after(op);
  if ((sums || &op == stage.last_gradient) && actions != nullptr) {
    ctx.final_gradients = actions->final_gradients(op.stage);
  }
  // Reading the clock, or a GPU's, costs more than what lies between two actions in a row.
  const bool follows = computed_until > 0;
  const double start = follows ? computed_until : steady_seconds();
  if (on_gpu) timer.start(stream(), op, follows);
  ctx.recomputed = take_recomputed(stage, op);
  if (op.action == ActionKind::kForward) {
    forward(stage, op, ctx);
  } else if (op.action == ActionKind::kRecompute) {
    recompute(stage, op, ctx);
  } else {
    backward(stage, op, ctx);
    if (sums && actions != nullptr) actions->end_gradients(op.stage);
  }
  if (on_gpu) {  // drain() tells how long it took
    timer.stop(stream());
    computed_until = start;
    return;
  }
  computed_until = steady_seconds();
  tally(op, start, computed_until);
}

void Engine::Impl::fold(const PlanOp& op, StepActions& actions) const {
  const int leaf = op.micro_batch / config.plan->fold_every;
  if (op.action == ActionKind::kForward) return actions.fold_forward(op.stage, leaf);
  actions.fold_backward(op.stage, leaf);
}

void Engine::Impl::reduce_grad(const PlanOp& op, StepActions& actions) {
  if (!on_gpu || config.trace_events == 0) return actions.reduce_grad(op.stage);
  timer.start(stream(), op);
  actions.reduce_grad(op.stage);
  timer.stop(stream());
}

// What this waits for is REDUCE_GRAD's, not that of `place`, where the rank is in its plan.
void Engine::Impl::end_sums(const PlanOp& place, StepActions& actions) {
  for (const PlanOp& op : mine.ops) {
    if (op.kind != OpKind::kReduceGrad) continue;
    now_at(place, op);
    const std::optional<TimeSpan> ran = actions.end_sums(op.stage);
    if (ran && !on_gpu && config.trace_events > 0) {
      record(TraceTrack::kSums, op, ran->start, ran->end);
    }
  }
  now_at(place);
}

void Engine::Impl::tally(const PlanOp& op, double start, double end) {
  if (op.kind == OpKind::kReduceGrad) return record(TraceTrack::kSums, op, start, end);
  LocalStage& stage = local(op);
  outcome.busy_seconds += end - start;
  stage.seconds.add(op.action, end - start);
  if (config.trace_events > 0) record(TraceTrack::kCompute, op, start, end);
}

void Engine::Impl::record_moves() {
  for (const auto& [move, time] : config.store->take_made()) {
    if (config.trace_events == 0) continue;
    const PlanOp op{.kind = OpKind::kStartMove,
                    .action = move.leaves ? ActionKind::kOffload : ActionKind::kFetch,
                    .stage = move.stage,
                    .micro_batch = move.micro_batch};
    record(TraceTrack::kMoves, op, time.start, time.end);
  }
}

void Engine::Impl::drain() {
  if (on_gpu) {
    drained.record(stream());
    until(drained);
    timer.read([&](const PlanOp& op, double start, double end) { tally(op, start, end); });
  }
  if (config.store != nullptr) record_moves();
  for (std::size_t i = 0; i < table.stages().size(); ++i) {
    outcome.actions[i] = table.stages()[i].seconds;
  }
}

void Engine::Impl::forward(LocalStage& stage, const PlanOp& op, StageContext& ctx) {
  expect(op, BufferKind::kState, SlotState::kFree).state = SlotState::kFilled;
  if (++in_flight > outcome.peak_in_flight) outcome.peak_in_flight = in_flight;
  Slot& output = expect(op, BufferKind::kOutput, SlotState::kFree);
  output.pool->shape(output, shape_of(op));
  LossResult* const result = result_of(stage, op);
  const bool last = op.stage + 1 == config.plan->placement.stages();
  const bool gives = last && request.phase == Phase::kGenerate;
  in_stage(stage, op, ctx, [&] {
    if (result != nullptr) {
      result->weight = target_weight(stage.binding, request.batch->targets[at(op.micro_batch)]);
    }
    calls.run(index_in_plan(op), *stage.binding.stage, ctx, host_takes_part(op, ctx),
              [&] { in_pass(stage, op, [&] { call_forward(stage, op, ctx, output, result); }); });
    if (gives) answer(stage, op, ctx, output);
  });
  output.state = SlotState::kFilled;
  if (config.plan->forward_only) --in_flight;
  if (gives && request.on_outputs != nullptr) hand_out(op);
}

void Engine::Impl::answer(const LocalStage& stage, const PlanOp& op, StageContext& ctx,
                          const Slot& output) {
  outputs = output.tensors;
  const std::span<const TensorSpec> answers = config.edges->answers(shape_of(op));
  if (answers.empty()) return;
  outputs.clear();
  answers_memory.resize(answers.size());
  for (std::size_t i = 0; i < answers.size(); ++i) {
    Buffer& memory = answers_memory[i];
    if (memory.size() < answers[i].bytes()) {
      memory = {};
      memory = config.compute->memory().allocate(answers[i].bytes(), DeviceMemory::Use::kTemporary);
    }
    outputs.push_back({memory.data(), answers[i]});
  }
  stage.binding.loss->answer(ctx, output.tensors, outputs);
}

void Engine::Impl::call_forward(LocalStage& stage, const PlanOp& op, StageContext& ctx,
                                const Slot& output, LossResult* result) {
  watched(stage.forward_watched, "output", output.tensors, ctx.inputs,
          [&] { stage.binding.stage->forward(ctx, ctx.inputs, output.tensors); });
  if (result == nullptr) return;
  const std::span<const Tensor> targets = batch.targets(op.micro_batch);
  if (on_gpu) return stage.binding.loss->loss(ctx, output.tensors, targets, &result->sum);
  // Further calls of a loss that makes collectives would be made on some ranks alone.
  const bool first = ctx.phase == Phase::kTrain && !std::exchange(stage.loss_watched, true);
  watch_loss(stage.binding, ctx, output.tensors, targets,
             first && !collectives.in_loss() && ctx.units == nullptr, &result->sum);
}

void Engine::Impl::call_backward(LocalStage& stage, const PlanOp& op, StageContext& ctx,
                                 const Slot& gradient, std::span<const Tensor> grad_inputs) {
  if (op.action == ActionKind::kBackwardWeight) {
    return stage.binding.split->backward_weight(ctx, gradient.tensors);
  }
  watched(stage.backward_watched, "the gradient of input", grad_inputs, ctx.inputs, [&] {
    if (op.action == ActionKind::kBackward) {
      stage.binding.stage->backward(ctx, gradient.tensors, grad_inputs);
    } else {
      stage.binding.split->backward_input(ctx, gradient.tensors, grad_inputs);
    }
  });
}

void Engine::Impl::backward(LocalStage& stage, const PlanOp& op, StageContext& ctx) {
  expect(op, BufferKind::kState, SlotState::kFilled);
  Slot& gradient = expect(op, gradient_of(stage), SlotState::kFilled);
  Slot* grad_input = nullptr;
  if (op.stage > 0 && op.action != ActionKind::kBackwardWeight) {
    grad_input = &expect(op, BufferKind::kGradInput, SlotState::kFree);
    grad_input->pool->shape(*grad_input, shape_of(op));
  }
  const std::span<const Tensor> grad_inputs =
      grad_input == nullptr ? std::span<const Tensor>() : grad_input->tensors;
  in_stage(stage, op, ctx, [&] {
    calls.run(index_in_plan(op), *stage.binding.stage, ctx, host_takes_part(op, ctx), [&] {
      in_pass(stage, op, [&] { call_backward(stage, op, ctx, gradient, grad_inputs); });
    });
  });
  if (op.action != ActionKind::kBackwardInput) --in_flight;
  if (grad_input != nullptr) grad_input->state = SlotState::kFilled;
}

bool Engine::Impl::take_recomputed(LocalStage& stage, const PlanOp& op) const {
  if (stage.recomputed < 0) return false;
  const bool next = op.action == ActionKind::kBackward || op.action == ActionKind::kBackwardInput;
  if (!next || op.micro_batch != stage.recomputed) {
    refuse(op, fmt::format("the stage holds what it has recomputed of micro-batch {}, whose B or I "
                           "must come first",
                           stage.recomputed));
  }
  stage.recomputed = -1;
  return true;
}

void Engine::Impl::recompute(LocalStage& stage, const PlanOp& op, StageContext& ctx) {
  expect(op, BufferKind::kState, SlotState::kFilled);
  in_stage(stage, op, ctx, [&] {
    calls.run(index_in_plan(op), *stage.binding.stage, ctx, host_takes_part(op, ctx),
              [&] { stage.binding.stage->recompute(ctx); });
  });
  stage.recomputed = op.micro_batch;
}

void Engine::Impl::at_rest(StepActions* actions) {
  ContextAccess::free_outgrown(*config.compute);
  if (calls.begin_recording()) record_calls(actions);
}

// The actions of the step that has just run, in its order: their calls put work on a stream that
// records it. They write gradients as they did.
void Engine::Impl::record_calls(StepActions* actions) {
  const auto set_stale_gradients = [&](bool stale) {
    if (actions == nullptr) return;  // the run adds to none
    for (LocalStage& stage : table.stages()) {
      ParameterSet* const set = stage.binding.parameters;
      if (set != nullptr && stage.binding.stage->overwrites_gradients())
        GradientAccess::set_stale(*set, stale);
    }
  };
  set_stale_gradients(request.first_batch);
  for (const PlanOp& op : mine.ops) {
    if (op.kind == OpKind::kFold) mark_folded(local(op).binding, op.action);
    if (op.kind != OpKind::kCompute) continue;
    LocalStage& stage = local(op);
    StageContext ctx = context_of(op);
    ctx.recomputed = take_recomputed(stage, op);
    if (op.action == ActionKind::kRecompute) stage.recomputed = op.micro_batch;
    if (sums_after(op)) continue;
    const bool reports = &op == stage.last_gradient && actions != nullptr &&
                         actions->final_gradients(op.stage) != nullptr;
    if (reports || host_takes_part(op, ctx)) continue;
    for (int k = 0; k < kBufferKinds; ++k) {
      Slot* const slot = table.slot(op, static_cast<BufferKind>(k));
      if (slot != nullptr) slot->pool->shape(*slot, shape_of(op));
    }
    if (op.stage > 0) ctx.inputs = table.slot(op, BufferKind::kInput)->tensors;
    in_stage(stage, op, ctx, [&] {
      calls.record(index_in_plan(op), *stage.binding.stage, ctx, [&] {
        if (op.action == ActionKind::kForward) {
          return call_forward(stage, op, ctx, *table.slot(op, BufferKind::kOutput),
                              result_of(stage, op));
        }
        if (op.action == ActionKind::kRecompute) return stage.binding.stage->recompute(ctx);
        const bool writes = op.stage > 0 && op.action != ActionKind::kBackwardWeight;
        call_backward(
            stage, op, ctx, *table.slot(op, gradient_of(stage)),
            writes ? table.slot(op, BufferKind::kGradInput)->tensors : std::span<const Tensor>());
      });
    });
  }
  set_stale_gradients(false);  // measure() has left none
}

void Engine::Impl::hand_out(const PlanOp& op) {
  if (on_gpu) {
    while (mirrors.size() < outputs.size()) mirrors.emplace_back(*config.compute);
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      outputs[i].data = mirrors[i].read_back(outputs[i]).data();
    }
    computed_until = 0;
  }
  (*request.on_outputs)(op.micro_batch, outputs);
}

void Engine::Impl::wait(const PlanOp& op, const Slot& slot) {
  Transport& over = transport_of(slot);
  if (!slot.device.empty()) computed_until = 0;  // the stream may wait
  for (std::size_t i = 0; i < slot.tickets.size(); ++i) {
    const Ticket ticket = slot.tickets[i];
    if (over.test(ticket)) continue;
    const StageTable::Message& place = table.message(op);
    const bool receives = op.kind == OpKind::kWaitRecv;
    wait_until({.what = receives ? WaitSubject::What::kReceive : WaitSubject::What::kSend,
                .peer = place.peer,
                .tag = place.tag,
                .bytes = slot.headers[i].bytes,
                .needed_op = table.needed_op(op)},
               [&] { return over.test(ticket); });
  }
}

void Engine::Impl::until(const Event& event) {
  wait_until({.what = WaitSubject::What::kDevice}, [&] { return event.done(); });
}

void Engine::Impl::refuse(const PlanOp& op, SlotState needed, SlotState state) const {
  refuse(op, fmt::format("a slot it needs {} is {}", describe(needed), describe(state)));
}

void Engine::Impl::refuse(const PlanOp& op, std::string_view why) const {
  throw_error(ErrorCode::kPlan, "the plan of schedule '{}' breaks at {} on pipeline rank {}: {}",
              config.plan->schedule_name, to_string(op), config.rank, why);
}

void Engine::Impl::record(TraceTrack track, const PlanOp& op, double start, double end) {
  if (events.size() == events.capacity()) return;
  events.push_back({.start = start,
                    .end = end,
                    .action = static_cast<std::uint8_t>(op.action),
                    .track = track,
                    .stage = static_cast<std::int16_t>(op.stage),
                    .micro_batch = op.micro_batch});
}

Engine::Engine(const EngineConfig& config) : impl_(std::make_unique<Impl>(config)) {}
Engine::~Engine() = default;

const StepOutcome& Engine::run(const StepRequest& request, StepActions* actions) {
  return impl_->run(request, actions);
}

void Engine::poll() { impl_->progress(); }

const StepOutcome& Engine::outcome() const { return impl_->outcome; }

std::span<const TraceEvent> Engine::trace() const { return impl_->events; }

}  // namespace sluice
