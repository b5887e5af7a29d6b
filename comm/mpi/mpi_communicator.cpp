#include <fmt/core.h>
#include <mpi.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include <sluice/error.hpp>
#include <sluice/mpi.hpp>

#include "comm/base/cores.hpp"
#include "comm/base/index.hpp"
#include "comm/group/waiter.hpp"
#include "comm/mpi/device_messages.hpp"
#include "comm/mpi/mpi_check.hpp"

namespace sluice {

void check_mpi(int result, const char* call) {
  if (result == MPI_SUCCESS) {
    return;
  }
  std::array<char, MPI_MAX_ERROR_STRING + 1> text{};
  int length = 0;
  if (MPI_Error_string(result, text.data(), &length) != MPI_SUCCESS) {
    length = 0;
  }
  throw Error(ErrorCode::kMpi, fmt::format("{} failed: {}", call,
                                           length > 0 ? std::string(text.data()) : "no text"));
}

namespace {

constexpr std::size_t kFirstSlots = 256;
constexpr auto kCancelTimeout = std::chrono::milliseconds(100);

// Cancelled messages of one communicator that go on, and the memory that they may use.
struct Unfinished {
  std::vector<MPI_Request> requests;
  std::vector<KeepAlive> memory;
  // A communicator that all its ranks leave open, until nothing can arrive on it any more.
  MPI_Comm left = MPI_COMM_NULL;
  int last_tag = 0;  // of the last message of a rank, which is empty
  int unheard = 0;   // ranks whose last message has not come

  // Takes over `comm`, on which this rank sends nothing any more.
  void leave(MPI_Comm comm, int size, int tag) {
    left = comm;
    last_tag = tag;
    unheard = size;
    for (int peer = 0; peer < size; ++peer) {
      MPI_Isend(nullptr, 0, MPI_BYTE, peer, tag, left, &requests.emplace_back(MPI_REQUEST_NULL));
    }
  }

  // Advances the messages; true if none is left.
  bool done() noexcept {
    while (unheard > 0 && receive_one()) continue;
    std::erase_if(requests, [](MPI_Request& request) {
      int done = 0;
      return MPI_Test(&request, &done, MPI_STATUS_IGNORE) != MPI_SUCCESS || done != 0;
    });
    if (!requests.empty() || unheard > 0) return false;
    if (left != MPI_COMM_NULL) MPI_Comm_free(&left);
    return true;
  }

 private:
  // Receives what nobody waits for; false: nothing is there. Those of one rank come in its order.
  bool receive_one() noexcept {
    int there = 0, bytes = 0;
    MPI_Status status;
    if (MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, left, &there, &status) != MPI_SUCCESS) return false;
    if (there == 0 || MPI_Get_count(&status, MPI_BYTE, &bytes) != MPI_SUCCESS) return false;
    try {
      const auto room = std::make_shared<std::vector<std::byte>>(at(bytes));
      memory.push_back(room);
      MPI_Irecv(room->data(), bytes, MPI_BYTE, status.MPI_SOURCE, status.MPI_TAG, left,
                &requests.emplace_back(MPI_REQUEST_NULL));
    } catch (const std::bad_alloc&) {
      return false;
    }
    if (status.MPI_TAG == last_tag) --unheard;
    return true;
  }
};

bool mpi_is_over() noexcept {
  int finalized = 0;
  return MPI_Finalized(&finalized) != MPI_SUCCESS || finalized != 0;
}

int granted_level() {
  int level = MPI_THREAD_SINGLE;
  check_mpi(MPI_Query_thread(&level), "MPI_Query_thread");
  return level;
}

// Under MPI_THREAD_FUNNELED one thread alone may call MPI.
void require_mpi_thread() {
  int is_main = 0;
  check_mpi(MPI_Is_thread_main(&is_main), "MPI_Is_thread_main");
  if (granted_level() == MPI_THREAD_FUNNELED && is_main == 0) {
    throw Error(ErrorCode::kUsage,
                "MPI grants MPI_THREAD_FUNNELED: only the thread that initialised it may make or "
                "call a communicator or a pipeline; do so on that thread, or initialise MPI with "
                "MPI_THREAD_SERIALIZED or MPI_THREAD_MULTIPLE");
  }
}

// Unfinished messages of destroyed communicators, shared by all communicators of one origin.
class Orphans {
 public:
  // MPI may use the memory of an open message until the end of MPI_Finalize. Such memory is never
  // freed.
  ~Orphans() {
    if (mpi_is_over()) return;
    sweep();
    if (left_.empty()) return;
    (void)std::make_unique<std::vector<Unfinished>>(std::move(left_)).release();
  }

  void add(Unfinished unfinished) {
    const std::lock_guard lock(mutex_);
    left_.push_back(std::move(unfinished));
  }

  // Frees memory that no message uses any more.
  void sweep() noexcept {
    const std::lock_guard lock(mutex_);
    std::erase_if(left_, [](Unfinished& unfinished) { return unfinished.done(); });
  }

 private:
  std::mutex mutex_;  // communicators may belong to several threads
  std::vector<Unfinished> left_;
};

// A Request is an index into a table of MPI requests, which grows only when all are open at once.
class MpiCommunicator final : public Communicator {
 public:
  // Takes over `comm`, unless it is borrowed.
  MpiCommunicator(MPI_Comm comm, int local_size, std::shared_ptr<Orphans> orphans,
                  bool borrowed = false)
      : left_open_(borrowed), comm_(comm), local_size_(local_size), orphans_(std::move(orphans)) {
    orphans_->sweep();
    if (!borrowed) {
      check_mpi(MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    }
    check_mpi(MPI_Comm_rank(comm_, &rank_), "MPI_Comm_rank");
    check_mpi(MPI_Comm_size(comm_, &size_), "MPI_Comm_size");
    int* bound = nullptr;
    int found = 0;
    check_mpi(MPI_Comm_get_attr(comm_, MPI_TAG_UB, &bound, &found), "MPI_Comm_get_attr");
    last_tag_ = found != 0 ? *bound : 32767;  // the least the standard allows
    grow();
  }

  ~MpiCommunicator() override {
    if (mpi_is_over()) return;
    for (std::size_t i = 0; i < slots_.size(); ++i) {
      Request request{static_cast<std::int32_t>(i)};
      if (slots_[i].request != MPI_REQUEST_NULL) {
        withdraw(request);
      }
    }
    if (all_leave_) unfinished_.leave(comm_, size_, last_tag_);
    if (!unfinished_.done()) {
      orphans_->add(std::move(unfinished_));
    }
    orphans_->sweep();
    if (!left_open_) MPI_Comm_free(&comm_);  // open sends on it go on
  }

  MpiCommunicator(const MpiCommunicator&) = delete;
  MpiCommunicator& operator=(const MpiCommunicator&) = delete;

  void leave_open(bool by_all) override {
    left_open_ = true;
    all_leave_ = by_all;
  }
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  int max_tag() const override { return last_tag_ - 1; }
  int local_size() const override { return local_size_; }
  const char* name() const override { return "mpi"; }
  std::string device_memory_unsupported_reason(Device device) const override {
    return mpi_device_memory_unsupported_reason(device);
  }

  Request start_send(int peer, int tag, std::span<const std::byte> bytes) override {
    const int count = count_of(bytes.size());
    Slot& slot = take_slot({.peer = peer, .tag = tag});
    return started(slot, MPI_Isend(bytes.data(), count, MPI_BYTE, peer, tag, comm_, &slot.request),
                   "MPI_Isend");
  }

  Request post_recv(int peer, int tag, std::span<std::byte> bytes) override {
    const int count = count_of(bytes.size());
    Slot& slot = take_slot({.capacity = bytes.size(), .peer = peer, .tag = tag, .receives = true});
    const int source = peer == kAnyPeer ? MPI_ANY_SOURCE : peer;
    return started(slot,
                   MPI_Irecv(bytes.data(), count, MPI_BYTE, source, tag, comm_, &slot.request),
                   "MPI_Irecv");
  }

  bool test(Request& request, Arrival* arrival) override {
    if (request.index == Request::kNone) {
      return true;
    }
    Slot& slot = slots_[at(request.index)];
    int done = 0;
    MPI_Status status;
    const int result = MPI_Test(&slot.request, &done, &status);
    if (result != MPI_SUCCESS) {
      request.index = Request::kNone;
      fail(slot, result, status);
    }
    if (done == 0) {
      return false;
    }
    if (arrival != nullptr && slot.receives) {
      int count = 0;
      MPI_Get_count(&status, MPI_BYTE, &count);
      *arrival = Arrival{status.MPI_SOURCE, status.MPI_TAG, static_cast<std::size_t>(count)};
    }
    free_.push_back(std::exchange(request.index, Request::kNone));
    return true;
  }

  void cancel(Request& request) override {
    if (request.index != Request::kNone) {
      withdraw(request);
    }
  }

  void keep(KeepAlive memory) override {
    const bool open = std::any_of(slots_.begin(), slots_.end(), [](const Slot& slot) {
      return slot.request != MPI_REQUEST_NULL && !slot.receives;
    });
    if (unfinished_.done() && !open) {
      unfinished_.memory.clear();
    } else {
      unfinished_.memory.push_back(std::move(memory));
    }
  }

  void require_this_thread() const override { require_mpi_thread(); }

  [[noreturn]] void abort(int code) const override {
    std::fflush(nullptr);
    MPI_Abort(comm_, code);
    std::_Exit(code);
  }

  std::unique_ptr<Communicator> split(int colour, int key) override {
    require_mpi_thread();
    MPI_Comm part = MPI_COMM_NULL;
    check_mpi(MPI_Comm_split(comm_, colour, key, &part), "MPI_Comm_split");
    return std::make_unique<MpiCommunicator>(part, local_size_, orphans_);
  }

  std::unique_ptr<Communicator> duplicate() override {
    require_mpi_thread();
    MPI_Comm copy = MPI_COMM_NULL;
    check_mpi(MPI_Comm_dup(comm_, &copy), "MPI_Comm_dup");
    return std::make_unique<MpiCommunicator>(copy, local_size_, orphans_);
  }

 private:
  struct Slot {
    MPI_Request request = MPI_REQUEST_NULL;
    std::size_t capacity = 0;
    int peer = 0;
    int tag = 0;
    bool receives = false;
  };

  static int count_of(std::size_t bytes) {
    if (bytes > static_cast<std::size_t>(INT_MAX)) {
      throw Error(ErrorCode::kInternal,
                  fmt::format("a message of {} bytes in one piece; at most {}", bytes, INT_MAX));
    }
    return static_cast<int>(bytes);
  }

  void grow() {
    const std::size_t old = slots_.size();
    const std::size_t size = std::max(kFirstSlots, 2 * old);
    slots_.resize(size);
    free_.reserve(size);
    for (std::size_t i = size; i > old; --i) {
      free_.push_back(static_cast<std::int32_t>(i - 1));
    }
  }

  Slot& take_slot(const Slot& slot) {
    if (free_.empty()) grow();
    return slots_[at(free_.back())] = slot;
  }

  // The request of the slot that was taken, which becomes free again where its start has failed.
  Request started(Slot& slot, int result, const char* call) {
    if (result != MPI_SUCCESS) slot.request = MPI_REQUEST_NULL;
    check_mpi(result, call);
    const std::int32_t index = free_.back();
    free_.pop_back();
    return Request{index};
  }

  // What a failed MPI_Test of a slot means.
  [[noreturn]] void fail(Slot& slot, int result, const MPI_Status& status) {
    slot.request = MPI_REQUEST_NULL;
    free_.push_back(static_cast<std::int32_t>(&slot - slots_.data()));
    int error_class = MPI_SUCCESS;
    MPI_Error_class(result, &error_class);
    if (error_class == MPI_ERR_TRUNCATE && slot.receives) {
      throw Error(ErrorCode::kMismatch,
                  fmt::format("rank {} received a message longer than the {} bytes it has room "
                              "for, from rank {} with tag {}",
                              rank_, slot.capacity,
                              slot.peer == kAnyPeer ? status.MPI_SOURCE : slot.peer, slot.tag),
                  rank_);
    }
    check_mpi(result, slot.receives ? "receiving" : "sending");
    throw Error(ErrorCode::kInternal, "MPI_Test failed without an error code");
  }

  // Ends the request without throwing.
  void withdraw(Request& request) noexcept {
    const std::int32_t index = std::exchange(request.index, Request::kNone);
    Slot& slot = slots_[at(index)];
    // A receive that has begun cannot be cancelled. It ends when its bytes are there, which a peer
    // that has stopped never sends.
    if (slot.receives) MPI_Cancel(&slot.request);
    bool& stuck = slot.receives ? receive_stuck_ : send_stuck_;
    if (!finish(slot.request, stuck)) {
      stuck = true;
      unfinished_.requests.push_back(slot.request);
    }
    slot.request = MPI_REQUEST_NULL;
    free_.push_back(index);  // has room for every slot
  }

  // True if the request is done. Waits for the time-out only until one, of the same direction, has
  // run into it.
  static bool finish(MPI_Request& request, bool stuck) noexcept {
    const auto deadline = std::chrono::steady_clock::now() + kCancelTimeout;
    Waiter waiter(std::numeric_limits<int>::max());
    for (;;) {
      int done = 0;
      if (MPI_Test(&request, &done, MPI_STATUS_IGNORE) != MPI_SUCCESS || done != 0) {
        return true;
      }
      if (stuck || std::chrono::steady_clock::now() > deadline) {
        return false;
      }
      waiter.pause();
    }
  }

  bool left_open_, all_leave_ = false;
  MPI_Comm comm_;
  int rank_ = 0;
  int size_ = 1;
  int last_tag_ = 0;  // Unfinished::last_tag
  int local_size_;
  bool send_stuck_ = false, receive_stuck_ = false;
  Unfinished unfinished_;
  std::shared_ptr<Orphans> orphans_;
  std::vector<Slot> slots_;
  std::vector<std::int32_t> free_;
};

int local_size_of(MPI_Comm comm) {
  MPI_Comm local = MPI_COMM_NULL;
  check_mpi(MPI_Comm_split_type(comm, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &local),
            "MPI_Comm_split_type");
  int size = 1;
  const int result = MPI_Comm_size(local, &size);
  MPI_Comm_free(&local);
  check_mpi(result, "MPI_Comm_size");
  return std::max(size, launcher_info().local_size);
}

void require_mpi() {
  int initialized = 0;
  int finalized = 0;
  check_mpi(MPI_Initialized(&initialized), "MPI_Initialized");
  check_mpi(MPI_Finalized(&finalized), "MPI_Finalized");
  if (initialized == 0 || finalized != 0) {
    throw Error(ErrorCode::kUsage, finalized != 0
                                       ? "MPI is finalised already"
                                       : "MPI is not initialised: call MPI_Init_thread first");
  }
  if (granted_level() < MPI_THREAD_FUNNELED) {
    throw Error(ErrorCode::kUsage,
                "MPI was initialised with MPI_THREAD_SINGLE; at least MPI_THREAD_FUNNELED is "
                "needed: call MPI_Init_thread");
  }
  require_mpi_thread();
}

}  // namespace

std::unique_ptr<Communicator> borrow_world() {
  return std::make_unique<MpiCommunicator>(MPI_COMM_WORLD, 1, std::make_shared<Orphans>(),
                                           /*borrowed=*/true);
}

std::unique_ptr<World> make_world(MPI_Comm comm) {
  require_mpi();
  if (comm == MPI_COMM_NULL) {
    throw Error(ErrorCode::kUsage, "the communicator is MPI_COMM_NULL");
  }
  int is_inter = 0;
  check_mpi(MPI_Comm_test_inter(comm, &is_inter), "MPI_Comm_test_inter");
  if (is_inter != 0) {
    throw Error(ErrorCode::kUsage,
                "the communicator is an inter-communicator; legal is one whose ranks are one "
                "group, as MPI_Intercomm_merge makes it of both");
  }
  MPI_Comm copy = MPI_COMM_NULL;
  check_mpi(MPI_Comm_dup(comm, &copy), "MPI_Comm_dup");
  MPI_Comm_set_errhandler(copy, MPI_ERRORS_RETURN);
  return std::make_unique<MpiCommunicator>(copy, local_size_of(copy), std::make_shared<Orphans>());
}

}  // namespace sluice
