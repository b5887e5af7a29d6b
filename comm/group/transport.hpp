// Transport: tagged, self-describing messages of a plan's channels, receives posted ahead. Here
// over a Communicator; runtime/group/nccl_routes.hpp has the one over NCCL.
//
// Every message starts with a 64-byte header. The receiver compares it with what its plan expects;
// a difference is an error that names both ends. Labels (step, phase, channel, slot) are opaque
// here. The header lies in the 64 bytes before the payload, in the same buffer. A payload above
// kMaxPieceBytes travels in pieces: the first with the header, the others with a tag of their own.
// The receiver posts those once the header has arrived.
//
// Device payloads travel through page-locked host memory. The message equals that of a host buffer,
// so a GPU's neighbour may be a CPU. The transport's streams copy some pieces while others are on
// the wire. Every buffer has its own staging memory, since receives are posted in advance. Between
// two GPUs whose MPI reads device memory the header travels alone and the pieces go from device to
// device (DeviceSide::direct, the same at both ends).
//
// An operation starts after a "ready" and ends with a "done". On host buffers ready is always now,
// and done is test(). On device buffers ready is a point of the compute stream, where the operation
// is started. test() then tells that the operation is done for that stream: work put on it from now
// on runs after the message. No call blocks but cancel_all(), and each test() advances every
// operation. All calls come from one thread. Only events for the pieces of a device payload are
// allocated after construction, when a payload has more pieces than any before.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <type_traits>

#include <sluice/device.hpp>

#include "comm/group/communicator.hpp"

namespace sluice {

inline constexpr std::size_t kHeaderBytes = 64;
inline constexpr int kMaxDims = 6;

// In front of every message of a plan. On the wire, little-endian, exactly 64 bytes.
struct MessageHeader {
  static constexpr std::uint32_t kMagic = 0x43554c53;  // "SLUC"
  static constexpr std::uint16_t kVersion = 2;

  std::uint32_t magic = kMagic;
  std::uint16_t version = kVersion;
  std::uint8_t phase = 0;  // 0 train, 1 evaluate, 2 generate
  std::uint8_t dtype = 0;  // DType's number
  std::uint64_t step = 0;
  std::int32_t channel = 0;      // index in the plan
  std::int32_t micro_batch = 0;  // which message of the channel
  std::uint16_t tensor = 0;      // index among the edge's tensors
  std::uint16_t tensor_count = 1;
  std::uint32_t rank = 0;  // number of dims in `shape`
  std::array<std::int32_t, kMaxDims> shape = {};
  std::uint64_t bytes = 0;  // of payload
};
static_assert(sizeof(MessageHeader) == kHeaderBytes);

// Whether two objects have the same bytes; inline and without branches.
template <typename T>
[[nodiscard]] inline bool same_words(const T& a, const T& b) {
  static_assert(std::has_unique_object_representations_v<T>, "padding may differ");
  static_assert(sizeof(T) % sizeof(std::uint64_t) == 0, "of whole words");
  using Words = std::array<std::uint64_t, sizeof(T) / sizeof(std::uint64_t)>;
  const auto words_of_a = std::bit_cast<Words>(a), words_of_b = std::bit_cast<Words>(b);
  std::uint64_t differs = 0;
  for (std::size_t i = 0; i < words_of_a.size(); ++i) differs |= words_of_a[i] ^ words_of_b[i];
  return differs == 0;
}

inline constexpr std::size_t kMaxPieceBytes = std::size_t{1} << 30;

// Where a payload lies on a GPU. Owned by the caller, as long as its operation is open.
struct DeviceSide {
  std::byte* payload = nullptr;
  // Recorded by the transport. After it a send may read the payload, or a receive may overwrite it.
  Event ready;
  // Likewise, before a receive's test() returns true. After it the payload is complete. A receive
  // is posted when the last one's is done.
  Event arrived;
  bool direct = false;  // MPI reads and writes the payload itself
};

// One end of a message: memory for header and payload.
struct MessageBuffer {
  std::byte* message = nullptr;  // kHeaderBytes of header, then the payload; host memory
  std::size_t capacity = 0;      // of payload, bytes
  // Null: the payload lies in `message`. Else `message` is page-locked staging memory; with
  // `direct` it holds the header alone.
  DeviceSide* device = nullptr;
  [[nodiscard]] MessageHeader& header() const { return *reinterpret_cast<MessageHeader*>(message); }
  [[nodiscard]] std::byte* payload() const { return message + kHeaderBytes; }
};

// An open operation of a transport; kDoneTicket for one that was done when it started.
using Ticket = std::int32_t;
inline constexpr Ticket kDoneTicket = -1;

class Transport {
 public:
  virtual ~Transport() = default;

  // The caller fills in the header in `buffer`; header.bytes of payload follow it. `tag` is the
  // plan's channel tag, `peer` a rank of the pipeline. kDoneTicket: the buffer is free again.
  // Counts as open while it starts.
  [[nodiscard]] virtual Ticket start_send(int peer, int tag, const MessageBuffer& buffer) = 0;
  // `expected` says what must arrive (magic, version, phase, step, channel, micro_batch, tensor,
  // tensor_count, dtype and rank are compared; shape and bytes may be smaller, never larger than
  // expected). Error(kMismatch) from test() names both ends. Where headers do not travel, messages
  // arrive in the order in which they were sent.
  [[nodiscard]] virtual Ticket post_recv(int peer, int tag, const MessageBuffer& buffer,
                                         const MessageHeader& expected) = 0;
  // Operations from hold() to flush() start together, where the transport has groups. A second
  // hold() adds to the group.
  virtual void hold() {}
  virtual void flush() {}
  // Advances all operations, for a rank that waits for something else.
  virtual void progress() = 0;
  // Calls progress(); true once the operation is done, and the ticket is then invalid.
  [[nodiscard]] virtual bool test(Ticket ticket) = 0;
  // Cancels all operations, after an error. The communicator keeps the memory of sends that go on.
  // Blocks until the copies on the transport's streams are done.
  virtual void cancel_all() = 0;
};

// The transport over a communicator, which must outlive it. Uses the tags [0, max_channel_tag] of
// `comm`, and max_tag() - tag for payloads above `piece_bytes` (at least 1; equal on all ranks).
// `max_open` operations may be open at once, else Error(kInternal). `device` is where device
// payloads lie that go through host memory; two streams are made for their copies. `compute`: the
// stream of those who write and read device payloads. The destructor cancels open operations. A
// payload in pieces allocates the first time. `memory` owns the buffers of sends; without it the
// caller keeps that memory as Communicator::cancel() says.
[[nodiscard]] std::unique_ptr<Transport> make_message_transport(
    Communicator& comm, std::size_t max_open, std::size_t piece_bytes = kMaxPieceBytes,
    Device device = {}, KeepAlive memory = nullptr, StreamView compute = {});

}  // namespace sluice
