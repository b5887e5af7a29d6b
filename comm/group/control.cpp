#include "comm/group/control.hpp"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/base/index.hpp"
#include "comm/group/waiter.hpp"

namespace sluice {

namespace {

constexpr int kReportTag = 0;   // to rank 0
constexpr int kVerdictTag = 1;  // from rank 0
constexpr auto kSendTimeout = std::chrono::seconds(1);
constexpr std::uint32_t kPollsPerTest = 4;

using Clock = std::chrono::steady_clock;

// On the wire. Small enough that a send is done without the receiver's help.
struct ErrorMessage {
  std::int32_t code = 0;
  std::int32_t rank = -1;
  std::uint32_t length = 0;
  std::array<char, 2036> text{};
};
static_assert(sizeof(ErrorMessage) == 2048);

ErrorMessage pack(const Error& error, int rank) {
  ErrorMessage message;
  message.code = static_cast<std::int32_t>(error.code());
  message.rank = error.rank() >= 0 ? error.rank() : rank;
  const std::size_t length = std::strlen(error.what());
  message.length = static_cast<std::uint32_t>(std::min(length, message.text.size()));
  std::memcpy(message.text.data(), error.what(), message.length);
  if (length > message.text.size()) {
    std::memcpy(message.text.data() + message.text.size() - 3, "...", 3);
  }
  return message;
}

Error unpack(const ErrorMessage& message) {
  const std::size_t length = std::min<std::size_t>(message.length, message.text.size());
  return Error(static_cast<ErrorCode>(message.code), std::string(message.text.data(), length),
               message.rank);
}

}  // namespace

struct ControlChannel::State {
  explicit State(std::unique_ptr<Communicator> own)
      : comm(std::move(own)), sends(at(comm->size())) {
    if (comm->size() > 1) {
      post();
    }
  }

  ~State() {
    for (Request& send : sends) {
      try {
        comm->cancel(send);
      } catch (...) {  // the request is lost with the communicator
      }
    }
    comm->keep(std::move(sent));
  }

  [[nodiscard]] bool decides() const { return comm->rank() == 0; }

  void post() {
    incoming = decides()
                   ? comm->post_recv(Communicator::kAnyPeer, kReportTag, object_bytes(received))
                   : comm->post_recv(0, kVerdictTag, object_bytes(received));
  }

  // True once a message has come: on rank 0 a report, elsewhere the verdict.
  bool arrived() { return incoming.index != Request::kNone && comm->test(incoming); }

  // Rank 0: takes all reports that have arrived; the lowest rank wins.
  void collect_reports() {
    while (arrived()) {
      if (!winner || received.rank < winner->rank) {
        winner = received;
      }
      post();
    }
  }

  // Rank 0: sends the winner to the others, which may not be polling.
  void announce() {
    sent->verdict = *winner;
    for (int peer = 1; peer < comm->size(); ++peer) {
      sends[at(peer)] = comm->start_send(peer, kVerdictTag, object_bytes(sent->verdict));
    }
    wait_for(
        [this] {
          bool done = true;
          for (Request& send : sends) {
            done = (send.index == Request::kNone || comm->test(send)) && done;
          }
          return done;
        },
        kSendTimeout);
  }

  // Polls `condition` until it holds or the time is over.
  template <typename Condition>
  void wait_for(Condition condition, Clock::duration timeout) {
    Waiter waiter(comm->local_size());
    const Clock::time_point deadline = Clock::now() + timeout;
    while (!condition() && Clock::now() <= deadline) {
      waiter.pause();
    }
  }

  // Every rank: takes what has arrived, and so the winner where there is one.
  void look() {
    if (winner || comm->size() == 1) {
      return;
    }
    if (decides()) {
      collect_reports();
      if (winner) {
        announce();
      }
    } else if (arrived()) {
      winner = received;
    }
  }

  // Declared before the communicator, whose destructor cancels the receive.
  ErrorMessage received;
  struct Sent {
    ErrorMessage report, verdict;
  };
  std::shared_ptr<Sent> sent = std::make_shared<Sent>();
  std::optional<ErrorMessage> winner;
  std::unique_ptr<Communicator> comm;
  std::vector<Request> sends;  // by peer
  Request incoming;
  std::uint32_t polls = 0;
};

ControlChannel::ControlChannel(Communicator& comm)
    : state_(std::make_unique<State>(comm.duplicate())) {}

ControlChannel::~ControlChannel() = default;

void ControlChannel::poll() {
  if (++state_->polls % kPollsPerTest == 0) {
    state_->look();
  }
  if (state_->winner) {
    throw unpack(*state_->winner);
  }
}

Error ControlChannel::report(const Error& error, std::chrono::milliseconds timeout) noexcept {
  State& state = *state_;
  try {
    state.look();
    if (!state.winner) {
      state.sent->report = pack(error, state.comm->rank());
      if (state.decides()) {
        state.winner = state.sent->report;
        state.announce();
      } else {
        state.sends[0] = state.comm->start_send(0, kReportTag, object_bytes(state.sent->report));
        state.wait_for(
            [&state] {
              state.look();
              return state.winner.has_value();
            },
            timeout);
      }
    }
  } catch (...) {
    // The communicator has failed: no other error can arrive.
  }
  if (!state.winner) {
    state.winner = pack(error, state.comm->rank());
  }
  return unpack(*state.winner);
}

std::unique_ptr<World> World::split(int colour, int key) {
  return communicator_of(*this).split(colour, key);
}

void Communicator::abort(int code) const {
  std::fflush(nullptr);
  std::_Exit(code);
}

}  // namespace sluice
