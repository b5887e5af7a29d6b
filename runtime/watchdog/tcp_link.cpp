#include "runtime/watchdog/tcp_link.hpp"

#include <arpa/inet.h>
#include <fcntl.h>
#include <fmt/core.h>
#include <ifaddrs.h>
#include <net/if.h>

#include <algorithm>
#include <array>
#include <boost/asio/ip/network_v4.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/read.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/write.hpp>
#include <charconv>
#include <chrono>
#include <cstring>
#include <deque>
#include <list>
#include <utility>

#include "comm/base/index.hpp"
#include "comm/base/throw_error.hpp"

namespace sluice {
namespace {

namespace asio = boost::asio;
using asio::ip::tcp;
using boost::system::error_code;

constexpr std::size_t kMostStrangers = 64;
constexpr auto kCloseTime = std::chrono::milliseconds(200);
constexpr auto kGreetingTime = std::chrono::seconds(5);
constexpr std::size_t kMostWaitingNotes = 64;    // notes
constexpr std::size_t kMostWaitingStatuses = 2;  // a peer that has stopped needs no more
constexpr const char* kLoopback = "127.0.0.1";

// In front of a note's contents. Little-endian; all ranks have the same build.
struct NoteHead {
  std::uint64_t number = 0;  // from 0, by direction
  std::int32_t rank = -1;
  NoteKind kind = NoteKind::kHello;
  bool called = false;  // whether the sender was called: the direction
  std::uint16_t spare = 0;
};
static_assert(sizeof(NoteHead) == 16);

constexpr std::size_t kDigest = sizeof(SecretKey);
constexpr std::size_t kLeastSize = sizeof(NoteHead) + kDigest;
constexpr std::size_t kMostSize = kLeastSize + kMostNoteBytes;

std::vector<tcp::endpoint> parse_endpoints(std::string_view text) {
  std::vector<tcp::endpoint> endpoints;
  while (!text.empty()) {
    const std::string_view each = text.substr(0, text.find(','));
    text.remove_prefix(std::min(each.size() + 1, text.size()));
    const std::size_t colon = each.find(':');
    if (colon == std::string_view::npos) continue;
    error_code error;
    const auto address = asio::ip::make_address_v4(std::string(each.substr(0, colon)), error);
    unsigned short port = 0;
    std::from_chars(each.data() + colon + 1, each.data() + each.size(), port);
    if (!error && port != 0) endpoints.emplace_back(address, port);
  }
  return endpoints;
}

// A child that runs another program would keep the connection open after this process has ended.
template <typename Socket>
void keep_from_children(Socket& socket) {
  ::fcntl(socket.native_handle(), F_SETFD, FD_CLOEXEC);
}

std::string text_of(const tcp::endpoint& endpoint) {
  return fmt::format("{}:{}", endpoint.address().to_string(), endpoint.port());
}

std::string_view setting(const NetworkFacts& facts, std::string_view name) {
  for (const auto& [key, value] : facts.settings) {
    if (key == name) return value;
  }
  return {};
}

// Whether `entry`, an interface's name or a network, names `each`.
bool names(std::string_view entry, const NetworkInterface& each) {
  if (entry.find('/') == std::string_view::npos) return entry == each.name;
  boost::system::error_code no_network, no_address;
  const auto network = asio::ip::make_network_v4(std::string(entry), no_network);
  const auto address = asio::ip::make_address_v4(each.address, no_address);
  return !no_network && !no_address &&
         asio::ip::network_v4(address, network.prefix_length()).canonical() == network.canonical();
}

bool named_by(std::string_view list, const NetworkInterface& each) {
  while (!list.empty()) {
    const std::size_t comma = std::min(list.find(','), list.size());
    if (names(list.substr(0, comma), each)) return true;
    list.remove_prefix(std::min(comma + 1, list.size()));
  }
  return false;
}

}  // namespace

std::vector<std::string> watch_addresses(const NetworkFacts& facts) {
  std::string_view include = setting(facts, "OMPI_MCA_btl_tcp_if_include");
  if (include.empty()) include = setting(facts, "OMPI_MCA_oob_tcp_if_include");
  const std::string_view exclude = setting(facts, "OMPI_MCA_btl_tcp_if_exclude");
  std::vector<std::string> chosen;
  const auto add = [&](const auto& condition) {
    for (const NetworkInterface& each : facts.interfaces) {
      if (condition(each)) chosen.push_back(each.address);
    }
  };
  if (!include.empty()) {
    add([&](const NetworkInterface& each) { return named_by(include, each); });
    if (!chosen.empty()) return chosen;
  }
  add([&](const NetworkInterface& each) {
    return !is_virtual_interface(each.name) && !named_by(exclude, each);
  });
  if (chosen.empty()) {
    add([&](const NetworkInterface& each) { return !named_by(exclude, each); });
  }
  std::stable_partition(chosen.begin(), chosen.end(), [&](const std::string& address) {
    return std::any_of(facts.connections.begin(), facts.connections.end(),
                       [&](const Connection& each) { return address_of(each.local) == address; });
  });
  return chosen;
}

bool networks_are_down(const std::vector<std::string>& addresses) {
  if (addresses.empty()) return false;
  ifaddrs* first = nullptr;
  if (::getifaddrs(&first) != 0) return false;
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> owner(first, &::freeifaddrs);
  for (const ifaddrs* each = first; each != nullptr; each = each->ifa_next) {
    constexpr unsigned int kWorks = IFF_UP | IFF_RUNNING;
    if (each->ifa_addr == nullptr || each->ifa_addr->sa_family != AF_INET ||
        (each->ifa_flags & kWorks) != kWorks) {
      continue;
    }
    const auto& address = reinterpret_cast<const sockaddr_in*>(each->ifa_addr)->sin_addr;
    const std::string text = asio::ip::address_v4(ntohl(address.s_addr)).to_string();
    if (std::find(addresses.begin(), addresses.end(), text) != addresses.end()) return false;
  }
  return true;
}

struct TcpLink::Impl final : std::enable_shared_from_this<TcpLink::Impl> {
  class Session;
  // What this rank knows of another.
  struct Peer {
    bool expected = false;            // its connection does not stand yet
    bool hopeless = false;            // all its addresses were tried
    bool left = false;                // it has said goodbye
    std::vector<tcp::endpoint> next;  // addresses to try, the next one last
    std::string fault;                // of the last try
    std::shared_ptr<Session> session;
  };

  Impl(asio::io_context& context_in, TcpPlan plan_in)
      : context(context_in),
        plan(std::move(plan_in)),
        peers(plan.hosts.size()),
        time_limit(context_in) {}

  void listen(const std::string& address);
  void accept(tcp::acceptor& acceptor);
  void meet(tcp::socket socket, int peer);
  void call(int rank);
  // The other end of a session has shown that it is `rank` of this job. False: it may not be.
  bool on_greeted(const Session& session, int rank);
  // `ended`: the other end has closed the session. `rank`: -1 before the greeting.
  void on_over(const Session& session, int rank, bool ended);
  void settle();
  void tell();
  void stop_listening();
  void stop();

  [[nodiscard]] Peer& peer(int rank) { return peers[at(rank)]; }
  [[nodiscard]] const std::string& host(int rank) const { return plan.hosts[at(rank)]; }
  [[nodiscard]] bool is_monitor(int rank) const {
    return std::binary_search(plan.monitors.begin(), plan.monitors.end(), rank);
  }
  // Whether this rank calls `rank`, rather than being called.
  [[nodiscard]] bool calls(int rank) const {
    return is_monitor(rank) && (!is_monitor(plan.rank) || rank < plan.rank);
  }

  asio::io_context& context;
  TcpPlan plan;
  SecretKey secret{};
  Listener* listener = nullptr;
  std::list<tcp::acceptor> acceptors;  // callbacks hold references
  std::vector<Peer> peers;             // [rank]
  std::list<std::shared_ptr<Session>> strangers;
  asio::steady_timer time_limit;
  std::function<void(std::string)> done;
  bool closed = false;
};

// One connection: the greeting that proves the job's secret, then notes.
class TcpLink::Impl::Session : public std::enable_shared_from_this<Session> {
 public:
  // `called`: the rank that was called; -1: the other end has called.
  Session(tcp::socket socket, Impl& owner, int called)
      : socket_(std::move(socket)),
        deadline_(socket_.get_executor()),
        owner_(&owner),
        called_(called) {
    const SecretKey random = random_key();
    std::copy_n(random.begin(), mine_.size(), mine_.begin());
  }

  void start() {
    error_code ignored;
    socket_.set_option(tcp::no_delay(true), ignored);
    deadline_.expires_after(kGreetingTime);
    deadline_.async_wait([self = shared_from_this()](const error_code& error) {
      if (!error && self->rank_ < 0) self->end(false);
    });
    waiting_.emplace_back(reinterpret_cast<const char*>(mine_.data()), mine_.size());
    write_next();
    read(asio::buffer(theirs_), [this] {
      make_key();
      send(NoteKind::kHello, {});
      read_note();
    });
  }

  void send(NoteKind kind, std::span<const std::byte> contents) {
    if (owner_ == nullptr || contents.size() > kMostNoteBytes) return;
    const std::size_t most = kind == NoteKind::kStatus ? kMostWaitingStatuses : kMostWaitingNotes;
    if (waiting_.size() >= most) return;
    waiting_.push_back(seal(kind, contents));
    if (waiting_.size() == 1) write_next();
  }

  // Closes without a word; the owner hears nothing more.
  void stop() {
    owner_ = nullptr;
    error_code ignored;
    deadline_.cancel();
    socket_.shutdown(tcp::socket::shutdown_both, ignored);
    socket_.close(ignored);
  }

  [[nodiscard]] int called() const { return called_; }
  [[nodiscard]] bool idle() const { return waiting_.empty(); }

 private:
  using Nonce = std::array<std::uint8_t, 16>;

  void make_key() {
    const bool caller = called_ >= 0;
    const std::array<Nonce, 2> both = {caller ? mine_ : theirs_, caller ? theirs_ : mine_};
    key_ = keyed_digest(owner_->secret, std::as_bytes(std::span(both)));
  }

  std::string seal(NoteKind kind, std::span<const std::byte> contents) {
    const auto size = static_cast<std::uint32_t>(kLeastSize + contents.size());
    const NoteHead head{
        .number = sent_++, .rank = owner_->plan.rank, .kind = kind, .called = called_ < 0};
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

  void write_next() {
    asio::async_write(socket_, asio::buffer(waiting_.front()),
                      [self = shared_from_this()](const error_code& error, std::size_t) {
                        if (self->owner_ == nullptr || error) return;  // the reader says why
                        self->waiting_.pop_front();
                        if (!self->waiting_.empty()) self->write_next();
                      });
  }

  // Fills the buffer, then calls `next`.
  template <typename Next>
  void read(asio::mutable_buffer buffer, Next next) {
    asio::async_read(
        socket_, buffer, [self = shared_from_this(), next](const error_code& error, std::size_t) {
          if (self->owner_ == nullptr) return;
          if (!error) return next();
          self->end(error == asio::error::eof || error == asio::error::connection_reset);
        });
  }

  void read_note() {
    read(asio::buffer(&size_, sizeof(size_)), [this] {
      if (size_ < kLeastSize || size_ > kMostSize) return end(false);
      note_.resize(size_);
      read(asio::buffer(note_), [this] {
        if (!take(note_)) return end(false);
        if (owner_ != nullptr) read_note();
      });
    });
  }

  // False where the note is none of this job's, or out of turn.
  bool take(std::span<const std::byte> note) {
    const std::span<const std::byte> said = note.first(note.size() - kDigest);
    const auto* theirs = reinterpret_cast<const std::uint8_t*>(note.data() + said.size());
    NoteHead head;
    if (!same_digest(keyed_digest(key_, said), {theirs, kDigest})) return false;
    std::memcpy(&head, said.data(), sizeof(head));
    if (head.number != received_++ || head.called != (called_ >= 0)) return false;
    if (rank_ < 0) {
      const bool expected =
          head.kind == NoteKind::kHello && head.rank >= 0 && (called_ < 0 || head.rank == called_);
      if (!expected || !owner_->on_greeted(*this, head.rank)) return false;
      rank_ = head.rank;
      deadline_.cancel();
      return true;
    }
    if (head.rank != rank_) return false;
    if (head.kind == NoteKind::kBye) owner_->peer(rank_).left = true;
    if (!owner_->closed) owner_->listener->on_note(rank_, head.kind, said.subspan(sizeof(head)));
    return true;
  }

  void end(bool ended) {
    Impl* const owner = owner_;
    const auto self = shared_from_this();  // the owner forgets it
    stop();
    if (owner != nullptr) owner->on_over(*this, rank_, ended);
  }

  tcp::socket socket_;
  asio::steady_timer deadline_;  // of the greeting
  Impl* owner_;                  // outlives callbacks, or is null after stop()
  const int called_;
  int rank_ = -1;  // of the other end; -1 before the greeting
  Nonce mine_{}, theirs_{};
  SecretKey key_{};
  std::uint64_t sent_ = 0, received_ = 0;  // notes
  std::uint32_t size_ = 0;
  std::vector<std::byte> note_;
  std::deque<std::string> waiting_;  // to be written; the first is under way
};

void TcpLink::Impl::listen(const std::string& address) {
  error_code error;
  const auto parsed = asio::ip::make_address_v4(address, error);
  if (error) return;
  const int first = plan.first_port, last = plan.last_port;
  for (int port = first; port <= last; ++port) {
    tcp::acceptor acceptor(context);
    const tcp::endpoint endpoint(parsed, static_cast<unsigned short>(port));
    acceptor.open(endpoint.protocol(), error);
    if (!error && port > 0) acceptor.set_option(tcp::acceptor::reuse_address(true), error);
    if (!error) acceptor.bind(endpoint, error);
    if (!error) acceptor.listen(asio::socket_base::max_listen_connections, error);
    if (error) continue;
    keep_from_children(acceptor);
    acceptors.push_back(std::move(acceptor));
    return;
  }
  throw_usage("the watchdog cannot listen on {} at {}: {}", address,
              first == last ? fmt::format("port {}", first)
                            : fmt::format("any of the ports {} to {}", first, last),
              error.message());
}

void TcpLink::Impl::accept(tcp::acceptor& acceptor) {
  acceptor.async_accept(
      [self = shared_from_this(), &acceptor](const error_code& error, tcp::socket socket) {
        if (!acceptor.is_open() || (error && error != asio::error::connection_aborted)) return;
        if (!error && self->strangers.size() < kMostStrangers) {
          self->meet(std::move(socket), /*peer=*/-1);
        }
        self->accept(acceptor);
      });
}

void TcpLink::Impl::meet(tcp::socket socket, int peer) {
  keep_from_children(socket);
  strangers.push_back(std::make_shared<Session>(std::move(socket), *this, peer));
  strangers.back()->start();
}

// Calls a monitor, over its addresses one after the other.
void TcpLink::Impl::call(int rank) {
  Peer& to = peer(rank);
  if (closed || !to.expected) return;
  if (to.next.empty()) {
    to.hopeless = true;
    return settle();
  }
  const tcp::endpoint endpoint = to.next.back();
  to.next.pop_back();
  to.fault = fmt::format("{}: no answer", text_of(endpoint));
  const auto socket = std::make_shared<tcp::socket>(context);
  socket->async_connect(
      endpoint, [self = shared_from_this(), socket, rank, endpoint](const error_code& error) {
        if (self->closed) return;
        if (!error) return self->meet(std::move(*socket), rank);
        self->peer(rank).fault = fmt::format("{}: {}", text_of(endpoint), error.message());
        self->call(rank);
      });
}

bool TcpLink::Impl::on_greeted(const Session& session, int rank) {
  if (at(rank) >= peers.size() || !peer(rank).expected) return false;
  const auto it = std::find_if(strangers.begin(), strangers.end(),
                               [&](const auto& each) { return each.get() == &session; });
  peer(rank).expected = false;
  peer(rank).session = *it;
  strangers.erase(it);
  settle();
  return true;
}

void TcpLink::Impl::on_over(const Session& session, int rank, bool ended) {
  std::erase_if(strangers, [&](const auto& each) { return each.get() == &session; });
  if (rank >= 0) {
    peer(rank).session.reset();
    if (ended && !closed && !peer(rank).left) listener->on_end(rank);
  } else if (session.called() >= 0) {
    peer(session.called()).fault = "the answer was no watchdog's of this job";
    call(session.called());
  }
}

// Calls `done` once all that can stand stands.
void TcpLink::Impl::settle() {
  const auto stands = [](const Peer& each) { return !each.expected; };
  if (std::all_of(peers.begin(), peers.end(), stands)) stop_listening();
  const auto is_over = [](const Peer& each) { return !each.expected || each.hopeless; };
  if (done && std::all_of(peers.begin(), peers.end(), is_over)) tell();
}

// Names a monitor that cannot be reached, else a rank that has not called.
void TcpLink::Impl::tell() {
  time_limit.cancel();
  std::string fault;
  for (int rank = 0; at(rank) < peers.size(); ++rank) {
    if (!peer(rank).expected) continue;
    if (calls(rank)) {
      fault = fmt::format("rank {} on {} cannot reach rank {} on {}: {}", plan.rank,
                          host(plan.rank), rank, host(rank), peer(rank).fault);
      break;
    }
    if (fault.empty()) fault = fmt::format("rank {} on {} has not called", rank, host(rank));
  }
  std::exchange(done, nullptr)(fault);
}

void TcpLink::Impl::stop_listening() {
  error_code ignored;
  for (tcp::acceptor& each : acceptors) each.close(ignored);
}

void TcpLink::Impl::stop() {
  closed = true;
  stop_listening();
  time_limit.cancel();
  for (const auto& each : strangers) each->stop();
  for (const Peer& each : peers) {
    if (each.session) each.session->stop();
  }
}

TcpLink::TcpLink(asio::io_context& context, TcpPlan plan)
    : impl_(std::make_shared<Impl>(context, std::move(plan))) {
  Impl& me = *impl_;
  if (!me.is_monitor(me.plan.rank)) return;
  const auto here = [&](const std::string& each) { return each == me.host(me.plan.rank); };
  if (std::count_if(me.plan.hosts.begin(), me.plan.hosts.end(), here) > 1) me.listen(kLoopback);
  if (std::all_of(me.plan.hosts.begin(), me.plan.hosts.end(), here)) return;
  for (const std::string& address : me.plan.addresses) me.listen(address);
}

TcpLink::~TcpLink() { impl_->stop(); }

std::string TcpLink::endpoints() const {
  std::string text;
  for (const tcp::acceptor& each : impl_->acceptors) {
    text += fmt::format("{}{}", text.empty() ? "" : ",", text_of(each.local_endpoint()));
  }
  return text;
}

void TcpLink::connect(const SecretKey& secret, const std::vector<std::string>& endpoints,
                      Listener& listener, double seconds,
                      std::function<void(std::string fault)> done) {
  Impl& me = *impl_;
  me.secret = secret;
  me.listener = &listener;
  me.done = std::move(done);
  for (int rank = 0; at(rank) < me.peers.size(); ++rank) {
    if (rank == me.plan.rank || !(me.is_monitor(rank) || me.is_monitor(me.plan.rank))) continue;
    Impl::Peer& peer = me.peer(rank);
    peer.expected = true;
    if (!me.calls(rank)) continue;
    peer.fault = "it has no address that other hosts can reach";
    peer.next = parse_endpoints(endpoints[at(rank)]);
    const bool near = me.host(rank) == me.host(me.plan.rank);
    std::erase_if(peer.next,
                  [&](const tcp::endpoint& each) { return each.address().is_loopback() != near; });
    std::reverse(peer.next.begin(), peer.next.end());
  }
  me.time_limit.expires_after(std::chrono::duration_cast<std::chrono::milliseconds>(
      std::chrono::duration<double>(seconds)));
  me.time_limit.async_wait([self = me.shared_from_this()](const error_code& error) {
    if (error || self->closed) return;
    self->stop_listening();
    if (self->done) self->tell();
  });
  for (tcp::acceptor& each : me.acceptors) me.accept(each);
  for (int rank = 0; at(rank) < me.peers.size(); ++rank) {
    if (me.calls(rank)) me.call(rank);
  }
  me.settle();
}

void TcpLink::send(int rank, NoteKind kind, std::span<const std::byte> contents) {
  if (const auto& session = impl_->peer(rank).session) session->send(kind, contents);
}

void TcpLink::close() {
  Impl& me = *impl_;
  me.closed = true;
  me.stop_listening();
  for (const Impl::Peer& each : me.peers) {
    if (each.session) each.session->send(NoteKind::kBye, {});
  }
  const auto until = std::chrono::steady_clock::now() + kCloseTime;
  while (std::chrono::steady_clock::now() < until &&
         std::any_of(me.peers.begin(), me.peers.end(), [](const Impl::Peer& each) {
           return each.session && !each.session->idle();
         })) {
    me.context.run_one_until(until);
  }
  me.stop();
}

std::size_t TcpLink::connections() const {
  return static_cast<std::size_t>(
      std::count_if(impl_->peers.begin(), impl_->peers.end(),
                    [](const Impl::Peer& each) { return each.session != nullptr; }));
}

}  // namespace sluice
