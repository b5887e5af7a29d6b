#include "comm/mpi/device_messages.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <sluice/error.hpp>

#include "tests/comm/group/both_transports.hpp"
#include "tests/comm/group/passing_communicator.hpp"

namespace sluice {
namespace {

TEST(DeviceMessagesTest, KnowsTheMemoryOfACudaDeviceInAList) {
  for (const char* kinds : {"cuda", "system,mpi,cuda", "cuda:device", "mpi,cuda:host:device,rocm"})
    EXPECT_TRUE(names_cuda_device(kinds)) << kinds;
  for (const char* kinds : {"", "system,mpi", "cuda:host", "rocm:device", "mpi,cuda:managed,rocm",
                            "cudax", "system:cuda"})
    EXPECT_FALSE(names_cuda_device(kinds)) << kinds;
}

SLUICE_COMM_TEST(DeviceMessagesTest, FindsNoFaultWhereAllBytesArrive) {
  EXPECT_EQ(device_message_fault(comm.duplicate(), Device{}), "");
}

// Passes everything on but one message, which it spoils or fails to send; in the latter case the
// message comes at its end, into the receive that is still open.
class MessageSpoiler final : public testing::PassingCommunicator {
 public:
  MessageSpoiler(Communicator& comm, int good, bool fails)
      : PassingCommunicator(comm), good_(good), fails_(fails) {}
  ~MessageSpoiler() override {
    if (!fails_) return;
    Request late = inner().start_send(rank(), 0, spoiled_);
    (void)testing::finish(inner(), late);
  }
  MessageSpoiler(const MessageSpoiler&) = delete;
  MessageSpoiler& operator=(const MessageSpoiler&) = delete;
  Request start_send(int peer, int tag, std::span<const std::byte> bytes) override {
    if (good_-- != 0) return inner().start_send(peer, tag, bytes);
    spoiled_.assign(bytes.begin(), bytes.end());
    if (fails_) throw Error(ErrorCode::kMpi, "MPI_Isend failed: invalid buffer");
    spoiled_.back() ^= std::byte{1};
    return inner().start_send(peer, tag, spoiled_);
  }

 private:
  int good_;  // messages until the one that does not pass as it is
  bool fails_;
  std::vector<std::byte> spoiled_;
};

SLUICE_COMM_TEST(DeviceMessagesTest, SaysThatBytesDiffer) {
  for (int good = 0; good < 3; ++good) {
    EXPECT_THAT(device_message_fault(std::make_unique<MessageSpoiler>(comm, good, false), Device{}),
                ::testing::HasSubstr("arrived with other bytes"))
        << good;
  }
}

SLUICE_COMM_TEST(DeviceMessagesTest, SaysWhatMpiAnsweredAndEndsWhatIsOpenBeforeTheMemoryGoes) {
  EXPECT_THAT(device_message_fault(std::make_unique<MessageSpoiler>(comm, 1, true), Device{}),
              ::testing::HasSubstr("a test message failed: MPI_Isend failed: invalid buffer"));
}

#ifdef SLUICE_UNDER_MPI
TEST(DeviceMessagesTest, MpiWithoutCudaIsNotTried) {
  EXPECT_EQ(testing::world().device_memory_unsupported_reason(Device{}), "MPI is not CUDA-aware");
}
#endif

}  // namespace
}  // namespace sluice
