// Engine overhead: nanoseconds per compute action with stages that do nothing, 1F1B. Under
// mpirun -n 2 also a bare MPI loop of the same messages with the same header check.
//   engine_benchmark [--json FILE]        mpirun -n 2 engine_benchmark
#include <mpi.h>

#include <chrono>
#include <cstdlib>
#include <cstring>

#include <sluice/program.hpp>

#include "comm/base/steady_seconds.hpp"
#include "comm/group/communicator.hpp"
#include "comm/group/transport.hpp"
#include "tests/benchmarks/benchmark_report.hpp"
#include "tests/benchmarks/idle_engine.hpp"

namespace sluice::benchmarks {
namespace {

// The same messages in the same order as two ranks' 1F1B, straight on MPI: receives posted two
// ahead, every header written and compared, nothing else.
class BareLoop {
 public:
  explicit BareLoop(int rank) : rank_(rank) {
    for (Slot& slot : slots_) slot.bytes.resize(kHeaderBytes + 16);
  }
  double ns() {
    std::vector<double> times;
    for (int round = 0; round < kRounds; ++round) {
      MPI_Barrier(MPI_COMM_WORLD);
      const double start = steady_seconds();
      step();
      times.push_back((steady_seconds() - start) * 1e9 / (2.0 * kMicroBatches));
    }
    return median(times);
  }

 private:
  struct Slot {
    std::vector<std::byte> bytes;
    MPI_Request request = MPI_REQUEST_NULL;
  };
  static void wait(Slot& slot) {
    int done = 0;
    while (done == 0) MPI_Test(&slot.request, &done, MPI_STATUS_IGNORE);
  }
  void post(int i) {
    Slot& slot = slots_[static_cast<std::size_t>(i % 2)];
    MPI_Irecv(slot.bytes.data(), static_cast<int>(slot.bytes.size()), MPI_BYTE, 1 - rank_, 0,
              MPI_COMM_WORLD, &slot.request);
  }
  void receive(int i) {
    Slot& slot = slots_[static_cast<std::size_t>(i % 2)];
    wait(slot);
    MessageHeader expected;
    expected.micro_batch = i;
    if (std::memcmp(slot.bytes.data(), &expected, kHeaderBytes) != 0) std::abort();
    if (i + 2 < kMicroBatches) post(i + 2);
  }
  void send(int i) {
    Slot& slot = slots_[static_cast<std::size_t>(2 + i % 2)];
    wait(slot);
    MessageHeader header;
    header.micro_batch = i;
    std::memcpy(slot.bytes.data(), &header, kHeaderBytes);
    MPI_Isend(slot.bytes.data(), static_cast<int>(slot.bytes.size()), MPI_BYTE, 1 - rank_, 0,
              MPI_COMM_WORLD, &slot.request);
  }
  void step() {
    post(0);
    post(1);
    if (rank_ == 0) send(0);
    for (int i = 0; i < kMicroBatches; ++i) {
      if (rank_ == 0) {
        if (i + 1 < kMicroBatches) send(i + 1);
        receive(i);
      } else {
        receive(i);
        send(i);
      }
    }
    wait(slots_[2]);
    wait(slots_[3]);
  }
  int rank_;
  Slot slots_[4];
};

}  // namespace
}  // namespace sluice::benchmarks

int main(int argc, char** argv) {
  using namespace sluice;
  using namespace sluice::benchmarks;
  return run_main(argc, argv, [&](World& ranks) {
    Communicator& world = communicator_of(ranks);
    Report report(
        "Engine overhead, stages that do nothing, ns per compute action",
        {"transport", "schedule", "ranks", "engine ns", "shown ns", "bare MPI ns", "above bare"});
    const double shown = engine_ns(world, "1f1b", {}, /*shown=*/true);
    if (world.size() == 2) {
      const double engine = engine_ns(world, "1f1b");
      const double bare = BareLoop(world.rank()).ns();
      report.row({"mpi", "1f1b", 2, engine, shown, bare, engine - bare});
    } else {
      report.row({"mpi", "1f1b", world.size(), engine_ns(world, "1f1b"), shown, "-", "-"});
    }
    if (world.rank() != 0) return;
    report.print();
    report.save(argument(argc, argv, "--json", ""));
  });
}
