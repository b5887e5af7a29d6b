// Requests of a collective that may end by an exception.
#pragma once

#include <fmt/core.h>

#include <array>
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

// At its end cancels the requests that are open; the communicator then keeps the memory of both
// owners, either of which may be null.
class OpenRequests {
 public:
  OpenRequests(Communicator& comm, std::span<Request> requests, KeepAlive owner,
               KeepAlive other = nullptr)
      : comm_(comm), requests_(requests), owners_{std::move(owner), std::move(other)} {}
  ~OpenRequests() {
    bool any = false;
    for (Request& request : requests_) {
      if (request.index == Request::kNone) {
        continue;
      }
      any = true;
      try {
        comm_.cancel(request);
      } catch (...) {  // the request is lost with its communicator
        request.index = Request::kNone;
      }
    }
    for (KeepAlive& owner : owners_) {
      if (any && owner != nullptr) comm_.keep(std::move(owner));
    }
  }
  OpenRequests(const OpenRequests&) = delete;
  OpenRequests& operator=(const OpenRequests&) = delete;

 private:
  Communicator& comm_;
  std::span<Request> requests_;
  std::array<KeepAlive, 2> owners_;
};

}  // namespace sluice
