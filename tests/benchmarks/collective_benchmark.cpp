// Gathers and ordered sums of the library against MPI_Sendrecv of the same bytes by all ranks at
// once, in one run:
//
//   mpirun -n 2 collective_benchmark [--rounds 31] [--mib 64] [--hosts 1] [--json FILE]
//
// A gather of B bytes over n ranks brings each rank B (n - 1) / n bytes, an ordered sum twice as
// many. Bare: one MPI_Sendrecv of as many bytes in a ring of the ranks, two for a sum. Both take
// turns; a rank that is late makes a round long, so a round is the time between two barriers. The
// share is the median over rounds of bare / ours. --hosts H tells the collectives that the ranks
// lie on H hosts, in blocks.
#include <fmt/core.h>
#include <mpi.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <string>
#include <vector>

#include <sluice/error.hpp>

#include "comm/base/index.hpp"
#include "comm/group/collectives.hpp"
#include "comm/mpi/mpi_session.hpp"
#include "tests/benchmarks/benchmark_report.hpp"

namespace {

using sluice::at;
using sluice::Collectives;
using sluice::Communicator;
using sluice::benchmarks::argument;
using sluice::benchmarks::median;
using sluice::benchmarks::Report;

constexpr std::size_t kMiB = std::size_t{1} << 20;

// Seconds until all ranks have done it.
template <typename Body>
double timed(const Body& body) {
  MPI_Barrier(MPI_COMM_WORLD);
  const auto start = std::chrono::steady_clock::now();
  body();
  MPI_Barrier(MPI_COMM_WORLD);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

class Turns {
 public:
  Turns(Communicator& comm, Collectives& collectives, std::size_t bytes)
      : collectives_(collectives),
        ranks_(at(comm.size())),
        next_((comm.rank() + 1) % comm.size()),
        previous_((comm.rank() + comm.size() - 1) % comm.size()),
        exchanged_(bytes / ranks_ * (ranks_ - 1)),
        values_(bytes / sizeof(float), 1.0F),
        out_(exchanged_),
        in_(exchanged_) {
    for (std::size_t rank = 1; rank < ranks_; ++rank)
      ends_.push_back(values_.size() / ranks_ * rank);
    ends_.push_back(values_.size());
  }

  // Appends a row: shares of the speed of Sendrecv, of one kind of collective.
  void measure(bool sum, int rounds, Report& report) {
    std::vector<double> bare, ours, shares;
    for (int round = -2; round < rounds; ++round) {
      const double bare_time = timed([&] {
        for (int i = 0; i < (sum ? 2 : 1); ++i) send_receive();
      });
      const double our_time = timed([&] {
        sum ? collectives_.ordered_sum(values_) : collectives_.all_gather_parts(values_, ends_);
      });
      if (round < 0) continue;
      bare.push_back(bare_time);
      ours.push_back(our_time);
      shares.push_back(bare_time / our_time);
    }
    const double moved = static_cast<double>(exchanged_) * (sum ? 2 : 1);
    report.row({sum ? "ordered sum" : "gather", ranks_, values_.size() * sizeof(float) / kMiB,
                median(bare) * 1e6, median(ours) * 1e6, moved / median(ours) * 1e-9,
                median(shares)});
    std::fill(values_.begin(), values_.end(), 1.0F);
  }

 private:
  void send_receive() {
    const int bytes = static_cast<int>(exchanged_);
    MPI_Sendrecv(out_.data(), bytes, MPI_BYTE, next_, 0, in_.data(), bytes, MPI_BYTE, previous_, 0,
                 MPI_COMM_WORLD, MPI_STATUS_IGNORE);
  }

  Collectives& collectives_;
  std::size_t ranks_;
  int next_, previous_;
  std::size_t exchanged_;  // bytes of a rank's parts for it, and from it
  std::vector<float> values_;
  std::vector<std::byte> out_, in_;
  std::vector<std::size_t> ends_;
};

// Hosts of the ranks: `hosts` blocks of them.
std::vector<int> in_blocks(int ranks, int hosts) {
  std::vector<int> numbers;
  for (int rank = 0; rank < ranks; ++rank) numbers.push_back(rank * hosts / ranks);
  return numbers;
}

}  // namespace

int main(int argc, char** argv) try {
  const sluice::MpiSession session(&argc, &argv);
  const auto world = session.world();
  if (world->size() < 2) {
    throw sluice::Error(sluice::ErrorCode::kUsage, "1 rank exchanges nothing; start 2 or more");
  }
  const int rounds = std::stoi(argument(argc, argv, "--rounds", "31"));
  const int hosts = std::stoi(argument(argc, argv, "--hosts", "1"));
  const std::size_t most = std::stoul(argument(argc, argv, "--mib", "64"));
  Collectives collectives(*world, 0, nullptr);
  collectives.sums().set_hosts(in_blocks(world->size(), hosts));
  Report report("Collectives against MPI_Sendrecv of the same bytes",
                {"collective", "ranks", "MiB", "bare us", "ours us", "GB/s", "share"});
  report.fact("hosts", hosts);
  for (const bool sum : {false, true}) {
    for (std::size_t mib = 1; mib <= most; mib *= 4) {
      Turns(*world, collectives, mib * kMiB).measure(sum, rounds, report);
    }
  }
  if (world->rank() == 0) {
    report.print();
    report.save(argument(argc, argv, "--json", ""));
  }
  return 0;
} catch (const sluice::Error& error) {
  fmt::print(stderr, "{}\n", error.what());
  return sluice::exit_code(error.code());
}
