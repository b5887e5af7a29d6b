#include "comm/loopback/loopback_endpoint.hpp"

#include <sched.h>

#include <algorithm>
#include <utility>

namespace sluice::loopback {

namespace {

using State = Operation::State;

bool matches(const Operation& receive, const Label& label, int source) {
  return receive.tag == label.tag && receive.context == label.context &&
         (receive.peer == source || receive.peer == Operation::kAnySource);
}

}  // namespace

Endpoint::Endpoint(std::shared_ptr<Fabric> fabric, std::size_t rank)
    : fabric_(std::move(fabric)), rank_(rank) {
  readers_.reserve(fabric_->ranks);
  outlets_.reserve(fabric_->ranks);
  for (std::size_t peer = 0; peer < fabric_->ranks; ++peer) {
    readers_.emplace_back(fabric_->rings, peer, rank_);
    outlets_.push_back({Writer(fabric_->rings, rank_, peer), {}});
  }
  make_offers(kFirstOffers);
  grow_early();
}

void Endpoint::close(std::uint32_t context) noexcept {
  std::erase(contexts_, context);
  for (Bucket& bucket : buckets_) {
    for (Early* message = bucket.messages.first; message != nullptr;) {
      Early* next = message->next;
      if (message->label.context == context) {
        if (message->label.offered != 0) {
          drop(message->offered);
        }
        bucket.messages.remove(*message);
        early_free_.push_back(message);
      }
      message = next;
    }
  }
}

bool Endpoint::send_now(std::size_t peer, std::uint32_t context, int tag,
                        std::span<const std::byte> bytes) {
  Outlet& outlet = outlets_[peer];
  if (bytes.size() > kEagerBytes || outlet.queue.first != nullptr ||
      !outlet.writer.has_room(bytes.size())) {
    return false;
  }
  outlet.writer.write(context, tag, bytes.data(), static_cast<std::uint32_t>(bytes.size()), false);
  return true;
}

void Endpoint::start(Operation& operation) {
  if (operation.receives) {
    if (operation.peer != Operation::kAnySource) {  // whose message may be there by now
      readers_[static_cast<std::size_t>(operation.peer)].prefetch();
    }
    if (!take_early(operation)) {
      operation.state = State::kPosted;
      bucket_of(operation.context, operation.tag).receives.append(operation);
    }
    return;
  }
  Outlet& outlet = outlets_[static_cast<std::size_t>(operation.peer)];
  if (outlet.queue.first != nullptr || !try_send(outlet, operation)) {
    operation.state = State::kQueued;
    outlet.queue.append(operation);
    ++queued_;
  }
}

// False where the ring is full.
bool Endpoint::try_send(Outlet& outlet, Operation& send) {
  if (send.bytes <= kEagerBytes) {
    if (!outlet.writer.has_room(send.bytes)) {
      return false;
    }
    outlet.writer.write(send.context, send.tag, send.data, static_cast<std::uint32_t>(send.bytes),
                        false);
    send.state = State::kDone;
    return true;
  }
  if (!outlet.writer.has_room(sizeof(Offered))) {
    return false;
  }
  send.offer = &take_offer();
  send.offer->state.store(Offer::State::kOffered, std::memory_order_relaxed);
  const Offered offered{send.offer, send.data, send.bytes};
  outlet.writer.write(send.context, send.tag, reinterpret_cast<const std::byte*>(&offered),
                      sizeof(offered), true);
  send.state = State::kOffered;
  return true;
}

void Endpoint::flush() {
  for (Outlet& outlet : outlets_) {
    while (outlet.queue.first != nullptr) {
      Operation& send = *outlet.queue.first;
      if (!try_send(outlet, send)) {
        break;
      }
      outlet.queue.remove(send);
      --queued_;
    }
  }
}

bool Endpoint::progress(Operation& operation) {
  if (queued_ > 0) {
    flush();
  }
  if (operation.state == State::kPosted && operation.peer != Operation::kAnySource) {
    const auto source = static_cast<std::size_t>(operation.peer);
    const Reader& reader = readers_[source];
    reader.prefetch();
    if (reader.front() != nullptr) drain(source, operation);
  }
  for (std::size_t source = 0; source < readers_.size() && operation.state != State::kDone;
       ++source) {
    if (readers_[source].front() != nullptr) drain(source, operation);
  }
  if (operation.state == State::kOffered &&
      operation.offer->state.load(std::memory_order_acquire) == Offer::State::kDone) {
    offers_free_.push_back(operation.offer);
    operation.state = State::kDone;
  }
  return operation.state == State::kDone;
}

// At most a ring's worth, so that a sender in full flow lets the caller look elsewhere.
void Endpoint::drain(std::size_t source, const Operation& wanted) {
  for (std::size_t taken = 0; taken < kRingCells && wanted.state != State::kDone; ++taken) {
    const Label* label = readers_[source].front();
    if (label == nullptr) {
      return;
    }
    take(source, *label);
  }
}

// The message at the front of a ring: to its receive, into a buffer, or nowhere.
void Endpoint::take(std::size_t source, const Label& label) {
  Reader& reader = readers_[source];
  Bucket& bucket = bucket_of(label.context, label.tag);
  Operation* receive = bucket.receives.first;
  while (receive != nullptr && !matches(*receive, label, static_cast<int>(source))) {
    receive = receive->next;
  }
  if (receive == nullptr) {
    keep(source, label, bucket);
  } else if (label.offered == 0) {
    reader.read(receive->memory, std::min<std::size_t>(label.bytes, receive->capacity));
    receive->bytes = label.bytes;
    receive->peer = static_cast<int>(source);
    receive->state = State::kDone;
    bucket.receives.remove(*receive);
  } else {
    Offered offered{};
    reader.read(reinterpret_cast<std::byte*>(&offered), sizeof(offered));
    if (accept(offered, *receive)) {
      receive->peer = static_cast<int>(source);
      bucket.receives.remove(*receive);
    }
  }
  reader.pop(label.bytes);
}

void Endpoint::keep(std::size_t source, const Label& label, Bucket& bucket) {
  const Reader& reader = readers_[source];
  Offered offered{};
  if (label.offered != 0) {
    reader.read(reinterpret_cast<std::byte*>(&offered), sizeof(offered));
  }
  if (std::find(contexts_.begin(), contexts_.end(), label.context) == contexts_.end()) {
    if (label.offered != 0) {
      drop(offered);
    }
    return;
  }
  if (early_free_.empty()) {
    grow_early();
  }
  Early& message = *early_free_.back();
  early_free_.pop_back();
  message.source = static_cast<int>(source);
  message.label = label;
  message.offered = offered;
  if (label.offered == 0) {
    reader.read(message.bytes.data(), label.bytes);
  }
  bucket.messages.append(message);
}

// The first early message that a new receive matches; false where there is none.
bool Endpoint::take_early(Operation& receive) {
  Bucket& bucket = bucket_of(receive.context, receive.tag);
  for (Early* message = bucket.messages.first; message != nullptr;) {
    Early* next = message->next;
    if (matches(receive, message->label, message->source)) {
      const bool offered = message->label.offered != 0;
      const int source = message->source;
      if (!offered) {
        receive.bytes = message->label.bytes;
        if (const std::size_t bytes = std::min(receive.bytes, receive.capacity); bytes > 0) {
          std::memcpy(receive.memory, message->bytes.data(), bytes);
        }
        receive.state = State::kDone;
      }
      const bool taken = !offered || accept(message->offered, receive);
      bucket.messages.remove(*message);
      early_free_.push_back(message);
      if (taken) {
        receive.peer = source;
        return true;
      }
    }
    message = next;
  }
  return false;
}

bool Endpoint::accept(const Offered& offered, Operation& receive) {
  auto expected = Offer::State::kOffered;
  if (!offered.offer->state.compare_exchange_strong(expected, Offer::State::kCopying,
                                                    std::memory_order_acquire)) {
    offered.offer->state.store(Offer::State::kDropped, std::memory_order_release);
    return false;
  }
  if (const std::size_t bytes = std::min(offered.bytes, receive.capacity); bytes > 0) {
    std::memcpy(receive.memory, offered.data, bytes);
  }
  receive.bytes = offered.bytes;
  receive.state = State::kDone;
  offered.offer->state.store(Offer::State::kDone, std::memory_order_release);
  return true;
}

// Whether withdrawn meanwhile or not: this rank does not look at it again.
void Endpoint::drop(const Offered& offered) {
  offered.offer->state.store(Offer::State::kDropped, std::memory_order_release);
}

void Endpoint::withdraw(Operation& operation) noexcept {
  switch (operation.state) {
    case State::kDone:
      break;
    case State::kPosted:
      bucket_of(operation.context, operation.tag).receives.remove(operation);
      break;
    case State::kQueued:
      outlets_[static_cast<std::size_t>(operation.peer)].queue.remove(operation);
      --queued_;
      break;
    case State::kOffered: {
      Offer& offer = *operation.offer;
      auto expected = Offer::State::kOffered;
      if (offer.state.compare_exchange_strong(expected, Offer::State::kWithdrawn,
                                              std::memory_order_acq_rel)) {
        offers_withdrawn_.push_back(&offer);
        break;
      }
      while (offer.state.load(std::memory_order_acquire) == Offer::State::kCopying) {
        sched_yield();
      }
      offers_free_.push_back(&offer);
      break;
    }
  }
  operation.state = State::kDone;
}

Offer& Endpoint::take_offer() {
  if (offers_free_.empty()) {
    std::erase_if(offers_withdrawn_, [this](Offer* offer) {
      const bool dropped = offer->state.load(std::memory_order_acquire) == Offer::State::kDropped;
      if (dropped) {
        offers_free_.push_back(offer);
      }
      return dropped;
    });
  }
  if (offers_free_.empty()) {
    make_offers(fabric_->offers[rank_].size());
  }
  Offer& offer = *offers_free_.back();
  offers_free_.pop_back();
  return offer;
}

void Endpoint::make_offers(std::size_t count) {
  std::deque<Offer>& offers = fabric_->offers[rank_];
  offers_free_.reserve(offers.size() + count);
  offers_withdrawn_.reserve(offers.size() + count);
  for (std::size_t i = 0; i < count; ++i) {
    offers_free_.push_back(&offers.emplace_back());
  }
}

void Endpoint::grow_early() {
  early_chunks_.push_back(std::make_unique_for_overwrite<Early[]>(kEarlyChunk));
  early_free_.reserve(early_chunks_.size() * kEarlyChunk);
  for (std::size_t i = kEarlyChunk; i > 0; --i) {
    early_free_.push_back(&early_chunks_.back()[i - 1]);
  }
}

}  // namespace sluice::loopback
