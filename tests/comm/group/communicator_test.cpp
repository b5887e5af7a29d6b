#include "comm/group/communicator.hpp"

#include <algorithm>
#include <array>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include <sluice/error.hpp>

#include "comm/group/collectives.hpp"
#include "tests/comm/group/both_transports.hpp"

namespace sluice {
namespace {

using testing::finish;
using testing::next;
using testing::previous;

std::span<const std::byte> bytes_of(const int& value) {
  return std::as_bytes(std::span(&value, 1));
}

std::span<std::byte> bytes_of(int& value) { return std::as_writable_bytes(std::span(&value, 1)); }

SLUICE_COMM_TEST(CommunicatorTest, MatchesByTagInAnyOrder) {
  constexpr int kTags = 40;
  std::array<int, kTags> sent{};
  std::array<int, kTags> received{};
  std::vector<Request> requests;
  for (int tag = 0; tag < kTags; ++tag) {
    sent[static_cast<std::size_t>(tag)] = 100 * comm.rank() + tag;
    requests.push_back(comm.start_send(
        next(comm), tag, bytes_of(std::as_const(sent)[static_cast<std::size_t>(tag)])));
  }
  for (int tag = kTags - 1; tag >= 0; --tag) {
    requests.push_back(
        comm.post_recv(previous(comm), tag, bytes_of(received[static_cast<std::size_t>(tag)])));
  }
  for (Request& request : requests) {
    finish(comm, request);
    EXPECT_EQ(request.index, Request::kNone);
  }
  for (int tag = 0; tag < kTags; ++tag) {
    EXPECT_EQ(received[static_cast<std::size_t>(tag)], 100 * previous(comm) + tag);
  }
}

SLUICE_COMM_TEST(CommunicatorTest, KeepsTheOrderOfOneTag) {
  // Large enough not to be buffered, small ones in between.
  constexpr std::size_t kCount = 6;
  std::vector<std::vector<int>> sent(kCount);
  std::vector<std::vector<int>> received(kCount);
  std::vector<Request> requests;
  for (std::size_t i = 0; i < kCount; ++i) {
    sent[i].assign(i % 2 == 0 ? 1 : 50'000, static_cast<int>(i));
    received[i].assign(sent[i].size(), -1);
    requests.push_back(comm.start_send(next(comm), 3, std::as_bytes(std::span(sent[i]))));
  }
  for (std::size_t i = 0; i < kCount; ++i) {
    requests.push_back(
        comm.post_recv(previous(comm), 3, std::as_writable_bytes(std::span(received[i]))));
  }
  for (Request& request : requests) {
    finish(comm, request);
  }
  EXPECT_EQ(received, sent);
}

SLUICE_COMM_TEST(CommunicatorTest, TakesMessagesWhoseReceiveIsPostedLater) {
  Collectives collectives(comm, 10, nullptr);
  for (const std::size_t count : {std::size_t{0}, std::size_t{5}, std::size_t{300'000}}) {
    std::vector<int> sent(count);
    std::iota(sent.begin(), sent.end(), comm.rank());
    std::vector<int> received(count, -1);
    Request send = comm.start_send(next(comm), 0, std::as_bytes(std::span(sent)));
    collectives.barrier();  // the message is on its way everywhere before a receive exists
    Request receive =
        comm.post_recv(previous(comm), 0, std::as_writable_bytes(std::span(received)));
    const Arrival arrival = finish(comm, receive);
    finish(comm, send);
    EXPECT_EQ(arrival.source, previous(comm));
    EXPECT_EQ(arrival.bytes, count * sizeof(int));
    std::iota(sent.begin(), sent.end(), previous(comm));
    EXPECT_EQ(received, sent);
  }
}

SLUICE_COMM_TEST(CommunicatorTest, ReceivesFromAnyPeerAndSaysFromWhom) {
  const int mine = 1000 + comm.rank();
  Request send = comm.start_send(0, 7, bytes_of(mine));
  if (comm.rank() == 0) {
    std::vector<int> sources;
    for (int i = 0; i < comm.size(); ++i) {
      int value = 0;
      Request receive = comm.post_recv(Communicator::kAnyPeer, 7, bytes_of(value));
      const Arrival arrival = finish(comm, receive);
      EXPECT_EQ(value, 1000 + arrival.source);
      EXPECT_EQ(arrival.tag, 7);
      sources.push_back(arrival.source);
    }
    std::sort(sources.begin(), sources.end());
    for (int i = 0; i < comm.size(); ++i) {
      EXPECT_EQ(sources[static_cast<std::size_t>(i)], i);
    }
  }
  finish(comm, send);
}

SLUICE_COMM_TEST(CommunicatorTest, RefusesAMessageLongerThanItsReceive) {
  if (comm.size() == 1 && std::string(comm.name()) == "mpi") {
    return;  // Open MPI cuts off a rank's message to itself and says nothing
  }
  Collectives collectives(comm, 10, nullptr);
  const std::array<int, 4> sent = {1, 2, 3, 4};
  std::array<int, 4> received = {-1, -1, -1, -1};
  Request receive =
      comm.post_recv(previous(comm), 5, std::as_writable_bytes(std::span(received).first(2)));
  Request send = comm.start_send(next(comm), 5, std::as_bytes(std::span(sent)));
  try {
    finish(comm, receive);
    ADD_FAILURE() << "a message of 16 bytes went into 8";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kMismatch);
    const std::string text = error.what();
    EXPECT_NE(text.find("from rank " + std::to_string(previous(comm))), std::string::npos) << text;
    EXPECT_NE(text.find("rank " + std::to_string(comm.rank()) + " received"), std::string::npos)
        << text;
    EXPECT_NE(text.find("tag 5"), std::string::npos) << text;
  }
  EXPECT_EQ(received[2], -1);
  EXPECT_EQ(received[3], -1);
  finish(comm, send);
  collectives.barrier();  // the communicator goes on
}

SLUICE_COMM_TEST(CommunicatorTest, GoesOnAfterAReceiveIsCancelled) {
  int withdrawn = -1;
  Request request = comm.post_recv(previous(comm), 2, bytes_of(withdrawn));
  EXPECT_FALSE(comm.test(request));
  comm.cancel(request);
  EXPECT_EQ(request.index, Request::kNone);
  comm.cancel(request);  // nothing
  Collectives collectives(comm, 10, nullptr);
  collectives.barrier();
  const int sent = comm.rank();
  int received = -1;
  Request send = comm.start_send(next(comm), 2, bytes_of(sent));
  request = comm.post_recv(previous(comm), 2, bytes_of(received));
  finish(comm, request);
  finish(comm, send);
  EXPECT_EQ(received, previous(comm));
  EXPECT_EQ(withdrawn, -1);
}

SLUICE_COMM_TEST(CommunicatorTest, MayBeDestroyedWithOpenReceives) {
  std::array<int, 3> memory = {-1, -1, -1};
  {
    const auto copy = comm.duplicate();
    for (int& value : memory) {
      const Request open = copy->post_recv(previous(comm), 1, bytes_of(value));
      EXPECT_NE(open.index, Request::kNone);
    }
  }
  Collectives collectives(comm, 10, nullptr);
  collectives.barrier();
  EXPECT_EQ(memory, (std::array<int, 3>{-1, -1, -1}));
}

SLUICE_COMM_TEST(CommunicatorTest, HandsOutMoreRequestsThanItStartsWith) {
  constexpr std::size_t kMany = 700;
  std::vector<int> sent(kMany);
  std::vector<int> received(kMany, -1);
  std::vector<Request> requests;
  std::iota(sent.begin(), sent.end(), 0);
  for (int& value : received) {
    requests.push_back(comm.post_recv(previous(comm), 0, bytes_of(value)));
  }
  for (const int& value : sent) {
    requests.push_back(comm.start_send(next(comm), 0, bytes_of(value)));
  }
  for (Request& request : requests) {
    finish(comm, request);
  }
  EXPECT_EQ(received, sent);
}

SLUICE_COMM_TEST(CommunicatorTest, SplitsByColourInTheOrderOfKeys) {
  const auto part = comm.split(comm.rank() % 2, -comm.rank());
  const int members = (comm.size() + 1 - comm.rank() % 2) / 2;
  EXPECT_EQ(part->size(), members);
  EXPECT_EQ(part->rank(), members - 1 - comm.rank() / 2);
  EXPECT_EQ(part->local_size(), comm.local_size());
  const int mine = comm.rank();
  std::vector<int> all(static_cast<std::size_t>(members));
  Collectives collectives(*part, 0, nullptr);
  collectives.all_gather(bytes_of(mine), std::as_writable_bytes(std::span(all)));
  for (int i = 0; i < members; ++i) {
    EXPECT_EQ(all[static_cast<std::size_t>(i)], 2 * (members - 1 - i) + comm.rank() % 2);
  }
}

SLUICE_COMM_TEST(CommunicatorTest, SplitsWithEqualKeysKeepTheOrderOfRanks) {
  for (int round = 0; round < 3; ++round) {
    const auto part = comm.split(0, 0);
    EXPECT_EQ(part->rank(), comm.rank());
    EXPECT_EQ(part->size(), comm.size());
  }
}

SLUICE_COMM_TEST(CommunicatorTest, KeepsMessagesOfDuplicatesApart) {
  const auto copy = comm.duplicate();
  const int first = 1;
  const int second = 2;
  int in_comm = 0;
  int in_copy = 0;
  Request sends[] = {comm.start_send(next(comm), 0, bytes_of(first)),
                     copy->start_send(next(comm), 0, bytes_of(second))};
  Request receive = copy->post_recv(previous(comm), 0, bytes_of(in_copy));
  finish(*copy, receive);
  receive = comm.post_recv(previous(comm), 0, bytes_of(in_comm));
  finish(comm, receive);
  finish(comm, sends[0]);
  finish(*copy, sends[1]);
  EXPECT_EQ(in_comm, first);
  EXPECT_EQ(in_copy, second);
}

}  // namespace
}  // namespace sluice
