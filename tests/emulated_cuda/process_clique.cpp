#include "tests/emulated_cuda/process_clique.hpp"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace sluice::emulated {

namespace {

constexpr int kPollMilliseconds = 5;  // until an abort is seen

// A name that is in no file system and gone with its process.
std::pair<sockaddr_un, socklen_t> address_of(const std::string& id, int rank) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  const std::string name = "sluice-emulated-nccl-" + id + "-" + std::to_string(rank);
  std::memcpy(address.sun_path + 1, name.data(),
              std::min(name.size(), sizeof address.sun_path - 1));
  return {address, static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size())};
}

int make_socket() { return ::socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0); }

bool wait_until(int socket, short events) {
  pollfd waiting = {socket, events, 0};
  return ::poll(&waiting, 1, kPollMilliseconds) > 0;
}

}  // namespace

// The bytes of one group.
class ProcessClique::Exchange {
 public:
  Exchange(const ProcessClique& clique, const std::vector<Operation>& operations)
      : clique_(clique), traffic(clique.hellos_.size()) {
    std::deque<const Operation*> sent_here, received_here;
    for (const Operation& operation : operations) {
      if (operation.kind == OperationKind::kAllReduce) {
        add_sum(operation);
      } else if (operation.kind != OperationKind::kSend &&
                 operation.kind != OperationKind::kReceive) {
        std::fprintf(stderr, "emulated nccl: no such collective between processes\n");
        std::abort();
      } else if (operation.peer == clique.rank_) {
        (operation.kind == OperationKind::kSend ? sent_here : received_here).push_back(&operation);
      } else if (operation.kind == OperationKind::kSend) {
        send(operation.peer, operation, 0);
      } else {
        receive(operation.peer, operation, operation.target, 0);
      }
    }
    is_complete = sent_here.size() == received_here.size();
    for (std::size_t i = 0; is_complete && i < sent_here.size(); ++i) {
      carry_out({sent_here[i], received_here[i]});
    }
  }

  // Whether what arrived is what was expected; NCCL would hang or deliver rubbish.
  [[nodiscard]] bool is_consistent() const {
    for (const Heads& one : heads_) {
      if (std::memcmp(&one.sent, &one.found, sizeof(Head)) == 0) continue;
      std::fprintf(stderr,
                   "emulated nccl: ranks %d and %d meet in operations that differ (%zu elements, "
                   "%zu); NCCL would hang or deliver rubbish, this waits\n",
                   clique_.rank_, one.peer, static_cast<std::size_t>(one.sent.count),
                   static_cast<std::size_t>(one.found.count));
      return false;
    }
    return true;
  }

  void add_up() {
    for (Sum& sum : sums_) {
      std::vector<Operation> all(clique_.hellos_.size(), sum.own);
      std::vector<const Operation*> match;
      for (std::size_t rank = 0; rank < all.size(); ++rank) {
        if (static_cast<int>(rank) != clique_.rank_) {
          all[rank].source = all[rank].target = sum.others[rank].data();
        }
        match.push_back(&all[rank]);
      }
      carry_out(match);
    }
  }

 private:
  struct Sum {
    Operation own;
    std::vector<std::vector<std::byte>> others;  // [rank]
  };

  static Head head_of(const Operation& operation, int is_collective) {
    return {operation.count, static_cast<std::int32_t>(operation.type), is_collective};
  }
  static std::size_t bytes_of(const Operation& operation) {
    return operation.count * size_of(operation.type);
  }
  void send(int peer, const Operation& operation, int is_collective) {
    auto& out = traffic[static_cast<std::size_t>(peer)].out;
    Head& head = sent_.emplace_back(head_of(operation, is_collective));
    out.push_back({reinterpret_cast<std::byte*>(&head), sizeof head});
    auto* source = static_cast<std::byte*>(const_cast<void*>(operation.source));
    out.push_back({source, bytes_of(operation)});
  }
  void receive(int peer, const Operation& operation, void* target, int is_collective) {
    auto& in = traffic[static_cast<std::size_t>(peer)].in;
    Heads& heads = heads_.emplace_back(Heads{head_of(operation, is_collective), {}, peer});
    in.push_back({reinterpret_cast<std::byte*>(&heads.found), sizeof(Head)});
    in.push_back({static_cast<std::byte*>(target), bytes_of(operation)});
  }
  void add_sum(const Operation& operation) {
    Sum& sum = sums_.emplace_back(Sum{operation, {}});
    sum.others.resize(traffic.size());
    for (int peer = 0; peer < static_cast<int>(traffic.size()); ++peer) {
      if (peer == clique_.rank_) continue;
      auto& room = sum.others[static_cast<std::size_t>(peer)];
      room.resize(bytes_of(operation));
      send(peer, operation, 1);
      receive(peer, operation, room.data(), 1);
    }
  }

  const ProcessClique& clique_;
  std::deque<Head> sent_;
  std::deque<Heads> heads_;
  std::deque<Sum> sums_;

 public:
  std::vector<Traffic> traffic;  // [peer]
  bool is_complete = true;       // what this rank sends to itself is received within the group
};

ProcessClique::ProcessClique(int ranks, std::string id)
    : Clique(ranks),
      id_(std::move(id)),
      sockets_(static_cast<std::size_t>(ranks), -1),
      hellos_(static_cast<std::size_t>(ranks)) {}

ProcessClique::~ProcessClique() {
  is_aborted_ = true;
  if (connecting_.joinable()) connecting_.join();
  for (const int socket : sockets_) {
    if (socket >= 0) ::close(socket);
  }
}

ncclResult_t ProcessClique::arrive(int rank, int device) {
  rank_ = rank;
  Hello& mine = hellos_[static_cast<std::size_t>(rank)];
  mine.rank = rank;
  mine.device = device;
  const char* machine = std::getenv("NCCL_HOSTID");
  std::snprintf(mine.machine, sizeof mine.machine, "%s", machine == nullptr ? "" : machine);
  listener_ = make_socket();
  const auto [address, size] = address_of(id_, rank);
  if (::bind(listener_, reinterpret_cast<const sockaddr*>(&address), size) != 0 ||
      ::listen(listener_, ranks()) != 0) {
    ::close(listener_);
    return ncclSystemError;
  }
  connecting_ = std::thread([this] { connect_all(); });
  return ncclSuccess;
}

void ProcessClique::end_connecting(ncclResult_t status) {
  ::close(listener_);
  const std::lock_guard lock(mutex_);
  status_ = status;
  changed_.notify_all();
}

int ProcessClique::connect_to(int peer) const {
  const int socket = make_socket();
  const auto [address, size] = address_of(id_, peer);
  while (::connect(socket, reinterpret_cast<const sockaddr*>(&address), size) != 0) {
    if (is_aborted_) {
      ::close(socket);
      return -1;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));  // it listens later
  }
  return socket;
}

int ProcessClique::accept_one() const {
  while (!is_aborted_) {
    if (!wait_until(listener_, POLLIN)) continue;
    const int socket = ::accept4(listener_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (socket >= 0) return socket;
  }
  return -1;
}

// Tells the peer who this is, and hears who it is.
bool ProcessClique::greet(int socket) {
  Hello theirs;
  const Hello& mine = hellos_[static_cast<std::size_t>(rank_)];
  if (::send(socket, &mine, sizeof mine, MSG_NOSIGNAL) != sizeof mine) return false;
  while (!is_aborted_) {
    if (!wait_until(socket, POLLIN)) continue;
    if (::recv(socket, &theirs, sizeof theirs, 0) != sizeof theirs) return false;
    if (theirs.rank < 0 || theirs.rank >= ranks()) return false;
    sockets_[static_cast<std::size_t>(theirs.rank)] = socket;
    hellos_[static_cast<std::size_t>(theirs.rank)] = theirs;
    return true;
  }
  return false;
}

void ProcessClique::connect_all() {
  for (int i = 0; i < ranks() - 1; ++i) {
    const int socket = i < rank_ ? connect_to(i) : accept_one();
    if (socket >= 0 && greet(socket)) continue;
    if (socket >= 0 && std::find(sockets_.begin(), sockets_.end(), socket) == sockets_.end()) {
      ::close(socket);
    }
    return end_connecting(ncclRemoteError);
  }
  for (std::size_t b = 0; b < hellos_.size(); ++b) {
    for (std::size_t a = 0; a < b; ++a) {
      if (hellos_[a].device != hellos_[b].device ||
          std::strcmp(hellos_[a].machine, hellos_[b].machine) != 0) {
        continue;
      }
      std::fprintf(stderr, "emulated nccl: ranks %zu and %zu are both on device %d\n", a, b,
                   hellos_[a].device);
      return end_connecting(ncclInvalidUsage);
    }
  }
  end_connecting(ncclSuccess);
}

ncclResult_t ProcessClique::status() const {
  const std::lock_guard lock(mutex_);
  return status_;
}

ncclResult_t ProcessClique::wait_for_all() const {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return status_ != ncclInProgress || is_aborted_; });
  return status_;
}

ncclResult_t ProcessClique::failure() const {
  return is_peer_gone_ ? ncclRemoteError : ncclSuccess;
}

// Reads or writes what the socket takes at once; false where the peer is gone.
bool ProcessClique::move_some(int peer, Traffic& traffic, bool reads) {
  const int socket = sockets_[static_cast<std::size_t>(peer)];
  auto& pieces = reads ? traffic.in : traffic.out;
  while (!pieces.empty()) {
    Piece& piece = pieces.front();
    if (piece.left > 0) {
      const ssize_t moved = reads ? ::recv(socket, piece.data, piece.left, 0)
                                  : ::send(socket, piece.data, piece.left, MSG_NOSIGNAL);
      if (moved < 0 && (errno == EAGAIN || errno == EINTR)) return true;
      if (moved <= 0) return false;
      piece.data += moved;
      piece.left -= static_cast<std::size_t>(moved);
    }
    if (piece.left == 0) pieces.pop_front();
  }
  return true;
}

bool ProcessClique::move(std::vector<Traffic>& traffic) {
  while (!is_aborted_) {
    std::vector<pollfd> waiting;
    for (std::size_t peer = 0; peer < traffic.size(); ++peer) {
      Traffic& one = traffic[peer];
      if (one.in.empty() && one.out.empty()) continue;
      if (!move_some(static_cast<int>(peer), one, true) ||
          !move_some(static_cast<int>(peer), one, false)) {
        is_peer_gone_ = true;
        return false;
      }
      const int events = (one.in.empty() ? 0 : POLLIN) | (one.out.empty() ? 0 : POLLOUT);
      if (events != 0) waiting.push_back({sockets_[peer], static_cast<short>(events), 0});
    }
    if (waiting.empty()) return true;
    static_cast<void>(::poll(waiting.data(), waiting.size(), kPollMilliseconds));
  }
  return false;
}

void ProcessClique::run_group(int rank, const std::vector<Operation>& operations) {
  {
    const std::lock_guard lock(mutex_);
    if (is_aborted_) return;
    ++groups_;
  }
  Exchange exchange(*this, operations);
  bool is_done = exchange.is_complete && move(exchange.traffic) && exchange.is_consistent();
  if (is_done) exchange.add_up();
  if (!is_done) wait_for_abort(rank);
  const std::lock_guard lock(mutex_);
  --groups_;
  changed_.notify_all();
}

void ProcessClique::wait_for_abort(int /*rank*/) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return is_aborted_.load(); });
}

void ProcessClique::abort(int /*rank*/) {
  std::unique_lock lock(mutex_);
  is_aborted_ = true;
  changed_.notify_all();
  changed_.wait(lock, [this] { return groups_ == 0; });
}

}  // namespace sluice::emulated
