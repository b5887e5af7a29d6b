#include "comm/group/transport.hpp"

#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include <sluice/error.hpp>

#include "comm/group/collectives.hpp"
#include "tests/comm/group/both_transports.hpp"

namespace sluice {
namespace {

using testing::next;
using testing::previous;

// Memory of one end of a message of floats.
class Memory {
 public:
  explicit Memory(std::size_t floats)
      : bytes_(kHeaderBytes + floats * sizeof(float)), floats_(floats) {}

  [[nodiscard]] MessageBuffer buffer() { return {bytes_.data(), floats_ * sizeof(float)}; }
  [[nodiscard]] std::span<float> values() {
    return {reinterpret_cast<float*>(bytes_.data() + kHeaderBytes), floats_};
  }

 private:
  std::vector<std::byte> bytes_;
  std::size_t floats_;
};

MessageHeader header_of(std::int32_t channel, std::int32_t micro_batch, std::size_t floats) {
  MessageHeader header;
  header.step = 7;
  header.channel = channel;
  header.micro_batch = micro_batch;
  header.rank = 2;
  header.shape = {1, static_cast<std::int32_t>(floats), 0, 0};
  header.bytes = floats * sizeof(float);
  return header;
}

void finish(Communicator& comm, Transport& transport, Ticket ticket) {
  Waiter waiter(comm.local_size());
  while (!transport.test(ticket)) {
    waiter.pause();
  }
}

Ticket send(Transport& transport, int peer, int tag, Memory& memory, const MessageHeader& header) {
  memory.buffer().header() = header;
  return transport.start_send(peer, tag, memory.buffer());
}

SLUICE_COMM_TEST(TransportTest, DeliversPayloadAndHeaderOfReceivesPostedAhead) {
  constexpr std::size_t kFloats = 1000;
  constexpr int kChannels = 3;
  constexpr int kMessages = 4;
  const auto transport = make_message_transport(comm, 2 * kChannels * kMessages);
  std::vector<Memory> outgoing(kChannels * kMessages, Memory(kFloats));
  std::vector<Memory> incoming(kChannels * kMessages, Memory(kFloats));
  std::vector<Ticket> receives;
  std::vector<Ticket> sends;
  for (std::size_t i = 0; i < incoming.size(); ++i) {
    const int channel = static_cast<int>(i) / kMessages;
    const int message = static_cast<int>(i) % kMessages;
    receives.push_back(transport->post_recv(previous(comm), channel, incoming[i].buffer(),
                                            header_of(channel, message, kFloats)));
  }
  // Channels in the other order: only the order within one is kept.
  for (int channel = kChannels - 1; channel >= 0; --channel) {
    for (int message = 0; message < kMessages; ++message) {
      Memory& memory = outgoing[static_cast<std::size_t>(channel * kMessages + message)];
      std::fill(memory.values().begin(), memory.values().end(),
                static_cast<float>(100 * comm.rank() + 10 * channel + message));
      sends.push_back(
          send(*transport, next(comm), channel, memory, header_of(channel, message, kFloats)));
    }
  }
  for (std::size_t i = incoming.size(); i > 0; --i) {
    finish(comm, *transport, receives[i - 1]);
  }
  for (const Ticket ticket : sends) {
    finish(comm, *transport, ticket);
  }
  for (std::size_t i = 0; i < incoming.size(); ++i) {
    const auto wanted = static_cast<float>(100 * previous(comm) + 10 * (static_cast<int>(i) / 4) +
                                           static_cast<int>(i) % 4);
    EXPECT_EQ(incoming[i].values().front(), wanted);
    EXPECT_EQ(incoming[i].values().back(), wanted);
    EXPECT_EQ(incoming[i].buffer().header().micro_batch, static_cast<int>(i) % kMessages);
  }
}

// However many are sent at once, only what is open takes a place; what came stays.
SLUICE_COMM_TEST(TransportTest, WhatIsDoneWhenItStartsTakesNoPlace) {
  constexpr int kMessages = 20;
  const auto transport = make_message_transport(comm, 2);
  Memory outgoing(8);
  int sent = 0, open = 0;
  for (int message = 0; message < kMessages && open == 0; ++message) {
    outgoing.values()[0] = static_cast<float>(message);
    const Ticket ticket = send(*transport, next(comm), 0, outgoing, header_of(0, message, 8));
    ++sent;
    if (ticket == kDoneTicket) continue;
    finish(comm, *transport, ticket);
    ++open;
  }
  if (std::string(comm.name()) == "loopback") {
    EXPECT_EQ(sent, kMessages);
  }
  for (int message = 0; message < sent; ++message) {
    Memory incoming(8);
    finish(comm, *transport,
           transport->post_recv(previous(comm), 0, incoming.buffer(), header_of(0, message, 8)));
    EXPECT_EQ(incoming.values()[0], static_cast<float>(message));
  }
}

SLUICE_COMM_TEST(TransportTest, TakesASmallerShapeThanDeclared) {
  const auto transport = make_message_transport(comm, 4);
  for (const std::size_t floats : {std::size_t{0}, std::size_t{3}, std::size_t{8}}) {
    Memory incoming(8);
    Memory outgoing(8);
    std::iota(outgoing.values().begin(), outgoing.values().end(), 1.0F);
    const Ticket receive =
        transport->post_recv(previous(comm), 0, incoming.buffer(), header_of(0, 0, 8));
    const Ticket sent = send(*transport, next(comm), 0, outgoing, header_of(0, 0, floats));
    finish(comm, *transport, receive);
    finish(comm, *transport, sent);
    EXPECT_EQ(incoming.buffer().header().bytes, floats * sizeof(float));
    EXPECT_EQ(incoming.buffer().header().shape[1], static_cast<std::int32_t>(floats));
    for (std::size_t i = 0; i < 8; ++i) {
      EXPECT_EQ(incoming.values()[i], i < floats ? static_cast<float>(i + 1) : 0.0F);
    }
  }
}

// What the error says when `change` is made to an otherwise right header of `floats` floats.
std::string mismatch(Communicator& comm, std::size_t floats,
                     const std::function<void(MessageHeader&)>& change) {
  const auto copy = comm.duplicate();
  const auto transport = make_message_transport(*copy, 4);
  MessageHeader expected = header_of(3, 2, 8);
  Memory incoming(8);
  Memory outgoing(std::max<std::size_t>(floats, 8));
  MessageHeader wrong = header_of(3, 2, floats);
  change(wrong);
  const Ticket receive = transport->post_recv(previous(comm), 0, incoming.buffer(), expected);
  const Ticket sent = send(*transport, next(comm), 0, outgoing, wrong);
  std::string text;
  try {
    finish(*copy, *transport, receive);
    ADD_FAILURE() << "a wrong message was taken";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kMismatch);
    EXPECT_EQ(error.rank(), comm.rank());
    text = error.what();
  }
  finish(*copy, *transport, sent);
  return text;
}

SLUICE_COMM_TEST(TransportTest, NamesBothEndsOfAWrongPairing) {
  const std::string text = mismatch(comm, 8, [](MessageHeader& header) { header.micro_batch = 1; });
  EXPECT_EQ(text, "message mismatch on rank " + std::to_string(comm.rank()) +
                      ": expected channel 3 micro-batch 2 tensor 0 of 1 step 7 (train) f32 [1, 8], "
                      "32 bytes from rank " +
                      std::to_string(previous(comm)) +
                      ", got channel 3 micro-batch 1 tensor 0 of 1 step 7 (train) f32 [1, 8], 32 "
                      "bytes: another micro-batch");
}

SLUICE_COMM_TEST(TransportTest, RefusesEveryLabelThatDiffers) {
  struct Case {
    const char* reason;
    std::function<void(MessageHeader&)> change;
  };
  const std::vector<Case> cases = {
      {"not a header of Sluice", [](auto& header) { header.magic = 1; }},
      {"header version 1 instead of 2", [](auto& header) { header.version = 1; }},
      {"another channel", [](auto& header) { header.channel = 4; }},
      {"another phase", [](auto& header) { header.phase = 1; }},
      {"another step", [](auto& header) { header.step = 8; }},
      {"another tensor", [](auto& header) { header.tensor = 1; }},
      {"another number of tensors", [](auto& header) { header.tensor_count = 2; }},
      {"another type of element", [](auto& header) { header.dtype = 1; }},
      {"another number of dimensions", [](auto& header) { header.rank = 3; }},
      {"too large a shape", [](auto& header) { header.shape[0] = 2; }},
      {"too large a shape", [](auto& header) { header.shape[1] = -1; }},
  };
  for (const Case& test : cases) {
    const std::string text = mismatch(comm, 8, test.change);
    EXPECT_NE(text.find(test.reason), std::string::npos) << test.reason << ": " << text;
    EXPECT_NE(text.find("from rank " + std::to_string(previous(comm))), std::string::npos) << text;
  }
}

SLUICE_COMM_TEST(TransportTest, RefusesAPayloadLongerThanTheBuffer) {
  const std::string text = mismatch(comm, 100, [](MessageHeader&) {});
  EXPECT_NE(text.find("expected channel 3 micro-batch 2"), std::string::npos) << text;
  EXPECT_NE(text.find("[1, 8], 32 bytes from rank"), std::string::npos) << text;
  EXPECT_NE(text.find("got channel 3 micro-batch 2"), std::string::npos) << text;
  EXPECT_NE(text.find("[1, 100], 400 bytes: "), std::string::npos) << text;
}

SLUICE_COMM_TEST(TransportTest, RefusesAMessageWithoutAHeader) {
  const auto transport = make_message_transport(comm, 1);
  Memory incoming(8);
  const Ticket receive =
      transport->post_recv(previous(comm), 0, incoming.buffer(), header_of(0, 0, 8));
  const int word = 5;
  Request request = comm.start_send(next(comm), 0, std::as_bytes(std::span(&word, 1)));
  try {
    finish(comm, *transport, receive);
    ADD_FAILURE() << "4 bytes were taken for a message";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("got 4 bytes, fewer than a header has"),
              std::string::npos)
        << error.what();
  }
  testing::finish(comm, request);
}

SLUICE_COMM_TEST(TransportTest, CutsLongPayloadsIntoPieces) {
  constexpr std::size_t kPiece = 256;      // bytes
  constexpr std::size_t kCapacity = 1000;  // floats
  // Below, at and above the limits of pieces, in an order that mixes the numbers of pieces.
  const std::vector<std::size_t> sizes = {1000, 1, 64, 65, 0, 128, 129, 999};
  const auto transport = make_message_transport(comm, 2 * sizes.size(), kPiece);
  for (int round = 0; round < 2; ++round) {
    std::vector<Memory> incoming(sizes.size(), Memory(kCapacity));
    std::vector<Memory> outgoing(sizes.size(), Memory(kCapacity));
    std::vector<Ticket> receives;
    std::vector<Ticket> sends;
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      receives.push_back(transport->post_recv(previous(comm), 1, incoming[i].buffer(),
                                              header_of(1, static_cast<int>(i), kCapacity)));
    }
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      std::iota(outgoing[i].values().begin(), outgoing[i].values().end(),
                static_cast<float>(10'000 * i));
      sends.push_back(send(*transport, next(comm), 1, outgoing[i],
                           header_of(1, static_cast<int>(i), sizes[i])));
    }
    // The last first: its pieces must not be taken by receives for another message's.
    for (std::size_t i = sizes.size(); i > 0; --i) {
      finish(comm, *transport, receives[i - 1]);
    }
    for (const Ticket ticket : sends) {
      finish(comm, *transport, ticket);
    }
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      const auto got = incoming[i].values().first(sizes[i]);
      const auto wanted = outgoing[i].values().first(sizes[i]);
      EXPECT_TRUE(std::equal(got.begin(), got.end(), wanted.begin())) << sizes[i];
      EXPECT_TRUE(sizes[i] == kCapacity || incoming[i].values()[sizes[i]] == 0.0F);
    }
  }
}

SLUICE_COMM_TEST(TransportTest, RefusesMoreOpenMessagesThanAgreed) {
  const auto copy = comm.duplicate();
  const auto transport = make_message_transport(*copy, 2);
  Memory memory(8);
  Memory other(8);
  Memory third(8);
  const MessageHeader header = header_of(0, 0, 8);
  const Ticket first = transport->post_recv(previous(comm), 0, memory.buffer(), header);
  const Ticket second = transport->post_recv(previous(comm), 0, other.buffer(), header);
  EXPECT_NE(first, second);
  EXPECT_THROW((void)transport->post_recv(previous(comm), 0, third.buffer(), header), Error);
}

SLUICE_COMM_TEST(TransportTest, RefusesABufferTooSmallForItsHeader) {
  const auto transport = make_message_transport(comm, 2);
  Memory memory(8);
  memory.buffer().header() = header_of(0, 0, 9);
  EXPECT_THROW((void)transport->start_send(next(comm), 0, memory.buffer()), Error);
  EXPECT_THROW((void)transport->post_recv(previous(comm), 0, memory.buffer(), header_of(0, 0, 9)),
               Error);
}

SLUICE_COMM_TEST(TransportTest, CancelledReceivesTakeNothing) {
  const auto transport = make_message_transport(comm, 2);
  Memory withdrawn(8);
  Memory incoming(8);
  Memory outgoing(8);
  const Ticket given_up =
      transport->post_recv(previous(comm), 0, withdrawn.buffer(), header_of(0, 0, 8));
  EXPECT_FALSE(transport->test(given_up));
  transport->cancel_all();
  Collectives(comm, 10, nullptr).barrier();
  std::iota(outgoing.values().begin(), outgoing.values().end(), 1.0F);
  const Ticket receive =
      transport->post_recv(previous(comm), 0, incoming.buffer(), header_of(0, 0, 8));
  const Ticket sent = send(*transport, next(comm), 0, outgoing, header_of(0, 0, 8));
  finish(comm, *transport, receive);
  finish(comm, *transport, sent);
  EXPECT_EQ(incoming.values()[7], 8.0F);
  EXPECT_EQ(withdrawn.values()[7], 0.0F);
}

}  // namespace
}  // namespace sluice
