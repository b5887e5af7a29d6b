#include "runtime/watch/tcp_link.hpp"

#include <fcntl.h>
#include <fmt/format.h>

#include <algorithm>
#include <boost/asio/connect.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <charconv>
#include <chrono>
#include <list>
#include <map>
#include <set>
#include <string_view>
#include <utility>

#include "comm/base/index.hpp"
#include "comm/base/throw_error.hpp"
#include "runtime/watch/tcp_session.hpp"

namespace sluice {
namespace {

namespace asio = boost::asio;
using asio::ip::tcp;
using boost::system::error_code;

constexpr std::size_t kMostStrangers = 64;
constexpr auto kCloseTime = std::chrono::milliseconds(200);
constexpr const char* kLoopback = "127.0.0.1";

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

}  // namespace

struct TcpLink::Impl final : TcpSession::Owner, std::enable_shared_from_this<TcpLink::Impl> {
  // A call to one monitor, over its addresses one after the other.
  struct Call {
    int rank = -1;
    std::vector<tcp::endpoint> left;  // the next one last
    tcp::socket socket;
    std::string fault;
  };

  Impl(asio::io_context& context_in, TcpPlan plan_in)
      : context(context_in), plan(std::move(plan_in)), time_limit(context_in) {}

  void listen(const std::string& address) {
    error_code error;
    const auto parsed = asio::ip::make_address_v4(address, error);
    if (error) return;
    const int first = plan.first_port > 0 ? plan.first_port : 0;
    const int last = plan.first_port > 0 ? plan.last_port : 0;
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

  void accept(tcp::acceptor& acceptor) {
    acceptor.async_accept(
        [self = shared_from_this(), &acceptor](const error_code& error, tcp::socket socket) {
          if (!acceptor.is_open() || (error && error != asio::error::connection_aborted)) return;
          if (!error && self->strangers.size() < kMostStrangers) {
            self->meet(std::move(socket), /*peer=*/-1);
          }
          self->accept(acceptor);
        });
  }

  void meet(tcp::socket socket, int peer) {
    keep_from_children(socket);
    const auto session =
        std::make_shared<TcpSession>(std::move(socket), *this, secret, plan.rank, peer);
    strangers.push_back(session);
    session->start();
  }

  void call_next(const std::shared_ptr<Call>& call) {
    if (closed || !expected.contains(call->rank)) return;
    if (call->left.empty()) return;  // time_limit tells
    const tcp::endpoint endpoint = call->left.back();
    call->left.pop_back();
    call->socket = tcp::socket(context);
    call->socket.async_connect(
        endpoint, [self = shared_from_this(), call, endpoint](const error_code& error) {
          if (self->closed) return;
          if (!error) {
            self->calls[call->rank] = call;
            return self->meet(std::move(call->socket), call->rank);
          }
          self->fail(call->rank, fmt::format("{}: {}", text_of(endpoint), error.message()));
          self->call_next(call);
        });
    calls[call->rank] = call;
    faults.try_emplace(call->rank, fmt::format("{}: no answer", text_of(endpoint)));
  }

  // What the last try ended with.
  void fail(int rank, const std::string& why) {
    faults[rank] = why;
    const bool over = calls.contains(rank) && calls[rank]->left.empty();
    if (over) {
      hopeless.insert(rank);
      settle();
    }
  }

  bool on_greeted(TcpSession& session, int rank) override {
    const auto known = expected.find(rank);
    if (known == expected.end()) return false;
    expected.erase(known);
    const auto it = std::find_if(strangers.begin(), strangers.end(),
                                 [&](const auto& each) { return each.get() == &session; });
    sessions[rank] = *it;
    strangers.erase(it);
    faults.erase(rank);
    settle();
    return true;
  }

  void on_note(int rank, NoteKind kind, std::span<const std::byte> contents) override {
    if (kind == NoteKind::kBye) said_goodbye.insert(rank);
    if (!closed) listener->on_note(rank, kind, contents);
  }

  void on_over(TcpSession& session, int rank, bool ended) override {
    std::erase_if(strangers, [&](const auto& each) { return each.get() == &session; });
    const auto found = sessions.find(rank);
    if (found == sessions.end() || found->second.get() != &session) {
      const auto call = calls.find(session.called());
      if (call == calls.end() || closed) return;
      fail(session.called(), "the answer was no watchdog's of this job");
      return call_next(call->second);
    }
    sessions.erase(found);
    if (ended && !closed && !said_goodbye.contains(rank)) listener->on_end(rank);
  }

  // Calls `done` once all that can stand stands.
  void settle() {
    if (expected.empty()) stop_listening();
    const bool all = std::all_of(expected.begin(), expected.end(),
                                 [&](int rank) { return hopeless.contains(rank); });
    if (done && all) tell();
  }

  void tell() {
    time_limit.cancel();
    std::string fault;
    for (const int rank : expected) {
      if (!calls_to(rank)) {
        if (fault.empty())
          fault = fmt::format("rank {} on {} has not called", rank, plan.hosts[at(rank)]);
        continue;
      }
      fault = fmt::format("rank {} on {} cannot reach rank {} on {}: {}", plan.rank,
                          plan.hosts[at(plan.rank)], rank, plan.hosts[at(rank)], faults[rank]);
      break;
    }
    std::exchange(done, nullptr)(fault);
  }

  void stop_listening() {
    error_code ignored;
    for (tcp::acceptor& each : acceptors) each.close(ignored);
  }

  [[nodiscard]] bool is_monitor(int rank) const {
    return std::binary_search(plan.monitors.begin(), plan.monitors.end(), rank);
  }
  // Whether this rank calls `rank`, rather than being called.
  [[nodiscard]] bool calls_to(int rank) const {
    return is_monitor(rank) && (!is_monitor(plan.rank) || rank < plan.rank);
  }

  asio::io_context& context;
  TcpPlan plan;
  SecretKey secret{};
  Listener* listener = nullptr;
  std::list<tcp::acceptor> acceptors;  // callbacks hold references
  std::set<int> expected;              // ranks whose connection does not stand yet
  std::set<int> hopeless;              // of them: all addresses were tried
  std::set<int> said_goodbye;
  std::map<int, std::shared_ptr<Call>> calls;  // [rank]
  std::map<int, std::string> faults;           // [rank]
  std::list<std::shared_ptr<TcpSession>> strangers;
  std::map<int, std::shared_ptr<TcpSession>> sessions;  // [rank]
  asio::steady_timer time_limit;
  std::function<void(std::string)> done;
  bool closed = false;
};

TcpLink::TcpLink(asio::io_context& context, TcpPlan plan)
    : impl_(std::make_shared<Impl>(context, std::move(plan))) {
  Impl& me = *impl_;
  if (!me.is_monitor(me.plan.rank)) return;
  const std::string& host = me.plan.hosts[at(me.plan.rank)];
  const auto here = [&](const std::string& each) { return each == host; };
  if (std::count_if(me.plan.hosts.begin(), me.plan.hosts.end(), here) > 1) me.listen(kLoopback);
  if (std::all_of(me.plan.hosts.begin(), me.plan.hosts.end(), here)) return;
  for (const std::string& address : me.plan.addresses) me.listen(address);
}

TcpLink::~TcpLink() {
  impl_->closed = true;
  impl_->stop_listening();
  for (const auto& each : impl_->strangers) each->stop();
  for (const auto& [rank, each] : impl_->sessions) each->stop();
}

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
  const int ranks = static_cast<int>(me.plan.hosts.size());
  for (int rank = 0; rank < ranks; ++rank) {
    if (rank != me.plan.rank && (me.is_monitor(rank) || me.is_monitor(me.plan.rank))) {
      me.expected.insert(rank);
    }
  }
  me.time_limit.expires_after(std::chrono::duration_cast<std::chrono::milliseconds>(
      std::chrono::duration<double>(seconds)));
  me.time_limit.async_wait([self = me.shared_from_this()](const error_code& error) {
    if (error || self->closed) return;
    self->stop_listening();
    if (self->done) self->tell();
  });
  for (tcp::acceptor& each : me.acceptors) me.accept(each);
  const std::set<int> expected = me.expected;
  for (const int rank : expected) {
    if (!me.calls_to(rank)) continue;
    const auto call = std::make_shared<Impl::Call>(
        Impl::Call{rank, parse_endpoints(endpoints[at(rank)]), tcp::socket(me.context), ""});
    const bool near = me.plan.hosts[at(rank)] == me.plan.hosts[at(me.plan.rank)];
    std::erase_if(call->left,
                  [&](const tcp::endpoint& each) { return each.address().is_loopback() != near; });
    std::reverse(call->left.begin(), call->left.end());
    if (call->left.empty()) {
      me.calls[rank] = call;
      me.fail(rank, "it has no address that other hosts can reach");
      continue;
    }
    me.call_next(call);
  }
  me.settle();
}

void TcpLink::send(int rank, NoteKind kind, std::span<const std::byte> contents) {
  const auto found = impl_->sessions.find(rank);
  if (found != impl_->sessions.end()) found->second->send(kind, contents);
}

void TcpLink::close() {
  Impl& me = *impl_;
  me.closed = true;
  me.stop_listening();
  me.time_limit.cancel();
  for (const auto& [rank, each] : me.sessions) each->send(NoteKind::kBye, {});
  const auto until = std::chrono::steady_clock::now() + kCloseTime;
  while (std::chrono::steady_clock::now() < until &&
         std::any_of(me.sessions.begin(), me.sessions.end(),
                     [](const auto& each) { return !each.second->idle(); })) {
    me.context.run_one_until(until);
  }
  for (const auto& each : me.strangers) each->stop();
  for (const auto& [rank, each] : me.sessions) each->stop();
  me.strangers.clear();
  me.sessions.clear();
}

std::size_t TcpLink::connections() const { return impl_->sessions.size(); }

}  // namespace sluice
