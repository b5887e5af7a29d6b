#include "comm/mpi/first_contact.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include <sluice/error.hpp>

#include "comm/base/index.hpp"
#include "comm/base/joined.hpp"
#include "comm/base/local_ranks.hpp"
#include "comm/group/waiter.hpp"
#include "comm/mpi/mpi_check.hpp"
#include "comm/mpi/mpi_session.hpp"

namespace sluice {
namespace {

using Clock = std::chrono::steady_clock;

template <std::size_t kSize>
void put(std::array<char, kSize>& field, std::string_view text) {
  std::memcpy(field.data(), text.data(), std::min(text.size(), kSize - 1));
}

// Both messages consist of zero-terminated texts. Their sizes are the same in all versions.
struct Greeting {
  std::array<char, 256> build{}, mpi{}, host{};
};
struct Verdict {
  std::array<char, 16> code{};  // name_of(); empty: no error
  std::array<char, 1008> text{};
};

// This rank's messages over MPI_COMM_WORLD, and their memory. Those that are still open at the end
// are cancelled; a send that goes on keeps the memory.
struct Contact {
  explicit Contact(const Greeting& mine) : world(borrow_world()), tag(world->max_tag() + 1) {
    memory->greetings.resize(at(world->size()));
    memory->greetings[at(world->rank())] = mine;
  }
  ~Contact() {
    for (Request& each : requests) world->cancel(each);
    world->keep(memory);
  }

  template <typename Message>
  void send(Message& message, int peer) {
    requests.push_back(world->start_send(peer, tag, object_bytes(message)));
  }
  template <typename Message>
  void receive(Message& message, int peer) {
    requests.push_back(world->post_recv(peer, tag, object_bytes(message)));
  }
  // Whether each request is done by `deadline`.
  std::vector<bool> wait(Clock::time_point deadline) {
    Waiter waiter(std::numeric_limits<int>::max());
    std::vector<bool> done(requests.size());
    while (true) {
      for (std::size_t i = 0; i < done.size(); ++i) done[i] = world->test(requests[i]);
      if (std::find(done.begin(), done.end(), false) == done.end() || Clock::now() > deadline) {
        return done;
      }
      waiter.pause();
    }
  }

  struct Memory {
    std::vector<Greeting> greetings;  // [rank]; of other ranks on rank 0 alone
    Verdict verdict;
  };
  std::shared_ptr<Memory> memory = std::make_shared<Memory>();
  std::unique_ptr<Communicator> world;
  int tag;  // above those that communicators use
  std::vector<Request> requests;
};

struct Refusal {
  ErrorCode code;
  std::string text;
};

double seconds(std::chrono::milliseconds time) { return static_cast<double>(time.count()) / 1e3; }

// `greetings`: [rank]; those of `silent` ranks are empty.
std::optional<Refusal> judge(const std::vector<Greeting>& greetings, const std::vector<int>& silent,
                             std::chrono::milliseconds limit) {
  if (!silent.empty()) {
    const std::string cause = silence_on_host(local_ranks(), static_cast<int>(greetings.size()));
    return Refusal{
        ErrorCode::kPeer,
        fmt::format("no message from rank{} {} reached rank 0 on {} within {} s: {}. "
                    "SLUICE_START_TIMEOUT=SECONDS allows more time",
                    silent.size() == 1 ? "" : "s", joined(silent, ", "), greetings[0].host.data(),
                    seconds(limit),
                    cause.empty() ? "their hosts do not reach it, or their processes do not run: "
                                    "name the network that joins all hosts ('--mca "
                                    "btl_tcp_if_include NETWORK'), and open its ports"
                                  : cause)};
  }
  const auto differ = [&](const auto field, const char* what,
                          const char* cure) -> std::optional<Refusal> {
    for (std::size_t rank = 1; rank < greetings.size(); ++rank) {
      const Greeting& first = greetings[0];
      const Greeting& other = greetings[rank];
      if (first.*field == other.*field) continue;
      return Refusal{ErrorCode::kMismatch,
                     fmt::format("ranks have different {}: rank 0 on {} has '{}', rank {} on {} "
                                 "has '{}'; {}",
                                 what, first.host.data(), (first.*field).data(), rank,
                                 other.host.data(), (other.*field).data(), cure)};
    }
    return std::nullopt;
  };
  if (auto refusal = differ(&Greeting::build, "builds of Sluice", "copy one to every host")) {
    return refusal;
  }
  return differ(&Greeting::mpi, "MPI libraries", "install one version on every host");
}

void greet_all(Contact& contact, std::chrono::milliseconds limit) {
  std::vector<Greeting>& greetings = contact.memory->greetings;
  const int ranks = contact.world->size();
  for (int peer = 1; peer < ranks; ++peer) contact.receive(greetings[at(peer)], peer);
  const std::vector<bool> here = contact.wait(Clock::now() + limit);
  std::vector<int> silent;
  for (int peer = 1; peer < ranks; ++peer) {
    if (here[at(peer - 1)]) continue;
    silent.push_back(peer);
    contact.world->cancel(contact.requests[at(peer - 1)]);
  }
  const std::optional<Refusal> refusal = judge(greetings, silent, limit);
  Verdict& verdict = contact.memory->verdict;
  if (refusal) {
    put(verdict.code, name_of(refusal->code));
    put(verdict.text, refusal->text);
  }
  for (int peer = 1; peer < ranks; ++peer) {
    if (here[at(peer - 1)]) contact.send(verdict, peer);
  }
  (void)contact.wait(Clock::now() + limit);
  if (refusal) throw Error(refusal->code, refusal->text, 0);
}

void greet_first(Contact& contact, std::chrono::milliseconds limit) {
  const int rank = contact.world->rank();
  Greeting& mine = contact.memory->greetings[at(rank)];
  const Verdict& verdict = contact.memory->verdict;
  contact.receive(contact.memory->verdict, 0);
  contact.send(mine, 0);
  // Rank 0 itself waits for `limit`.
  if (!contact.wait(Clock::now() + 2 * limit)[0]) {
    const std::string cause = silence_on_host(local_ranks(), contact.world->size());
    throw Error(ErrorCode::kPeer,
                fmt::format("rank {} on {} hears nothing from rank 0 since {} s: {}", rank,
                            mine.host.data(), seconds(2 * limit),
                            cause.empty() ? "their hosts do not reach each other, or rank 0 does "
                                            "not run"
                                          : cause),
                rank);
  }
  const std::string_view code(verdict.code.data());
  if (code.empty()) return;
  throw Error(code == name_of(ErrorCode::kPeer) ? ErrorCode::kPeer : ErrorCode::kMismatch,
              verdict.text.data(), 0);
}

}  // namespace

void make_first_contact(const std::string& build, std::chrono::milliseconds limit) {
  const MpiInfo info = mpi_info();
  Greeting mine;
  put(mine.build, build);
  put(mine.mpi, info.library);
  put(mine.host, info.host);
  Contact contact(mine);
  if (contact.world->rank() == 0) {
    greet_all(contact, limit);
  } else {
    greet_first(contact, limit);
  }
}

}  // namespace sluice
