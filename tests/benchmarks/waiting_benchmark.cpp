// CPU time burnt while waiting: ranks 1 to n-1 wait for a message that rank 0 sends after a pause.
//
//   mpirun --oversubscribe -n 4 waiting_benchmark [--json FILE]
//
// For each way of waiting: CPU seconds per second of waiting and rank (mean over the waiting
// ranks), and how long after the send the message was taken (median over rounds, of the slowest
// rank, from a clock all ranks of a host share). "bare MPI_Recv" blocks inside MPI; run once with
// OMPI_MCA_mpi_yield_when_idle=0 and once with 1 to see both of its ways.
#include <fmt/core.h>
#include <mpi.h>
#include <sys/resource.h>
#include <time.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include <sluice/error.hpp>

#include "comm/group/waiter.hpp"
#include "comm/mpi/mpi_session.hpp"
#include "tests/benchmarks/benchmark_report.hpp"

namespace {

using sluice::Communicator;
using sluice::Request;
using sluice::benchmarks::median;
using sluice::benchmarks::Report;

constexpr int kRounds = 20;
constexpr long kPauseNs = 50'000'000;

double clock_seconds(clockid_t clock) {
  timespec time{};
  clock_gettime(clock, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

struct Result {
  std::string name;
  double cpu_share = 0;  // CPU seconds per second waited
  double delay_us = 0;   // from send to receipt
};

// `wait(value)` returns once rank 0's number has arrived.
Result measure(Communicator& comm, const std::string& name,
               const std::function<void(double&)>& wait,
               const std::function<void(int, const double&)>& send) {
  double cpu = 0;
  double wall = 0;
  std::vector<double> delays;
  for (int round = 0; round < kRounds; ++round) {
    MPI_Barrier(MPI_COMM_WORLD);
    double delay = 0;
    if (comm.rank() == 0) {
      const timespec pause{0, kPauseNs};
      nanosleep(&pause, nullptr);
      for (int peer = 1; peer < comm.size(); ++peer) {
        send(peer, clock_seconds(CLOCK_MONOTONIC));
      }
    } else {
      const double cpu_start = clock_seconds(CLOCK_PROCESS_CPUTIME_ID);
      const double wall_start = clock_seconds(CLOCK_MONOTONIC);
      double sent = 0;
      wait(sent);
      const double end = clock_seconds(CLOCK_MONOTONIC);
      delay = end - sent;
      wall += end - wall_start;
      cpu += clock_seconds(CLOCK_PROCESS_CPUTIME_ID) - cpu_start;
    }
    double slowest = 0;
    MPI_Reduce(&delay, &slowest, 1, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
    delays.push_back(slowest);
  }
  const double mine[2] = {cpu, wall};
  double sums[2] = {0, 0};
  MPI_Reduce(mine, sums, 2, MPI_DOUBLE, MPI_SUM, 0, MPI_COMM_WORLD);
  return {name, comm.rank() == 0 ? sums[0] / sums[1] : 0, median(delays) * 1e6};
}

Result measure_ours(Communicator& comm) {
  sluice::Waiter waiter(comm.local_size());
  const auto finish = [&](Request request) {
    while (!comm.test(request)) {
      waiter.pause();
    }
    waiter.reset();
  };
  return measure(
      comm, "Waiter",
      [&](double& value) {
        finish(comm.post_recv(0, 0, std::as_writable_bytes(std::span(&value, 1))));
      },
      [&](int peer, const double& value) {
        finish(comm.start_send(peer, 0, std::as_bytes(std::span(&value, 1))));
      });
}

Result measure_bare(Communicator& comm) {
  const char* yields = std::getenv("OMPI_MCA_mpi_yield_when_idle");
  return measure(
      comm, fmt::format("bare MPI_Recv, mpi_yield_when_idle={}", yields ? yields : "unset"),
      [](double& value) {
        MPI_Recv(&value, 1, MPI_DOUBLE, 0, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
      },
      [](int peer, const double& value) {
        MPI_Send(&value, 1, MPI_DOUBLE, peer, 1, MPI_COMM_WORLD);
      });
}

}  // namespace

int main(int argc, char** argv) try {
  const sluice::MpiSession session(&argc, &argv);
  const auto world = session.world();
  if (world->size() < 2) {
    fmt::print(stderr, "waiting_benchmark needs at least 2 ranks under mpirun\n");
    return 2;
  }
  const std::vector<Result> results = {measure_ours(*world), measure_bare(*world)};
  if (world->rank() != 0) {
    return 0;
  }
  Report report("Waiting for a message", {"way of waiting", "CPU s per s and rank", "delay us"});
  report.fact("ranks", world->size());
  report.fact("cores in this rank's mask", sluice::mpi_info().cores);
  for (const Result& result : results) {
    report.row({result.name, result.cpu_share, result.delay_us});
  }
  report.print();
  report.save(sluice::benchmarks::argument(argc, argv, "--json", ""));
  return 0;
} catch (const sluice::Error& error) {
  fmt::print(stderr, "{}\n", error.what());
  return sluice::exit_code(error.code());
}
