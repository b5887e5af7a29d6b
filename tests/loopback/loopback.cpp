#include "tests/loopback/loopback.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <limits>
#include <map>
#include <mutex>
#include <numeric>
#include <thread>
#include <utility>
#include <vector>

#include <sluice/error.hpp>

#include "comm/base/index.hpp"

namespace sluice {

namespace {

constexpr std::size_t kEagerBytes = 4096;
constexpr std::size_t kEagerMessages = 64;        // that wait in one mailbox
constexpr std::size_t kFirstOperations = 256;     // room for what is open, made in advance
constexpr auto kGrace = std::chrono::seconds(2);  // between a failure and Error(kPeer) elsewhere

// A send or receive. Guarded by the mutex of the receiver's mailbox; `done` is set last.
struct Operation {
  std::atomic<bool> done = true;
  bool taken = false;  // by a request
  bool receives = false;
  int peer = 0;  // of a receive, kAnyPeer until it is done
  int tag = 0;
  std::byte* data = nullptr;  // not written by a send
  std::size_t bytes = 0;      // of a receive: its capacity
  std::size_t arrived = 0;    // of a receive: the message's bytes, may be more than its capacity
};

// A message that came before its receive.
struct Message {
  int source = 0;
  int tag = 0;
  const std::byte* data = nullptr;  // in `eager`, or the sender's
  std::size_t bytes = 0;
  Operation* send = nullptr;  // null: its bytes are in `eager`
};

// One rank's unmatched receives and messages within a group, each in the order they came.
struct Mailbox {
  Mailbox() {
    receives.reserve(kFirstOperations);
    messages.reserve(kFirstOperations);
    for (std::size_t i = 0; i < kEagerMessages; ++i) free.push_back(&eager[i * kEagerBytes]);
  }

  std::mutex mutex;
  std::vector<Operation*> receives;
  std::vector<Message> messages;
  std::unique_ptr<std::byte[]> eager =
      std::make_unique_for_overwrite<std::byte[]>(kEagerMessages * kEagerBytes);
  std::vector<std::byte*> free;  // of eager
  bool closed = false;           // its communicator is gone
};

bool match(const Operation& receive, int source, int tag) {
  return receive.tag == tag && (receive.peer == source || receive.peer == Communicator::kAnyPeer);
}

void deliver(const Message& message, Operation& receive) {
  std::copy_n(message.data, std::min(message.bytes, receive.bytes), receive.data);
  receive.arrived = message.bytes;
  receive.peer = message.source;
  receive.done.store(true, std::memory_order_release);
  if (message.send != nullptr) message.send->done.store(true, std::memory_order_release);
}

// Shared by all groups split from one run.
struct Job {
  explicit Job(int rank_count) : ranks(rank_count), exceptions(at(ranks)), followed(at(ranks)) {}
  const int ranks;
  std::atomic<bool> failed = false;  // some rank's body threw
  // [rank], each written by its own rank: how its body ended, and whether it only gave up waiting.
  std::vector<std::exception_ptr> exceptions;
  std::vector<int> followed;
};

struct Group;

// What one collective split() makes: every rank brings its colour and key, the last makes groups.
struct Split {
  struct Entry {
    int colour = 0, key = 0;
    int rank = 0;
    std::shared_ptr<Group> group;
  };
  std::vector<Entry> entries;  // [rank of the parent]
  int arrived = 0;
};

struct Group {
  Group(std::shared_ptr<Job> shared_job, std::vector<int> ranks)
      : job(std::move(shared_job)), job_ranks(std::move(ranks)), mailboxes(job_ranks.size()) {}
  const std::shared_ptr<Job> job;
  const std::vector<int> job_ranks;  // [rank of the group]
  std::deque<Mailbox> mailboxes;     // [rank of the group]
  std::mutex mutex;                  // of splits
  std::condition_variable changed;
  std::map<int, std::shared_ptr<Split>> splits;  // under way, by number
};

void form_groups(const Group& parent, Split& split) {
  std::map<int, std::vector<int>> members;  // by colour, in rank order
  for (int rank = 0; rank < static_cast<int>(split.entries.size()); ++rank) {
    members[split.entries[at(rank)].colour].push_back(rank);
  }
  for (auto& [colour, ranks] : members) {
    std::stable_sort(ranks.begin(), ranks.end(), [&](int a, int b) {
      return split.entries[at(a)].key < split.entries[at(b)].key;
    });
    std::vector<int> job_ranks;
    for (const int rank : ranks) {
      split.entries[at(rank)].rank = static_cast<int>(job_ranks.size());
      job_ranks.push_back(parent.job_ranks[at(rank)]);
    }
    const auto group = std::make_shared<Group>(parent.job, std::move(job_ranks));
    for (const int rank : ranks) split.entries[at(rank)].group = group;
  }
}

class LoopbackCommunicator final : public Communicator {
 public:
  LoopbackCommunicator(std::shared_ptr<Group> group, int rank)
      : group_(std::move(group)), rank_(rank), operations_(kFirstOperations) {}

  ~LoopbackCommunicator() override {
    for (Operation& operation : operations_) withdraw(operation);
    Mailbox& mine = group_->mailboxes[at(rank_)];
    const std::lock_guard lock(mine.mutex);
    mine.closed = true;
    mine.messages.clear();
  }

  LoopbackCommunicator(const LoopbackCommunicator&) = delete;
  LoopbackCommunicator& operator=(const LoopbackCommunicator&) = delete;

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(group_->job_ranks.size()); }
  int max_tag() const override { return std::numeric_limits<int>::max(); }
  int local_size() const override { return group_->job->ranks; }
  const char* name() const override { return "loopback"; }
  std::string device_memory_unsupported_reason(Device /*device*/) const override {
    return "loopback moves host memory";
  }

  Request start_send(int peer, int tag, std::span<const std::byte> bytes) override {
    check(peer, tag);
    Mailbox& theirs = group_->mailboxes[at(peer)];
    Message message{rank_, tag, bytes.data(), bytes.size(), nullptr};
    const std::lock_guard lock(theirs.mutex);
    const auto receive =
        std::find_if(theirs.receives.begin(), theirs.receives.end(),
                     [&](const Operation* each) { return match(*each, rank_, tag); });
    if (receive != theirs.receives.end()) {
      deliver(message, **receive);
      theirs.receives.erase(receive);
      return {};
    }
    if (bytes.size() <= kEagerBytes && theirs.closed) return {};
    if (bytes.size() <= kEagerBytes && !theirs.free.empty()) {
      message.data = std::copy(bytes.begin(), bytes.end(), theirs.free.back()) - bytes.size();
      theirs.free.pop_back();
      theirs.messages.push_back(message);
      return {};
    }
    const Request request = begin(/*receives=*/false, peer, tag);
    message.send = &operation_of(request);
    if (!theirs.closed) theirs.messages.push_back(message);
    return request;
  }

  Request post_recv(int peer, int tag, std::span<std::byte> bytes) override {
    check(peer == kAnyPeer ? 0 : peer, tag);
    const Request request = begin(/*receives=*/true, peer, tag);
    Operation& receive = operation_of(request);
    receive.data = bytes.data();
    receive.bytes = bytes.size();
    Mailbox& mine = group_->mailboxes[at(rank_)];
    const std::lock_guard lock(mine.mutex);
    const auto message =
        std::find_if(mine.messages.begin(), mine.messages.end(),
                     [&](const Message& each) { return match(receive, each.source, each.tag); });
    if (message == mine.messages.end()) {
      mine.receives.push_back(&receive);
      return request;
    }
    deliver(*message, receive);
    // The buffer of an eager message is free again.
    if (message->send == nullptr) mine.free.push_back(const_cast<std::byte*>(message->data));
    mine.messages.erase(message);
    return request;
  }

  bool test(Request& request, Arrival* arrival) override {
    if (request.index == Request::kNone) return true;
    Operation& operation = operation_of(request);
    if (!operation.done.load(std::memory_order_acquire)) {
      check_failure();
      return false;
    }
    give_back(request);
    if (!operation.receives) return true;
    if (operation.arrived > operation.bytes) {
      throw Error(
          ErrorCode::kMismatch,
          fmt::format("rank {} received a message of {} bytes where it has room for {}, "
                      "from rank {} with tag {}",
                      rank_, operation.arrived, operation.bytes, operation.peer, operation.tag),
          rank_);
    }
    if (arrival != nullptr) *arrival = {operation.peer, operation.tag, operation.arrived};
    return true;
  }

  void cancel(Request& request) override {
    if (request.index == Request::kNone) return;
    withdraw(operation_of(request));
    give_back(request);
  }

  void keep(KeepAlive /*memory*/) override {}  // every send can be withdrawn

  std::unique_ptr<Communicator> split(int colour, int key) override {
    std::unique_lock lock(group_->mutex);
    const int number = splits_++;
    std::shared_ptr<Split>& place = group_->splits[number];
    if (place == nullptr) place = std::make_shared<Split>();
    const std::shared_ptr<Split> split = place;
    split->entries.resize(at(size()));
    Split::Entry& mine = split->entries[at(rank_)];
    mine.colour = colour;
    mine.key = key;
    if (++split->arrived == size()) {
      form_groups(*group_, *split);
      group_->splits.erase(number);
      group_->changed.notify_all();
    }
    while (!group_->changed.wait_for(lock, std::chrono::milliseconds(50),
                                     [&] { return mine.group != nullptr; })) {
      check_failure();
    }
    return std::make_unique<LoopbackCommunicator>(std::move(mine.group), mine.rank);
  }

  std::unique_ptr<Communicator> duplicate() override { return split(0, 0); }

 private:
  void check(int peer, int tag) const {
    if (peer >= 0 && peer < size() && tag >= 0) return;
    throw Error(
        ErrorCode::kInternal,
        fmt::format("no message with tag {} for rank {} in a group of {} ranks", tag, peer, size()),
        rank_);
  }

  // Where some rank's body has thrown, what this rank waits for may never come.
  void check_failure() {
    Job& job = *group_->job;
    if (!job.failed.load(std::memory_order_relaxed)) return;
    const auto now = std::chrono::steady_clock::now();
    if (deadline_ == std::chrono::steady_clock::time_point{}) deadline_ = now + kGrace;
    if (now < deadline_) return;
    job.followed[at(group_->job_ranks[at(rank_)])] = 1;
    throw Error(ErrorCode::kPeer,
                fmt::format("rank {} waits for a message, but another rank has failed", rank_),
                rank_);
  }

  // Ends an operation in any state; its memory is the caller's again.
  void withdraw(Operation& operation) {
    if (operation.done.load(std::memory_order_acquire)) return;
    Mailbox& mailbox = group_->mailboxes[at(operation.receives ? rank_ : operation.peer)];
    const std::lock_guard lock(mailbox.mutex);
    std::erase(mailbox.receives, &operation);
    std::erase_if(mailbox.messages, [&](const Message& each) { return each.send == &operation; });
    operation.done.store(true, std::memory_order_relaxed);
  }

  Operation& operation_of(const Request& request) { return operations_[at(request.index)]; }

  // An operation of this rank that is under way from here on.
  Request begin(bool receives, int peer, int tag) {
    const auto unused = std::find_if(operations_.begin(), operations_.end(),
                                     [](const Operation& each) { return !each.taken; });
    const Request request{static_cast<std::int32_t>(unused - operations_.begin())};
    if (unused == operations_.end()) operations_.emplace_back();
    Operation& operation = operation_of(request);
    operation.done.store(false, std::memory_order_relaxed);
    operation.taken = true;
    operation.receives = receives;
    operation.peer = peer;
    operation.tag = tag;
    return request;
  }

  void give_back(Request& request) {
    operation_of(request).taken = false;
    request.index = Request::kNone;
  }

  std::shared_ptr<Group> group_;
  int rank_;
  int splits_ = 0;  // that this rank has begun
  std::chrono::steady_clock::time_point deadline_{};
  std::deque<Operation> operations_;  // by index of a request
};

}  // namespace

void run_loopback(int ranks, const std::function<void(Communicator&)>& body) {
  if (ranks < 1) {
    throw Error(ErrorCode::kUsage, fmt::format("loopback needs at least 1 rank, got {}", ranks));
  }
  const auto job = std::make_shared<Job>(ranks);
  std::vector<int> all(at(ranks));
  std::iota(all.begin(), all.end(), 0);
  const auto group = std::make_shared<Group>(job, std::move(all));
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        LoopbackCommunicator comm(group, rank);
        body(comm);
      } catch (...) {
        job->exceptions[at(rank)] = std::current_exception();
        job->failed.store(true, std::memory_order_relaxed);
      }
    });
  }
  threads.clear();  // joins
  for (const int followed : {0, 1}) {
    for (int rank = 0; rank < ranks; ++rank) {
      if (job->exceptions[at(rank)] != nullptr && job->followed[at(rank)] == followed) {
        std::rethrow_exception(job->exceptions[at(rank)]);
      }
    }
  }
}

}  // namespace sluice
