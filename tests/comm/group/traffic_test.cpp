// More messages than a transport has room for, of all sizes, out of order and over several
// communicators.
#include <algorithm>
#include <array>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "tests/comm/group/both_transports.hpp"

namespace sluice {
namespace {

using testing::finish;
using testing::next;
using testing::previous;

using Bytes = std::vector<std::byte>;

// Bytes that differ between messages.
Bytes pattern(std::size_t size, int seed) {
  Bytes bytes(size);
  for (std::size_t i = 0; i < size; ++i) {
    bytes[i] = static_cast<std::byte>((static_cast<std::size_t>(seed) * 31 + i * 7) & 0xFF);
  }
  return bytes;
}

SLUICE_COMM_TEST(TrafficTest, KeepsEveryByteOfMessagesOfAllSizes) {
  constexpr int kMessages = 900;
  constexpr int kAhead = 4;
  constexpr std::size_t kLargest = 4300;
  const auto size_of_message = [](int i) { return static_cast<std::size_t>(i) * 37 % kLargest; };
  std::array<Bytes, kAhead> incoming;
  std::array<Bytes, kAhead> outgoing;
  std::array<Request, kAhead> receives;
  std::array<Request, kAhead> sends;
  for (int i = 0; i < kMessages + kAhead; ++i) {
    const auto slot = static_cast<std::size_t>(i % kAhead);
    if (i >= kAhead) {
      const Arrival arrival = finish(comm, receives[slot]);
      finish(comm, sends[slot]);
      incoming[slot].resize(arrival.bytes);
      ASSERT_EQ(incoming[slot], pattern(size_of_message(i - kAhead), i - kAhead + previous(comm)))
          << "message " << i - kAhead;
    }
    if (i < kMessages) {
      incoming[slot].assign(kLargest, std::byte{0xEE});
      receives[slot] = comm.post_recv(previous(comm), 0, incoming[slot]);
      outgoing[slot] = pattern(size_of_message(i), i + comm.rank());
      sends[slot] = comm.start_send(next(comm), 0, outgoing[slot]);
    }
  }
}

SLUICE_COMM_TEST(TrafficTest, TakesASendersWholeFloodOnceReceivesAreThere) {
  constexpr int kMessages = 1500;
  constexpr std::size_t kBytes = 200;
  std::vector<Bytes> outgoing;
  std::vector<Request> sends;
  for (int i = 0; i < kMessages; ++i) {
    outgoing.push_back(pattern(kBytes, i + comm.rank()));
    sends.push_back(comm.start_send(next(comm), 0, outgoing.back()));
  }
  // Loopback keeps no more than it has room for; with peers, one that is ahead may take some.
  if (std::string(comm.name()) == "loopback" && comm.size() == 1) {
    EXPECT_NE(sends.back().index, Request::kNone);
    EXPECT_FALSE(comm.test(sends.back()));
  }
  for (int i = 0; i < kMessages; ++i) {
    Bytes incoming(kBytes);
    Request receive = comm.post_recv(previous(comm), 0, incoming);
    finish(comm, receive);
    ASSERT_EQ(incoming, pattern(kBytes, i + previous(comm))) << "message " << i;
  }
  for (Request& send : sends) {
    finish(comm, send);
  }
}

SLUICE_COMM_TEST(TrafficTest, MatchesManyTagsInTheReverseOrder) {
  constexpr int kTags = 200;
  constexpr int kPerTag = 3;
  const auto size_of_message = [](int tag, int i) {
    return tag % 50 == 7 ? std::size_t{20'000} : static_cast<std::size_t>(tag + i);
  };
  std::vector<Bytes> outgoing;
  std::vector<Request> sends;
  for (int i = 0; i < kPerTag; ++i) {
    for (int tag = 0; tag < kTags; ++tag) {
      outgoing.push_back(pattern(size_of_message(tag, i), tag + i));
      sends.push_back(comm.start_send(next(comm), tag, outgoing.back()));
    }
  }
  for (int tag = kTags - 1; tag >= 0; --tag) {
    for (int i = 0; i < kPerTag; ++i) {
      Bytes incoming(20'000);
      const int source = tag % 2 == 0 ? previous(comm) : Communicator::kAnyPeer;
      Request receive = comm.post_recv(source, tag, incoming);
      incoming.resize(finish(comm, receive).bytes);
      ASSERT_EQ(incoming, pattern(size_of_message(tag, i), tag + i)) << tag << ", " << i;
    }
  }
  for (Request& send : sends) {
    finish(comm, send);
  }
}

SLUICE_COMM_TEST(TrafficTest, FinishesALargeSendWhoseReceiverWaitsOnAnotherCommunicator) {
  const auto copy = comm.duplicate();
  const int partner = comm.rank() ^ 1;
  if (partner >= comm.size()) {
    return;
  }
  for (const int sender : {0, 1}) {
    Bytes token(1);
    if (comm.rank() % 2 == sender) {
      const Bytes large = pattern(1'000'000, comm.rank());
      Request send = copy->start_send(partner, 0, large);
      finish(*copy, send);
      send = comm.start_send(partner, 0, token);
      finish(comm, send);
    } else {
      Bytes incoming(1'000'000);
      Request large = copy->post_recv(partner, 0, incoming);
      Request receive = comm.post_recv(partner, 0, token);
      finish(comm, receive);  // comes only after the large send is done
      finish(*copy, large);
      EXPECT_EQ(incoming, pattern(1'000'000, partner));
    }
  }
}

SLUICE_COMM_TEST(TrafficTest, KeepsInterleavedCommunicatorsApart) {
  const auto copy = comm.duplicate();
  constexpr std::size_t kMessages = 120;
  const auto payload = [](std::size_t i, int rank) {
    return pattern(i % 10 == 3 ? 9000 : 50 + i, static_cast<int>(i) + rank);
  };
  std::vector<Bytes> outgoing;
  std::vector<Bytes> incoming(kMessages, Bytes(9000));
  std::vector<Request> sends;
  std::vector<Request> receives(kMessages);
  const auto channel = [&](std::size_t i) -> Communicator& { return i % 2 == 0 ? comm : *copy; };
  for (std::size_t i = 0; i < kMessages; ++i) {
    outgoing.push_back(payload(i, comm.rank()));
    sends.push_back(channel(i).start_send(next(comm), 5, outgoing.back()));
  }
  for (const std::size_t first : {std::size_t{1}, std::size_t{0}}) {  // the copy's first
    for (std::size_t i = first; i < kMessages; i += 2) {
      receives[i] = channel(i).post_recv(previous(comm), 5, incoming[i]);
    }
    for (std::size_t i = first; i < kMessages; i += 2) {
      incoming[i].resize(finish(channel(i), receives[i]).bytes);
    }
  }
  for (std::size_t i = 0; i < kMessages; ++i) {
    finish(channel(i), sends[i]);
    ASSERT_EQ(incoming[i], payload(i, previous(comm))) << "message " << i;
  }
}

}  // namespace
}  // namespace sluice
