// What a loopback message waits in: one mailbox per rank, matched by tag and source in the order of
// arrival. Internal to comm/.
//
// A node is in a bucket's list while kQueued; who takes it out, under the bucket's lock, makes it
// kMatched and owns both ends of the copy, which happens outside the lock; kDone gives each node
// back to its owner.
#pragma once

#include <sched.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <memory>

#include "comm/communicator.hpp"

namespace sluice::loopback {

inline constexpr std::size_t kBuckets = 32;       // of a mailbox, by tag
inline constexpr std::size_t kEagerBytes = 4096;  // the largest message a sender's buffer takes
inline constexpr std::size_t kEagerCells = 32;    // messages a sender's buffer holds

enum class State : int { kQueued, kMatched, kDone };

// A message on its way or a receive that waits for one; in a bucket's list while kQueued.
struct alignas(64) Node {
  Node* previous = nullptr;
  Node* next = nullptr;
  int source = 0;  // of a receive: may be kAnyPeer
  int tag = 0;
  const std::byte* data = nullptr;  // of a message
  std::byte* memory = nullptr;      // of a receive
  std::size_t bytes = 0;            // of a message; of a receive: of what arrived
  std::size_t capacity = 0;
  std::atomic<State> state = State::kDone;
};

// Held for a few list operations; whoever waits for a preempted holder yields to it.
class SpinLock {
 public:
  void lock() {
    for (int spins = 0; held_.exchange(true, std::memory_order_acquire);) {
      if (++spins > 64) {
        sched_yield();
      }
    }
  }
  void unlock() { held_.store(false, std::memory_order_release); }

 private:
  std::atomic<bool> held_ = false;
};

// In order of arrival.
struct List {
  Node* first = nullptr;
  Node* last = nullptr;

  void append(Node& node) {
    node.previous = last;
    node.next = nullptr;
    (last == nullptr ? first : last->next) = &node;
    last = &node;
  }
  void remove(Node& node) {
    (node.previous == nullptr ? first : node.previous->next) = node.next;
    (node.next == nullptr ? last : node.next->previous) = node.previous;
  }
};

// All messages and receives of one destination whose tags share a remainder.
struct alignas(64) Bucket {
  SpinLock lock;
  List messages;
  List receives;
};

struct EagerCell {
  Node node;
  std::array<std::byte, kEagerBytes> bytes;
};

// What one rank owns and others reach.
struct Port {
  std::array<Bucket, kBuckets> buckets;  // messages to this rank
  // Messages from this rank that wait in a buffer. Uninitialised: pages never used cost nothing.
  std::unique_ptr<EagerCell[]> cells = std::make_unique_for_overwrite<EagerCell[]>(kEagerCells);
};

// The copy between a matched pair, outside every lock: both nodes are out of their lists. A message
// too long leaves its first bytes, so that its header can be read.
inline void deliver(Node& message, Node& receive) {
  if (message.bytes > 0 && receive.capacity > 0) {
    std::memcpy(receive.memory, message.data, std::min(message.bytes, receive.capacity));
  }
  receive.bytes = message.bytes;
  receive.source = message.source;
  message.state.store(State::kDone, std::memory_order_release);
  receive.state.store(State::kDone, std::memory_order_release);
}

inline bool matches(const Node& message, const Node& receive) {
  return message.tag == receive.tag &&
         (receive.source == Communicator::kAnyPeer || receive.source == message.source);
}

// Takes `node` out of `list`, under the bucket's lock.
inline void claim(List& list, Node& node) {
  list.remove(node);
  node.state.store(State::kMatched, std::memory_order_relaxed);
}

}  // namespace sluice::loopback
