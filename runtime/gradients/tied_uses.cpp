#include "runtime/gradients/tied_uses.hpp"

#include <algorithm>
#include <utility>

#include <sluice/operators.hpp>

#include "comm/base/index.hpp"
#include "stages/tensor/stale_gradients.hpp"

namespace sluice {
namespace {

Parameter* find(const TiedUse& use, std::span<const StageBinding> stages) {
  for (const StageBinding& binding : stages) {
    if (binding.index == use.stage) return binding.parameters->all()[at(use.index)];
  }
  return nullptr;
}

}  // namespace

TiedUses::TiedUses(JobContext& job, const StepPlans& plans, const ParameterTable& table,
                   ComputeContext& compute, NcclRoutes* nccl, HostMirror& mirror,
                   std::vector<StageBinding> stages)
    : job_(job),
      placement_(plans.placement()),
      table_(table),
      ties_(table.tied),
      compute_(compute),
      nccl_(nccl),
      stages_(std::move(stages)),
      mirror_(mirror) {
  for (const TiedParameter& tie : ties_) {
    std::vector<Parameter*>& uses = parameters_.emplace_back();
    for (const TiedUse& use : tie.uses) uses.push_back(find(use, stages_));
  }
  if (!plans.train.forward_only) allocate_receive_buffer();
  const std::size_t messages = most_open(table);
  open_.reserve(messages);
  for (std::size_t i = 0; i < messages; ++i) ready_.emplace_back(compute.device());
}

int TiedUses::peer_of(std::size_t group, std::size_t use) const {
  return rank_of(group, parameters_[group].front() != nullptr ? use : 0);
}

// Room for the largest gradient that another rank sends.
void TiedUses::allocate_receive_buffer() {
  std::size_t bytes = 0;
  for (std::size_t group = 0; group < parameters_.size(); ++group) {
    if (rank_of(group, 0) != job_.place.here.pipeline) continue;
    for (std::size_t use = 1; use < parameters_[group].size(); ++use) {
      if (rank_of(group, use) == job_.place.here.pipeline) continue;
      bytes = std::max(bytes, parameters_[group].front()->grad.spec.bytes());
    }
  }
  received_ = std::make_shared<Buffer>(compute_.memory().allocate(bytes));
}

// An upper bound: this rank sends to every other use, or receives once.
std::size_t TiedUses::most_open(const ParameterTable& table) {
  std::size_t messages = 0;
  for (const TiedParameter& tie : table.tied) messages += tie.uses.size();
  return messages;
}

ElementRange TiedUses::summed(std::size_t group, bool whole) const {
  const TiedUse& owner = ties_[group].uses.front();
  const ParameterEntry& entry = table_.stages[at(owner.stage)].parameters[at(owner.index)];
  if (whole) return {0, entry.elements};
  if (table_.cut && !entry.updated) return {};  // nobody reads it
  return entry.part(job_.place.here.replica);
}

void TiedUses::sum_gradients(int group_index, bool whole) {
  const std::size_t group = at(group_index);
  const ElementRange range = summed(group, whole);
  if (range.count == 0) return;
  for (Parameter* use : parameters_[group]) {  // what no micro-batch has written is zero
    if (use != nullptr) zero_if_stale(*use, compute_.stream());
  }
  for (std::size_t use = 1; use < parameters_[group].size(); ++use) {
    Parameter* const mine = parameters_[group][use];
    if (Parameter* const owner = parameters_[group].front(); owner != nullptr) {
      const Tensor sum = elements_of(owner->grad, range);
      Tensor addend = sum;
      addend.data = mine != nullptr ? elements_of(mine->grad, range).data : received_->data();
      if (mine == nullptr) receive(addend, received_, group, use);
      add(compute_, addend, sum);
    } else if (mine != nullptr) {
      send(elements_of(mine->grad, range), mine->memory, group, use);
    }
  }
}

void TiedUses::wait_all_on_stream() {
  for (NcclTicket& ticket : open_) nccl_->wait_on_stream(ticket);
  open_.clear();
}

void TiedUses::broadcast_tied_values() {
  wait_all_on_stream();
  for (std::size_t group = 0; group < parameters_.size(); ++group) {
    const TiedUse& first = ties_[group].uses.front();
    const ElementRange range = table_.at_rest(first.stage, first.index, job_.place.here.replica);
    for (std::size_t use = 1; use < parameters_[group].size(); ++use) {
      const Parameter* const owner = parameters_[group].front();
      Parameter* const mine = parameters_[group][use];
      if (mine != nullptr) mine->bf16_copy_is_current = false;
      if (range.count == 0) continue;
      if (owner != nullptr && mine != nullptr) {
        if (mine->value.data == owner->value.data) continue;  // inference
        const Tensor from = elements_of(owner->value, range);
        copy_async(elements_of(mine->value, range).data, from.data, from.spec.bytes(),
                   compute_.stream());
      } else if (mine != nullptr) {
        receive(elements_of(mine->value, range), mine->memory, group, use);
      } else if (owner != nullptr) {
        send(elements_of(owner->value, range), owner->memory, group, use);
      }
    }
  }
  wait_all_on_stream();
}

void TiedUses::mark_values_changed() {
  for (const StageBinding& binding : stages_) {
    if (ParameterSet* set = binding.parameters) set->mark_values_changed();
  }
}

void TiedUses::receive(const Tensor& tensor, const KeepAlive& memory, std::size_t group,
                       std::size_t use) {
  const int peer = peer_of(group, use);
  if (ties_[group].routes[use].kind != RouteKind::kNccl) {
    const std::span<std::byte> bytes = mirror_.writable_host_copy(tensor);
    job_.group(Axis::kPipeline).collectives->recv(peer, bytes, mirror_.owner(memory));
    mirror_.write_back();
    return;
  }
  Event& ready = ready_[open_.size()];
  ready.record(compute_.stream());
  NcclTicket ticket =
      nccl_->recv(peer, {static_cast<std::byte*>(tensor.data), tensor.spec.bytes()}, ready);
  nccl_->wait_on_stream(ticket);
}

void TiedUses::send(const Tensor& tensor, const KeepAlive& memory, std::size_t group,
                    std::size_t use) {
  const int peer = peer_of(group, use);
  if (ties_[group].routes[use].kind != RouteKind::kNccl) {
    const std::span<const std::byte> bytes = mirror_.read_back(tensor);
    job_.group(Axis::kPipeline).collectives->send(peer, bytes, mirror_.owner(memory));
    return;
  }
  Event& ready = ready_[open_.size()];
  ready.record(compute_.stream());
  open_.push_back(
      nccl_->send(peer, {static_cast<std::byte*>(tensor.data), tensor.spec.bytes()}, ready));
}

}  // namespace sluice
