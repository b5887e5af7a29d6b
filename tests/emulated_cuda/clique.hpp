// What the ranks of one emulated NCCL communicator share: who has arrived, and the sends, receives
// and collectives that wait for their counterparts. Ranks are threads of one process; those of a
// ProcessClique (process_clique.hpp) are processes.
//
// Counterparts find each other by order alone: the nth send from a to b meets the nth receive of b
// from a, the nth collective of each rank those of all others. A wrong order therefore delivers the
// wrong tensor or waits for ever, as NCCL does.
#pragma once

#include <nccl.h>

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

namespace sluice::emulated {

enum class OperationKind : std::uint8_t {
  kSend,
  kReceive,
  kAllReduce,
  kAllGather,
  kReduceScatter,
  kBroadcast,
};

struct Operation {
  OperationKind kind;
  const void* source = nullptr;
  void* target = nullptr;
  std::size_t count = 0;  // as given to NCCL
  ncclDataType_t type = ncclFloat32;
  ncclRedOp_t reduction = ncclSum;
  int peer = 0;  // or root
};

// Bytes of an element; 0 for a type the emulation lacks.
[[nodiscard]] std::size_t size_of(ncclDataType_t type);

class Clique {
 public:
  explicit Clique(int ranks);
  virtual ~Clique() = default;
  Clique(const Clique&) = delete;
  Clique& operator=(const Clique&) = delete;

  [[nodiscard]] int ranks() const { return static_cast<int>(members_.size()); }

  // ncclInvalidUsage where the rank is there already or another rank has the same device.
  virtual ncclResult_t arrive(int rank, int device);
  // ncclInProgress until all ranks have arrived; ncclInvalidUsage where one was refused.
  [[nodiscard]] virtual ncclResult_t status() const;
  virtual ncclResult_t wait_for_all() const;

  // Posts the operations of one group at once; blocks until all have met their counterparts and are
  // done, or the rank aborts. To be called for one group of a rank after the other.
  virtual void run_group(int rank, const std::vector<Operation>& operations);
  // Blocks until the rank aborts.
  virtual void wait_for_abort(int rank);
  // Releases what the rank waits for, now and from now on; none of its buffers is touched any more.
  virtual void abort(int rank);
  // ncclRemoteError once a peer is gone.
  [[nodiscard]] virtual ncclResult_t failure() const { return ncclSuccess; }

  // One ncclCommSplit of each rank. Ranks of one color get one new clique, ordered by key, then by
  // rank here; `membership` is filled in once all ranks have called.
  struct Membership {
    bool is_known = false;  // under the mutex of the clique that is split
    std::shared_ptr<Clique> clique;
    int rank = 0;
  };
  void split(int rank, int device, int color, int key, std::shared_ptr<Membership> membership);
  void wait_for(const Membership& membership) const;
  [[nodiscard]] bool is_known(const Membership& membership) const;

 private:
  // An operation that has been posted.
  struct Posting {
    Operation operation;
    int rank;
    bool is_done = false;
  };
  using Postings = std::vector<std::shared_ptr<Posting>>;

  struct Member {
    bool is_here = false;
    bool is_aborted = false;
    int device = -1;
    int copying = 0;  // matches that read or write buffers of this rank at the moment
    std::uint64_t collectives = 0;
    std::uint64_t splits = 0;
  };

  // Between one sender and one receiver; one of the two is empty.
  struct Channel {
    std::deque<std::shared_ptr<Posting>> sends, receives;
  };

  struct Splitting {
    int color;
    int key;
    int rank;
    int device;
    std::shared_ptr<Membership> membership;
  };

  [[nodiscard]] Member& member(int rank) { return members_[static_cast<std::size_t>(rank)]; }
  [[nodiscard]] ncclResult_t status_locked() const;
  void post(const std::shared_ptr<Posting>& posting, std::vector<Postings>& matches);
  void withdraw(const Postings& postings);
  void complete(std::unique_lock<std::mutex>& lock, const Postings& match);
  static bool is_consistent(const Postings& match);
  static void finish_split(const std::vector<Splitting>& all);

  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::vector<Member> members_;
  bool is_refused_ = false;
  std::map<std::pair<int, int>, Channel> channels_;  // by sender, receiver
  std::map<std::uint64_t, Postings> collectives_;    // by number; null where a rank is missing
  std::map<std::uint64_t, std::vector<Splitting>> splits_;
};

// The arithmetic and copies of one match: the operations of both ends, or of all ranks in order.
void carry_out(const std::vector<const Operation*>& match);

}  // namespace sluice::emulated
