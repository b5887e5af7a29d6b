// The emulated NCCL, with a thread per rank.
#include <gtest/gtest.h>
#include <nccl.h>

#include <functional>
#include <future>
#include <thread>
#include <vector>

#include "tests/emulated_cuda/control.hpp"
#include "tests/emulated_cuda/on_device.hpp"

namespace sluice::emulated {
namespace {

// One rank: a device, a stream and a communicator.
struct Rank {
  int rank;
  int ranks;
  cudaStream_t stream = nullptr;
  ncclComm_t comm = nullptr;

  void send(const OnDevice<float>& buffer, int peer) const {
    EXPECT_EQ(ncclSend(buffer.get(), 1, ncclFloat32, peer, comm, stream), ncclSuccess);
  }
  void receive(const OnDevice<float>& buffer, int peer) const {
    EXPECT_EQ(ncclRecv(buffer.get(), 1, ncclFloat32, peer, comm, stream), ncclSuccess);
  }
  void synchronize() const { EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess); }
};

// Runs `body` on a thread per rank, each with a communicator of them all, which it destroys where
// the body has left one.
void run_ranks(int ranks, bool blocking, const std::function<void(Rank&)>& body) {
  ncclUniqueId id;
  ASSERT_EQ(ncclGetUniqueId(&id), ncclSuccess);
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r) {
    threads.emplace_back([=, &body] {
      Rank rank{r, ranks};
      EXPECT_EQ(cudaSetDevice(r), cudaSuccess);
      EXPECT_EQ(cudaStreamCreateWithFlags(&rank.stream, cudaStreamNonBlocking), cudaSuccess);
      ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
      config.blocking = blocking ? 1 : 0;
      EXPECT_EQ(ncclCommInitRankConfig(&rank.comm, ranks, id, r, &config),
                blocking ? ncclSuccess : ncclInProgress);
      body(rank);
      EXPECT_EQ(ncclCommDestroy(rank.comm), ncclSuccess);
      cudaStreamDestroy(rank.stream);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

ncclResult_t async_error(ncclComm_t comm) {
  ncclResult_t status = ncclInternalError;
  EXPECT_EQ(ncclCommGetAsyncError(comm, &status), ncclSuccess);
  return status;
}

void poll_until_ready(ncclComm_t comm) {
  while (async_error(comm) == ncclInProgress) std::this_thread::yield();
  EXPECT_EQ(async_error(comm), ncclSuccess);
}

TEST(EmulatedNcclTest, ARingOfSendsAndReceivesPassesValuesOn) {
  run_ranks(4, true, [](Rank& self) {
    const OnDevice<float> own(std::vector<float>{static_cast<float>(self.rank)}), got(1);
    const int next = (self.rank + 1) % self.ranks, before = (self.rank + 3) % self.ranks;
    EXPECT_EQ(ncclGroupStart(), ncclSuccess);
    self.send(own, next);
    self.receive(got, before);
    EXPECT_EQ(ncclGroupEnd(), ncclSuccess);
    self.synchronize();
    EXPECT_EQ(got.values(), std::vector<float>{static_cast<float>(before)});
  });
}

TEST(EmulatedNcclTest, CollectivesDoWhatTheySay) {
  run_ranks(3, true, [](Rank& self) {
    const auto mine = static_cast<float>(self.rank + 1);
    const OnDevice<float> own(std::vector<float>{mine, 10 * mine, 100 * mine});
    const OnDevice<float> sum(3), part(1), all(9);
    EXPECT_EQ(ncclAllReduce(own.get(), sum.get(), 3, ncclFloat32, ncclSum, self.comm, self.stream),
              ncclSuccess);
    EXPECT_EQ(
        ncclReduceScatter(own.get(), part.get(), 1, ncclFloat32, ncclMax, self.comm, self.stream),
        ncclSuccess);
    EXPECT_EQ(ncclAllGather(own.get(), all.get(), 3, ncclFloat32, self.comm, self.stream),
              ncclSuccess);
    EXPECT_EQ(ncclBroadcast(own.get(), own.get(), 3, ncclFloat32, 1, self.comm, self.stream),
              ncclSuccess);
    self.synchronize();
    EXPECT_EQ(sum.values(), (std::vector<float>{6, 60, 600}));
    EXPECT_EQ(part.values(), (std::vector<float>{3 * std::vector<float>{1, 10, 100}.at(
                                                         static_cast<std::size_t>(self.rank))}));
    EXPECT_EQ(all.values(), (std::vector<float>{1, 10, 100, 2, 20, 200, 3, 30, 300}));
    EXPECT_EQ(own.values(), (std::vector<float>{2, 20, 200}));
  });
}

TEST(EmulatedNcclTest, PairsByOrderSoThatAWrongOrderDeliversTheWrongTensor) {
  run_ranks(2, true, [](Rank& self) {
    const OnDevice<float> first(std::vector<float>{1}), second(std::vector<float>{2});
    if (self.rank == 0) {
      self.send(first, 1);
      self.send(second, 1);
    } else {
      self.receive(second, 0);
      self.receive(first, 0);
    }
    self.synchronize();
    EXPECT_EQ(first.values(), std::vector<float>{self.rank == 0 ? 1.0F : 2.0F});
    EXPECT_EQ(second.values(), std::vector<float>{self.rank == 0 ? 2.0F : 1.0F});
  });
}

// Both ranks send first, each send a group of its own: legal for buffered messages, not for NCCL.
TEST(EmulatedNcclTest, ADeadlockLastsUntilBothRanksAbort) {
  std::promise<void> is_stuck[2];
  std::future<void> futures[2] = {is_stuck[0].get_future(), is_stuck[1].get_future()};
  run_ranks(2, true, [&](Rank& self) {
    const OnDevice<float> own(std::vector<float>{5}), got(std::vector<float>{7});
    self.send(own, 1 - self.rank);
    self.receive(got, 1 - self.rank);
    EXPECT_EQ(cudaStreamQuery(self.stream), cudaErrorNotReady);
    is_stuck[self.rank].set_value();
    futures[1 - self.rank].wait();
    EXPECT_EQ(ncclCommAbort(self.comm), ncclSuccess);
    self.comm = nullptr;
    self.synchronize();
    EXPECT_EQ(got.values(), std::vector<float>{7}) << "nothing was delivered";
  });
}

// The first group cannot start yet; the second, on a stream of its own, could.
TEST(EmulatedNcclTest, GroupsOnTwoStreamsRunInTheOrderOfIssue) {
  run_ranks(2, true, [](Rank& self) {
    const OnDevice<float> first(std::vector<float>{1}), second(std::vector<float>{2});
    if (self.rank == 1) {
      self.receive(first, 0);
      self.receive(second, 0);
    } else {
      cudaStream_t other = nullptr;
      EXPECT_EQ(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking), cudaSuccess);
      std::promise<void> gate;
      std::shared_future<void> opened = gate.get_future().share();
      const auto wait = [](void* future) {
        static_cast<std::shared_future<void>*>(future)->wait();
      };
      EXPECT_EQ(cudaLaunchHostFunc(self.stream, wait, &opened), cudaSuccess);
      self.send(first, 1);
      EXPECT_EQ(ncclSend(second.get(), 1, ncclFloat32, 1, self.comm, other), ncclSuccess);
      for (int i = 0; i < 10000 && cudaStreamQuery(other) == cudaErrorNotReady; ++i) {
        std::this_thread::yield();  // time to overtake for an emulation that lets it
      }
      EXPECT_EQ(cudaStreamQuery(other), cudaErrorNotReady);
      gate.set_value();
      EXPECT_EQ(cudaStreamSynchronize(other), cudaSuccess);
      EXPECT_EQ(cudaStreamDestroy(other), cudaSuccess);
    }
    self.synchronize();
    EXPECT_EQ(first.values(), std::vector<float>{1});
    EXPECT_EQ(second.values(), std::vector<float>{2});
  });
}

TEST(EmulatedNcclTest, InNonBlockingModeNothingIsOnTheStreamUntilPolled) {
  run_ranks(2, false, [](Rank& self) {
    poll_until_ready(self.comm);
    const OnDevice<float> own(std::vector<float>{static_cast<float>(self.rank)}), got(1);
    EXPECT_EQ(ncclGroupStart(), ncclSuccess);
    self.send(own, 1 - self.rank);
    self.receive(got, 1 - self.rank);
    EXPECT_EQ(ncclGroupEnd(), ncclInProgress);
    EXPECT_EQ(ncclSend(own.get(), 1, ncclFloat32, 0, self.comm, self.stream), ncclInvalidArgument)
        << "the communicator is busy";
    self.synchronize();
    std::uint32_t bits = 0;
    EXPECT_EQ(cudaMemcpy(&bits, got.get(), sizeof bits, cudaMemcpyDeviceToHost), cudaSuccess);
    EXPECT_EQ(bits, 0xFFFFFFFFU);
    EXPECT_EQ(async_error(self.comm), ncclInProgress);
    poll_until_ready(self.comm);
    self.synchronize();
    EXPECT_EQ(got.values(), std::vector<float>{static_cast<float>(1 - self.rank)});
    EXPECT_EQ(ncclCommFinalize(self.comm), ncclInProgress);
    poll_until_ready(self.comm);
  });
}

TEST(EmulatedNcclTest, AFailedCommunicatorSaysSoAndIsReleasedByAbort) {
  run_ranks(2, true, [](Rank& self) {
    const OnDevice<float> buffer(1);
    if (self.rank == 1) return;  // never sends
    self.receive(buffer, 1);
    fail_communicator(self.comm, ncclRemoteError);
    EXPECT_EQ(async_error(self.comm), ncclRemoteError);
    EXPECT_EQ(cudaStreamQuery(self.stream), cudaErrorNotReady);
    EXPECT_EQ(ncclCommAbort(self.comm), ncclSuccess);
    self.comm = nullptr;
    self.synchronize();
  });
}

TEST(EmulatedNcclTest, ASplitOrdersByKey) {
  run_ranks(4, true, [](Rank& self) {
    ncclComm_t half = nullptr;
    EXPECT_EQ(ncclCommSplit(self.comm, self.rank % 2, -self.rank, &half, nullptr), ncclSuccess);
    int rank = -1, count = 0;
    EXPECT_EQ(ncclCommUserRank(half, &rank), ncclSuccess);
    EXPECT_EQ(ncclCommCount(half, &count), ncclSuccess);
    EXPECT_EQ(count, 2);
    EXPECT_EQ(rank, self.rank < 2 ? 1 : 0);
    EXPECT_EQ(ncclCommDestroy(half), ncclSuccess);
  });
}

TEST(EmulatedNcclTest, TwoRanksOnOneDeviceAreRefused) {
  ncclUniqueId id;
  ASSERT_EQ(ncclGetUniqueId(&id), ncclSuccess);
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  ncclComm_t first = nullptr, second = nullptr;
  EXPECT_EQ(ncclCommInitRankConfig(&first, 2, id, 0, &config), ncclInProgress);
  EXPECT_EQ(ncclCommInitRankConfig(&second, 2, id, 1, &config), ncclInvalidUsage);
  EXPECT_EQ(async_error(first), ncclInvalidUsage);
  EXPECT_EQ(ncclCommAbort(first), ncclSuccess);
}

}  // namespace
}  // namespace sluice::emulated
