// Small messages between the ranks' watchdogs, over TCP connections of their own. All calls come
// from one thread, and none blocks but close().
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
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/entry/network_facts.hpp"
#include "runtime/files/sha256.hpp"

namespace sluice {

enum class NoteKind : std::uint8_t {
  kHello,    // the first of a connection
  kStatus,   // the bytes of a RankStatus
  kBye,      // the sender's watchdog ends in order
  kVerdict,  // the culprit's rank, then the headline as text
  kAnswer,   // to a verdict
};
inline constexpr std::size_t kMostNoteBytes = 8192;  // of a note's contents

[[nodiscard]] inline std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

// The IPv4 addresses of this host that other hosts' watchdogs may reach, chosen as MPI's interfaces
// are, the likeliest first. Those that OMPI_MCA_btl_tcp_if_include names (interfaces or
// networks such as 10.0.0.0/24), else those of OMPI_MCA_oob_tcp_if_include; without either all but
// those of OMPI_MCA_btl_tcp_if_exclude. Where no such setting leaves one: those that
// is_virtual_interface() does not know, addresses of the connections that MPI has first.
[[nodiscard]] std::vector<std::string> watch_addresses(const NetworkFacts& facts);

// Whether the host has networks, but none is up.
[[nodiscard]] bool networks_are_down(const std::vector<std::string>& addresses);

struct TcpPlan {
  int rank = 0;
  std::vector<std::string> hosts;      // [rank]
  std::vector<int> monitors;           // ascending
  std::vector<std::string> addresses;  // of this host, for ranks of others
  int first_port = 0, last_port = 0;   // 0: any
};

class TcpLink {
 public:
  class Listener {
   public:
    virtual ~Listener() = default;
    virtual void on_note(int rank, NoteKind kind, std::span<const std::byte> contents) = 0;
    // The rank's process has closed its end, as the kernel does for a process that dies. Not for a
    // network that fails: a rank behind it is silent.
    virtual void on_end(int rank) = 0;
  };

  // Listens where this rank is a monitor. Throws Error(kUsage) where no port of the range is free.
  TcpLink(boost::asio::io_context& context, TcpPlan plan);
  ~TcpLink();
  TcpLink(const TcpLink&) = delete;
  TcpLink& operator=(const TcpLink&) = delete;

  // Where other ranks find this one: "127.0.0.1:40001,10.0.0.5:40002"; empty where it does not
  // listen.
  [[nodiscard]] std::string endpoints() const;
  // Connects to the monitors. `endpoints`: [rank], as endpoints() there. `done` is called once:
  // with nothing where all connections of this rank stand, else with what failed, within `seconds`.
  void connect(const SecretKey& secret, const std::vector<std::string>& endpoints,
               Listener& listener, double seconds, std::function<void(std::string fault)> done);

  // To a rank that this one is connected to, else nowhere. What the rank does not take waits; of
  // statuses two do, of other notes 64.
  void send(int rank, NoteKind kind, std::span<const std::byte> contents);
  // Says goodbye to all ranks, as far as they listen, within 200 ms. The last call.
  void close();

  // The connections that stand now.
  [[nodiscard]] std::size_t connections() const;

 private:
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

}  // namespace sluice
