#include "tests/loopback/loopback.hpp"

#include <gtest/gtest.h>

#include <array>
#include <barrier>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <sluice/error.hpp>

#include "comm/group/collectives.hpp"
#include "tests/comm/group/both_transports.hpp"

namespace sluice {
namespace {

using testing::finish;

constexpr std::size_t kLarge = 100'000;  // bytes: handed over from the sender's memory

TEST(LoopbackTest, RethrowsTheErrorOfTheLowestRank) {
  try {
    run_loopback(4, [](Communicator& comm) {
      if (comm.rank() >= 2) {
        throw std::runtime_error("from rank " + std::to_string(comm.rank()));
      }
    });
    ADD_FAILURE() << "no error";
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "from rank 2");
  }
}

TEST(LoopbackTest, EndsRanksThatWaitForOneThatThrew) {
  try {
    run_loopback(3, [](Communicator& comm) {
      if (comm.rank() == 2) {
        throw std::runtime_error("the cause");
      }
      Collectives(comm, 0, nullptr).barrier();
    });
    ADD_FAILURE() << "no error";
  } catch (const std::exception& error) {
    EXPECT_STREQ(error.what(), "the cause");
  }
}

TEST(LoopbackTest, EndsRanksThatWaitInASplit) {
  EXPECT_THROW(run_loopback(2,
                            [](Communicator& comm) {
                              if (comm.rank() == 1) {
                                throw std::runtime_error("the cause");
                              }
                              (void)comm.duplicate();
                            }),
               std::runtime_error);
}

TEST(LoopbackTest, RefusesNoRanks) {
  EXPECT_THROW(run_loopback(0, [](Communicator&) {}), Error);
}

TEST(LoopbackTest, RefusesAPeerOutsideTheGroup) {
  run_loopback(2, [](Communicator& comm) {
    EXPECT_THROW((void)comm.start_send(2, 0, {}), Error);
    EXPECT_THROW((void)comm.post_recv(-2, 0, {}), Error);
    EXPECT_THROW((void)comm.start_send(0, -1, {}), Error);
  });
}

// The receiver learns of the large message before or after it is withdrawn.
TEST(LoopbackTest, AWithdrawnLargeSendIsNeverReceived) {
  for (const bool known : {false, true}) {
    SCOPED_TRACE(known ? "known to the receiver" : "on its way");
    std::barrier withdrawn(2);
    run_loopback(2, [&](Communicator& comm) {
      Collectives collectives(comm, 10, nullptr);
      for (int round = 0; round < 150; ++round) {  // more than there are offers at first
        std::array<std::byte, 8> small{};
        if (comm.rank() == 0) {
          auto large = std::make_unique<std::array<std::byte, kLarge>>();
          Request send = comm.start_send(1, 1, *large);
          if (known) {
            collectives.barrier();  // takes what came before it
          }
          EXPECT_FALSE(comm.test(send));
          comm.cancel(send);
          large.reset();
          withdrawn.arrive_and_wait();
          small.fill(std::byte{7});
          send = comm.start_send(1, 1, small);
          finish(comm, send);
        } else {
          if (known) {
            collectives.barrier();
          }
          withdrawn.arrive_and_wait();
          Request receive = comm.post_recv(0, 1, small);
          EXPECT_EQ(finish(comm, receive).bytes, small.size());
          EXPECT_EQ(small[7], std::byte{7});
        }
      }
    });
  }
}

TEST(LoopbackTest, ALargeSendWithdrawnWhileItIsTakenIsWholeOrNotThere) {
  for (int round = 0; round < 50; ++round) {
    run_loopback(2, [](Communicator& comm) {
      std::vector<std::byte> memory(kLarge, std::byte{3});
      const auto copy = comm.duplicate();
      std::array<std::byte, 1> token{};
      if (comm.rank() == 0) {
        (void)copy->start_send(1, 1, memory);
        Request send = comm.start_send(1, 2, token);
        finish(comm, send);
        (void)comm.duplicate();  // both start from here
        return;                  // the copy ends, then the memory
      }
      memory.assign(kLarge, std::byte{0});
      Request receive = comm.post_recv(0, 2, token);
      finish(comm, receive);  // the large message is known
      (void)comm.duplicate();
      receive = copy->post_recv(0, 1, memory);
      const bool taken = copy->test(receive);
      copy->cancel(receive);
      EXPECT_EQ(memory, std::vector<std::byte>(kLarge, taken ? std::byte{3} : std::byte{0}));
    });
  }
}

TEST(LoopbackTest, DropsWhatComesForACommunicatorThatIsGone) {
  for (const bool early : {false, true}) {
    SCOPED_TRACE(early ? "gone with messages waiting" : "gone before the messages come");
    run_loopback(2, [&](Communicator& comm) {
      Collectives collectives(comm, 10, nullptr);
      for (int round = 0; round < 100; ++round) {
        auto copy = comm.duplicate();
        if (comm.rank() == 1 && !early) {
          copy.reset();
        }
        collectives.barrier();
        if (comm.rank() == 0) {
          const std::vector<std::byte> large(kLarge);
          Request small = copy->start_send(1, 0, std::span(large).first(10));
          Request offered = copy->start_send(1, 0, large);
          collectives.barrier();
          finish(*copy, small);
          EXPECT_FALSE(copy->test(offered));
          collectives.barrier();
          copy->cancel(offered);
        } else {
          collectives.barrier();
          copy.reset();
          collectives.barrier();
        }
      }
    });
  }
}

TEST(LoopbackTest, AMessageOutlivesItsSender) {
  run_loopback(2, [](Communicator& comm) {
    std::array<std::byte, 3000> memory{};
    if (comm.rank() == 0) {
      memory.fill(std::byte{9});
      Request send = comm.start_send(1, 0, memory);
      EXPECT_TRUE(comm.test(send));
      memory.fill(std::byte{1});
      return;
    }
    Request receive = comm.post_recv(0, 0, memory);
    finish(comm, receive);
    EXPECT_EQ(memory[2999], std::byte{9});
  });
}

TEST(LoopbackTest, RunsSeveralJobsAtOnce) {
  const auto job = [](int ranks) {
    run_loopback(ranks, [](Communicator& comm) {
      Collectives collectives(comm, 0, nullptr);
      for (int round = 0; round < 50; ++round) {
        for (const std::string& text :
             collectives.all_gather_strings(std::to_string(comm.size() * 1000 + round))) {
          EXPECT_EQ(text, std::to_string(comm.size() * 1000 + round));
        }
      }
    });
  };
  const std::jthread first(job, 2);
  const std::jthread second(job, 3);
  job(4);
}

}  // namespace
}  // namespace sluice
