#include "comm/group/host_sums.hpp"

#include <fmt/core.h>

#include <algorithm>

#include <sluice/error.hpp>

#include "comm/base/index.hpp"
#include "comm/base/joined.hpp"
#include "comm/group/open_requests.hpp"

namespace sluice {

namespace {

using What = BlockStep::What;

// Of a part: how large they are, and how many are on their way at a time. Those of a sum stay in a
// core's cache; a gather adds nothing, and needs no memory for them.
struct Blocks {
  std::size_t floats, in_flight;
};
constexpr Blocks kSumBlocks = {32 * 1024, 4};
constexpr Blocks kGatherBlocks = {256 * 1024, 8};

struct Range {
  std::size_t begin = 0;
  std::size_t size = 0;
};

// The part of `rank` of the values that are divided at `ends`.
Range part_of(std::span<const std::size_t> ends, int rank) {
  const std::size_t begin = rank == 0 ? 0 : ends[at(rank) - 1];
  return {begin, ends[at(rank)] - begin};
}

// Of a part, in blocks of `floats`; empty beyond the part's end.
Range block_of(std::span<const std::size_t> ends, int rank, std::size_t floats, std::size_t block) {
  const Range part = part_of(ends, rank);
  const std::size_t before = std::min(part.size, block * floats);
  return {part.begin + before, std::min(floats, part.size - before)};
}

std::size_t largest_part(std::span<const std::size_t> ends) {
  std::size_t largest = 0;
  for (int rank = 0; rank < static_cast<int>(ends.size()); ++rank) {
    largest = std::max(largest, part_of(ends, rank).size);
  }
  return largest;
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

HostSums::HostSums(Communicator& comm, const Tags& tags, Interrupt* interrupt)
    : comm_(comm),
      tags_(tags),
      interrupt_(interrupt),
      waiter_(comm.local_size()),
      even_ends_(at(comm.size())),
      blocks_(std::make_shared<std::vector<float>>()) {
  set_hosts(std::vector<int>(at(comm.size())));
  reserve(0);
}

void HostSums::set_hosts(std::span<const int> hosts) {
  if (hosts.size() != at(comm_.size())) {
    throw Error(ErrorCode::kInternal,
                fmt::format("hosts of {} ranks, of {}", hosts.size(), comm_.size()), comm_.rank());
  }
  if (comm_.size() == 1) return;
  scatter_ = scatter_steps(hosts, comm_.rank());
  gather_ = gather_steps(hosts, comm_.rank());
  open_.resize(std::max(kSumBlocks.in_flight * at(scatter_.requests),
                        kGatherBlocks.in_flight * at(gather_.requests)));
}

void HostSums::reserve(std::size_t count, std::size_t calls) {
  while (calls_.size() < calls) calls_.emplace_back().ends.resize(at(comm_.size()));
  const std::size_t needed =
      kSumBlocks.in_flight * at(scatter_.slots) * std::min(kSumBlocks.floats, count);
  if (blocks_.use_count() > 1 || blocks_->size() < needed) {
    blocks_ = std::make_shared<std::vector<float>>(needed);
  }
}

HostSums::Ticket HostSums::start_reduce_scatter(std::span<float> values,
                                                std::span<const std::size_t> ends,
                                                const KeepAlive& owner) {
  return start(scatter_, tags_.addends, values, ends, owner);
}

HostSums::Ticket HostSums::start_gather(std::span<float> values, std::span<const std::size_t> ends,
                                        const KeepAlive& owner) {
  return start(gather_, tags_.parts, values, ends, owner);
}

HostSums::Ticket HostSums::start_sum(std::span<float> values, const KeepAlive& owner) {
  const std::size_t part = (values.size() + even_ends_.size() - 1) / even_ends_.size();
  for (std::size_t rank = 0; rank < even_ends_.size(); ++rank) {
    even_ends_[rank] = std::min(values.size(), (rank + 1) * part);
  }
  start_reduce_scatter(values, even_ends_, owner);
  return start_gather(values, even_ends_, owner);
}

HostSums::Ticket HostSums::start(const BlockSteps& steps, int tag, std::span<float> values,
                                 std::span<const std::size_t> ends, const KeepAlive& owner) {
  if (ends.size() != at(comm_.size()) || !std::is_sorted(ends.begin(), ends.end()) ||
      ends.back() != values.size()) {
    throw Error(ErrorCode::kInternal,
                fmt::format("{} values in parts that end at {}; legal: {} ends that ascend to {}",
                            values.size(), joined(ends, ", "), comm_.size(), values.size()),
                comm_.rank());
  }
  const std::size_t largest = largest_part(ends);
  if (comm_.size() == 1 || largest == 0) return started_;
  if (last_ == calls_.size()) calls_.emplace_back();
  Call& call = calls_[last_++];
  call.steps = &steps;
  call.tag = tag;
  call.values = values;
  call.ends.assign(ends.begin(), ends.end());
  call.owner = owner;
  const Blocks& blocks = &steps == &scatter_ ? kSumBlocks : kGatherBlocks;
  call.floats = std::min(blocks.floats, largest);
  call.in_flight = blocks.in_flight;
  call.blocks = (largest + call.floats - 1) / call.floats;
  call.begun = call.block = call.next = 0;
  return ++started_;
}

void HostSums::progress() {
  try {
    while (first_ != last_ && step()) continue;
  } catch (...) {
    abandon();
    throw;
  }
}

void HostSums::wait(Ticket ticket) {
  try {
    while (!done(ticket)) {
      const std::uint64_t before = steps_;  // the interrupt may make the next one
      wait_until(waiter_, interrupt_, subject(), [&] { return steps_ != before || step(); });
    }
  } catch (...) {
    abandon();
    throw;
  }
}

// Makes the next step of the call that runs; false: it has to wait.
bool HostSums::step() {
  Call& call = calls_[first_];
  if (call.begun == 0 && call.steps == &scatter_) reserve(call.values.size());
  for (; call.begun < std::min(call.blocks, call.block + call.in_flight); ++call.begun) {
    for (const BlockStep& begins : call.steps->begin) (void)make(call, call.begun, begins);
  }
  if (!make(call, call.block, call.steps->rest[call.next])) return false;
  ++steps_;
  if (++call.next < call.steps->rest.size()) return true;
  call.next = 0;
  if (++call.block < call.blocks) return true;
  call.owner.reset();
  ++finished_;
  if (++first_ == last_) first_ = last_ = 0;
  return true;
}

// False: it has to wait.
bool HostSums::make(const Call& call, std::size_t block, const BlockStep& step) {
  const Range range = block_of(call.ends, step.part, call.floats, block);
  if (range.size == 0) return true;
  const auto place = [&](int slot) {
    const std::size_t first = block % call.in_flight * at(call.steps->slots);
    return slot == BlockStep::kValues ? call.values.data() + range.begin
                                      : blocks_->data() + (first + at(slot)) * call.floats;
  };
  if (step.what == What::kAdd) {
    add(place(step.left), place(step.right), place(step.place), range.size);
    return true;
  }
  Request& request = open_[block % call.in_flight * at(call.steps->requests) + at(step.request)];
  const int tag = step.second_hand ? tags_.second_hand : call.tag;
  const std::span<float> floats(place(step.place), range.size);
  if (step.what == What::kReceive) {
    request = comm_.post_recv(step.peer, tag, std::as_writable_bytes(floats));
  } else if (step.what == What::kSend) {
    request = comm_.start_send(step.peer, tag, std::as_bytes(floats));
  } else if (step.what == What::kSent) {
    return comm_.test(request);
  } else {
    Arrival arrival;
    arrival.bytes = floats.size_bytes();
    if (!comm_.test(request, &arrival)) return false;
    require_size(comm_, floats.size_bytes(), arrival);
  }
  return true;
}

WaitSubject HostSums::subject() const {
  const Call& call = calls_[first_];
  const BlockStep& step = call.steps->rest[call.next];
  return {step.what == What::kReceived ? WaitSubject::What::kCollectiveReceive
                                       : WaitSubject::What::kCollectiveSend,
          step.peer, step.second_hand ? tags_.second_hand : call.tag,
          block_of(call.ends, step.part, call.floats, call.block).size * sizeof(float)};
}

void HostSums::abandon() noexcept {
  if (first_ != last_) {
    const OpenRequests cancelled(comm_, open_, calls_[first_].owner, blocks_);
  }
  for (Call& call : calls_) call.owner.reset();
  first_ = last_ = 0;
  finished_ = started_;
}

}  // namespace sluice
