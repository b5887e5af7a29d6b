// NcclCommunicator and NcclQueue: creation, refusals, order, errors, the end.
#include "comm/nccl/nccl.hpp"

#include <gmock/gmock.h>

#include <cstdlib>
#include <memory>
#include <numeric>

#include "comm/nccl/nccl_queue.hpp"
#include "tests/comm/nccl/nccl_ranks.hpp"
#ifdef SLUICE_EMULATED
#include <cuda_runtime_api.h>

#include "tests/emulated_cuda/control.hpp"
#include "tests/emulated_cuda/modules.hpp"
#endif

namespace sluice {
namespace {

using ::testing::AllOf;
using testing::error_of;
using ::testing::HasSubstr;
using testing::OnDevice;
using testing::Rank;
using testing::ThrowingInterrupt;

std::unique_ptr<NcclCommunicator> make(Rank& rank) {
  return std::make_unique<NcclCommunicator>(rank.bootstrap, rank.device, NcclLabel{"the ring"},
                                            &rank.control);
}

class NcclTest : public testing::NcclRanksTest {};
class NcclPeersTest : public testing::NcclRanksTest {};
class NcclQueueTest : public testing::NcclRanksTest {};
class NcclQueuePeersTest : public testing::NcclRanksTest {};
SLUICE_NCCL_RANKS(NcclTest);
SLUICE_NCCL_PEERS(NcclPeersTest);
SLUICE_NCCL_RANKS(NcclQueueTest);
SLUICE_NCCL_PEERS(NcclQueuePeersTest);

TEST_P(NcclTest, CountsAsTheSeamDoes) {
  run([](Rank& rank) {
    const auto communicator = make(rank);
    EXPECT_EQ(communicator->size(), rank.size());
    EXPECT_EQ(communicator->rank(), rank.rank());
    EXPECT_EQ(communicator->device(), rank.device);
    EXPECT_TRUE(communicator->ready());
    communicator->finalize(&rank.control);
    EXPECT_THROW(communicator->poll(), Error);  // it is over
  });
}

TEST_P(NcclTest, SendsAndReceivesOfAGroupRunSideBySide) {
  run([](Rank& rank) {
    const auto communicator = make(rank);
    const Stream stream(rank.device);
    const OnDevice<int> out(rank.device, std::vector<int>(1000, 100 + rank.rank()));
    const OnDevice<int> in(rank.device, std::vector<int>(1000, -1));
    NcclGroup group(*communicator);
    communicator->recv(rank.previous(), in.bytes(), stream.view());
    communicator->send(rank.next(), out.bytes(), stream.view());
    group.end();
    communicator->wait_ready(&rank.control);
    Event end(rank.device);
    end.record(stream.view());
    Waiter waiter(rank.size());
    while (!end.done()) waiter.pause();
    EXPECT_EQ(in.read(), std::vector<int>(1000, 100 + rank.previous()));
    communicator->finalize(&rank.control);
  });
}

TEST_P(NcclTest, CanBeAbortedAtAnyTime) {
  run([](Rank& rank) {
    const auto idle = make(rank);
    idle->abort();
    idle->abort();
    EXPECT_EQ(error_of([&] { idle->poll(); }).code(), ErrorCode::kInternal);
    // And by its destructor, next to another one.
    const auto first = make(rank);
    const auto second = make(rank);
    NcclCommunicator* const both[] = {first.get(), nullptr, second.get()};
    NcclCommunicator::abort_all(both);
  });
}

#ifdef SLUICE_EMULATED
// Sluice's kernels are loaded before NCCL can wait for a peer (<sluice/cuda.hpp>).

TEST_P(NcclTest, LoadsKernelsBeforeTheFirstCommunicatorIsMade) {
  emulated::unload_all();
  run([](Rank& rank) {
    ASSERT_EQ(emulated::count_loaded(rank.device.index), 0);
    const auto communicator = make(rank);
    EXPECT_GE(emulated::count_loaded(rank.device.index), 1);
    communicator->finalize(&rank.control);
  });
}

TEST_P(NcclTest, LeavesLoadingToCudaWhereThatIsEager) {
  emulated::unload_all();
  ASSERT_EQ(setenv("CUDA_MODULE_LOADING", "EAGER", 1), 0);
  run([](Rank& rank) {
    EXPECT_EQ(nccl_refusal(rank.bootstrap, rank.device, NcclLabel{"the ring"}), std::nullopt);
    EXPECT_EQ(emulated::count_loaded(rank.device.index), 0);
  });
  ASSERT_EQ(unsetenv("CUDA_MODULE_LOADING"), 0);
}

TEST_P(NcclTest, RefusesADriverThatCannotLoadKernelsAhead) {
  emulated::set_driver_version(12030);
  run([](Rank& rank) {
    const auto why = nccl_refusal(rank.bootstrap, rank.device, NcclLabel{"the ring"});
    ASSERT_TRUE(why.has_value());
    EXPECT_EQ(why->code(), ErrorCode::kDevice);
    EXPECT_THAT(why->what(), AllOf(HasSubstr("the ring: rank 0 on "),
                                   HasSubstr("CUDA_MODULE_LOADING=EAGER"), Not(HasSubstr("\n"))));
  });
  emulated::set_driver_version(CUDART_VERSION);
}
#endif

TEST_P(NcclTest, TakesMemoryOfItsDeviceUntilItEnds) {
  run([](Rank& rank) {
    const auto communicator = make(rank);
    const OnDevice<int> memory(rank.device, std::vector<int>(1000, 1));
    (void)communicator->register_memory(memory.bytes());  // it may refuse
#ifdef SLUICE_EMULATED
    EXPECT_GE(emulated::registered_bytes(), 4000U);
    std::vector<std::byte> on_host(100);
    EXPECT_FALSE(communicator->register_memory(on_host));
#endif
    communicator->finalize(&rank.control);
  });
}

#ifdef SLUICE_EMULATED
TEST_P(NcclTest, RefusesFewHardwareQueuesByName) {
  for (const char* few : {"1", "31", "", "many", "32x"}) {
    ASSERT_EQ(setenv("CUDA_DEVICE_MAX_CONNECTIONS", few, 1), 0);
    run([&](Rank& rank) {
      const auto why = nccl_refusal(rank.bootstrap, rank.device, NcclLabel{"the ring"});
      ASSERT_TRUE(why.has_value()) << few;
      EXPECT_THAT(why->what(), AllOf(HasSubstr("rank 0 on "),
                                     HasSubstr("CUDA_DEVICE_MAX_CONNECTIONS='" + std::string(few)),
                                     HasSubstr("legal: 32, or not set"), Not(HasSubstr("\n"))));
    });
  }
  ASSERT_EQ(setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1), 0);
  run([&](Rank& rank) {
    EXPECT_EQ(nccl_refusal(rank.bootstrap, rank.device, NcclLabel{"the ring"}), std::nullopt);
  });
}
#endif

TEST_P(NcclTest, AsksForHardwareQueuesBeforeTheFirstCallOfCuda) {
  EXPECT_NE(std::getenv("CUDA_DEVICE_MAX_CONNECTIONS"), nullptr);
}

#ifndef SLUICE_UNDER_MPI  // with threads alone it is known which GPUs there are
TEST_P(NcclPeersTest, RefusesTwoRanksOnOneGpuByName) {
  run([](Rank& rank) {
    const Error error = error_of([&] {
      const NcclCommunicator never(rank.bootstrap, {DeviceKind::kCuda, 0},
                                   NcclLabel{"the pipeline"}, nullptr);
    });
    EXPECT_EQ(error.code(), ErrorCode::kUsage);
    EXPECT_THAT(error.what(), AllOf(HasSubstr("the pipeline: rank 0 on "), HasSubstr("rank 1 on "),
                                    HasSubstr("(cuda:0) share the GPU at "), Not(HasSubstr("\n"))));
    const auto why =
        nccl_refusal(rank.bootstrap, {DeviceKind::kCuda, 0}, NcclLabel{"the pipeline"});
    ASSERT_TRUE(why.has_value());
    EXPECT_STREQ(why->what(), error.what());
    EXPECT_EQ(nccl_refusal(rank.bootstrap, rank.device, NcclLabel{"the pipeline"}), std::nullopt);
  });
}

// Of a job's second group messages name the job's ranks, not the group's.
TEST_P(NcclPeersTest, NamesTheRanksOfTheJob) {
  const int members = GetParam();
  SLUICE_NEED_GPUS(2 * members, device_count(DeviceKind::kCuda));
  run_with(2 * members, [members](Rank& rank) {
    const int group = rank.rank() / members;
    const auto part = rank.comm.split(group, rank.rank());
    Collectives bootstrap(*part, 0, &rank.control);
    const NcclLabel label{"its group", rank.rank()};
    const std::string first = "rank " + std::to_string(group * members) + " on ";
    const std::string second = "rank " + std::to_string(group * members + 1) + " on ";
    EXPECT_THAT(nccl_refusal(bootstrap, {DeviceKind::kCuda, 0}, label)->what(),
                AllOf(HasSubstr("its group: " + first), HasSubstr(" and " + second)));

    NcclCommunicator communicator(bootstrap, rank.device, label, &rank.control);
    communicator.finalize(&rank.control);
    EXPECT_THAT(error_of([&] { communicator.poll(); }).what(),
                HasSubstr("NCCL of its group, rank " + std::to_string(rank.rank()) + " on "));
  });
}

#endif

TEST_P(NcclPeersTest, RefusesARankWithoutGpuByName) {
  run([](Rank& rank) {
    const bool last = rank.rank() == rank.size() - 1;
    const Error error = error_of([&] {
      const NcclCommunicator never(rank.bootstrap, last ? Device{} : rank.device,
                                   NcclLabel{"the pipeline"}, nullptr);
    });
    EXPECT_EQ(error.code(), ErrorCode::kUsage);
    EXPECT_THAT(error.what(), AllOf(HasSubstr("rank " + std::to_string(rank.size() - 1) + " on "),
                                    HasSubstr("(cpu) has no GPU")));
  });
}

TEST_P(NcclPeersTest, ARankThatDiesWhileItIsMadeEndsItOnAllOthers) {
  run([](Rank& rank) {
    // The last rank meets the others over the bootstrap, and dies before it meets them in NCCL.
    ThrowingInterrupt dies(1, "the last rank is gone");
    const bool last = rank.rank() == rank.size() - 1;
    Interrupt* interrupt = last ? static_cast<Interrupt*>(&dies) : &rank.control;
    const Error seen = error_of([&] {
      const NcclCommunicator never(rank.bootstrap, rank.device, NcclLabel{"the ring"}, interrupt);
    });
    EXPECT_STREQ(rank.control.report(seen).what(), "the last rank is gone");
  });
}

TEST_P(NcclQueueTest, PassesAroundTheRingInStreamOrder) {
  run([](Rank& rank) {
    NcclQueue queue(rank.device, 8, rank.size());
    const int nccl_stream = queue.add(make(rank));
    const Stream compute(rank.device);
    const std::vector<int> start(257, rank.rank());
    const OnDevice<int> mine(rank.device, start);
    const OnDevice<int> theirs(rank.device, std::vector<int>(257, -1));
    Event ready(rank.device);
    Event free(rank.device);
    // The host never waits for a device: what is received is copied, in stream order, to where the
    // next round sends it from.
    for (int round = 0; round < rank.size(); ++round) {
      ready.record(compute.view());
      free.record(compute.view());
      queue.begin_group();
      NcclTicket sent = queue.send(nccl_stream, rank.next(), mine.bytes(), ready);
      NcclTicket received = queue.recv(nccl_stream, rank.previous(), theirs.bytes(), free);
      queue.end_group();
      queue.wait_issued(received, &rank.control);
      queue.wait_on(compute.view(), received);
      queue.wait_on(compute.view(), sent);
      copy_async(mine.bytes().data(), theirs.bytes().data(), mine.bytes().size(), compute.view());
    }
    compute.view().synchronize();
    EXPECT_EQ(theirs.read(), start);  // once around
    queue.finalize(&rank.control);
  });
}

TEST_P(NcclQueueTest, IssuesManyGroupsInTheOrderGiven) {
  run([](Rank& rank) {
    NcclQueue queue(rank.device, 64, rank.size());
    const int nccl_stream = queue.add(make(rank));
    std::vector<int> numbers(64);
    std::iota(numbers.begin(), numbers.end(), 1000 * rank.rank());
    const OnDevice<int> out(rank.device, numbers);
    const OnDevice<int> in(rank.device, std::vector<int>(64, -1));
    const Event now;
    std::vector<NcclTicket> tickets;
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      queue.begin_group();
      tickets.push_back(queue.send(nccl_stream, rank.next(), out.bytes().subspan(4 * i, 4), now));
      tickets.push_back(
          queue.recv(nccl_stream, rank.previous(), in.bytes().subspan(4 * i, 4), now));
      queue.end_group();
    }
    for (NcclTicket& ticket : tickets) queue.wait(ticket, &rank.control);
    std::iota(numbers.begin(), numbers.end(), 1000 * rank.previous());
    EXPECT_EQ(in.read(), numbers);
    queue.finalize(&rank.control);
  });
}

TEST_P(NcclQueueTest, SumsThroughTheLibrary) {
  run([](Rank& rank) {
    NcclQueue queue(rank.device, 2, rank.size());
    const int nccl_stream = queue.add(make(rank));
    const OnDevice<float> values(rank.device,
                                 std::vector<float>(77, static_cast<float>(1 + 2 * rank.rank())));
    const Event now;
    queue.begin_group();
    NcclTicket summed = queue.all_reduce_sum(nccl_stream, values.values(), now);
    queue.end_group();
    queue.wait(summed, &rank.control);
    const int odd_numbers = rank.size() * rank.size();
    EXPECT_EQ(values.read(), std::vector<float>(77, static_cast<float>(odd_numbers)));
    queue.finalize(&rank.control);
  });
}

TEST_P(NcclQueueTest, RefusesWhatItsContractForbids) {
  run([](Rank& rank) {
    NcclQueue queue(rank.device, 2, rank.size());
    const int nccl_stream = queue.add(make(rank));
    const OnDevice<int> memory(rank.device, std::vector<int>(8, 7));
    const Event now;
    const auto exchange = [&] {
      queue.begin_group();
      NcclTicket sent = queue.send(nccl_stream, rank.next(), memory.bytes().first(16), now);
      queue.drop(sent);
      NcclTicket received = queue.recv(nccl_stream, rank.previous(), memory.bytes().last(16), now);
      queue.end_group();
      return received;
    };
    EXPECT_THROW(queue.end_group(), Error);
    EXPECT_THROW(static_cast<void>(queue.send(nccl_stream, 0, memory.bytes(), now)), Error);
    NcclTicket first = exchange();
    NcclTicket second = exchange();
    EXPECT_THAT(error_of(exchange).what(), HasSubstr("more than 2 groups are open"));
    NcclTicket copy = first;
    queue.wait(first, &rank.control);
    EXPECT_TRUE(queue.done(first));  // given back: it is a ticket of nothing
    EXPECT_THAT(error_of([&] { queue.drop(copy); }).what(), HasSubstr("after its return"));
    NcclTicket third = exchange();  // there is room again
    queue.wait(second, &rank.control);
    queue.wait(third, &rank.control);
    queue.finalize(&rank.control);
  });
}

TEST_P(NcclQueuePeersTest, TheWrongOrderEndsByAbortWithTheErrorNamed) {
  run([](Rank& rank) {
    NcclQueue queue(rank.device, 8, rank.size());
    const int nccl_stream = queue.add(make(rank));
    const OnDevice<int> memory(rank.device, std::vector<int>(2, 7));
    const Event now;
    // Every rank receives first, in a group of its own: no rank ever sends.
    queue.begin_group();
    NcclTicket received = queue.recv(nccl_stream, rank.previous(), memory.bytes().first(4), now);
    queue.end_group();
    queue.begin_group();
    NcclTicket sent = queue.send(nccl_stream, rank.next(), memory.bytes().last(4), now);
    queue.end_group();
    ThrowingInterrupt limit(500, "0RECV_F0 waits for its send");
    Interrupt* interrupt = rank.rank() == 0 ? static_cast<Interrupt*>(&limit) : &rank.control;
    const Error seen = error_of([&] { queue.wait(received, interrupt); });
    EXPECT_STREQ(rank.control.report(seen).what(), "0RECV_F0 waits for its send");
    EXPECT_GE(sent.group, 0);  // never done
    queue.abort();
    EXPECT_EQ(error_of([&] { queue.progress(); }).code(), ErrorCode::kInternal);
  });
}

#ifdef SLUICE_EMULATED
// Only the emulation fails on request.
TEST_P(NcclQueuePeersTest, AFailureOfNcclNamesTheRankAndItsPeer) {
  // The first group of rank 1 finds its peer gone.
  ASSERT_EQ(setenv("SLUICE_EMULATED_NCCL_FAILURE", "1:0", 1), 0);
  run([](Rank& rank) {
    NcclQueue queue(rank.device, 8, rank.size());
    const int nccl_stream = queue.add(make(rank));
    const OnDevice<int> memory(rank.device, std::vector<int>(2, 7));
    const Event now;
    queue.begin_group();
    NcclTicket sent = queue.send(nccl_stream, rank.next(), memory.bytes().first(4), now);
    NcclTicket received = queue.recv(nccl_stream, rank.previous(), memory.bytes().last(4), now);
    const Error seen = error_of([&] {
      queue.end_group();
      queue.wait(sent, &rank.control);
      queue.wait(received, &rank.control);
      for (Waiter waiter(rank.size());; waiter.pause()) rank.control.poll();
    });
    const Error winner = rank.control.report(seen);
    EXPECT_EQ(winner.code(), ErrorCode::kPeer);
    EXPECT_EQ(winner.rank(), 1);
    EXPECT_THAT(winner.what(), AllOf(HasSubstr("NCCL of the ring, rank 1 on "),
                                     HasSubstr("(cuda:1)"), HasSubstr("communication failed: "),
                                     HasSubstr("remote process exited"), Not(HasSubstr("\n"))));
    if (rank.size() == 2) {
      EXPECT_THAT(winner.what(), HasSubstr(" with rank 0 on "));
    }
    queue.abort();
  });
  unsetenv("SLUICE_EMULATED_NCCL_FAILURE");
}
#endif

}  // namespace
}  // namespace sluice
