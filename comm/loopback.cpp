#include "comm/loopback.hpp"

#include <fmt/core.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <limits>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include "comm/error.hpp"
#include "comm/loopback_mailbox.hpp"

namespace sluice {

namespace {

using loopback::Bucket;
using loopback::claim;
using loopback::deliver;
using loopback::EagerCell;
using loopback::kBuckets;
using loopback::kEagerBytes;
using loopback::kEagerCells;
using loopback::matches;
using loopback::Node;
using loopback::Port;
using loopback::State;

constexpr std::size_t kSlotsPerChunk = 128;       // requests are allocated in chunks
constexpr auto kGrace = std::chrono::seconds(2);  // for a dead rank's last words to arrive

// How one rank's body ended.
struct Outcome {
  std::exception_ptr exception;
  bool followed = false;  // it gave up waiting for a rank that had thrown
};

// Shared by all groups split from one run.
struct Job {
  explicit Job(int rank_count) : ranks(rank_count), outcomes(static_cast<std::size_t>(ranks)) {}
  const int ranks;
  std::atomic<bool> failed = false;  // some rank's body threw
  std::vector<Outcome> outcomes;     // each written by its own rank
};

struct Group;

// One split at a time: every rank brings its colour and key, the last one makes the groups.
struct SplitTable {
  struct Entry {
    int colour = 0;
    int key = 0;
    std::shared_ptr<Group> group;
    int rank = 0;
  };
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<Entry> entries;
  int arrived = 0;
  int left = 0;
  std::uint64_t round = 0;
};

struct Group {
  Group(std::shared_ptr<Job> shared_job, int size)
      : job(std::move(shared_job)), ports(static_cast<std::size_t>(size)) {
    splits.entries.resize(ports.size());
  }
  std::shared_ptr<Job> job;
  std::vector<Port> ports;
  SplitTable splits;
};

void form_groups(const std::shared_ptr<Job>& job, std::vector<SplitTable::Entry>& entries) {
  std::map<int, std::vector<SplitTable::Entry*>> members;  // by colour, in rank order
  for (SplitTable::Entry& entry : entries) {
    members[entry.colour].push_back(&entry);
  }
  for (auto& [colour, ranks] : members) {
    std::stable_sort(ranks.begin(), ranks.end(),
                     [](const auto* a, const auto* b) { return a->key < b->key; });
    const auto group = std::make_shared<Group>(job, static_cast<int>(ranks.size()));
    int rank = 0;
    for (SplitTable::Entry* entry : ranks) {
      entry->group = group;
      entry->rank = rank++;
    }
  }
}

class LoopbackCommunicator final : public Communicator {
 public:
  LoopbackCommunicator(std::shared_ptr<Group> group, int rank, int job_rank)
      : group_(std::move(group)), rank_(rank), job_rank_(job_rank) {
    grow();
  }

  ~LoopbackCommunicator() override {
    for (const auto& chunk : chunks_) {
      for (std::size_t i = 0; i < kSlotsPerChunk; ++i) {
        if (chunk[i].open) {
          withdraw(chunk[i]);
        }
      }
    }
  }

  LoopbackCommunicator(const LoopbackCommunicator&) = delete;
  LoopbackCommunicator& operator=(const LoopbackCommunicator&) = delete;

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(group_->ports.size()); }
  int max_tag() const override { return std::numeric_limits<int>::max(); }
  int local_size() const override { return group_->job->ranks; }
  const char* name() const override { return "loopback"; }

  Request start_send(int peer, int tag, std::span<const std::byte> bytes) override {
    Bucket& bucket = bucket_of(peer, tag);
    const Request request = take_slot();
    Slot& slot = slot_of(request);
    slot.bucket = &bucket;
    slot.receives = false;
    EagerCell* cell = bytes.size() <= kEagerBytes ? free_cell() : nullptr;
    Node& message = slot.node;
    message.source = rank_;
    message.tag = tag;
    message.data = bytes.data();
    message.bytes = bytes.size();
    message.state.store(State::kQueued, std::memory_order_relaxed);
    if (Node* receive = match_or_queue(bucket, message, cell); receive != nullptr) {
      deliver(message, *receive);
    }
    return request;
  }

  Request post_recv(int peer, int tag, std::span<std::byte> bytes) override {
    if (peer != kAnyPeer) {
      check_peer(peer);
    }
    Bucket& bucket = bucket_of(rank_, tag);
    const Request request = take_slot();
    Slot& slot = slot_of(request);
    slot.bucket = &bucket;
    slot.receives = true;
    Node& receive = slot.node;
    receive.source = peer;
    receive.tag = tag;
    receive.memory = bytes.data();
    receive.capacity = bytes.size();
    receive.state.store(State::kQueued, std::memory_order_relaxed);
    Node* message = nullptr;
    {
      const std::lock_guard guard(bucket.lock);
      for (message = bucket.messages.first; message != nullptr; message = message->next) {
        if (matches(*message, receive)) {
          break;
        }
      }
      if (message != nullptr) {
        claim(bucket.messages, *message);
        receive.state.store(State::kMatched, std::memory_order_relaxed);
      } else {
        bucket.receives.append(receive);
      }
    }
    if (message != nullptr) {
      deliver(*message, receive);
    }
    return request;
  }

  bool test(Request& request, Arrival* arrival) override {
    Slot& slot = slot_of(request);
    if (slot.node.state.load(std::memory_order_acquire) != State::kDone) {
      if (group_->job->failed.load(std::memory_order_relaxed)) {
        check_grace();
      }
      return false;
    }
    if (slot.receives) {
      if (slot.node.bytes > slot.node.capacity) {
        give_back(request);
        refuse_long(slot.node);
      }
      if (arrival != nullptr) {
        *arrival = Arrival{slot.node.source, slot.node.tag, slot.node.bytes};
      }
    }
    give_back(request);
    return true;
  }

  void cancel(Request& request) override {
    if (request.index != Request::kNone) {
      withdraw(slot_of(request));
      give_back(request);
    }
  }

  std::unique_ptr<Communicator> split(int colour, int key) override {
    SplitTable& table = group_->splits;
    std::unique_lock lock(table.mutex);
    wait_for(table, lock, [&] { return table.left == 0; });  // the split before has ended
    table.entries[static_cast<std::size_t>(rank_)] = {colour, key, nullptr, 0};
    const std::uint64_t round = table.round;
    if (++table.arrived == size()) {
      form_groups(group_->job, table.entries);
      table.arrived = 0;
      table.left = size();
      ++table.round;
      table.changed.notify_all();
    }
    wait_for(table, lock, [&] { return table.round != round; });
    SplitTable::Entry& mine = table.entries[static_cast<std::size_t>(rank_)];
    auto part = std::make_unique<LoopbackCommunicator>(std::exchange(mine.group, nullptr),
                                                       mine.rank, job_rank_);
    if (--table.left == 0) {
      table.changed.notify_all();
    }
    return part;
  }

  std::unique_ptr<Communicator> duplicate() override { return split(0, 0); }

 private:
  struct Slot {
    Node node;
    Bucket* bucket = nullptr;
    bool receives = false;
    bool open = false;
  };

  // The receive that takes `message`, or null after `message` was queued (copied, where there is a
  // cell).
  static Node* match_or_queue(Bucket& bucket, Node& message, EagerCell* cell) {
    const std::lock_guard guard(bucket.lock);
    for (Node* receive = bucket.receives.first; receive != nullptr; receive = receive->next) {
      if (matches(message, *receive)) {
        claim(bucket.receives, *receive);
        return receive;
      }
    }
    if (cell == nullptr) {
      bucket.messages.append(message);
      return nullptr;
    }
    if (message.bytes > 0) {
      std::memcpy(cell->bytes.data(), message.data, message.bytes);
    }
    cell->node.source = message.source;
    cell->node.tag = message.tag;
    cell->node.data = cell->bytes.data();
    cell->node.bytes = message.bytes;
    cell->node.state.store(State::kQueued, std::memory_order_relaxed);
    bucket.messages.append(cell->node);
    message.state.store(State::kDone, std::memory_order_relaxed);
    return nullptr;
  }

  EagerCell* free_cell() {
    Port& port = group_->ports[static_cast<std::size_t>(rank_)];
    for (std::size_t i = 0; i < kEagerCells; ++i) {
      EagerCell& cell = port.cells[next_cell_];
      next_cell_ = (next_cell_ + 1) % kEagerCells;
      if (cell.node.state.load(std::memory_order_acquire) == State::kDone) {
        return &cell;
      }
    }
    return nullptr;
  }

  void check_peer(int peer) const {
    if (peer < 0 || peer >= size()) {
      throw Error(ErrorCode::kInternal,
                  fmt::format("rank {} is not in a group of {} ranks", peer, size()), rank_);
    }
  }

  Bucket& bucket_of(int destination, int tag) const {
    check_peer(destination);
    if (tag < 0) {
      throw Error(ErrorCode::kInternal, fmt::format("message tag {} is negative", tag), rank_);
    }
    return group_->ports[static_cast<std::size_t>(destination)]
        .buckets[static_cast<std::size_t>(tag) % kBuckets];
  }

  // Ends the request: out of its list, or after the copy that is running.
  static void withdraw(Slot& slot) noexcept {
    {
      const std::lock_guard guard(slot.bucket->lock);
      if (slot.node.state.load(std::memory_order_acquire) == State::kQueued) {
        (slot.receives ? slot.bucket->receives : slot.bucket->messages).remove(slot.node);
        slot.node.state.store(State::kDone, std::memory_order_relaxed);
      }
    }
    while (slot.node.state.load(std::memory_order_acquire) != State::kDone) {
      sched_yield();
    }
  }

  [[noreturn]] void refuse_long(const Node& receive) const {
    throw Error(ErrorCode::kMismatch,
                fmt::format("rank {} received a message of {} bytes where it has room for {}, from "
                            "rank {} with tag {}",
                            rank_, receive.bytes, receive.capacity, receive.source, receive.tag),
                rank_);
  }

  // Some rank's body threw: what this one waits for may never come.
  void check_grace() {
    const auto now = std::chrono::steady_clock::now();
    if (failure_seen_ == std::chrono::steady_clock::time_point{}) {
      failure_seen_ = now;
    } else if (now - failure_seen_ > kGrace) {
      group_->job->outcomes[static_cast<std::size_t>(job_rank_)].followed = true;
      throw Error(ErrorCode::kPeer,
                  fmt::format("rank {} waits for a message, but another rank has failed", rank_),
                  rank_);
    }
  }

  template <typename Condition>
  void wait_for(SplitTable& table, std::unique_lock<std::mutex>& lock, Condition condition) {
    while (!table.changed.wait_for(lock, std::chrono::milliseconds(50), condition)) {
      if (group_->job->failed.load(std::memory_order_relaxed)) {
        check_grace();
      }
    }
  }

  void grow() {
    const std::size_t old = chunks_.size() * kSlotsPerChunk;
    chunks_.push_back(std::make_unique<Slot[]>(kSlotsPerChunk));
    free_.reserve(old + kSlotsPerChunk);
    for (std::size_t i = kSlotsPerChunk; i > 0; --i) {
      free_.push_back(static_cast<std::int32_t>(old + i - 1));
    }
  }

  Slot& slot_of(const Request& request) {
    const auto index = static_cast<std::size_t>(request.index);
    return chunks_[index / kSlotsPerChunk][index % kSlotsPerChunk];
  }

  Request take_slot() {
    if (free_.empty()) {
      grow();
    }
    const Request request{free_.back()};
    free_.pop_back();
    slot_of(request).open = true;
    return request;
  }

  void give_back(Request& request) {
    slot_of(request).open = false;
    free_.push_back(std::exchange(request.index, Request::kNone));
  }

  std::shared_ptr<Group> group_;
  int rank_;
  int job_rank_;
  std::size_t next_cell_ = 0;
  std::chrono::steady_clock::time_point failure_seen_{};
  std::vector<std::unique_ptr<Slot[]>> chunks_;
  std::vector<std::int32_t> free_;
};

}  // namespace

void run_loopback(int ranks, const std::function<void(Communicator&)>& body) {
  if (ranks < 1) {
    throw Error(ErrorCode::kUsage, fmt::format("loopback needs at least 1 rank, got {}", ranks));
  }
  const auto job = std::make_shared<Job>(ranks);
  const auto group = std::make_shared<Group>(job, ranks);
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      LoopbackCommunicator comm(group, rank, rank);
      try {
        body(comm);
      } catch (...) {
        job->outcomes[static_cast<std::size_t>(rank)].exception = std::current_exception();
        job->failed.store(true, std::memory_order_relaxed);
      }
    });
  }
  threads.clear();  // joins
  for (const bool followed : {false, true}) {
    for (const Outcome& outcome : job->outcomes) {
      if (outcome.exception && outcome.followed == followed) {
        std::rethrow_exception(outcome.exception);
      }
    }
  }
}

}  // namespace sluice
