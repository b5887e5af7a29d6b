// Requests of a collective that may end by an exception.
#pragma once

#include <fmt/core.h>

#include <cstddef>
#include <span>
#include <utility>

#include <sluice/error.hpp>

#include "comm/group/communicator.hpp"

namespace sluice {

// Throws Error(kMismatch) for other sizes.
inline void require_size(const Communicator& comm, std::size_t expected, const Arrival& arrival) {
  if (arrival.bytes == expected) return;
  throw Error(
      ErrorCode::kMismatch,
      fmt::format("rank {} expected {} bytes from rank {}, got {}: the ranks disagree about "
                  "the size of a collective",
                  comm.rank(), expected, arrival.source, arrival.bytes),
      comm.rank());
}

// Cancels those that are open; true: there were some, and the communicator has to keep their
// memory.
inline bool cancel_open(Communicator& comm, std::span<Request> requests) noexcept {
  bool any = false;
  for (Request& request : requests) {
    if (request.index == Request::kNone) continue;
    any = true;
    try {
      comm.cancel(request);
    } catch (...) {  // the request is lost with its communicator
      request.index = Request::kNone;
    }
  }
  return any;
}

// At its end cancels the requests that are open; the communicator then keeps the owner's memory.
class OpenRequests {
 public:
  // `owner` may be null.
  OpenRequests(Communicator& comm, std::span<Request> requests, KeepAlive owner)
      : comm_(comm), requests_(requests), owner_(std::move(owner)) {}
  ~OpenRequests() {
    if (cancel_open(comm_, requests_) && owner_ != nullptr) comm_.keep(std::move(owner_));
  }
  OpenRequests(const OpenRequests&) = delete;
  OpenRequests& operator=(const OpenRequests&) = delete;

 private:
  Communicator& comm_;
  std::span<Request> requests_;
  KeepAlive owner_;
};

}  // namespace sluice
