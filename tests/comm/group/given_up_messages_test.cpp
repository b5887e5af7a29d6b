// What becomes of messages that MPI cannot withdraw: sends, and receives of which a part has
// arrived. They are too long for MPI to copy.
#include <gtest/gtest.h>
#include <mpi.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include <sluice/error.hpp>
#include <sluice/mpi.hpp>

#include "comm/group/collectives.hpp"
#include "tests/comm/group/both_transports.hpp"

namespace sluice {
namespace {

using Bytes = std::vector<std::byte>;
constexpr std::size_t kLong = Collectives::kPieceBytes;

// Ends every wait at once.
struct AlwaysFailing : Interrupt {
  void poll() override { throw Error(ErrorCode::kData, "ended"); }
};

void expect_sevens(Communicator& comm, std::size_t bytes, int tag) {
  Bytes got(bytes);
  Request receive = comm.post_recv(0, tag, got);
  EXPECT_EQ(testing::finish(comm, receive).bytes, bytes);
  EXPECT_EQ(std::count(got.begin(), got.end(), std::byte{7}), static_cast<std::ptrdiff_t>(bytes));
}

TEST(GivenUpSendsTest, ReadTheirMemoryUntilTheyAreDone) {
  const auto comm = testing::world().duplicate();
  Collectives others(testing::world(), 0, nullptr);
  if (comm->size() < 2) return;
  if (comm->rank() == 0) {
    auto memory = std::make_shared<Bytes>(kLong, std::byte{7});
    const std::weak_ptr<Bytes> kept = memory;
    Request send = comm->start_send(1, 0, *memory);
    comm->cancel(send);
    comm->keep(std::move(memory));
    EXPECT_FALSE(kept.expired());
    others.barrier();
    for (Waiter waiter(comm->local_size()); !kept.expired(); waiter.pause()) comm->keep(nullptr);
  } else {
    others.barrier();  // only now
    if (comm->rank() == 1) expect_sevens(*comm, kLong, 0);
  }
  others.barrier();
}

TEST(GivenUpSendsTest, OutliveTheirCommunicator) {
  auto comm = testing::world().duplicate();
  Collectives others(testing::world(), 0, nullptr);
  if (comm->size() < 2) return;
  if (comm->rank() == 0) {
    auto memory = std::make_shared<Bytes>(kLong, std::byte{7});
    const std::weak_ptr<Bytes> kept = memory;
    (void)comm->start_send(1, 0, *memory);
    comm->keep(std::move(memory));
    comm.reset();
    EXPECT_FALSE(kept.expired());
  }
  others.barrier();
  if (testing::world().rank() == 1) expect_sevens(*comm, kLong, 0);
  others.barrier();
}

TEST(GivenUpSendsTest, OfACollectiveReadACopy) {
  const auto comm = testing::world().duplicate();
  Collectives others(testing::world(), 0, nullptr);
  if (comm->size() < 2) return;
  for (const std::size_t bytes : {std::size_t{100'000}, kLong}) {
    if (comm->rank() == 0) {
      AlwaysFailing interrupt;
      Collectives collectives(*comm, 0, &interrupt);
      Bytes mine(bytes, std::byte{7});
      EXPECT_THROW(collectives.send(1, mine), Error);
      std::fill(mine.begin(), mine.end(), std::byte{0});
    }
    others.barrier();
    if (comm->rank() == 1) {
      Bytes got(bytes);
      Collectives(*comm, 0, nullptr).recv(0, got);
      EXPECT_EQ(std::count(got.begin(), got.end(), std::byte{7}),
                static_cast<std::ptrdiff_t>(bytes));
    }
    others.barrier();
  }
}

TEST(GivenUpSendsTest, OfASumReadMemoryWhoseOwnerIsNamed) {
  const auto comm = testing::world().duplicate();
  Collectives others(testing::world(), 0, nullptr);
  if (comm->size() < 2) return;
  if (comm->rank() == 0) {
    AlwaysFailing interrupt;
    Collectives collectives(*comm, 0, &interrupt);
    std::vector<std::size_t> ends(static_cast<std::size_t>(comm->size()), kLong);
    ends.front() = kLong / 2;
    for (const auto& call :
         {&Collectives::ordered_reduce_scatter, &Collectives::all_gather_parts}) {
      auto values = std::make_shared<std::vector<float>>(kLong);
      const std::weak_ptr<std::vector<float>> kept = values;
      EXPECT_THROW((collectives.*call)(*values, ends, values), Error);
      values.reset();
      EXPECT_FALSE(kept.expired());
    }
  }
  others.barrier();  // no rank ever receives it
}

TEST(GivenUpSendsTest, OfAGatherThatNobodyWaitsForReadMemoryWhoseOwnerIsNamed) {
  const auto comm = testing::world().duplicate();
  Collectives others(testing::world(), 0, nullptr);
  if (comm->size() < 2) return;
  if (comm->rank() == 0) {
    auto values = std::make_shared<std::vector<float>>(kLong);
    const std::weak_ptr<std::vector<float>> kept = values;
    {
      Collectives collectives(*comm, 0, nullptr);
      const std::vector<std::size_t> ends(static_cast<std::size_t>(comm->size()), kLong);
      collectives.sums().start_gather(*values, ends, values);
      collectives.sums().progress();
    }
    values.reset();
    EXPECT_FALSE(kept.expired());
  }
  others.barrier();  // no rank ever receives it
}

// The number of MPI's handle of a new communicator: the lowest that is free.
int next_handle() {
  MPI_Comm copy = MPI_COMM_NULL;
  MPI_Comm_dup(MPI_COMM_WORLD, &copy);
  const int handle = MPI_Comm_c2f(copy);
  MPI_Comm_free(&copy);
  return handle;
}

TEST(LeftOpenTest, ACommunicatorGoesOnceAllRanksHaveLeftIt) {
  const auto origin = communicator_of(make_world(MPI_COMM_WORLD));
  const int before = next_handle();
  constexpr int kMany = 50;
  for (int i = 0; i < kMany; ++i) {
    const auto comm = origin->duplicate();
    const auto sent = std::make_shared<Bytes>(i == 0 ? kLong : 100);
    (void)comm->start_send(testing::next(*comm), 3, *sent);  // nobody receives it
    comm->keep(sent);
    comm->leave_open(/*by_all=*/true);
  }
  int more = kMany;
  for (int i = 0; i < 1000 && more > kMany / 10; ++i) {  // messages move in calls alone
    (void)origin->duplicate();
    const int mine = next_handle() - before;
    MPI_Allreduce(&mine, &more, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
  }
  EXPECT_LE(more, kMany / 10);
}

// A word that all ranks of this host see without a call of MPI, which would move messages.
class SharedWord {
 public:
  SharedWord() {
    void* base = nullptr;
    MPI_Win_allocate_shared(rank() == 0 ? sizeof(int) : 0, sizeof(int), MPI_INFO_NULL,
                            MPI_COMM_WORLD, &base, &window_);
    MPI_Aint size = 0;
    int unit = 0;
    MPI_Win_shared_query(window_, 0, &size, &unit, &word_);
    if (rank() == 0) *word_ = 0;
    MPI_Barrier(MPI_COMM_WORLD);
  }
  ~SharedWord() { MPI_Win_free(&window_); }
  SharedWord(const SharedWord&) = delete;
  SharedWord& operator=(const SharedWord&) = delete;

  [[nodiscard]] std::atomic_ref<int> get() const { return std::atomic_ref<int>(*word_); }

 private:
  static int rank() { return testing::world().rank(); }
  MPI_Win window_ = MPI_WIN_NULL;
  int* word_ = nullptr;
};

using Messages = std::function<void(Collectives&)>;

// Rank 1 starts a send to rank 0 and stops. Rank 0's `receive` ends by an exception, unless one
// copy by rank 0 has moved the whole message. Then `after` runs there, rank 1 goes on, and the
// message ends. True on rank 0 where `receive` threw.
bool give_up_a_receive(const Messages& send, const Messages& receive,
                       const std::function<void()>& after) {
  enum : int { kBefore, kStarted, kGoOn };
  struct Sender : Interrupt {
    explicit Sender(const SharedWord& shared) : word(shared) {}
    void poll() override {
      if (word.get() == kBefore) word.get() = kStarted;
      while (word.get() != kGoOn) std::this_thread::yield();
    }
    const SharedWord& word;
  };
  struct Receiver : Interrupt {
    explicit Receiver(const SharedWord& shared) : word(shared) {}
    void poll() override {
      if (word.get() == kStarted && ++polls > 100) throw Error(ErrorCode::kPeer, "ended");
    }
    const SharedWord& word;
    int polls = 0;
  };
  Collectives others(testing::world(), 0, nullptr);
  const auto comm = testing::world().duplicate();
  const SharedWord word;
  bool threw = false;
  if (comm->rank() == 0) {
    Receiver interrupt(word);
    Collectives collectives(*comm, 0, &interrupt);
    try {
      receive(collectives);
    } catch (const Error&) {
      threw = true;
    }
    after();
    word.get() = kGoOn;
  } else if (comm->rank() == 1) {
    Sender interrupt(word);
    Collectives collectives(*comm, 0, &interrupt);
    send(collectives);
  }
  others.barrier();
  return threw;
}

void send_sevens(Collectives& collectives) {
  collectives.send(0, Bytes(Collectives::kPieceBytes, std::byte{7}));
}

TEST(GivenUpReceivesTest, LeaveMemoryWithoutAnOwnerAlone) {
  if (testing::world().size() < 2) return;
  Bytes memory(Collectives::kPieceBytes);
  const bool threw = give_up_a_receive(
      send_sevens, [&](Collectives& collectives) { collectives.recv(1, memory); },
      [&] { std::fill(memory.begin(), memory.end(), std::byte{5}); });
  if (!threw) return;
  EXPECT_EQ(std::count(memory.begin(), memory.end(), std::byte{5}),
            static_cast<std::ptrdiff_t>(memory.size()));
}

TEST(GivenUpReceivesTest, OfAGatherLeaveItsResultAlone) {
  const int ranks = testing::world().size();
  if (ranks < 2) return;
  const Bytes mine(Collectives::kPieceBytes, std::byte{7});
  Bytes all(mine.size() * static_cast<std::size_t>(ranks));
  const bool threw =
      give_up_a_receive([&](Collectives& collectives) { collectives.gather(mine, {}, 0); },
                        [&](Collectives& collectives) { collectives.gather(mine, all, 0); },
                        [&] { std::fill(all.begin(), all.end(), std::byte{5}); });
  if (!threw) return;
  EXPECT_EQ(std::count(all.begin(), all.end(), std::byte{5}),
            static_cast<std::ptrdiff_t>(all.size()));
}

TEST(GivenUpReceivesTest, WriteToMemoryWhoseOwnerIsNamed) {
  if (testing::world().size() < 2) return;
  auto memory = std::make_shared<Bytes>(Collectives::kPieceBytes);
  const std::weak_ptr<Bytes> kept = memory;
  bool freed = false;
  const bool threw = give_up_a_receive(
      send_sevens, [&](Collectives& collectives) { collectives.recv(1, *memory, memory); },
      [&] {
        memory.reset();
        freed = kept.expired();
      });
  EXPECT_EQ(freed, testing::world().rank() == 0 && !threw);
}

}  // namespace
}  // namespace sluice
