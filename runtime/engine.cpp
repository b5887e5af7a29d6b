#include "runtime/engine.hpp"

#include <fmt/format.h>

#include <optional>
#include <string>
#include <utility>

#include "comm/error.hpp"
#include "runtime/slots.hpp"

namespace sluice {
namespace {

// A stage of this rank with the pools its ops name.
struct LocalStage {
  StageBinding binding;
  SlotPool* input = nullptr;        // own kInput; null on stage 0
  SlotPool* output = nullptr;       // own kOutput, or the next stage's kInput at a local hand-over
  SlotPool* grad_output = nullptr;  // own kGradOutput; null on the last stage
  SlotPool* grad_input = nullptr;   // own kGradInput, or the previous stage's kGradOutput
  SlotPool* state = nullptr;
  ActionSeconds seconds;
};

std::size_t index_of(std::int32_t value) { return static_cast<std::size_t>(value); }

const char* describe(SlotState state) {
  switch (state) {
    case SlotState::kFree:
      return "free";
    case SlotState::kPosted:
      return "posted";
    case SlotState::kFilled:
      return "filled";
    case SlotState::kSending:
      return "being sent";
  }
  return "unknown";
}

}  // namespace

struct Engine::Impl {
  explicit Impl(const EngineConfig& config_in);

  const StepOutcome& run(const StepRequest& request_in, StepActions* actions);
  void execute(const PlanOp& op, StepActions* actions);
  void post_recv(const PlanOp& op);
  void wait_recv(const PlanOp& op);
  void start_send(const PlanOp& op);
  void wait_send(const PlanOp& op);
  void release(const PlanOp& op);
  void compute(const PlanOp& op);
  void forward(LocalStage& local, const PlanOp& op, StageContext& ctx);
  void backward(LocalStage& local, const PlanOp& op, StageContext& ctx);

  void bind_stages();
  void wait(Ticket ticket);
  LocalStage& local(const PlanOp& op);
  SlotPool* own_pool(LocalStage& stage, BufferKind kind) const;
  void bind_messages();
  Slot& message_slot(const PlanOp& op);
  // The slot `kind` of `op` in `pool`, which must be in state `needed`.
  Slot& expect(SlotPool* pool, const PlanOp& op, BufferKind kind, SlotState needed);
  MessageHeader header_of(const PlanOp& op, const Tensor& tensor, std::size_t index,
                          std::size_t count) const;
  void require_micro_batch(const PlanOp& op) const;
  [[noreturn]] void refuse(const PlanOp& op, const std::string& why) const;
  void record(TraceTrack track, const PlanOp& op, double start, double end);
  std::int64_t samples(const PlanOp& op) const {
    return request.micro_batches[index_of(op.micro_batch)].count;
  }

  EngineConfig config;
  const RankPlan& mine;
  std::vector<SlotPool> pools;
  std::vector<LocalStage> locals;
  std::vector<std::int32_t> local_of_stage;  // [global stage] index into locals or -1
  std::unique_ptr<Transport> transport;
  Waiter waiter;
  StepRequest request;
  StepOutcome outcome;
  std::vector<TraceEvent> events;
  Slot* last_output = nullptr;
  int in_flight = 0;
  std::vector<Slot*> message_slots;  // [index into mine.ops], null where no message or no slot
  double computed_until = 0;         // when the last compute ended, while only bookkeeping follows
};

Engine::Impl::Impl(const EngineConfig& config_in)
    : config(config_in),
      mine(config_in.plan->ranks[index_of(config_in.rank)]),
      waiter(config_in.communicator->local_size()) {
  pools.reserve(mine.pools.size());
  std::size_t open = 1;
  for (const BufferPool& pool : mine.pools) {
    pools.emplace_back(pool, *config.edges, config.compute->device());
    if (pool.kind != BufferKind::kState) {
      const auto edge = config.edges->inputs(config.edges->largest(), SlotPool::edge_of(pool));
      open += static_cast<std::size_t>(pool.count) * edge.size();
    }
  }
  transport = make_message_transport(*config.communicator, open);
  bind_stages();
  bind_messages();
  outcome.actions.resize(locals.size());
  if (!config.stages.empty() && config.stages.back().loss != nullptr) {
    outcome.losses.resize(index_of(config.plan->micro_batches));
  }
  events.reserve(config.trace_events);
}

void Engine::Impl::bind_stages() {
  const int stages = config.plan->placement.stages();
  local_of_stage.assign(index_of(stages), -1);
  locals.resize(config.stages.size());
  for (std::size_t i = 0; i < locals.size(); ++i) {
    locals[i].binding = config.stages[i];
    locals[i].seconds.stage = config.stages[i].index;
    local_of_stage[index_of(config.stages[i].index)] = static_cast<std::int32_t>(i);
  }
  for (SlotPool& pool : pools) {
    const BufferPool& what = pool.description();
    LocalStage& stage = locals[index_of(local_of_stage[index_of(what.stage)])];
    const auto neighbour = [&](int other) -> LocalStage* {
      if (other < 0 || other >= stages || local_of_stage[index_of(other)] < 0) return nullptr;
      return &locals[index_of(local_of_stage[index_of(other)])];
    };
    switch (what.kind) {
      case BufferKind::kInput:
        stage.input = &pool;
        if (LocalStage* previous = neighbour(what.stage - 1)) previous->output = &pool;
        break;
      case BufferKind::kGradOutput:
        stage.grad_output = &pool;
        if (LocalStage* next = neighbour(what.stage + 1)) next->grad_input = &pool;
        break;
      case BufferKind::kOutput:
        stage.output = &pool;
        break;
      case BufferKind::kGradInput:
        stage.grad_input = &pool;
        break;
      case BufferKind::kState:
        stage.state = &pool;
        break;
    }
  }
}

const StepOutcome& Engine::Impl::run(const StepRequest& request_in, StepActions* actions) {
  request = request_in;
  outcome.busy_seconds = 0;
  outcome.peak_in_flight = 0;
  in_flight = 0;
  computed_until = 0;
  events.clear();
  for (LocalStage& stage : locals) {
    stage.seconds = ActionSeconds{};
    stage.seconds.stage = stage.binding.index;
  }
  for (const PlanOp& op : mine.ops) execute(op, actions);
  for (std::size_t i = 0; i < locals.size(); ++i) outcome.actions[i] = locals[i].seconds;
  return outcome;
}

void Engine::Impl::execute(const PlanOp& op, StepActions* actions) {
  const bool reduces = op.kind == OpKind::kReduceGrad || op.kind == OpKind::kReduceTied ||
                       op.kind == OpKind::kOptimizer;
  if (reduces && actions == nullptr) refuse(op, "there is nobody to reduce");
  if (reduces || op.kind == OpKind::kStartSend) computed_until = 0;
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
      return compute(op);
    case OpKind::kRelease:
      return release(op);
    case OpKind::kReduceGrad:
      return actions->reduce_grad(op.stage);
    case OpKind::kReduceTied:
      return actions->reduce_tied(op.channel);
    case OpKind::kOptimizer:
      return actions->optimizer();
  }
}

void Engine::Impl::post_recv(const PlanOp& op) {
  Slot& slot = message_slot(op);
  const Channel& channel = config.plan->channels[index_of(op.channel)];
  if (slot.state != SlotState::kFree)
    refuse(op, "its slot is " + std::string(describe(slot.state)));
  SlotPool* pool =
      own_pool(local(op), op.action == ActionKind::kRecvForward ? BufferKind::kInput
                                                                : BufferKind::kGradOutput);
  pool->shape(slot, samples(op));
  slot.tickets.clear();
  if (config.trace_events > 0) slot.started = steady_seconds();
  const std::size_t count = slot.tensors.size();
  for (std::size_t i = 0; i < count; ++i) {
    if (slot.tensors[i].data == nullptr) continue;
    slot.tickets.push_back(transport->post_recv(channel.from_rank, channel.tag, slot.buffers[i],
                                                header_of(op, slot.tensors[i], i, count)));
  }
  slot.state = SlotState::kPosted;
}

void Engine::Impl::wait_recv(const PlanOp& op) {
  Slot& slot = message_slot(op);
  if (slot.state != SlotState::kPosted) {
    refuse(op, "it waits for a receive that was never posted (the slot is " +
                   std::string(describe(slot.state)) + ")");
  }
  for (const Ticket ticket : slot.tickets) wait(ticket);
  for (std::size_t i = 0; i < slot.tensors.size(); ++i) {
    if (slot.tensors[i].data == nullptr) continue;
    const MessageHeader& header = slot.buffers[i].header();
    std::array<std::int64_t, kMaxDims> dims = {};
    for (std::size_t d = 0; d < header.rank; ++d) dims[d] = header.shape[d];
    slot.tensors[i].spec.shape = Shape(std::span<const std::int64_t>(dims.data(), header.rank));
  }
  slot.state = SlotState::kFilled;
  if (config.trace_events > 0) {
    record(TraceTrack::kReceives, op, slot.started, steady_seconds());
  }
}

void Engine::Impl::start_send(const PlanOp& op) {
  Slot& slot = message_slot(op);
  const Channel& channel = config.plan->channels[index_of(op.channel)];
  if (slot.state != SlotState::kFilled)
    refuse(op, "its slot is " + std::string(describe(slot.state)));
  slot.tickets.clear();
  if (config.trace_events > 0) slot.started = steady_seconds();
  const std::size_t count = slot.tensors.size();
  for (std::size_t i = 0; i < count; ++i) {
    if (slot.tensors[i].data == nullptr) continue;
    slot.buffers[i].header() = header_of(op, slot.tensors[i], i, count);
    slot.tickets.push_back(transport->start_send(channel.to_rank, channel.tag, slot.buffers[i]));
  }
  slot.state = SlotState::kSending;
}

void Engine::Impl::wait_send(const PlanOp& op) {
  Slot& slot = message_slot(op);
  if (slot.state != SlotState::kSending)
    refuse(op, "its slot is " + std::string(describe(slot.state)));
  for (const Ticket ticket : slot.tickets) wait(ticket);
  slot.state = SlotState::kFree;
  if (config.trace_events > 0) record(TraceTrack::kSends, op, slot.started, steady_seconds());
}

void Engine::Impl::release(const PlanOp& op) {
  LocalStage& stage = local(op);
  for (int k = 0; k < kBufferKinds; ++k) {
    const auto kind = static_cast<BufferKind>(k);
    const std::int32_t index = op.slot(kind);
    if (index < 0) continue;
    SlotPool* pool = own_pool(stage, kind);
    if (pool == nullptr || index >= pool->count()) refuse(op, "it names no slot");
    Slot& slot = pool->slot(index);
    if (slot.state != SlotState::kFilled) {
      refuse(op, "its slot is " + std::string(describe(slot.state)));
    }
    slot.state = SlotState::kFree;
  }
}

void Engine::Impl::compute(const PlanOp& op) {
  LocalStage& stage = local(op);
  require_micro_batch(op);
  const SampleRange& range = request.micro_batches[index_of(op.micro_batch)];
  StageContext ctx{.compute = *config.compute,
                   .stage = op.stage,
                   .micro_batch = op.micro_batch,
                   .slot = op.slot(BufferKind::kState),
                   .phase = request.phase,
                   .step = request.step,
                   .seed = request.seed,
                   .first_sample = range.first,
                   .samples = range.count,
                   .loss_scale = request.loss_scale,
                   .inputs = {},
                   .collective = config.collective};
  if (op.stage == 0) {
    ctx.inputs = request.batch->inputs[index_of(op.micro_batch)];
  } else {
    ctx.inputs = expect(stage.input, op, BufferKind::kInput, SlotState::kFilled).tensors;
  }
  // Reading the clock costs more than what lies between two actions in a row.
  const double start = computed_until > 0 ? computed_until : steady_seconds();
  if (op.action == ActionKind::kForward) {
    forward(stage, op, ctx);
  } else {
    backward(stage, op, ctx);
  }
  const double end = steady_seconds();
  computed_until = end;
  outcome.busy_seconds += end - start;
  ActionSeconds::Sum& sum = op.action == ActionKind::kForward    ? stage.seconds.forward
                            : op.action == ActionKind::kBackward ? stage.seconds.backward
                            : op.action == ActionKind::kBackwardInput
                                ? stage.seconds.backward_input
                                : stage.seconds.backward_weight;
  sum.seconds += end - start;
  ++sum.count;
  if (config.trace_events > 0) record(TraceTrack::kCompute, op, start, end);
}

void Engine::Impl::forward(LocalStage& stage, const PlanOp& op, StageContext& ctx) {
  expect(stage.state, op, BufferKind::kState, SlotState::kFree).state = SlotState::kFilled;
  if (++in_flight > outcome.peak_in_flight) outcome.peak_in_flight = in_flight;
  Slot& output = expect(stage.output, op, BufferKind::kOutput, SlotState::kFree);
  stage.output->shape(output, samples(op));
  if (op.stage == 0) stage.binding.stage->check_inputs(ctx.inputs);
  stage.binding.stage->forward(ctx, ctx.inputs, output.tensors);
  output.state = SlotState::kFilled;
  if (stage.binding.loss != nullptr) {
    last_output = &output;
    if (request.phase != Phase::kGenerate) {
      const auto& targets = request.batch->targets[index_of(op.micro_batch)];
      LossResult& result = outcome.losses[index_of(op.micro_batch)];
      result.weight = stage.binding.loss->target_weight(targets);
      stage.binding.loss->loss(ctx, output.tensors, targets, &result.sum);
    }
  }
  if (config.plan->forward_only) --in_flight;
}

void Engine::Impl::backward(LocalStage& stage, const PlanOp& op, StageContext& ctx) {
  expect(stage.state, op, BufferKind::kState, SlotState::kFilled);
  const bool last = stage.binding.loss != nullptr;
  Slot& gradient = last
                       ? expect(stage.output, op, BufferKind::kOutput, SlotState::kFilled)
                       : expect(stage.grad_output, op, BufferKind::kGradOutput, SlotState::kFilled);
  if (op.action == ActionKind::kBackwardWeight) {
    stage.binding.split->backward_weight(ctx, gradient.tensors);
    --in_flight;
    return;
  }
  Slot* grad_input = nullptr;
  if (op.stage > 0) {
    grad_input = &expect(stage.grad_input, op, BufferKind::kGradInput, SlotState::kFree);
    stage.grad_input->shape(*grad_input, samples(op));
  }
  const std::span<const Tensor> grad_inputs =
      grad_input == nullptr ? std::span<const Tensor>() : grad_input->tensors;
  if (op.action == ActionKind::kBackward) {
    stage.binding.stage->backward(ctx, gradient.tensors, grad_inputs);
    --in_flight;
  } else {
    stage.binding.split->backward_input(ctx, gradient.tensors, grad_inputs);
  }
  if (grad_input != nullptr) grad_input->state = SlotState::kFilled;
}

void Engine::Impl::wait(Ticket ticket) {
  if (transport->test(ticket)) return;
  computed_until = 0;
  waiter.reset();
  while (!transport->test(ticket)) {
    if (config.interrupt != nullptr) config.interrupt->poll();
    waiter.pause();
  }
}

LocalStage& Engine::Impl::local(const PlanOp& op) {
  const std::int32_t index = local_of_stage[index_of(op.stage)];
  if (index < 0) refuse(op, "the stage is not on this rank");
  return locals[index_of(index)];
}

SlotPool* Engine::Impl::own_pool(LocalStage& stage, BufferKind kind) const {
  switch (kind) {
    case BufferKind::kInput:
      return stage.input;
    case BufferKind::kOutput:
      return stage.output;
    case BufferKind::kGradOutput:
      return stage.grad_output;
    case BufferKind::kGradInput:
      return stage.grad_input;
    case BufferKind::kState:
      return stage.state;
  }
  return nullptr;
}

// Which slot a message op means, once for all steps.
void Engine::Impl::bind_messages() {
  message_slots.assign(mine.ops.size(), nullptr);
  for (std::size_t i = 0; i < mine.ops.size(); ++i) {
    const PlanOp& op = mine.ops[i];
    std::optional<BufferKind> kind;
    if (op.action == ActionKind::kRecvForward) kind = BufferKind::kInput;
    if (op.action == ActionKind::kSendForward) kind = BufferKind::kOutput;
    if (op.action == ActionKind::kRecvBackward) kind = BufferKind::kGradOutput;
    if (op.action == ActionKind::kSendBackward) kind = BufferKind::kGradInput;
    const bool has_channel = op.channel >= 0 && index_of(op.channel) < config.plan->channels.size();
    if (!kind || !has_channel || local_of_stage[index_of(op.stage)] < 0) continue;
    SlotPool* pool = own_pool(local(op), *kind);
    const std::int32_t index = op.slot(*kind);
    if (pool == nullptr || index < 0 || index >= pool->count()) continue;
    message_slots[i] = &pool->slot(index);
  }
}

Slot& Engine::Impl::message_slot(const PlanOp& op) {
  Slot* slot = message_slots[static_cast<std::size_t>(&op - mine.ops.data())];
  if (slot == nullptr) refuse(op, "it names no channel or no slot of a message");
  require_micro_batch(op);
  return *slot;
}

Slot& Engine::Impl::expect(SlotPool* pool, const PlanOp& op, BufferKind kind, SlotState needed) {
  const std::int32_t index = op.slot(kind);
  if (pool == nullptr || index < 0 || index >= pool->count()) refuse(op, "it names no slot");
  Slot& slot = pool->slot(index);
  if (slot.state != needed) {
    refuse(op, fmt::format("a slot it needs {} is {}", describe(needed), describe(slot.state)));
  }
  return slot;
}

void Engine::Impl::require_micro_batch(const PlanOp& op) const {
  if (op.micro_batch < 0 || index_of(op.micro_batch) >= request.micro_batches.size()) {
    refuse(op, "it names no micro-batch of the step");
  }
}

MessageHeader Engine::Impl::header_of(const PlanOp& op, const Tensor& tensor, std::size_t index,
                                      std::size_t count) const {
  MessageHeader header;
  header.phase = static_cast<std::uint8_t>(request.phase);
  header.dtype = static_cast<std::uint8_t>(tensor.spec.dtype);
  header.step = request.step;
  header.channel = op.channel;
  header.micro_batch = op.micro_batch;
  header.tensor = static_cast<std::uint16_t>(index);
  header.tensor_count = static_cast<std::uint16_t>(count);
  header.rank = static_cast<std::uint32_t>(tensor.shape().rank());
  for (int d = 0; d < tensor.shape().rank(); ++d) {
    header.shape[static_cast<std::size_t>(d)] = static_cast<std::int32_t>(tensor.shape()[d]);
  }
  header.bytes = tensor.spec.bytes();
  return header;
}

void Engine::Impl::refuse(const PlanOp& op, const std::string& why) const {
  throw Error(ErrorCode::kPlan,
              fmt::format("the plan of schedule '{}' breaks at {} on pipeline rank {}: {}",
                          config.plan->schedule_name, to_string(op), config.rank, why));
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

const StepOutcome& Engine::outcome() const { return impl_->outcome; }

std::span<const Tensor> Engine::outputs() const {
  if (impl_->last_output == nullptr) return {};
  return impl_->last_output->tensors;
}

std::span<const TraceEvent> Engine::trace() const { return impl_->events; }

std::size_t Engine::buffer_bytes(const Plan& plan, int rank, const EdgeTable& edges) {
  std::size_t bytes = 0;
  for (const BufferPool& pool : plan.ranks[index_of(rank)].pools) {
    bytes += SlotPool::bytes(pool, edges);
  }
  return bytes;
}

}  // namespace sluice
