// What a message costs above the library that carries it, in one run:
//
//   mpirun -n 2 transport_benchmark [--json FILE]     ping-pong over MPI, and per-message overhead
//   transport_benchmark                               the same over loopback, two threads
//
// A ping-pong sends the same payload there and back. Bare: MPI_Irecv posted ahead, MPI_Isend,
// MPI_Test until both are done. Ours: the transport, header included. Rounds of both take turns;
// the table shows the fastest round of each. Overhead: windows of small messages one way and back,
// against bare MPI with the same bytes, the same window and a comparison of the header.
//
// A second table has no measurement: what the records of a step take to rank 0 and back in large
// jobs, in a model of the network, up a tree and one after the other.
#include <fmt/core.h>
#include <mpi.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <sluice/error.hpp>

#include "comm/group/binomial_tree.hpp"
#include "comm/group/transport.hpp"
#include "comm/mpi/mpi_session.hpp"
#include "tests/benchmarks/benchmark_report.hpp"
#include "tests/loopback/loopback.hpp"

namespace {

using sluice::Communicator;
using sluice::kHeaderBytes;
using sluice::MessageBuffer;
using sluice::MessageHeader;
using sluice::Ticket;
using sluice::Transport;
using sluice::benchmarks::Report;

constexpr std::size_t kWindow = 32;       // messages in flight in the overhead test
constexpr std::size_t kSmallBytes = 256;  // their payload

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double fastest(const std::vector<double>& values) {
  return *std::min_element(values.begin(), values.end());
}

struct Memory {
  explicit Memory(std::size_t payload) : bytes(kHeaderBytes + payload), capacity(payload) {}
  MessageBuffer buffer() { return {bytes.data(), capacity}; }
  std::vector<std::byte> bytes;
  std::size_t capacity;
};

MessageHeader header_of(std::size_t bytes, std::uint64_t step) {
  MessageHeader header;
  header.step = step;
  header.rank = 1;
  header.bytes = bytes;
  return header;
}

// One side of a ping-pong or of a window; `first` sends first.
class Bare {
 public:
  Bare(std::size_t payload, int peer, std::size_t buffers = 1)
      : in_(buffers, Memory(payload)), out_(buffers, Memory(payload)), peer_(peer) {}

  void ping_pong(bool first, int repeats) {
    MPI_Request receive = MPI_REQUEST_NULL;
    const int bytes = static_cast<int>(in_[0].capacity);
    for (int i = 0; i < repeats; ++i) {
      MPI_Irecv(in_[0].bytes.data(), bytes, MPI_BYTE, peer_, 0, MPI_COMM_WORLD, &receive);
      if (first) send(bytes);
      wait(receive);
      if (!first) send(bytes);
    }
  }

  void window(bool first, int repeats, std::uint64_t step) {
    const int bytes = static_cast<int>(in_[0].bytes.size());
    MPI_Request requests[kWindow];
    for (int i = 0; i < repeats; ++i) {
      for (int half = 0; half < 2; ++half) {
        const bool sends = (half == 0) == first;
        const MessageHeader header = header_of(in_[0].capacity, step);
        for (std::size_t k = 0; k < kWindow; ++k) {
          if (sends) {
            std::memcpy(out_[k].bytes.data(), &header, sizeof(header));
            MPI_Isend(out_[k].bytes.data(), bytes, MPI_BYTE, peer_, 0, MPI_COMM_WORLD,
                      &requests[k]);
          } else {
            MPI_Irecv(in_[k].bytes.data(), bytes, MPI_BYTE, peer_, 0, MPI_COMM_WORLD, &requests[k]);
          }
        }
        for (std::size_t k = 0; k < kWindow; ++k) {
          wait(requests[k]);
          if (!sends && std::memcmp(in_[k].bytes.data(), &header, 32) != 0) {
            MPI_Abort(MPI_COMM_WORLD, 1);
          }
        }
      }
    }
  }

 private:
  static void wait(MPI_Request& request) {
    for (int done = 0; done == 0;) MPI_Test(&request, &done, MPI_STATUS_IGNORE);
  }
  void send(int bytes) {
    MPI_Request request = MPI_REQUEST_NULL;
    MPI_Isend(out_[0].bytes.data(), bytes, MPI_BYTE, peer_, 0, MPI_COMM_WORLD, &request);
    wait(request);
  }

  std::vector<Memory> in_;
  std::vector<Memory> out_;
  int peer_;
};

class Ours {
 public:
  Ours(Communicator& comm, std::size_t payload, int peer, std::size_t buffers = 1)
      : transport_(sluice::make_message_transport(comm, 2 * kWindow)),
        in_(buffers, Memory(payload)),
        out_(buffers, Memory(payload)),
        peer_(peer) {}

  void ping_pong(bool first, int repeats) {
    const MessageHeader header = header_of(in_[0].capacity, 0);
    for (int i = 0; i < repeats; ++i) {
      const Ticket receive = transport_->post_recv(peer_, 0, in_[0].buffer(), header);
      if (first) send(header);
      wait(receive);
      if (!first) send(header);
    }
  }

  void window(bool first, int repeats, std::uint64_t step) {
    Ticket tickets[kWindow];
    for (int i = 0; i < repeats; ++i) {
      for (int half = 0; half < 2; ++half) {
        const bool sends = (half == 0) == first;
        const MessageHeader header = header_of(in_[0].capacity, step);
        for (std::size_t k = 0; k < kWindow; ++k) {
          if (sends) {
            out_[k].buffer().header() = header;
            tickets[k] = transport_->start_send(peer_, 0, out_[k].buffer());
          } else {
            tickets[k] = transport_->post_recv(peer_, 0, in_[k].buffer(), header);
          }
        }
        for (const Ticket ticket : tickets) wait(ticket);
      }
    }
  }

 private:
  void wait(Ticket ticket) {
    while (!transport_->test(ticket)) {
    }
  }
  void send(const MessageHeader& header) {
    out_[0].buffer().header() = header;
    wait(transport_->start_send(peer_, 0, out_[0].buffer()));
  }

  std::unique_ptr<Transport> transport_;
  std::vector<Memory> in_;
  std::vector<Memory> out_;
  int peer_;
};

struct Row {
  std::string name;
  std::size_t bytes = 0;
  double bare_us = 0;  // one way; 0 where there is no bare library
  double ours_us = 0;
};

// Seconds per repeat of `body`.
double timed(int repeats, const std::function<void(int)>& body) {
  const double start = now();
  body(repeats);
  return (now() - start) / repeats;
}

Row ping_pong(Communicator& comm, std::size_t bytes, bool with_bare) {
  const bool first = comm.rank() == 0;
  const int peer = 1 - comm.rank();
  const int repeats = static_cast<int>(std::clamp<std::size_t>((4U << 20U) / bytes, 2, 200));
  Bare bare(with_bare ? bytes : 1, peer);
  Ours ours(comm, bytes, peer);
  std::vector<double> bare_times;
  std::vector<double> our_times;
  for (int round = -1; round < 60; ++round) {
    if (with_bare) {
      bare_times.push_back(timed(repeats, [&](int n) { bare.ping_pong(first, n); }));
    }
    our_times.push_back(timed(repeats, [&](int n) { ours.ping_pong(first, n); }));
    if (round < 0) {
      bare_times.clear();
      our_times.clear();
    }
  }
  return {"ping-pong", bytes, with_bare ? fastest(bare_times) / 2 * 1e6 : 0,
          fastest(our_times) / 2 * 1e6};
}

Row overhead(Communicator& comm, bool with_bare) {
  const bool first = comm.rank() == 0;
  const int peer = 1 - comm.rank();
  Bare bare(kSmallBytes, peer, kWindow);
  Ours ours(comm, kSmallBytes, peer, kWindow);
  std::vector<double> bare_times;
  std::vector<double> our_times;
  for (std::uint64_t round = 0; round < 200; ++round) {
    if (with_bare) {
      bare_times.push_back(timed(30, [&](int n) { bare.window(first, n, round); }));
    }
    our_times.push_back(timed(30, [&](int n) { ours.window(first, n, round); }));
  }
  const double scale = 1e6 / (2 * static_cast<double>(kWindow));
  return {"per message", kSmallBytes, with_bare ? fastest(bare_times) * scale : 0,
          fastest(our_times) * scale};
}

// Both ends of a message to itself on one thread: what the instructions cost, without any waiting.
Row instructions(Communicator& comm) {
  const auto transport = sluice::make_message_transport(comm, 4);
  Memory in(kSmallBytes);
  Memory out(kSmallBytes);
  const MessageHeader header = header_of(kSmallBytes, 1);
  std::vector<double> times;
  for (int round = 0; round < 41; ++round) {
    times.push_back(timed(2000, [&](int n) {
      for (int i = 0; i < n; ++i) {
        const Ticket receive = transport->post_recv(comm.rank(), 0, in.buffer(), header);
        out.buffer().header() = header;
        const Ticket send = transport->start_send(comm.rank(), 0, out.buffer());
        while (!transport->test(send) || !transport->test(receive)) {
        }
      }
    }));
  }
  return {"both ends, one thread", kSmallBytes, 0, fastest(times) * 1e6};
}

Report report_of(const char* transport, const std::vector<Row>& rows) {
  Report report(
      "Messages above the library that carries them",
      {"transport", "name", "bytes", "bare us", "ours us", "added us", "ratio", "ours GB/s"});
  for (const Row& row : rows) {
    const double speed = static_cast<double>(row.bytes) / row.ours_us * 1e-3;
    if (row.bare_us > 0) {
      report.row({transport, row.name, row.bytes, row.bare_us, row.ours_us,
                  row.ours_us - row.bare_us, row.bare_us / row.ours_us, speed});
    } else {
      report.row({transport, row.name, row.bytes, "-", row.ours_us, "-", "-", speed});
    }
  }
  return report;
}

// Of one message: the time under way, that of a processor at each end, and the bandwidth at the
// receiver, which takes one message after the other. All ranks begin at once.
struct Network {
  double latency = 2e-6, overhead = 5e-7, seconds_per_byte = 1 / 12.5e9;

  [[nodiscard]] double arrival(double start) const { return start + overhead + latency; }
  [[nodiscard]] double take(double bytes) const { return overhead + bytes * seconds_per_byte; }
};

// Bytes of a rank's record, of a job's ranks.
struct Records {
  const char* name;
  int ranks;
  std::function<double(int)> bytes;
  double answer;  // bytes that all ranks get

  [[nodiscard]] double of(int first, int end) const {
    double sum = 0;
    for (int rank = first; rank < end; ++rank) sum += bytes(rank);
    return sum;
  }
};

double serial_gather(const Network& net, const Records& records) {
  double time = 0;
  for (int rank = 1; rank < records.ranks; ++rank) {
    time = std::max(time, net.arrival(0)) + net.take(records.bytes(rank));
  }
  return time;
}

// Until `rank` has its subtree's records.
double tree_gather(const Network& net, const Records& records, int rank = 0) {
  double time = 0;
  for (int i = 0; i < sluice::child_count(rank, records.ranks); ++i) {
    const int child = sluice::tree_child(rank, i);
    time = std::max(time, net.arrival(tree_gather(net, records, child))) +
           net.take(records.of(child, sluice::subtree_end(child, records.ranks)));
  }
  return time;
}

// Until the last rank of the subtree of `rank`, which has the answer at `time`, has it too.
double broadcast(const Network& net, const Records& records, int rank = 0, double time = 0) {
  double last = time;
  for (int i = sluice::child_count(rank, records.ranks) - 1; i >= 0; --i) {
    const double there = net.arrival(time) + net.take(records.answer);
    last = std::max(last, broadcast(net, records, sluice::tree_child(rank, i), there));
    time += net.take(records.answer);
  }
  return last;
}

// Pipelines of 64 ranks, 64 micro-batches, 8 parameters per rank.
Report model_of_records() {
  constexpr int kPipeline = 64;
  constexpr double kHead = 40, kLosses = 16 * 64, kSquares = 8 * 8, kHeader = 48;
  Report report("Small records of a step to rank 0 and back, in a model of the network",
                {"records", "ranks", "receives of rank 0", "KB to it", "serial us", "tree us",
                 "serial and back us", "tree and back us"});
  const Network net;
  for (const int ranks : {64, 512, 4096}) {
    const Records all_have_all{"losses and squares of all", ranks,
                               [&](int) { return kHead + kLosses + kSquares; }, 128};
    const Records of_step{"of last stages, replica 0", ranks,
                          [&](int rank) {
                            return kHead + (rank % kPipeline == kPipeline - 1 ? kLosses : 0) +
                                   (rank < kPipeline ? kSquares : 0);
                          },
                          128};
    const Records of_call{"what a call begins with", ranks, [&](int) { return kHeader; },
                          kHeader * ranks};
    for (const Records* each : {&all_have_all, &of_step, &of_call}) {
      const double serial = serial_gather(net, *each), tree = tree_gather(net, *each);
      const double back = broadcast(net, *each);
      report.row({each->name, ranks, sluice::child_count(0, ranks), each->of(1, ranks) * 1e-3,
                  serial * 1e6, tree * 1e6, (serial + back) * 1e6, (tree + back) * 1e6});
    }
  }
  report.fact("latency us", net.latency * 1e6);
  report.fact("overhead us", net.overhead * 1e6);
  report.fact("GB/s", 1e-9 / net.seconds_per_byte);
  return report;
}

// The rows of one pair of ranks; only rank 0's count.
std::vector<Row> measure(Communicator& comm, bool with_bare) {
  std::vector<Row> rows;
  for (std::size_t bytes = 1024; bytes <= std::size_t{16} << 20U; bytes *= 4) {
    rows.push_back(ping_pong(comm, bytes, with_bare));
  }
  rows.push_back(overhead(comm, with_bare));
  return rows;
}

}  // namespace

int main(int argc, char** argv) try {
  const sluice::MpiSession session(&argc, &argv);
  const auto world = session.world();
  const char* name = "mpi";
  std::vector<Row> rows;
  if (world->size() == 2) {
    rows = measure(*world, /*with_bare=*/true);
  } else if (world->size() == 1) {
    name = "loopback";
    sluice::run_loopback(2, [&rows](Communicator& comm) {
      std::vector<Row> mine = measure(comm, /*with_bare=*/false);
      mine.push_back(instructions(comm));
      if (comm.rank() == 0) {
        rows = std::move(mine);
      }
    });
  } else if (world->rank() == 0) {
    fmt::print(stderr, "transport_benchmark runs with 1 rank (loopback) or 2, not {}\n",
               world->size());
  }
  if (world->rank() != 0 || rows.empty()) {
    return rows.empty() ? 2 : 0;
  }
  for (const Report& report : {report_of(name, rows), model_of_records()}) {
    report.print();
    report.save(sluice::benchmarks::argument(argc, argv, "--json", ""));
  }
  return 0;
} catch (const sluice::Error& error) {
  fmt::print(stderr, "{}\n", error.what());
  return sluice::exit_code(error.code());
}
