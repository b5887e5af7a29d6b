#include "comm/nccl/nccl_queue.hpp"

#include <fmt/core.h>

#include <utility>

#include <sluice/error.hpp>

#include "comm/base/index.hpp"

namespace sluice {

namespace {

[[noreturn]] void misused(const std::string& why) {
  throw Error(ErrorCode::kInternal, "NCCL's queue: " + why);
}

}  // namespace

struct NcclQueue::Operation {
  enum class Kind : std::uint8_t { kSend, kRecv, kAllReduce, kAddShards };
  Kind kind = Kind::kSend;
  std::int32_t nccl_stream = 0;
  std::int32_t peer = 0;
  const Event* ready = nullptr;
  std::byte* data = nullptr;  // not written by a send
  std::size_t bytes = 0;
  ShardSum sum = {};
};

struct NcclQueue::Group {
  enum class State : std::uint8_t { kFree, kOpen, kPending, kIssuing, kIssued };
  State state = State::kFree;
  std::uint64_t number = 0;           // distinguishes its tickets from those of the next use
  std::int32_t tickets = 0;           // not returned
  std::vector<Operation> operations;  // keeps its capacity
  std::vector<bool> touched;          // [nccl_stream]
  std::vector<Event> ends;            // [nccl_stream]
};

struct NcclQueue::NcclStream {
  std::unique_ptr<NcclCommunicator> communicator;
  Stream stream;
};

NcclQueue::NcclQueue(Device device, std::size_t max_open, int local_ranks)
    : device_(device), groups_(max_open), pending_(max_open), waiter_(local_ranks) {
  free_.reserve(max_open);
  for (std::size_t i = max_open; i-- > 0;) free_.push_back(static_cast<std::int32_t>(i));
}

NcclQueue::~NcclQueue() { abort(); }

int NcclQueue::add(std::unique_ptr<NcclCommunicator> communicator) {
  if (open_ >= 0) misused("a nccl_stream is added inside a group");
  if (communicator->device() != device_) {
    misused(fmt::format("a nccl_stream of {} is added to a queue of {}",
                        to_string(communicator->device()), to_string(device_)));
  }
  // High: a message or a sum, of which another rank's work depends, is not to wait for the rest of
  // this rank's kernels.
  NcclStream nccl_stream{std::move(communicator), Stream(device_, StreamPriority::kHigh)};
  communicators_.push_back(nccl_stream.communicator.get());
  nccl_streams_.push_back(std::move(nccl_stream));
  for (Group& group : groups_) {
    group.ends.emplace_back(device_);
    group.touched.push_back(false);  // of groups still open too
  }
  return static_cast<int>(nccl_streams_.size()) - 1;
}

NcclCommunicator& NcclQueue::communicator(int nccl_stream) const {
  return *nccl_streams_[at(nccl_stream)].communicator;
}

void NcclQueue::begin_group() {
  if (open_ >= 0) misused("a group begins inside a group");
  if (free_.empty()) misused(fmt::format("more than {} groups are open", groups_.size()));
  open_ = free_.back();
  free_.pop_back();
  Group& group = groups_[at(open_)];
  group.state = Group::State::kOpen;
  group.number = ++numbers_;
  group.tickets = 0;
  group.operations.clear();
  group.touched.assign(nccl_streams_.size(), false);
}

NcclTicket NcclQueue::append(Operation operation) {
  if (open_ < 0) misused("an operation is given outside a group");
  Group& group = groups_[at(open_)];
  group.touched.at(at(operation.nccl_stream)) = true;
  if (operation.ready != nullptr && operation.ready->native() == nullptr) operation.ready = nullptr;
  group.operations.push_back(operation);
  ++group.tickets;
  return {.group = open_, .nccl_stream = operation.nccl_stream, .number = group.number};
}

NcclTicket NcclQueue::send(int nccl_stream, int peer, std::span<const std::byte> data,
                           const Event& ready) {
  return append({.kind = Operation::Kind::kSend,
                 .nccl_stream = nccl_stream,
                 .peer = peer,
                 .ready = &ready,
                 .data = const_cast<std::byte*>(data.data()),
                 .bytes = data.size()});
}

NcclTicket NcclQueue::recv(int nccl_stream, int peer, std::span<std::byte> data,
                           const Event& ready) {
  return append({.kind = Operation::Kind::kRecv,
                 .nccl_stream = nccl_stream,
                 .peer = peer,
                 .ready = &ready,
                 .data = data.data(),
                 .bytes = data.size()});
}

NcclTicket NcclQueue::all_reduce_sum(int nccl_stream, std::span<float> values, const Event& ready) {
  return append({.kind = Operation::Kind::kAllReduce,
                 .nccl_stream = nccl_stream,
                 .ready = &ready,
                 .data = std::as_writable_bytes(values).data(),
                 .bytes = values.size_bytes()});
}

NcclTicket NcclQueue::add_shards(int nccl_stream, const ShardSum& sum) {
  const NcclTicket ticket =
      append({.kind = Operation::Kind::kAddShards, .nccl_stream = nccl_stream, .sum = sum});
  if (groups_[at(open_)].operations.size() > 1) misused("a kernel is alone in its group");
  return ticket;
}

void NcclQueue::end_group() {
  if (open_ < 0) misused("a group ends that never began");
  const std::int32_t index = std::exchange(open_, -1);
  Group& group = groups_[at(index)];
  if (group.operations.empty()) {
    group.state = Group::State::kIssued;
    recycle(index);
    return;
  }
  group.state = Group::State::kPending;
  pending_[(first_pending_ + pending_count_++) % pending_.size()] = index;
  progress();
}

void NcclQueue::progress() {
  if (!nccl_streams_ready()) return;
  for (;;) {
    if (issuing_ >= 0) {
      record(std::exchange(issuing_, -1));
    }
    if (pending_count_ == 0) return;
    const std::int32_t index = pending_[first_pending_];
    first_pending_ = (first_pending_ + 1) % pending_.size();
    --pending_count_;
    issue(groups_[at(index)]);
    issuing_ = index;
    if (!nccl_streams_ready()) return;
  }
}

// Asks every nccl_stream, so that none fails unseen; those of the group being issued decide, as
// nothing is under way on the others.
bool NcclQueue::nccl_streams_ready() {
  bool ready = true;
  for (const NcclStream& nccl_stream : nccl_streams_)
    ready = nccl_stream.communicator->ready() && ready;
  return ready;
}

// The streams wait for the operations' ready events first. Nothing may follow the group on them
// until NCCL has issued it.
void NcclQueue::issue(Group& group) {
  group.state = Group::State::kIssuing;
  for (const Operation& operation : group.operations) {
    if (operation.ready != nullptr) {
      nccl_streams_[at(operation.nccl_stream)].stream.view().wait(*operation.ready);
    }
  }
  if (group.operations.front().kind == Operation::Kind::kAddShards) {
    const Operation& kernel = group.operations.front();
    use_device(device_);
    launch_shard_sum(kernel.sum, nccl_streams_[at(kernel.nccl_stream)].stream.view());
    return;
  }
  NcclGroup calls(*nccl_streams_[at(group.operations.front().nccl_stream)].communicator);
  for (const Operation& operation : group.operations) {
    const NcclStream& nccl_stream = nccl_streams_[at(operation.nccl_stream)];
    const std::span<std::byte> data(operation.data, operation.bytes);
    switch (operation.kind) {
      case Operation::Kind::kSend:
        nccl_stream.communicator->send(operation.peer, data, nccl_stream.stream.view());
        break;
      case Operation::Kind::kRecv:
        nccl_stream.communicator->recv(operation.peer, data, nccl_stream.stream.view());
        break;
      case Operation::Kind::kAllReduce:
        nccl_stream.communicator->all_reduce_sum(
            {reinterpret_cast<float*>(operation.data), operation.bytes / sizeof(float)},
            nccl_stream.stream.view());
        break;
      case Operation::Kind::kAddShards:
        break;
    }
  }
  calls.end();
}

void NcclQueue::record(std::int32_t index) {
  Group& group = groups_[at(index)];
  for (std::size_t nccl_stream = 0; nccl_stream < nccl_streams_.size(); ++nccl_stream) {
    if (group.touched[nccl_stream])
      group.ends[nccl_stream].record(nccl_streams_[nccl_stream].stream.view());
  }
  group.state = Group::State::kIssued;
  recycle(index);
}

// A group can be used again once it is issued and all its tickets are returned.
void NcclQueue::recycle(std::int32_t index) {
  Group& group = groups_[at(index)];
  if (group.state != Group::State::kIssued || group.tickets > 0) return;
  group.state = Group::State::kFree;
  free_.push_back(index);
}

NcclQueue::Group& NcclQueue::group_of(const NcclTicket& ticket) {
  Group& group = groups_[at(ticket.group)];
  if (group.number != ticket.number || group.tickets == 0) {
    misused("a ticket is used after its return");
  }
  return group;
}

void NcclQueue::give_back(NcclTicket& ticket) {
  --group_of(ticket).tickets;
  recycle(ticket.group);
  ticket = NcclTicket{};
}

bool NcclQueue::issued(const NcclTicket& ticket) {
  if (ticket.group < 0) return true;
  const Group& group = group_of(ticket);
  if (group.state != Group::State::kIssued) progress();
  return group.state == Group::State::kIssued;
}

bool NcclQueue::done(NcclTicket& ticket) {
  if (ticket.group < 0) return true;
  progress();
  const Group& group = group_of(ticket);
  if (group.state != Group::State::kIssued || !group.ends[at(ticket.nccl_stream)].done()) {
    return false;
  }
  give_back(ticket);
  return true;
}

void NcclQueue::wait_on(StreamView stream, NcclTicket& ticket) {
  if (ticket.group < 0) return;
  const Group& group = group_of(ticket);
  if (group.state != Group::State::kIssued)
    misused("a stream waits for an operation that is not issued");
  stream.wait(group.ends[at(ticket.nccl_stream)]);
  give_back(ticket);
}

void NcclQueue::drop(NcclTicket& ticket) {
  if (ticket.group >= 0) give_back(ticket);
}

void NcclQueue::wait_issued(const NcclTicket& ticket, Interrupt* interrupt) {
  wait_until(waiter_, interrupt, {WaitSubject::What::kNccl}, [&] { return issued(ticket); });
}

void NcclQueue::wait(NcclTicket& ticket, Interrupt* interrupt) {
  wait_until(waiter_, interrupt, {WaitSubject::What::kNccl}, [&] { return done(ticket); });
}

void NcclQueue::finalize(Interrupt* interrupt) {
  const WaitSubject subject = {WaitSubject::What::kNccl};
  wait_until(waiter_, interrupt, subject, [&] {
    progress();
    return issuing_ < 0 && pending_count_ == 0;
  });
  for (NcclStream& nccl_stream : nccl_streams_) {
    Event end(device_);
    end.record(nccl_stream.stream.view());
    wait_until(waiter_, interrupt, subject, [&] {
      progress();
      return end.done();
    });
  }
  for (NcclStream& nccl_stream : nccl_streams_) nccl_stream.communicator->finalize(interrupt);
}

void NcclQueue::abort() noexcept { NcclCommunicator::abort_all(communicators_); }

}  // namespace sluice
