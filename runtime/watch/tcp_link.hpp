// A Link over TCP connections of its own.
//
// At the start each monitor listens: on the loopback interface for ranks of its host, and on this
// host's addresses for others. It listens until the expected ranks are connected, or until the time
// is up; later nothing listens. Of two monitors the higher rank connects.
//
// Both ends of a connection send 16 random bytes. The key of the connection is a keyed digest of
// both under the job's secret. Every note carries a keyed digest of itself, its direction and its
// number. A connection that shows no such digest within five seconds is closed, as is one whose
// notes are wrong; at most 64 connections wait for that at once. So who lacks the secret can
// neither read the job's state nor change it, but may delay the start.
#pragma once

#include <boost/asio/io_context.hpp>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "runtime/files/sha256.hpp"
#include "runtime/watch/link.hpp"

namespace sluice {

struct TcpPlan {
  int rank = 0;
  std::vector<std::string> hosts;      // [rank]
  std::vector<int> monitors;           // ascending
  std::vector<std::string> addresses;  // of this host, for ranks of others
  int first_port = 0, last_port = 0;   // 0: any
};

class TcpLink final : public Link {
 public:
  // Listens where this rank is a monitor. Throws Error(kUsage) where no port of the range is free.
  TcpLink(boost::asio::io_context& context, TcpPlan plan);
  ~TcpLink() override;
  TcpLink(const TcpLink&) = delete;
  TcpLink& operator=(const TcpLink&) = delete;

  // Where other ranks find this one: "127.0.0.1:40001,10.0.0.5:40002"; empty where it does not
  // listen.
  [[nodiscard]] std::string endpoints() const;
  // Connects to the monitors. `endpoints`: [rank], as endpoints() there. `done` is called once:
  // with nothing where all connections of this rank stand, else with what failed, within `seconds`.
  void connect(const SecretKey& secret, const std::vector<std::string>& endpoints,
               Listener& listener, double seconds, std::function<void(std::string fault)> done);

  void send(int rank, NoteKind kind, std::span<const std::byte> contents) override;
  void close() override;

  // The connections that stand now.
  [[nodiscard]] std::size_t connections() const;

 private:
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

}  // namespace sluice
