// The ranks of an emulated NCCL communicator as processes of one machine, with a socket between any
// two. Counterparts find each other by their order on the socket, as those of a Clique do. A peer
// that dies closes its sockets: failure() is ncclRemoteError then, as NCCL's is over a network. A
// peer that is stopped leaves the others waiting. Only sends, receives and all-reduces.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "tests/emulated_cuda/clique.hpp"

namespace sluice::emulated {

class ProcessClique final : public Clique {
 public:
  // `id`: equal in all ranks, and no other clique's.
  ProcessClique(int ranks, std::string id);
  ~ProcessClique() override;
  ProcessClique(const ProcessClique&) = delete;
  ProcessClique& operator=(const ProcessClique&) = delete;

  // Connects in a thread of its own.
  ncclResult_t arrive(int rank, int device) override;
  [[nodiscard]] ncclResult_t status() const override;
  ncclResult_t wait_for_all() const override;
  void run_group(int rank, const std::vector<Operation>& operations) override;
  void wait_for_abort(int rank) override;
  void abort(int rank) override;
  [[nodiscard]] ncclResult_t failure() const override;

 private:
  struct Piece {  // bytes that pass a socket one after the other
    std::byte* data;
    std::size_t left;
  };
  struct Traffic {  // of one peer
    std::deque<Piece> out, in;
  };
  struct Hello {
    int rank = -1, device = -1;
    char machine[128] = {};
  };
  struct Head {  // precedes the elements of a message
    std::uint64_t count = 0;
    std::int32_t type = 0;
    std::int32_t is_collective = 0;
  };
  struct Heads {
    Head sent, found;
    int peer = 0;
  };
  class Exchange;

  void connect_all();
  [[nodiscard]] int connect_to(int peer) const;
  [[nodiscard]] int accept_one() const;
  bool greet(int socket);
  // Moves everything; false after abort(), or where a peer is gone.
  bool move(std::vector<Traffic>& traffic);
  bool move_some(int peer, Traffic& traffic, bool reads);
  void end_connecting(ncclResult_t status);

  std::string id_;
  int rank_ = -1;
  int listener_ = -1;
  std::vector<int> sockets_;   // [peer]; -1 for this rank
  std::vector<Hello> hellos_;  // [rank]
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  ncclResult_t status_ = ncclInProgress;
  std::atomic<bool> is_aborted_ = false, is_peer_gone_ = false;
  int groups_ = 0;  // that run at the moment
  std::thread connecting_;
};

}  // namespace sluice::emulated
