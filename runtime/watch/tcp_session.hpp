// One TCP connection between two watchdogs: the greeting that proves the job's secret, then notes.
// Internal to TcpLink, whose thread makes all calls.
#pragma once

#include <array>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "runtime/files/sha256.hpp"
#include "runtime/watch/link.hpp"

namespace sluice {

class TcpSession : public std::enable_shared_from_this<TcpSession> {
 public:
  // Who gets what a session finds out; outlives its sessions' callbacks, or is told to forget them
  // by stop().
  class Owner {
   public:
    virtual ~Owner() = default;
    // The other end has shown that it is `rank` of this job. False: it may not be.
    virtual bool on_greeted(TcpSession& session, int rank) = 0;
    virtual void on_note(int rank, NoteKind kind, std::span<const std::byte> contents) = 0;
    // The session is over. `ended`: the other end has closed it. `rank`: -1 before the greeting.
    virtual void on_over(TcpSession& session, int rank, bool ended) = 0;
  };

  // `peer`: the rank that was called; -1: whoever calls.
  TcpSession(boost::asio::ip::tcp::socket socket, Owner& owner, const SecretKey& secret, int rank,
             int peer);

  void start();
  void send(NoteKind kind, std::span<const std::byte> contents);
  // Closes without a word; the owner hears nothing more.
  void stop();
  [[nodiscard]] int rank() const { return rank_; }  // of the other end; -1 before the greeting
  // The rank that was called; -1: the other end has called.
  [[nodiscard]] int called() const { return called_; }
  [[nodiscard]] bool idle() const { return waiting_.empty(); }

 private:
  using Nonce = std::array<std::uint8_t, 16>;

  void read_nonce();
  void make_key();
  void read_size();
  void read_rest();
  void take(std::span<const std::byte> note);
  void write_next();
  void end(bool ended);
  [[nodiscard]] std::string seal(NoteKind kind, std::span<const std::byte> contents);

  boost::asio::ip::tcp::socket socket_;
  boost::asio::steady_timer deadline_;  // of the greeting
  Owner* owner_;                        // null after stop()
  const SecretKey secret_;
  const int me_, called_;
  int rank_ = -1;
  Nonce mine_{}, theirs_{};
  SecretKey key_{};
  std::uint64_t sent_ = 0, received_ = 0;  // notes
  std::uint32_t size_ = 0;
  std::vector<std::byte> note_;
  std::deque<std::string> waiting_;  // to be written; the first is under way
};

}  // namespace sluice
