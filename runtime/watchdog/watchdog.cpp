#include "runtime/watchdog/watchdog.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <future>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <sluice/error.hpp>

#include "comm/base/index.hpp"
#include "comm/base/threads.hpp"
#include "comm/base/throw_error.hpp"
#include "comm/group/communicator.hpp"
#include "runtime/entry/network_facts.hpp"
#include "runtime/watchdog/tcp_link.hpp"

namespace sluice {
namespace {

namespace asio = boost::asio;

constexpr double kConnectSeconds = 5;
constexpr double kMostSeconds = 1e6;
constexpr int kMostPort = 65535;

std::vector<std::string> hosts_of(const std::vector<WatchedRank>& ranks) {
  std::vector<std::string> hosts;
  for (const WatchedRank& each : ranks) hosts.push_back(each.host);
  return hosts;
}

std::vector<std::string> my_addresses(const std::vector<WatchedRank>& ranks) {
  const auto elsewhere = [&](const WatchedRank& each) { return each.host != ranks.front().host; };
  if (std::none_of(ranks.begin(), ranks.end(), elsewhere)) return {};
  NetworkFacts facts = network_facts();
  facts.connections = tcp_connections();
  return watch_addresses(facts);
}

}  // namespace

void require_sensible(const PipelineOptions::Watch& options) {
  for (const auto& [name, value] : {std::pair("timeout", options.timeout),
                                    std::pair("timeout of an action", options.action_timeout)}) {
    if (value == 0 || (value >= 1 && value <= kMostSeconds)) continue;
    throw_usage("the watchdog's {} is {} s; legal are 1 to {:.0f}, and 0 for the default", name,
                value, kMostSeconds);
  }
  const int first = options.first_port, last = options.last_port;
  if ((first == 0 && last == 0) || (first >= 1 && first <= last && last <= kMostPort)) return;
  throw_usage("the watchdog's ports are {}-{}; legal are ports from 1 to {}, the lower one first",
              first, last, kMostPort);
}

struct Watchdog::Impl {
  Impl(Collectives& world_in, WatchedJob job, const PipelineOptions::Watch& options)
      : world(world_in.communicator()),
        timer(context),
        work(asio::make_work_guard(context)),
        addresses(my_addresses(job.ranks)),
        ranks(job.ranks),
        watcher(std::move(job), options, addresses) {}

  ~Impl() {
    if (!thread.joinable()) return;
    asio::post(context, [this] { end(); });
    thread.join();
  }

  void run() noexcept {
    try {
      context.run();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "sluice: watchdog: it has ended on rank %d: %s\n", world.rank(),
                   error.what());
    }
  }

  // On the thread.
  void begin(Watcher::Send send) {
    watcher.begin(std::move(send));
    tick();
  }
  void tick() {
    const double wait = watcher.tick();
    timer.expires_after(std::chrono::microseconds(static_cast<std::int64_t>(wait * 1e6)));
    timer.async_wait([this](const boost::system::error_code& error) {
      if (!error) tick();
    });
  }
  void end() {
    timer.cancel();
    watcher.end();
    if (tcp) tcp->close();
    work.reset();
    context.stop();
  }

  // Collective. Why the ranks are not connected; empty where they are. The same on all ranks.
  std::string connect(Collectives& collectives, const PipelineOptions::Watch& options) {
    std::string fault;
    try {
      tcp.emplace(context, TcpPlan{.rank = world.rank(),
                                   .hosts = hosts_of(ranks),
                                   .monitors = watcher.monitors(),
                                   .addresses = addresses,
                                   .first_port = options.first_port,
                                   .last_port = options.last_port});
    } catch (const Error& error) {
      fault = fmt::format("rank {} on {}: {}", world.rank(), ranks[at(world.rank())].host,
                          error.what());
    }
    SecretKey secret = random_key();
    collectives.broadcast(std::as_writable_bytes(std::span(secret)), 0);
    const auto endpoints = collectives.all_gather_strings(tcp ? tcp->endpoints() : "");
    thread = start_thread("watchdog", [this] { run(); });
    if (tcp) {
      std::promise<std::string> result;
      asio::post(context, [&] {
        tcp->connect(secret, endpoints, watcher, kConnectSeconds,
                     [&](const std::string& why) { result.set_value(why); });
      });
      fault = result.get_future().get();
    }
    for (const std::string& each : collectives.all_gather_strings(fault)) {
      if (!each.empty()) return each;
    }
    return "";
  }

  Communicator& world;
  asio::io_context context;
  asio::steady_timer timer;
  asio::executor_work_guard<asio::io_context::executor_type> work;
  std::vector<std::string> addresses;
  std::vector<WatchedRank> ranks;
  Watcher watcher;
  std::optional<TcpLink> tcp;
  std::thread thread;
};

Watchdog::Watchdog(Collectives& world, WatchedJob job, const PipelineOptions::Watch& options) {
  require_sensible(options);
  impl_ = std::make_unique<Impl>(world, std::move(job), options);
  Impl& me = *impl_;
  if (me.world.size() == 1) {
    me.thread = start_thread("watchdog", [&me] { me.run(); });
    asio::post(me.context, [&me] { me.begin(nullptr); });
    return;
  }
  const std::string fault = me.connect(world, options);
  if (fault.empty()) {
    asio::post(me.context, [&me] {
      me.begin(
          [&me](int rank, NoteKind kind, auto contents) { me.tcp->send(rank, kind, contents); });
    });
    return;
  }
  if (me.world.rank() == 0) {
    std::fprintf(stderr,
                 "sluice: watchdog: %s; no rank watches another: a rank that stops, dies or is cut "
                 "off is not noticed. Open the ports of --watchdog-ports FIRST-LAST between the "
                 "hosts, or give --watchdog off\n",
                 fault.c_str());
  }
  asio::post(me.context, [&me] {
    if (me.tcp) me.tcp->close();
    me.tcp.reset();
  });
}

Watchdog::~Watchdog() = default;

}  // namespace sluice
