// One rank's end of loopback: what it sends, what waits for it, and which message meets which
// receive. Internal to comm/.
//
// All communicators of a rank share its endpoint, so waiting on any of them moves all of them on.
// Everything here is private to the rank's thread; ranks meet only in the rings and in offers.
// Messages of one ring are taken in order: into the receive that waits, or else into a buffer, so
// that none holds up those behind it; they are taken only while something is waited for, so a
// sender that runs ahead meets a full ring, and its sends then wait in a queue of its own.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <vector>

#include "comm/loopback/loopback_ring.hpp"

namespace sluice::loopback {

// What the ranks of a job share; outlives their endpoints.
struct Fabric {
  explicit Fabric(int rank_count)
      : ranks(static_cast<std::size_t>(rank_count)), rings(ranks), offers(ranks) {}
  const std::size_t ranks;
  Rings rings;
  std::vector<std::deque<Offer>> offers;  // [rank], made by that rank, which others reach
};

// Doubly linked through `previous` and `next` of its elements.
template <typename T>
struct List {
  T* first = nullptr;
  T* last = nullptr;

  void append(T& element) {
    element.previous = last;
    element.next = nullptr;
    (last == nullptr ? first : last->next) = &element;
    last = &element;
  }
  void remove(T& element) {
    (element.previous == nullptr ? first : element.previous->next) = element.next;
    (element.next == nullptr ? last : element.next->previous) = element.previous;
  }
};

// A send or receive. Its owner fills in what it is and keeps it in place while it is not kDone.
struct Operation {
  enum class State : std::uint8_t {
    kDone,
    kPosted,   // a receive that waits for its message
    kQueued,   // a send that waits for room in its ring
    kOffered,  // a send whose reader has yet to copy it
  };
  static constexpr int kAnySource = -1;

  State state = State::kDone;
  bool receives = false;
  int peer = 0;  // rank of the job; of a receive, kAnySource until it is done
  std::uint32_t context = 0;
  std::int32_t tag = 0;
  const std::byte* data = nullptr;  // of a send
  std::byte* memory = nullptr;      // of a receive
  std::size_t bytes = 0;            // of a send; of a receive: of what arrived, may be > capacity
  std::size_t capacity = 0;         // of a receive
  Offer* offer = nullptr;
  Operation* previous = nullptr;
  Operation* next = nullptr;
};

class Endpoint {
 public:
  Endpoint(std::shared_ptr<Fabric> fabric, std::size_t rank);

  // Messages of other contexts are dropped. Ids are never used again within a job.
  void open(std::uint32_t context) { contexts_.push_back(context); }
  void close(std::uint32_t context) noexcept;

  // Before send_now(), where something else is done in between.
  void prepare(std::size_t peer) const { outlets_[peer].writer.prepare(); }
  // Sends at once what is small and finds room; false: start(operation) has to.
  bool send_now(std::size_t peer, std::uint32_t context, int tag, std::span<const std::byte> bytes);
  void start(Operation& operation);
  // Moves everything on until `operation` is done or nothing more is there; true once it is done.
  bool progress(Operation& operation);
  // Ends an operation in any state; its memory is the caller's again.
  void withdraw(Operation& operation) noexcept;

 private:
  // A message that came before its receive.
  struct Early {
    Early* previous;
    Early* next;
    int source;
    Label label;
    Offered offered;
    std::array<std::byte, kEagerBytes> bytes;
  };
  // All receives and early messages whose contexts and tags share a remainder.
  struct Bucket {
    List<Operation> receives;
    List<Early> messages;
  };
  struct Outlet {
    Writer writer;
    List<Operation> queue;
  };
  static constexpr std::size_t kBuckets = 64;
  static constexpr std::size_t kFirstOffers = 64;
  static constexpr std::size_t kEarlyChunk = 64;  // made at a time; pages never used cost nothing

  Bucket& bucket_of(std::uint32_t context, std::int32_t tag) {
    return buckets_[(static_cast<std::uint32_t>(tag) + 31 * context) % kBuckets];
  }
  bool try_send(Outlet& outlet, Operation& send);
  void flush();
  bool take_early(Operation& receive);
  void drain(std::size_t source, const Operation& wanted);
  void take(std::size_t source, const Label& label);
  void keep(std::size_t source, const Label& label, Bucket& bucket);
  // False where the sender has withdrawn it.
  static bool accept(const Offered& offered, Operation& receive);
  static void drop(const Offered& offered);
  Offer& take_offer();
  void make_offers(std::size_t count);
  void grow_early();

  std::shared_ptr<Fabric> fabric_;
  std::size_t rank_;
  std::vector<Reader> readers_;  // [source]
  std::vector<Outlet> outlets_;  // [destination]
  std::size_t queued_ = 0;       // sends in all outlets' queues
  std::array<Bucket, kBuckets> buckets_;
  std::vector<std::uint32_t> contexts_;  // open
  std::vector<std::unique_ptr<Early[]>> early_chunks_;
  std::vector<Early*> early_free_;
  std::vector<Offer*> offers_free_;
  std::vector<Offer*> offers_withdrawn_;  // free once the reader has dropped them
};

}  // namespace sluice::loopback
