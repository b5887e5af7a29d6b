#include "runtime/program/doctor/collective_probe.hpp"

#include <algorithm>
#include <array>
#include <memory>
#include <span>

#include "comm/base/index.hpp"
#include "comm/base/steady_seconds.hpp"
#include "comm/group/collectives.hpp"
#include "comm/group/open_requests.hpp"
#include "runtime/program/doctor/network_probe.hpp"

namespace sluice {
namespace {

constexpr std::size_t kSmall = std::size_t{256} << 10;  // bytes
constexpr std::size_t kTimesSmall = 16, kLarge = kTimesSmall * kSmall;
constexpr double kRoundsSeconds = 1;  // that all rounds take, if they can
constexpr double kMostRounds = 9;
constexpr int kPlainTag = Collectives::kTags;  // beside those of the group's Collectives

struct Round {
  double plain = 0, gather = 0, sum = 0;  // seconds
  [[nodiscard]] double all() const { return plain + gather + sum; }
};

// This rank's part in the rounds of all groups.
class Replicas {
 public:
  Replicas(Communicator& job, int base_tag, const Topology& topology,
           const std::vector<RankDevice>& devices, double silence_seconds)
      : silence_(job.rank(), silence_seconds, "the collectives of all replicas"),
        all_(job, base_tag, &silence_),
        place_(topology.place_of(job.rank())),
        group_(job.split(topology.group_number(Axis::kReplica, place_), place_.replica)),
        collectives_(*group_, 0, &silence_),
        waiter_(job.local_size()),
        memory_(std::make_shared<std::vector<float>>(2 * kLarge / sizeof(float))) {
    collectives_.sums().set_hosts(hosts_of(devices, topology.group(Axis::kReplica, place_)));
  }

  // [rank of the job]
  std::vector<Round> round(std::size_t bytes) {
    const std::span values = std::span(*memory_).first(bytes / sizeof(float));
    const std::size_t ranks = at(group_->size());
    std::vector<std::size_t> ends;
    for (std::size_t rank = 1; rank <= ranks; ++rank) ends.push_back(values.size() * rank / ranks);
    Round mine;
    mine.plain = timed([&] { send_around(bytes / ranks * (ranks - 1)); });
    mine.gather = timed([&] { collectives_.all_gather_parts(values, ends, memory_); });
    mine.sum = timed([&] { collectives_.ordered_sum(values, memory_); });
    std::vector<Round> rounds(at(all_.communicator().size()));
    silence_.restart();
    all_.all_gather(mine, rounds);
    return rounds;
  }

 private:
  template <typename Body>
  double timed(const Body& body) {
    silence_.restart();
    all_.barrier();
    const double start = steady_seconds();
    body();
    return steady_seconds() - start;
  }

  void send_around(std::size_t bytes) {
    const std::span memory = std::as_writable_bytes(std::span(*memory_));
    const int me = group_->rank(), ranks = group_->size();
    std::array<Request, 2> open;
    const OpenRequests guard(*group_, open, memory_);
    open[0] = group_->post_recv((me + ranks - 1) % ranks, kPlainTag, memory.subspan(kLarge, bytes));
    open[1] = group_->start_send((me + 1) % ranks, kPlainTag, memory.first(bytes));
    for (Request& each : open) {
      wait_until(waiter_, &silence_, {}, [&] { return group_->test(each); });
    }
  }

  SilenceLimit silence_;
  Collectives all_;
  Place place_;
  std::unique_ptr<Communicator> group_;
  Collectives collectives_;
  Waiter waiter_;
  std::shared_ptr<std::vector<float>> memory_;  // values, then what plain messages bring
};

double longest(const std::vector<Round>& rounds) {
  double most = 1e-6;
  for (const Round& each : rounds) most = std::max(most, each.all());
  return most;
}

// Of a group, from its slowest rank in each round.
CollectiveFigures figures_of(const std::vector<int>& group, std::size_t bytes,
                             const std::vector<std::vector<Round>>& rounds) {
  std::vector<double> gathers, sums, gather_shares, sum_shares;
  for (const std::vector<Round>& round : rounds) {
    const auto slowest = [&](double Round::*kind) {
      double most = 1e-9;
      for (const int rank : group) most = std::max(most, round[at(rank)].*kind);
      return most;
    };
    const double plain = slowest(&Round::plain);
    gathers.push_back(slowest(&Round::gather));
    sums.push_back(slowest(&Round::sum));
    gather_shares.push_back(plain / gathers.back());
    sum_shares.push_back(2 * plain / sums.back());  // a sum sends as many bytes twice
  }
  const std::size_t others = group.size() - 1;
  const double sent = static_cast<double>(bytes * others) / static_cast<double>(group.size());
  return {.ranks = group,
          .gather = sent / median(gathers),
          .gather_share = median(gather_shares),
          .sum = 2 * sent / median(sums),
          .sum_share = median(sum_shares)};
}

}  // namespace

CollectiveResult probe_collectives(Communicator& comm, int base_tag, const Topology& topology,
                                   const std::vector<RankDevice>& devices, double silence_seconds) {
  if (topology.size.replica == 1) return {};
  Replicas replicas(comm, base_tag, topology, devices, silence_seconds);
  CollectiveResult result{.bytes = kSmall, .groups = {}};
  (void)replicas.round(result.bytes);  // connects and allocates
  double seconds = longest(replicas.round(result.bytes));
  if (seconds * static_cast<double>(kTimesSmall) < kRoundsSeconds) {
    result.bytes = kLarge;
    seconds = longest(replicas.round(result.bytes));
  }
  std::vector<std::vector<Round>> rounds;
  for (auto left = static_cast<int>(std::clamp(kRoundsSeconds / seconds, 1.0, kMostRounds));
       left > 0; --left) {
    rounds.push_back(replicas.round(result.bytes));
  }
  for (const std::vector<int>& group : topology.groups(Axis::kReplica)) {
    result.groups.push_back(figures_of(group, result.bytes, rounds));
  }
  return result;
}

}  // namespace sluice
