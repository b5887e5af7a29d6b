#include "runtime/program/doctor/network_probe.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <memory>
#include <set>
#include <span>
#include <utility>

#include <sluice/error.hpp>

#include "comm/base/index.hpp"
#include "comm/base/steady_seconds.hpp"
#include "comm/base/throw_error.hpp"
#include "comm/group/collectives.hpp"

namespace sluice {
namespace {

constexpr std::size_t kSmallest = std::size_t{64} << 10;  // bytes of a piece
constexpr std::size_t kLargest = std::size_t{4} << 20;
constexpr std::size_t kPing = 8;
constexpr std::size_t kMostPings = 200;  // that are measured
constexpr int kRounds = 3;               // of all at once
constexpr double kRoundSeconds = 0.02;   // that a message of such a round takes, if it can be
constexpr std::size_t kMostRoundBytes = std::size_t{64} << 20;  // that a rank sends in a round

enum TagOffset : int {
  kPingTag = Collectives::kTags,
  kPieceTag,
  kAnswerTag,
  kRoundTag,
  kRoundAnswerTag
};

// Arithmetic without a call of the communicator.
void compute_for(double seconds) {
  const double end = steady_seconds() + seconds;
  volatile double value = 1;
  while (steady_seconds() < end) {
    for (int i = 0; i < 1000; ++i) value = value * 1.0000001;
  }
}

// Messages of one rank with one other and their memory; what is open at the end is cancelled.
class Traffic {
 public:
  // No message is longer than `largest` bytes.
  Traffic(Communicator& comm, int base_tag, int peer, double silence, std::size_t largest)
      : comm_(comm),
        base_tag_(base_tag),
        peer_(peer),
        silence_(comm.rank(), silence, fmt::format("a message from rank {}", peer)),
        largest_(largest),
        waiter_(comm.local_size()),
        bytes_(std::make_shared<std::vector<std::byte>>(3 * largest)) {}
  Traffic(const Traffic&) = delete;
  Traffic& operator=(const Traffic&) = delete;
  ~Traffic() {
    bool sending = false;
    for (Request* request : {&sends_[0], &sends_[1], &receives_[0], &receives_[1]}) {
      if (request->index == Request::kNone) continue;
      sending = sending || request == &sends_[0] || request == &sends_[1];
      try {
        comm_.cancel(*request);
      } catch (...) {  // the request is lost with its communicator
        request->index = Request::kNone;
      }
    }
    if (sending) comm_.keep(bytes_);
  }

  // Two sends and two receives may be open, each with memory of its own.
  void send(int slot, int tag, std::size_t bytes, std::byte first = std::byte{1}) {
    finish_send(slot);
    if (bytes_->front() != first) bytes_->front() = first;  // the other send may still read it
    sends_[at(slot)] = comm_.start_send(peer_, base_tag_ + tag, memory(0).first(bytes));
  }
  void finish_send(int slot) { (void)wait(sends_[at(slot)]); }
  void post(int slot, int tag) {
    receives_[at(slot)] = comm_.post_recv(peer_, base_tag_ + tag, memory(1 + slot));
  }
  // Bytes that arrived.
  std::size_t receive(int slot) { return wait(receives_[at(slot)]).bytes; }
  [[nodiscard]] std::byte first_byte(int slot) { return memory(1 + slot).front(); }
  void cancel(int slot) {
    if (receives_[at(slot)].index != Request::kNone) comm_.cancel(receives_[at(slot)]);
  }

  // Without waiting: whether the slot's send or receive is done.
  bool test_send(int slot) { return comm_.test(sends_[at(slot)]); }
  bool test_receive(int slot) { return comm_.test(receives_[at(slot)]); }

  SilenceLimit& silence() { return silence_; }

 private:
  std::span<std::byte> memory(int part) {
    return std::span(*bytes_).subspan(at(part) * largest_, largest_);
  }
  Arrival wait(Request& request) {
    Arrival arrival;
    silence_.restart();
    while (!comm_.test(request, &arrival)) {
      silence_.poll();
      waiter_.pause();
    }
    waiter_.reset();
    return arrival;
  }

  Communicator& comm_;
  int base_tag_, peer_;
  SilenceLimit silence_;
  std::size_t largest_;
  Waiter waiter_;
  std::array<Request, 2> sends_, receives_;
  std::shared_ptr<std::vector<std::byte>> bytes_;  // what is sent, then a part per receive
};

// One way, in seconds. Half of the time warms up. The first byte of a ping says whether another
// follows.
double ping(Traffic& traffic, double seconds) {
  const double begin = steady_seconds();
  std::vector<double> trips;
  for (bool last = false; !last;) {
    const double start = steady_seconds();
    const std::size_t measured = trips.size() + 1;
    const bool warm = start >= begin + seconds / 2;
    last = warm && (measured == kMostPings || (measured > 2 && start > begin + seconds));
    traffic.post(0, kPingTag);
    traffic.send(0, kPingTag, kPing, std::byte{last ? std::uint8_t{0} : std::uint8_t{1}});
    (void)traffic.receive(0);
    if (warm) trips.push_back((steady_seconds() - start) / 2);
  }
  traffic.finish_send(0);
  return median(std::move(trips));
}

void answer_pings(Traffic& traffic) {
  for (bool last = false; !last;) {
    traffic.post(0, kPingTag);
    (void)traffic.receive(0);
    last = traffic.first_byte(0) == std::byte{0};
    traffic.send(0, kPingTag, kPing);
  }
  traffic.finish_send(0);
}

// Bytes per second. Each piece is answered by one byte; a message of one byte ends it. Pieces grow
// until one takes an eighth of the time; then two are under way for the rest of it.
double push(Traffic& traffic, double seconds) {
  const double start = steady_seconds();
  std::size_t size = kSmallest;
  double bandwidth = 0;
  for (;; size = std::min(2 * size, kLargest)) {
    const double sent = steady_seconds();
    traffic.post(0, kAnswerTag);
    traffic.send(0, kPieceTag, size);
    (void)traffic.receive(0);
    const double took = std::max(steady_seconds() - sent, 1e-9);
    bandwidth = static_cast<double>(size) / took;
    if (took > seconds / 8 || size == kLargest || steady_seconds() > start + seconds / 2) break;
  }
  const double stream = steady_seconds();
  std::size_t pieces = 0;
  const auto more = [&] { return steady_seconds() < start + seconds; };
  for (; more(); ++pieces) {
    const int slot = static_cast<int>(pieces % 2);
    if (pieces >= 2) (void)traffic.receive(slot);
    traffic.post(slot, kAnswerTag);
    traffic.send(slot, kPieceTag, size);
  }
  for (std::size_t open = pieces - std::min<std::size_t>(pieces, 2); open < pieces; ++open) {
    (void)traffic.receive(static_cast<int>(open % 2));
  }
  if (pieces >= 2) {
    bandwidth = static_cast<double>(pieces * size) / (steady_seconds() - stream);
  }
  traffic.send(0, kPieceTag, 1);
  traffic.finish_send(0);
  traffic.finish_send(1);
  return bandwidth;
}

void pull(Traffic& traffic) {
  traffic.post(0, kPieceTag);
  traffic.post(1, kPieceTag);
  for (int slot = 0; traffic.receive(slot) > 1; slot = 1 - slot) {
    traffic.post(slot, kPieceTag);
    traffic.send(slot, kAnswerTag, 1);
  }
  traffic.finish_send(0);
  traffic.finish_send(1);
  for (const int slot : {0, 1}) traffic.cancel(slot);
}

// Of one rank, over all measured pairs.
class Probe {
 public:
  Probe(Communicator& comm, int base_tag, const std::vector<RankPair>& pairs,
        const ProbeLimits& limits)
      : comm_(comm),
        base_tag_(base_tag),
        pairs_(pairs),
        limits_(limits),
        silence_(comm.rank(), limits.silence_seconds, "the other ranks"),
        collectives_(comm, base_tag, &silence_),
        links_(2 * pairs.size()) {}

  ProbeResult run() {
    const double start = steady_seconds();
    for (; measured_ < pairs_.size(); ++measured_) {
      const bool late = measured_ > 0 && steady_seconds() > start + limits_.total_seconds;
      if (!go_on(!late)) break;
      probe_alone(measured_);
    }
    if (measured_ == 0) return {};
    probe_together();
    return gathered();
  }

 private:
  // What rank 0 says; the others' `mine` counts for nothing.
  bool go_on(bool mine) {
    std::array<std::byte, 1> word = {std::byte{mine ? std::uint8_t{1} : std::uint8_t{0}}};
    silence_.restart();
    collectives_.broadcast(word, 0);
    return word[0] != std::byte{0};
  }
  void barrier() {
    silence_.restart();
    collectives_.barrier();
  }

  // Links 2i and 2i + 1 are those of pair i from low to high and back.
  void probe_alone(std::size_t pair) {
    const RankPair& ends = pairs_[pair];
    const double each = limits_.pair_seconds * 0.4;
    if (comm_.rank() == ends.low || comm_.rank() == ends.high) {
      const bool low = comm_.rank() == ends.low;
      Traffic traffic(comm_, base_tag_, low ? ends.high : ends.low, limits_.silence_seconds,
                      kLargest);
      if (low) {
        const double latency = ping(traffic, limits_.pair_seconds * 0.2);
        links_[2 * pair].latency = links_[2 * pair + 1].latency = latency;
        links_[2 * pair].bandwidth = push(traffic, each);
        pull(traffic);
      } else {
        answer_pings(traffic);
        pull(traffic);
        links_[2 * pair + 1].bandwidth = push(traffic, each);
      }
    }
    barrier();
  }

  // The messages of this rank and a peer in each round: one each way, and an answer to each.
  struct Exchange {
    std::unique_ptr<Traffic> traffic;
    std::size_t bytes = 0;     // that are sent
    std::size_t outgoing = 0;  // index of the link
    bool received = false, answered = false;
    double answer_time = 0;               // of the last round, after its start
    std::vector<double> idle, computing;  // answer times of the rounds
  };

  void probe_together() {
    std::vector<Exchange> exchanges = open_exchanges();
    std::vector<double> longest;
    for (int i = 0; i < kRounds; ++i) {
      longest.push_back(round(exchanges, 0));
      for (Exchange& each : exchanges) each.idle.push_back(each.answer_time);
    }
    const double busy = largest_of_all(median(longest));
    for (int i = 0; i < kRounds; ++i) {
      (void)round(exchanges, busy);
      for (Exchange& each : exchanges) each.computing.push_back(each.answer_time);
    }
    for (const Exchange& each : exchanges) {
      const double idle = std::max(median(each.idle), 1e-9);
      const double left = std::max(0.0, median(each.computing) - busy);
      LinkFigures& link = links_[each.outgoing];
      link.shared_bandwidth = static_cast<double>(each.bytes) / idle;
      link.advanced = std::clamp(1 - left / idle, 0.0, 1.0);
    }
    barrier();
  }

  // The same on all ranks: bytes of a message of which the rank with most peers sends one to each.
  [[nodiscard]] std::size_t largest_of_round() const {
    std::vector<std::size_t> peers(at(comm_.size()));
    for (std::size_t pair = 0; pair < measured_; ++pair) {
      ++peers[at(pairs_[pair].low)];
      ++peers[at(pairs_[pair].high)];
    }
    const std::size_t share = kMostRoundBytes / *std::ranges::max_element(peers);
    return std::clamp(share, kSmallest, kLargest);
  }

  std::vector<Exchange> open_exchanges() {
    std::vector<Exchange> exchanges;
    const std::size_t most = largest_of_round();
    for (std::size_t pair = 0; pair < measured_; ++pair) {
      const RankPair& ends = pairs_[pair];
      if (comm_.rank() != ends.low && comm_.rank() != ends.high) continue;
      const bool low = comm_.rank() == ends.low;
      Exchange exchange;
      exchange.traffic = std::make_unique<Traffic>(comm_, base_tag_, low ? ends.high : ends.low,
                                                   limits_.silence_seconds, most);
      exchange.outgoing = 2 * pair + (low ? 0 : 1);
      const double bytes =
          std::min(links_[exchange.outgoing].bandwidth * kRoundSeconds, static_cast<double>(most));
      exchange.bytes = std::max(kSmallest, static_cast<std::size_t>(bytes));
      exchanges.push_back(std::move(exchange));
    }
    return exchanges;
  }

  // Seconds from the start until all messages of this rank are done. Computes first for `busy`.
  double round(std::vector<Exchange>& exchanges, double busy) {
    for (Exchange& each : exchanges) {
      each.traffic->post(0, kRoundTag);
      each.traffic->post(1, kRoundAnswerTag);
      each.received = each.answered = false;
    }
    barrier();
    const double start = steady_seconds();
    for (Exchange& each : exchanges) each.traffic->send(0, kRoundTag, each.bytes);
    if (busy > 0) compute_for(busy);
    finish(exchanges, start);
    const double took = steady_seconds() - start;
    barrier();
    return took;
  }

  static bool advance(Exchange& exchange, double start) {
    Traffic& traffic = *exchange.traffic;
    if (!exchange.received && traffic.test_receive(0)) {
      exchange.received = true;
      traffic.send(1, kRoundAnswerTag, 1);
    }
    if (!exchange.answered && traffic.test_receive(1)) {
      exchange.answered = true;
      exchange.answer_time = steady_seconds() - start;
    }
    const bool sent = traffic.test_send(0);
    return exchange.received && exchange.answered && traffic.test_send(1) && sent;
  }

  void finish(std::vector<Exchange>& exchanges, double start) {
    Waiter waiter(comm_.local_size());
    for (Exchange& each : exchanges) each.traffic->silence().restart();
    for (bool open = true; open;) {
      open = false;
      for (Exchange& each : exchanges) {
        if (advance(each, start)) continue;
        open = true;
        each.traffic->silence().poll();
      }
      if (open) waiter.pause();
    }
  }

  double largest_of_all(double mine) {
    std::vector<double> all(at(comm_.size()));
    silence_.restart();
    collectives_.all_gather(std::as_bytes(std::span(&mine, 1)),
                            std::as_writable_bytes(std::span(all)));
    return *std::ranges::max_element(all);
  }

  ProbeResult gathered() {
    const std::size_t links = 2 * measured_;
    std::vector<LinkFigures> all(comm_.rank() == 0 ? links * at(comm_.size()) : 0);
    silence_.restart();
    collectives_.gather(std::as_bytes(std::span(links_).first(links)),
                        std::as_writable_bytes(std::span(all)), 0);
    ProbeResult result;
    result.pairs_left_out = static_cast<int>(pairs_.size() - measured_);
    for (std::size_t i = 0; comm_.rank() == 0 && i < links; ++i) {
      const RankPair& ends = pairs_[i / 2];
      // The sender has measured it, but for the latency.
      const auto [from, to] =
          i % 2 == 0 ? std::pair(ends.low, ends.high) : std::pair(ends.high, ends.low);
      LinkFigures& link = result.links.emplace_back(all[at(from) * links + i]);
      link.from = from;
      link.to = to;
      link.latency = all[at(ends.low) * links + i].latency;
    }
    return result;
  }

  Communicator& comm_;
  int base_tag_;
  const std::vector<RankPair>& pairs_;
  ProbeLimits limits_;
  SilenceLimit silence_;
  Collectives collectives_;
  std::size_t measured_ = 0;        // pairs; the same on all ranks
  std::vector<LinkFigures> links_;  // what this rank has measured of them
};

}  // namespace

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

std::vector<RankPair> pairs_of_training(const Topology& topology, int chunks) {
  std::vector<RankPair> pairs;
  std::set<std::pair<int, int>> known;
  const auto add = [&](int one, int two) {
    const auto [low, high] = std::minmax(one, two);
    if (low != high && known.insert({low, high}).second) pairs.push_back({low, high});
  };
  for (const std::vector<int>& ranks : topology.groups(Axis::kPipeline)) {
    for (std::size_t i = 1; i < ranks.size(); ++i) add(ranks[i - 1], ranks[i]);
    if (chunks > 1) add(ranks.back(), ranks.front());
  }
  for (const Axis axis : {Axis::kReplica, Axis::kTensor}) {
    for (const std::vector<int>& ranks : topology.groups(axis)) {
      for (std::size_t high = 1; high < ranks.size(); ++high) {
        for (std::size_t low = 0; low < high; ++low) add(ranks[low], ranks[high]);
      }
    }
  }
  return pairs;
}

ProbeResult probe_links(Communicator& comm, int base_tag, const std::vector<RankPair>& pairs,
                        const ProbeLimits& limits) {
  return Probe(comm, base_tag, pairs, limits).run();
}

SilenceLimit::SilenceLimit(int rank, double seconds, std::string what)
    : rank_(rank), seconds_(seconds), what_(std::move(what)) {
  restart();
}

void SilenceLimit::restart() { until_ = steady_seconds() + seconds_; }

void SilenceLimit::poll() {
  if (steady_seconds() < until_) return;
  throw_error(ErrorCode::kPeer,
              "rank {} has waited {:.0f} s for {}: one of them does not answer, or MPI's messages "
              "do not arrive; choose the network with 'mpirun --mca btl_tcp_if_include <network>'",
              rank_, seconds_, what_);
}

}  // namespace sluice
