#include "comm/group/transport.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cstddef>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <sluice/error.hpp>

#include "comm/base/index.hpp"
#include "comm/base/joined.hpp"

namespace sluice {

namespace {

// All labels, shape and bytes, in one line.
std::string describe(const MessageHeader& header) {
  constexpr std::array kPhases = {"train", "evaluate", "generate"};
  constexpr std::array kDtypes = {"f32", "bf16", "i32", "u8", "f64", "f16", "i64"};
  const auto shape = std::span(header.shape).first(std::min<std::size_t>(header.rank, kMaxDims));
  return fmt::format("channel {} micro-batch {} tensor {} of {} step {} ({}) {} [{}], {} bytes",
                     header.channel, header.micro_batch, header.tensor, header.tensor_count,
                     header.step,
                     header.phase < kPhases.size() ? kPhases[header.phase] : "unknown phase",
                     header.dtype < kDtypes.size() ? kDtypes[header.dtype] : "unknown type",
                     joined(shape, ", "), header.bytes);
}

// Why a message with header `got` may not arrive where `expected` is due; empty where it may. Shape
// and bytes may be smaller, every other field is equal.
std::string difference(const MessageHeader& expected, const MessageHeader& got) {
  if (same_words(expected, got)) return {};
  if (got.magic != expected.magic) return "not a header of Sluice";
  if (got.version != expected.version) {
    return fmt::format("header version {} instead of {}", got.version, expected.version);
  }
  if (got.channel != expected.channel) return "another channel";
  if (got.phase != expected.phase) return "another phase";
  if (got.step != expected.step) return "another step";
  if (got.micro_batch != expected.micro_batch) return "another micro-batch";
  if (got.tensor != expected.tensor) return "another tensor";
  if (got.tensor_count != expected.tensor_count) return "another number of tensors";
  if (got.dtype != expected.dtype) return "another type of element";
  if (got.rank != expected.rank) return "another number of dimensions";
  if (got.bytes > expected.bytes) return "too many bytes";
  for (std::uint32_t i = 0; i < std::min<std::uint32_t>(expected.rank, kMaxDims); ++i) {
    if (got.shape[i] < 0 || got.shape[i] > expected.shape[i]) return "too large a shape";
  }
  return {};
}

struct Piece {
  std::size_t offset = 0, length = 0;  // of the payload
};

// How a payload is cut: `head` bytes travel with the header, the rest in pieces of at most `most`.
struct Pieces {
  std::size_t bytes, head, most;

  [[nodiscard]] std::size_t count() const { return 1 + (bytes - head + most - 1) / most; }
  [[nodiscard]] Piece operator[](std::size_t index) const {
    if (index == 0) return {0, head};
    const std::size_t offset = head + (index - 1) * most;
    return {offset, std::min(most, bytes - offset)};
  }
};

bool is_direct(const MessageBuffer& buffer) {
  return buffer.device != nullptr && buffer.device->direct;
}

// What goes over the wire: the host's copy, or the device's memory itself.
std::byte* wire(const MessageBuffer& buffer) {
  return is_direct(buffer) ? buffer.device->payload : buffer.payload();
}

// Copies of payloads between a device and page-locked host memory, on one stream per direction.
class DeviceStaging {
 public:
  explicit DeviceStaging(Device device)
      : device_(device),
        from_device_(device, StreamPriority::kHigh),
        to_device_(device, StreamPriority::kHigh) {}

  // Enqueues the copies of a send's pieces after its ready event; `copied` gets one event per
  // piece.
  void copy_from_device(const MessageBuffer& buffer, const Pieces& pieces,
                        std::vector<Event>& copied) {
    while (copied.size() < pieces.count()) copied.emplace_back(device_);
    from_device_.view().wait(buffer.device->ready);
    for (std::size_t i = 0; i < pieces.count(); ++i) {
      const Piece piece = pieces[i];
      copy_async(buffer.payload() + piece.offset, buffer.device->payload + piece.offset,
                 piece.length, from_device_.view());
      copied[i].record(from_device_.view());
    }
  }

  // Enqueues the copy of a receive's piece, the first after its ready event.
  void copy_to_device(const MessageBuffer& buffer, Piece piece, bool first) {
    if (first) to_device_.view().wait(buffer.device->ready);
    copy_async(buffer.device->payload + piece.offset, buffer.payload() + piece.offset, piece.length,
               to_device_.view());
  }

  // After all pieces of a receive.
  void record_arrival(DeviceSide& device) { device.arrived.record(to_device_.view()); }

  void synchronize() {
    from_device_.view().synchronize();
    to_device_.view().synchronize();
  }

 private:
  Device device_;
  Stream from_device_, to_device_;
};

// Operations live in a table of fixed size; a ticket is an index into it.
class MessageTransport final : public Transport {
 public:
  MessageTransport(Communicator& comm, std::size_t max_open, std::size_t piece_bytes, Device device,
                   KeepAlive memory, StreamView compute)
      : comm_(comm),
        memory_(std::move(memory)),
        compute_(compute),
        piece_bytes_(piece_bytes),
        staging_(device),
        operations_(max_open) {
    if (piece_bytes < 1 || piece_bytes > kMaxPieceBytes) {
      throw Error(ErrorCode::kInternal,
                  fmt::format("a piece of {} bytes; legal: 1 to {}", piece_bytes, kMaxPieceBytes));
    }
    free_.reserve(max_open);
    driven_.reserve(max_open);
    for (std::size_t i = max_open; i > 0; --i) {
      free_.push_back(static_cast<Ticket>(i - 1));
    }
  }

  ~MessageTransport() override {
    try {
      cancel_all();
    } catch (...) {  // nothing more can be cancelled
    }
  }

  Ticket start_send(int peer, int tag, const MessageBuffer& buffer) override {
    const std::uint64_t bytes = buffer.header().bytes;
    if (bytes > buffer.capacity) {
      refuse_size("sends", bytes, buffer.capacity, buffer.header());
    }
    if (buffer.device == nullptr && bytes <= piece_bytes_) {
      require_room();
      const Request head = comm_.start_send(peer, tag, {buffer.message, kHeaderBytes + bytes});
      if (head.index == Request::kNone) return kDoneTicket;
      const Ticket ticket = open(peer, tag, buffer, /*receives=*/false);
      operation_of(ticket).head = head;
      return ticket;
    }
    const Ticket ticket = open(peer, tag, buffer, /*receives=*/false);
    Operation& operation = operation_of(ticket);
    if (buffer.device == nullptr) {
      start_pieces(operation, pieces_of(operation).count());
    } else {
      // MPI reads a direct payload itself, after its ready event.
      buffer.device->ready.record(compute_);
      if (!buffer.device->direct) {
        staging_.copy_from_device(buffer, pieces_of(operation), operation.copied);
      }
      drive_along(ticket);
    }
    return ticket;
  }

  Ticket post_recv(int peer, int tag, const MessageBuffer& buffer,
                   const MessageHeader& expected) override {
    if (expected.bytes > buffer.capacity) {
      refuse_size("expects", expected.bytes, buffer.capacity, expected);
    }
    const Ticket ticket = open(peer, tag, buffer, /*receives=*/true);
    Operation& operation = operation_of(ticket);
    operation.expected = expected;
    operation.number = posted_++;
    buffer.header().magic = 0;  // shows whether a message that is too long left its header
    if (buffer.device != nullptr) buffer.device->ready.record(compute_);
    const std::size_t head = head_bytes(buffer, buffer.capacity);
    operation.head = comm_.post_recv(peer, tag, {buffer.message, kHeaderBytes + head});
    if (buffer.device != nullptr || head < expected.bytes) drive_along(ticket);
    return ticket;
  }

  void progress() override {
    if (!driven_.empty()) drive();
    // The library moves all messages while it is asked about one.
    for (Operation& operation : operations_) {
      if (!operation.open || operation.driven || operation.head.index == Request::kNone) continue;
      (void)test_head(operation);
      return;
    }
  }

  bool test(Ticket ticket) override {
    if (ticket == kDoneTicket) return true;
    Operation& operation = operation_of(ticket);
    if (!driven_.empty()) drive();
    if (operation.driven || !complete(operation)) return false;
    if (operation.receives && operation.buffer.device != nullptr) {
      compute_.wait(operation.buffer.device->arrived);
    }
    operation.open = false;
    free_.push_back(ticket);
    return true;
  }

  void cancel_all() override {
    for (std::size_t i = 0; i < operations_.size(); ++i) {
      Operation& operation = operations_[i];
      if (!operation.open) {
        continue;
      }
      comm_.cancel(operation.head);
      for (Request& request : operation.tail) {
        comm_.cancel(request);
      }
      operation.tail.clear();
      operation.driven = false;
      operation.open = false;
      free_.push_back(static_cast<Ticket>(i));
    }
    driven_.clear();
    if (memory_ != nullptr) comm_.keep(memory_);
    staging_.synchronize();
  }

 private:
  struct Operation {
    MessageHeader expected;  // of a receive
    MessageBuffer buffer;
    Request head;  // header and first piece
    int peer = 0;
    int tag = 0;
    bool open = false;
    bool receives = false;
    bool tail_due = false;      // the first piece has arrived, receives for the rest are not posted
    std::uint64_t number = 0;   // of a receive, in order of posting
    std::vector<Request> tail;  // pieces after the first
    bool driven = false;        // by every test(), until nothing is left to start
    bool arrived = false;       // of a receive: its event is recorded
    std::size_t started = 0;    // of a send: pieces on the wire
    std::vector<Event> copied;  // of a device payload's send: [piece]
    std::size_t delivered = 0;  // of a receive: pieces whose copies to the device are under way
  };

  Operation& operation_of(Ticket ticket) { return operations_[at(ticket)]; }

  void require_room() const {
    if (!free_.empty()) return;
    throw Error(
        ErrorCode::kInternal,
        fmt::format("more than {} messages open on rank {}", operations_.size(), comm_.rank()),
        comm_.rank());
  }

  Ticket open(int peer, int tag, const MessageBuffer& buffer, bool receives) {
    require_room();
    const Ticket ticket = free_.back();
    free_.pop_back();
    Operation& operation = operation_of(ticket);
    operation.buffer = buffer;
    operation.peer = peer;
    operation.tag = tag;
    operation.open = true;
    operation.receives = receives;
    operation.tail_due = false;
    operation.driven = operation.arrived = false;
    operation.started = operation.delivered = 0;
    operation.tail.clear();
    return ticket;
  }

  // Bytes of payload in the message that carries the header.
  [[nodiscard]] std::size_t head_bytes(const MessageBuffer& buffer, std::size_t bytes) const {
    return is_direct(buffer) ? 0 : std::min(bytes, piece_bytes_);
  }

  [[nodiscard]] Pieces pieces_of(const Operation& operation) const {
    const std::size_t bytes = operation.buffer.header().bytes;
    return {bytes, head_bytes(operation.buffer, bytes), piece_bytes_};
  }

  // Puts pieces [started, until) of a send on the wire.
  void start_pieces(Operation& operation, std::size_t until) {
    for (; operation.started < until; ++operation.started) {
      const Piece piece = pieces_of(operation)[operation.started];
      if (operation.started == 0) {
        operation.head = comm_.start_send(operation.peer, operation.tag,
                                          {operation.buffer.message, kHeaderBytes + piece.length});
      } else {
        operation.tail.push_back(
            comm_.start_send(operation.peer, comm_.max_tag() - operation.tag,
                             {wire(operation.buffer) + piece.offset, piece.length}));
      }
    }
  }

  // From here on every test() advances the operation: a peer may wait for its next piece while this
  // rank waits for something else.
  void drive_along(Ticket ticket) {
    operation_of(ticket).driven = true;
    driven_.push_back(ticket);
    drive();
  }

  void drive() {
    bool sends_wait = false;
    std::size_t left = 0;
    for (const Ticket ticket : driven_) {
      Operation& operation = operation_of(ticket);
      if (operation.receives) {
        operation.driven = !complete(operation);
      } else {
        // Sends go to the wire in the order they were started, as messages of one tag have to.
        operation.driven = sends_wait || !start_copied(operation);
        sends_wait = operation.driven;
      }
      if (operation.driven) driven_[left++] = ticket;
    }
    driven_.resize(left);
  }

  // True once all pieces of a device payload's send are on the wire.
  bool start_copied(Operation& operation) {
    const std::size_t pieces = pieces_of(operation).count();
    while (operation.started < pieces && copied(operation, operation.started)) {
      start_pieces(operation, operation.started + 1);
    }
    return operation.started == pieces;
  }
  [[nodiscard]] static bool copied(const Operation& operation, std::size_t piece) {
    const DeviceSide& device = *operation.buffer.device;
    return device.direct ? device.ready.done() : operation.copied[piece].done();
  }

  // Starts the copy of a receive's piece to the device, where there is one to make.
  void deliver(Operation& operation, std::size_t index) {
    if (operation.buffer.device == nullptr || is_direct(operation.buffer)) return;
    staging_.copy_to_device(operation.buffer, pieces_of(operation)[index],
                            operation.delivered++ == 0);
  }

  // True once every message of the operation is done.
  bool complete(Operation& operation) {
    if (!test_head(operation) || (!operation.tail.empty() && !test_tail(operation))) return false;
    DeviceSide* device = operation.buffer.device;
    if (operation.receives && device != nullptr && !operation.arrived) {
      staging_.record_arrival(*device);
      operation.arrived = true;
    }
    return true;
  }

  // True once the first piece is done and checked, and the operations of the other pieces are
  // started.
  bool test_head(Operation& operation) {
    if (operation.head.index != Request::kNone) {
      if (!operation.receives) return comm_.test(operation.head);
      Arrival arrival;
      try {
        if (!comm_.test(operation.head, &arrival)) return false;
      } catch (const Error& error) {
        refuse_long(operation, error);
      }
      check_head(operation, arrival);
    }
    return !operation.tail_due || test_order(operation);
  }

  // A message too long for its receive still leaves its header there.
  [[noreturn]] void refuse_long(const Operation& operation, const Error& error) const {
    if (error.code() != ErrorCode::kMismatch ||
        operation.buffer.header().magic != MessageHeader::kMagic) {
      throw;
    }
    refuse(operation, "longer than there is room for");
  }

  // Posts the receives of the pieces after the first, once the order of receives allows it.
  bool test_order(Operation& operation) {
    // Receives match pieces in the order of posting, which must be the channel's order.
    for (Operation& other : operations_) {
      if (other.open && other.receives && other.peer == operation.peer &&
          other.tag == operation.tag && other.number < operation.number && !test_head(other)) {
        return false;
      }
    }
    return open_tail(operation);
  }

  // The first piece of a receive.
  void check_head(Operation& operation, const Arrival& arrival) {
    const MessageHeader& got = operation.buffer.header();
    if (arrival.bytes < kHeaderBytes) {
      refuse_got(operation, fmt::format("{} bytes, fewer than a header has", arrival.bytes));
    }
    if (const std::string why = difference(operation.expected, got); !why.empty()) {
      refuse(operation, why);
    }
    const std::size_t head = head_bytes(operation.buffer, got.bytes);
    if (arrival.bytes != kHeaderBytes + head) {
      refuse(operation, fmt::format("its first piece has {} bytes instead of {}",
                                    arrival.bytes - kHeaderBytes, head));
    }
    operation.tail_due = head < got.bytes;
    deliver(operation, 0);
  }

  // Posts the receives of the pieces after the first. MPI writes a direct payload itself, so the
  // device's memory must be free by then.
  bool open_tail(Operation& operation) {
    if (is_direct(operation.buffer) && !operation.buffer.device->ready.done()) return false;
    operation.tail.clear();
    const Pieces pieces = pieces_of(operation);
    for (std::size_t i = 1; i < pieces.count(); ++i) {
      const Piece piece = pieces[i];
      operation.tail.push_back(
          comm_.post_recv(operation.peer, comm_.max_tag() - operation.tag,
                          {wire(operation.buffer) + piece.offset, piece.length}));
    }
    operation.tail_due = false;
    return true;
  }

  bool test_tail(Operation& operation) {
    bool done = true;
    for (std::size_t i = 0; i < operation.tail.size(); ++i) {
      Request& request = operation.tail[i];
      if (request.index == Request::kNone) continue;
      if (!comm_.test(request)) {
        done = false;
      } else if (operation.receives) {
        deliver(operation, i + 1);
      }
    }
    if (done) {
      operation.tail.clear();
    }
    return done;
  }

  [[noreturn]] void refuse(const Operation& operation, const std::string& reason) const {
    const MessageHeader& got = operation.buffer.header();
    refuse_got(operation, (got.magic == MessageHeader::kMagic ? describe(got) : "other bytes") +
                              ": " + reason);
  }

  [[noreturn]] void refuse_got(const Operation& operation, const std::string& got) const {
    throw Error(ErrorCode::kMismatch,
                fmt::format("message mismatch on rank {}: expected {} from rank {}, got {}",
                            comm_.rank(), describe(operation.expected), operation.peer, got),
                comm_.rank());
  }

  [[noreturn]] void refuse_size(const char* verb, std::uint64_t bytes, std::size_t capacity,
                                const MessageHeader& header) const {
    throw Error(ErrorCode::kInternal,
                fmt::format("rank {} {} {} bytes with a buffer of {}: {}", comm_.rank(), verb,
                            bytes, capacity, describe(header)),
                comm_.rank());
  }

  Communicator& comm_;
  KeepAlive memory_;  // that buffers are sent from
  StreamView compute_;
  std::size_t piece_bytes_;
  DeviceStaging staging_;
  std::vector<Ticket> driven_;  // in the order they were opened
  std::vector<Operation> operations_;
  std::vector<Ticket> free_;
  std::uint64_t posted_ = 0;
};

}  // namespace

std::unique_ptr<Transport> make_message_transport(Communicator& comm, std::size_t max_open,
                                                  std::size_t piece_bytes, Device device,
                                                  KeepAlive memory, StreamView compute) {
  return std::make_unique<MessageTransport>(comm, max_open, piece_bytes, device, std::move(memory),
                                            compute);
}

}  // namespace sluice
