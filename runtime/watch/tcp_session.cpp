#include "runtime/watch/tcp_session.hpp"

#include <algorithm>
#include <boost/asio/buffer.hpp>
#include <boost/asio/read.hpp>
#include <boost/asio/write.hpp>
#include <chrono>
#include <cstring>
#include <utility>

namespace sluice {
namespace {

using boost::system::error_code;

constexpr auto kGreetingTime = std::chrono::seconds(5);
constexpr std::size_t kMostWaitingNotes = 64;    // notes
constexpr std::size_t kMostWaitingStatuses = 2;  // a peer that has stopped needs no more

// In front of a note's contents. Little-endian; all ranks have the same build.
struct NoteHead {
  std::uint64_t number = 0;  // from 0, by direction
  std::int32_t rank = -1;
  std::uint8_t kind = 0;
  std::uint8_t called = 0;  // whether the sender was called: the direction
  std::uint16_t spare = 0;
};
static_assert(sizeof(NoteHead) == 16);

constexpr std::size_t kDigest = sizeof(SecretKey);
constexpr std::size_t kLeastSize = sizeof(NoteHead) + kDigest;
constexpr std::size_t kMostSize = kLeastSize + kMostNoteBytes;

}  // namespace

TcpSession::TcpSession(boost::asio::ip::tcp::socket socket, Owner& owner, const SecretKey& secret,
                       int rank, int peer)
    : socket_(std::move(socket)),
      deadline_(socket_.get_executor()),
      owner_(&owner),
      secret_(secret),
      me_(rank),
      called_(peer) {
  const SecretKey random = random_key();
  std::copy_n(random.begin(), mine_.size(), mine_.begin());
}

void TcpSession::start() {
  error_code ignored;
  socket_.set_option(boost::asio::ip::tcp::no_delay(true), ignored);
  deadline_.expires_after(kGreetingTime);
  deadline_.async_wait([self = shared_from_this()](const error_code& error) {
    if (!error && self->rank_ < 0) self->end(false);
  });
  waiting_.emplace_back(reinterpret_cast<const char*>(mine_.data()), mine_.size());
  write_next();
  read_nonce();
}

void TcpSession::read_nonce() {
  boost::asio::async_read(socket_, boost::asio::buffer(theirs_),
                          [self = shared_from_this()](const error_code& error, std::size_t) {
                            if (self->owner_ == nullptr) return;
                            if (error) return self->end(false);
                            self->make_key();
                            self->send(NoteKind::kHello, {});
                            self->read_size();
                          });
}

void TcpSession::make_key() {
  std::array<std::byte, 2 * sizeof(Nonce)> both{};
  const bool caller = called_ >= 0;
  std::memcpy(both.data(), caller ? mine_.data() : theirs_.data(), sizeof(Nonce));
  std::memcpy(both.data() + sizeof(Nonce), caller ? theirs_.data() : mine_.data(), sizeof(Nonce));
  key_ = keyed_digest(secret_, both);
}

std::string TcpSession::seal(NoteKind kind, std::span<const std::byte> contents) {
  const auto size = static_cast<std::uint32_t>(kLeastSize + contents.size());
  const NoteHead head{.number = sent_++,
                      .rank = me_,
                      .kind = static_cast<std::uint8_t>(kind),
                      .called = called_ < 0};
  std::string note(sizeof(size) + size, '\0');
  char* to = note.data();
  std::memcpy(to, &size, sizeof(size));
  std::memcpy(to += sizeof(size), &head, sizeof(head));
  if (!contents.empty()) std::memcpy(to + sizeof(head), contents.data(), contents.size());
  const std::size_t signed_bytes = sizeof(head) + contents.size();
  const SecretKey digest = keyed_digest(key_, std::as_bytes(std::span(to, signed_bytes)));
  std::memcpy(to + signed_bytes, digest.data(), digest.size());
  return note;
}

void TcpSession::send(NoteKind kind, std::span<const std::byte> contents) {
  if (owner_ == nullptr || contents.size() > kMostNoteBytes) return;
  const std::size_t most = kind == NoteKind::kStatus ? kMostWaitingStatuses : kMostWaitingNotes;
  if (waiting_.size() >= most) return;
  waiting_.push_back(seal(kind, contents));
  if (waiting_.size() == 1) write_next();
}

void TcpSession::write_next() {
  boost::asio::async_write(socket_, boost::asio::buffer(waiting_.front()),
                           [self = shared_from_this()](const error_code& error, std::size_t) {
                             if (self->owner_ == nullptr || error) return;  // the reader says why
                             self->waiting_.pop_front();
                             if (!self->waiting_.empty()) self->write_next();
                           });
}

void TcpSession::read_size() {
  boost::asio::async_read(socket_, boost::asio::buffer(&size_, sizeof(size_)),
                          [self = shared_from_this()](const error_code& error, std::size_t) {
                            if (self->owner_ == nullptr) return;
                            const bool ended = error == boost::asio::error::eof ||
                                               error == boost::asio::error::connection_reset;
                            if (error) return self->end(ended);
                            if (self->size_ < kLeastSize || self->size_ > kMostSize) {
                              return self->end(false);
                            }
                            self->note_.resize(self->size_);
                            self->read_rest();
                          });
}

void TcpSession::read_rest() {
  boost::asio::async_read(socket_, boost::asio::buffer(note_),
                          [self = shared_from_this()](const error_code& error, std::size_t) {
                            if (self->owner_ == nullptr) return;
                            const bool ended = error == boost::asio::error::eof ||
                                               error == boost::asio::error::connection_reset;
                            if (error) return self->end(ended);
                            self->take(self->note_);
                            if (self->owner_ != nullptr) self->read_size();
                          });
}

void TcpSession::take(std::span<const std::byte> note) {
  const std::span<const std::byte> said = note.first(note.size() - kDigest);
  const SecretKey digest = keyed_digest(key_, said);
  const auto* theirs = reinterpret_cast<const std::uint8_t*>(note.data() + said.size());
  NoteHead head;
  std::memcpy(&head, said.data(), sizeof(head));
  const bool from_caller = head.called == 0;
  if (!same_digest(digest, {theirs, kDigest}) || head.number != received_ ||
      from_caller != (called_ < 0)) {
    return end(false);
  }
  ++received_;
  const auto kind = static_cast<NoteKind>(head.kind);
  if (rank_ >= 0) {
    if (head.kind > static_cast<std::uint8_t>(NoteKind::kAnswer) || head.rank != rank_) {
      return end(false);
    }
    return owner_->on_note(rank_, kind, said.subspan(sizeof(head)));
  }
  const bool expected =
      kind == NoteKind::kHello && head.rank >= 0 && (called_ < 0 || head.rank == called_);
  if (!expected || !owner_->on_greeted(*this, head.rank)) return end(false);
  rank_ = head.rank;
  deadline_.cancel();
}

void TcpSession::end(bool ended) {
  Owner* const owner = owner_;
  const auto self = shared_from_this();  // the owner forgets it
  const int rank = rank_;
  stop();
  if (owner != nullptr) owner->on_over(*this, rank, ended);
}

void TcpSession::stop() {
  owner_ = nullptr;
  error_code ignored;
  deadline_.cancel();
  socket_.shutdown(boost::asio::ip::tcp::socket::shutdown_both, ignored);
  socket_.close(ignored);
}

}  // namespace sluice
