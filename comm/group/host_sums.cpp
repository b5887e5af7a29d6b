#include "comm/group/host_sums.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <utility>

#include <sluice/error.hpp>

#include "comm/base/index.hpp"
#include "comm/base/joined.hpp"
#include "comm/base/steady_seconds.hpp"
#include "comm/group/open_requests.hpp"

namespace sluice {

namespace {

using What = BlockStep::What;

// Blocks of a part, in floats. Operators let messages advance every few milliseconds, in which a
// fast link takes a MiB or more: so many are on their way at a time. Those of a sum stay in a
// core's cache on one host; a gather adds nothing, and needs no memory for its blocks.
struct Blocks {
  std::size_t size;    // of one
  std::size_t window;  // of those on their way, from all ranks
  std::size_t least;   // blocks on their way from a rank
};
struct Lanes {
  Blocks sums, gathers;
};
constexpr Lanes kOnOneHost = {{32 * 1024, 256 * 1024, 4}, {256 * 1024, 2048 * 1024, 8}};
// MPI sends a message of up to 64 KiB with its header by default. A longer one waits until the
// receiver has answered, which it does between operators.
constexpr Lanes kBetweenHosts = {{15 * 1024, 512 * 1024, 4}, {15 * 1024, 1024 * 1024, 8}};

const Lanes& lanes_of(std::span<const int> hosts) {
  const bool one = std::count(hosts.begin(), hosts.end(), hosts.front()) == std::ssize(hosts);
  return one ? kOnOneHost : kBetweenHosts;
}

// On their way from a rank.
std::size_t most_blocks(const Blocks& blocks, std::size_t ranks) {
  return std::max(blocks.least, blocks.window / blocks.size / (ranks - 1));
}

void add_to(float* __restrict sum, const float* __restrict term, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) sum[i] += term[i];
}

void add_both(const float* __restrict left, const float* __restrict right, float* __restrict sum,
              std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) sum[i] = left[i] + right[i];
}

// The sum may be in the place of an addend.
void add(const float* left, const float* right, float* sum, std::size_t count) {
  if (sum == left) return add_to(sum, right, count);
  if (sum == right) return add_to(sum, left, count);
  add_both(left, right, sum, count);
}

}  // namespace

HostSums::Range HostSums::Range::block(std::size_t floats, std::size_t number) const {
  const std::size_t before = std::min(size, number * floats);
  return {begin + before, std::min(floats, size - before)};
}

HostSums::HostSums(Communicator& comm, const Tags& of_sums, const Tags& of_gathers,
                   Interrupt* interrupt)
    : comm_(comm),
      interrupt_(interrupt),
      waiter_(comm.local_size()),
      sums_{.tags = of_sums},
      gathers_{.tags = of_gathers},
      even_ends_(at(comm.size())),
      slots_(std::make_shared<std::vector<float>>()) {
  set_hosts(std::vector<int>(at(comm.size())));
  reserve(0);
}

void HostSums::set_hosts(std::span<const int> hosts) {
  if (hosts.size() != at(comm_.size())) {
    throw Error(ErrorCode::kInternal,
                fmt::format("hosts of {} ranks, of {}", hosts.size(), comm_.size()), comm_.rank());
  }
  if (comm_.size() == 1) return;
  sums_.steps = scatter_steps(hosts, comm_.rank());
  gathers_.steps = gather_steps(hosts, comm_.rank());
  const Lanes& blocks = lanes_of(hosts);
  for (auto [lane, of] : {std::pair(&sums_, blocks.sums), std::pair(&gathers_, blocks.gathers)}) {
    lane->floats = of.size;
    lane->most = most_blocks(of, hosts.size());
    lane->open.resize(lane->most * at(lane->steps.requests));
  }
  slot_floats_ = 0;
}

std::size_t HostSums::bytes_for(std::span<const int> hosts, int rank, std::size_t count) {
  if (hosts.size() == 1) return 0;
  const Blocks& blocks = lanes_of(hosts).sums;
  return most_blocks(blocks, hosts.size()) * at(scatter_steps(hosts, rank).slots) *
         std::min(blocks.size, count) * sizeof(float);
}

void HostSums::reserve(std::size_t count, std::size_t calls) {
  for (Lane* lane : {&sums_, &gathers_}) {
    while (lane->calls.size() < calls) lane->calls.emplace_back().parts.resize(at(comm_.size()));
  }
  const std::size_t floats = std::min(sums_.floats, count);
  if (slots_.use_count() == 1 && floats <= slot_floats_) return;
  const std::size_t larger = std::max(slot_floats_, floats);
  slots_ = std::make_shared<std::vector<float>>(sums_.most * at(sums_.steps.slots) * larger);
  slot_floats_ = larger;
}

HostSums::Ticket HostSums::start_reduce_scatter(std::span<float> values,
                                                std::span<const std::size_t> ends,
                                                const KeepAlive& owner, double* ended,
                                                std::span<const int> parts) {
  start(sums_, values, ends, owner, ended, parts);
  return started();
}

HostSums::Ticket HostSums::start_gather(std::span<float> values, std::span<const std::size_t> ends,
                                        const KeepAlive& owner) {
  start(gathers_, values, ends, owner, nullptr);
  return started();
}

HostSums::Ticket HostSums::start_sum(std::span<float> values, const KeepAlive& owner,
                                     double* ended) {
  const std::size_t part = (values.size() + even_ends_.size() - 1) / even_ends_.size();
  for (std::size_t rank = 0; rank < even_ends_.size(); ++rank) {
    even_ends_[rank] = std::min(values.size(), (rank + 1) * part);
  }
  start(sums_, values, even_ends_, owner, nullptr);
  start(gathers_, values, even_ends_, owner, ended);
  return started();
}

void HostSums::start(Lane& lane, std::span<float> values, std::span<const std::size_t> ends,
                     const KeepAlive& owner, double* ended, std::span<const int> parts) {
  if (ends.size() != at(comm_.size()) || !std::is_sorted(ends.begin(), ends.end()) ||
      ends.back() != values.size()) {
    throw Error(ErrorCode::kInternal,
                fmt::format("{} values in parts that end at {}; legal: {} ends that ascend to {}",
                            values.size(), joined(ends, ", "), comm_.size(), values.size()),
                comm_.rank());
  }
  if (comm_.size() == 1 || values.empty()) return;
  if (lane.last == lane.calls.size()) lane.calls.emplace_back();
  Call& call = lane.calls[lane.last];
  call.values = values;
  call.parts.resize(ends.size());
  std::size_t largest = 0;
  for (std::size_t rank = 0; rank < ends.size(); ++rank) {
    const std::size_t part = parts.empty() ? rank : at(parts[rank]);
    const std::size_t begin = part == 0 ? 0 : ends[part - 1];
    call.parts[rank] = {begin, ends[part] - begin};
    largest = std::max(largest, call.parts[rank].size);
  }
  call.owner = owner;
  call.ended = ended;
  call.blocks = (largest + lane.floats - 1) / lane.floats;
  call.after = started().sums;
  ++lane.last;
}

HostSums::Ticket HostSums::started() const {
  const auto of = [](const Lane& lane) { return lane.finished + (lane.last - lane.first); };
  return {of(sums_), of(gathers_)};
}

void HostSums::progress() {
  try {
    while (step()) continue;
  } catch (...) {
    abandon();
    throw;
  }
}

void HostSums::wait(const Ticket& ticket) {
  try {
    while (!done(ticket)) {
      const std::uint64_t before = steps_;  // the interrupt may make the next one
      wait_until(waiter_, interrupt_, subject(ticket), [&] { return steps_ != before || step(); });
    }
  } catch (...) {
    abandon();
    throw;
  }
}

// Makes the next step of the lane's block; false: it has to wait, or there is none.
bool HostSums::step(Lane& lane) {
  begin(lane);
  if (lane.ended == lane.begun) return false;
  if (!make(lane, lane.ends, lane.ended, lane.steps.rest[lane.next])) return false;
  ++steps_;
  if (++lane.next < lane.steps.rest.size()) return true;
  lane.next = 0;
  ++lane.ended;
  if (!advance(lane, lane.ends)) return true;
  Call& done = lane.calls[lane.first];
  done.owner.reset();
  if (done.ended != nullptr) *done.ended = steady_seconds();
  ++lane.finished;
  if (++lane.first == lane.last) lane.rewind();
  return true;
}

// In the order of the blocks, so that all ranks post and send in one order.
void HostSums::begin(Lane& lane) {
  while (lane.begins.call != lane.last && lane.begun - lane.ended < lane.most) {
    const Call& call = lane.calls[lane.begins.call];
    if (&lane == &gathers_ ? call.after > sums_.finished : !has_slots(call)) return;
    for (const BlockStep& step : lane.steps.begin) (void)make(lane, lane.begins, lane.begun, step);
    ++lane.begun;
    (void)advance(lane, lane.begins);
  }
}

// Renews them between blocks.
bool HostSums::has_slots(const Call& call) {
  const std::size_t floats = std::min(sums_.floats, call.values.size());
  if (slots_.use_count() == 1 && floats <= slot_floats_) return true;
  if (sums_.begun != sums_.ended) return false;
  reserve(floats);
  return true;
}

// True: that was the call's last block.
bool HostSums::advance(const Lane& lane, Place& place) {
  if (++place.block < lane.calls[place.call].blocks) return false;
  place = {place.call + 1, 0};
  return true;
}

// False: it has to wait. `number`: of the block in the lane.
bool HostSums::make(Lane& lane, const Place& place, std::uint64_t number, const BlockStep& step) {
  const Call& call = lane.calls[place.call];
  const Range range = call.parts[at(step.part)].block(lane.floats, place.block);
  if (range.size == 0) return true;
  const auto floats = [&](int slot) {
    return slot == BlockStep::kValues
               ? call.values.data() + range.begin
               : slots_->data() +
                     (number % lane.most * at(lane.steps.slots) + at(slot)) * slot_floats_;
  };
  if (step.what == What::kAdd) {
    add(floats(step.left), floats(step.right), floats(step.place), range.size);
    return true;
  }
  Request& request = lane.open[number % lane.most * at(lane.steps.requests) + at(step.request)];
  const int tag = step.second_hand ? lane.tags.second_hand : lane.tags.direct;
  const std::span<float> message(floats(step.place), range.size);
  if (step.what == What::kReceive) {
    request = comm_.post_recv(step.peer, tag, std::as_writable_bytes(message));
  } else if (step.what == What::kSend) {
    request = comm_.start_send(step.peer, tag, std::as_bytes(message));
  } else if (step.what == What::kSent) {
    return comm_.test(request);
  } else {
    Arrival arrival;
    arrival.bytes = message.size_bytes();
    if (!comm_.test(request, &arrival)) return false;
    require_size(comm_, message.size_bytes(), arrival);
  }
  return true;
}

// Of what `ticket` needs first.
WaitSubject HostSums::subject(const Ticket& ticket) const {
  const Lane& lane = ticket.sums > sums_.finished ? sums_ : gathers_;
  const BlockStep& step = lane.steps.rest[lane.next];
  const Range range =
      lane.calls[lane.ends.call].parts[at(step.part)].block(lane.floats, lane.ends.block);
  return {step.what == What::kReceived ? WaitSubject::What::kCollectiveReceive
                                       : WaitSubject::What::kCollectiveSend,
          step.peer, step.second_hand ? lane.tags.second_hand : lane.tags.direct,
          range.size * sizeof(float)};
}

void HostSums::abandon() noexcept {
  const bool of_sums = cancel_open(comm_, sums_.open);
  const bool goes_on = cancel_open(comm_, gathers_.open) || of_sums;
  if (goes_on) comm_.keep(slots_);
  for (Lane* lane : {&sums_, &gathers_}) {
    for (; lane->first != lane->last; ++lane->first, ++lane->finished) {
      KeepAlive owner = std::exchange(lane->calls[lane->first].owner, nullptr);
      if (goes_on && owner != nullptr) comm_.keep(std::move(owner));
    }
    lane->ended = lane->begun;
    lane->rewind();
  }
}

}  // namespace sluice
