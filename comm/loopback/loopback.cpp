#include "comm/loopback/loopback.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <limits>
#include <map>
#include <mutex>
#include <numeric>
#include <thread>
#include <utility>

#include <sluice/error.hpp>

#include "comm/loopback/loopback_endpoint.hpp"

namespace sluice {

namespace {

using loopback::Endpoint;
using loopback::Fabric;
using loopback::Operation;

constexpr std::size_t kSlotsPerChunk = 128;       // requests are allocated in chunks
constexpr auto kGrace = std::chrono::seconds(2);  // for a dead rank's last words to arrive

// How one rank's body ended.
struct Outcome {
  std::exception_ptr exception;
  bool followed = false;  // it gave up waiting for a rank that had thrown
};

// Shared by all groups split from one run.
struct Job {
  explicit Job(int rank_count)
      : ranks(rank_count),
        fabric(std::make_shared<Fabric>(ranks)),
        ended(static_cast<std::size_t>(ranks)),
        outcomes(static_cast<std::size_t>(ranks)) {}
  const int ranks;
  const std::shared_ptr<Fabric> fabric;
  std::atomic<std::uint32_t> next_context = 0;
  std::atomic<bool> failed = false;      // some rank's body threw
  std::vector<std::atomic<bool>> ended;  // [rank] its body has returned or thrown
  std::vector<Outcome> outcomes;         // each written by its own rank
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
  Group(std::shared_ptr<Job> shared_job, std::vector<int> ranks)
      : job(std::move(shared_job)),
        context(job->next_context++),
        job_ranks(std::move(ranks)),
        group_ranks(static_cast<std::size_t>(job->ranks), -1) {
    for (std::size_t rank = 0; rank < job_ranks.size(); ++rank) {
      group_ranks[static_cast<std::size_t>(job_ranks[rank])] = static_cast<int>(rank);
    }
    splits.entries.resize(job_ranks.size());
  }
  const std::shared_ptr<Job> job;
  const std::uint32_t context;
  const std::vector<int> job_ranks;  // [rank of the group]
  std::vector<int> group_ranks;      // [rank of the job], -1 where not of the group
  SplitTable splits;
};

void form_groups(Group& parent) {
  std::map<int, std::vector<SplitTable::Entry*>> members;  // by colour, in rank order
  for (SplitTable::Entry& entry : parent.splits.entries) {
    members[entry.colour].push_back(&entry);
  }
  for (auto& [colour, entries] : members) {
    std::stable_sort(entries.begin(), entries.end(),
                     [](const auto* a, const auto* b) { return a->key < b->key; });
    std::vector<int> job_ranks;
    for (SplitTable::Entry* entry : entries) {
      entry->rank = static_cast<int>(job_ranks.size());
      job_ranks.push_back(
          parent.job_ranks[static_cast<std::size_t>(entry - parent.splits.entries.data())]);
    }
    const auto group = std::make_shared<Group>(parent.job, std::move(job_ranks));
    for (SplitTable::Entry* entry : entries) {
      entry->group = group;
    }
  }
}

class LoopbackCommunicator final : public Communicator {
 public:
  LoopbackCommunicator(std::shared_ptr<Group> group, std::shared_ptr<Endpoint> endpoint, int rank)
      : group_(std::move(group)), endpoint_(std::move(endpoint)), rank_(rank) {
    grow();
    endpoint_->open(group_->context);
  }

  ~LoopbackCommunicator() override {
    for (const auto& chunk : chunks_) {
      for (std::size_t i = 0; i < kSlotsPerChunk; ++i) {
        endpoint_->withdraw(chunk[i]);
      }
    }
    endpoint_->close(group_->context);
  }

  LoopbackCommunicator(const LoopbackCommunicator&) = delete;
  LoopbackCommunicator& operator=(const LoopbackCommunicator&) = delete;

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(group_->job_ranks.size()); }
  int max_tag() const override { return std::numeric_limits<int>::max(); }
  int local_size() const override { return group_->job->ranks; }
  const char* name() const override { return "loopback"; }
  std::string why_no_device_memory(Device /*device*/) const override {
    return "loopback moves host memory";
  }

  void prepare_send(int peer) override {
    endpoint_->prepare(static_cast<std::size_t>(group_->job_ranks[static_cast<std::size_t>(peer)]));
  }

  Request start_send(int peer, int tag, std::span<const std::byte> bytes) override {
    check(peer, tag);
    const int to = group_->job_ranks[static_cast<std::size_t>(peer)];
    if (endpoint_->send_now(static_cast<std::size_t>(to), group_->context, tag, bytes)) {
      return Request{};
    }
    const Request request = take_slot();
    Operation& send = slot_of(request);
    send.receives = false;
    send.peer = to;
    send.context = group_->context;
    send.tag = tag;
    send.data = bytes.data();
    send.bytes = bytes.size();
    endpoint_->start(send);
    return request;
  }

  Request post_recv(int peer, int tag, std::span<std::byte> bytes) override {
    check(peer == kAnyPeer ? 0 : peer, tag);
    const Request request = take_slot();
    Operation& receive = slot_of(request);
    receive.receives = true;
    receive.peer = peer == kAnyPeer ? Operation::kAnySource
                                    : group_->job_ranks[static_cast<std::size_t>(peer)];
    receive.context = group_->context;
    receive.tag = tag;
    receive.memory = bytes.data();
    receive.capacity = bytes.size();
    endpoint_->start(receive);
    return request;
  }

  bool test(Request& request, Arrival* arrival) override {
    if (request.index == Request::kNone) {
      return true;
    }
    Operation& operation = slot_of(request);
    if (operation.state != Operation::State::kDone && !endpoint_->progress(operation)) {
      if (group_->job->failed.load(std::memory_order_relaxed) || waits_for_ended(operation)) {
        check_grace();
      }
      return false;
    }
    give_back(request);
    if (operation.receives) {
      const int source = group_->group_ranks[static_cast<std::size_t>(operation.peer)];
      if (operation.bytes > operation.capacity) {
        refuse_long(operation, source);
      }
      if (arrival != nullptr) {
        *arrival = Arrival{source, operation.tag, operation.bytes};
      }
    }
    return true;
  }

  void cancel(Request& request) override {
    if (request.index != Request::kNone) {
      endpoint_->withdraw(slot_of(request));
      give_back(request);
    }
  }

  void keep(Owner /*memory*/) override {}  // every send can be withdrawn

  std::unique_ptr<Communicator> split(int colour, int key) override {
    SplitTable& table = group_->splits;
    std::unique_lock lock(table.mutex);
    wait_for(table, lock, [&] { return table.left == 0; });  // the split before has ended
    table.entries[static_cast<std::size_t>(rank_)] = {colour, key, nullptr, 0};
    const std::uint64_t round = table.round;
    if (++table.arrived == size()) {
      form_groups(*group_);
      table.arrived = 0;
      table.left = size();
      ++table.round;
      table.changed.notify_all();
    }
    wait_for(table, lock, [&] { return table.round != round; });
    SplitTable::Entry& mine = table.entries[static_cast<std::size_t>(rank_)];
    auto part = std::make_unique<LoopbackCommunicator>(std::exchange(mine.group, nullptr),
                                                       endpoint_, mine.rank);
    if (--table.left == 0) {
      table.changed.notify_all();
    }
    return part;
  }

  std::unique_ptr<Communicator> duplicate() override { return split(0, 0); }

 private:
  void check(int peer, int tag) const {
    if (peer < 0 || peer >= size()) {
      throw Error(ErrorCode::kInternal,
                  fmt::format("rank {} is not in a group of {} ranks", peer, size()), rank_);
    }
    if (tag < 0) {
      throw Error(ErrorCode::kInternal, fmt::format("message tag {} is negative", tag), rank_);
    }
  }

  [[noreturn]] void refuse_long(const Operation& receive, int source) const {
    throw Error(ErrorCode::kMismatch,
                fmt::format("rank {} received a message of {} bytes where it has room for {}, from "
                            "rank {} with tag {}",
                            rank_, receive.bytes, receive.capacity, source, receive.tag),
                rank_);
  }

  // Whether the one rank that a message has to come from sends no more.
  [[nodiscard]] bool waits_for_ended(const Operation& operation) const {
    return operation.receives && operation.peer != Operation::kAnySource &&
           group_->job->ended[static_cast<std::size_t>(operation.peer)].load(
               std::memory_order_relaxed);
  }

  // Some rank's body threw or has ended: what this one waits for may never come.
  void check_grace() {
    const auto now = std::chrono::steady_clock::now();
    if (failure_seen_ == std::chrono::steady_clock::time_point{}) {
      failure_seen_ = now;
    } else if (now - failure_seen_ > kGrace) {
      const int job_rank = group_->job_ranks[static_cast<std::size_t>(rank_)];
      group_->job->outcomes[static_cast<std::size_t>(job_rank)].followed = true;
      throw Error(
          ErrorCode::kPeer,
          fmt::format("rank {} waits for a message, but another rank has failed or ended", rank_),
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
    chunks_.push_back(std::make_unique<Operation[]>(kSlotsPerChunk));
    free_.reserve(old + kSlotsPerChunk);
    for (std::size_t i = kSlotsPerChunk; i > 0; --i) {
      free_.push_back(static_cast<std::int32_t>(old + i - 1));
    }
  }

  Operation& slot_of(const Request& request) {
    const auto index = static_cast<std::size_t>(request.index);
    return chunks_[index / kSlotsPerChunk][index % kSlotsPerChunk];
  }

  Request take_slot() {
    if (free_.empty()) {
      grow();
    }
    const Request request{free_.back()};
    free_.pop_back();
    return request;
  }

  void give_back(Request& request) {
    free_.push_back(std::exchange(request.index, Request::kNone));
  }

  std::shared_ptr<Group> group_;
  std::shared_ptr<Endpoint> endpoint_;  // of this rank's thread
  int rank_;
  std::chrono::steady_clock::time_point failure_seen_{};
  std::vector<std::unique_ptr<Operation[]>> chunks_;
  std::vector<std::int32_t> free_;
};

}  // namespace

void run_loopback(int ranks, const std::function<void(Communicator&)>& body) {
  if (ranks < 1) {
    throw Error(ErrorCode::kUsage, fmt::format("loopback needs at least 1 rank, got {}", ranks));
  }
  const auto job = std::make_shared<Job>(ranks);
  std::vector<int> all(static_cast<std::size_t>(ranks));
  std::iota(all.begin(), all.end(), 0);
  const auto group = std::make_shared<Group>(job, std::move(all));
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        LoopbackCommunicator comm(
            group, std::make_shared<Endpoint>(job->fabric, static_cast<std::size_t>(rank)), rank);
        body(comm);
      } catch (...) {
        job->outcomes[static_cast<std::size_t>(rank)].exception = std::current_exception();
        job->failed.store(true, std::memory_order_relaxed);
      }
      job->ended[static_cast<std::size_t>(rank)].store(true, std::memory_order_relaxed);
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
