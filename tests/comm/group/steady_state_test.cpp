// Counts what the communication layer allocates.
#include <atomic>
#include <vector>

#include "comm/group/collectives.hpp"
#include "comm/group/control.hpp"
#include "comm/group/transport.hpp"
#include "tests/allocation_counter.hpp"
#include "tests/comm/group/both_transports.hpp"

namespace sluice {
namespace {

using testing::next;
using testing::previous;

void exchange(Communicator& comm, Transport& transport, Interrupt& interrupt,
              std::vector<std::byte>& outgoing, std::vector<std::byte>& incoming, int step) {
  Waiter waiter(comm.local_size());
  MessageHeader header;
  header.step = static_cast<std::uint64_t>(step);
  header.bytes = outgoing.size() - kHeaderBytes;
  const MessageBuffer from{outgoing.data(), header.bytes};
  const MessageBuffer to{incoming.data(), header.bytes};
  from.header() = header;
  const Ticket receive = transport.post_recv(previous(comm), 0, to, header);
  const Ticket send = transport.start_send(next(comm), 0, from);
  for (const Ticket ticket : {receive, send}) {
    while (!transport.test(ticket)) {
      interrupt.poll();
      waiter.pause();
    }
  }
}

SLUICE_COMM_TEST(SteadyStateTest, AllocatesNothing) {
  const auto transport = make_message_transport(comm, 4);
  ControlChannel control(comm);
  Collectives collectives(comm, 100, &control);
  for (const std::size_t payload : {std::size_t{64}, std::size_t{100'000}}) {
    std::vector<std::byte> outgoing(kHeaderBytes + payload);
    std::vector<std::byte> incoming(kHeaderBytes + payload);
    std::vector<float> values(5001, 1.0F);
    collectives.sums().reserve(values.size());
    const std::vector<std::size_t> parts(static_cast<std::size_t>(comm.size()), values.size());
    std::vector<int> all(static_cast<std::size_t>(comm.size()));
    // Records of a step: longer on rank 0, as replica 0's are.
    std::vector<double> records;
    std::vector<std::size_t> ends;
    std::size_t mine = 0;
    for (int rank = 0; rank < comm.size(); ++rank) {
      const std::size_t size = rank == 0 ? 1000 : 5;
      records.resize(records.size() + size);
      ends.push_back(records.size() * sizeof(double));
      if (rank == comm.rank()) mine = size;
    }
    const std::vector<double> record(mine);
    collectives.gather(std::as_bytes(std::span(record)), ends,
                       std::as_writable_bytes(std::span(records)), 0);
    const std::size_t before = testing::allocations_of_this_thread();
    for (int step = 0; step < 50; ++step) {
      exchange(comm, *transport, control, outgoing, incoming, step);
      collectives.ordered_sum(values);
      collectives.ordered_reduce_scatter(values, parts);
      collectives.all_gather_parts(values, parts);
      collectives.all_gather(std::as_bytes(std::span(&step, 1)),
                             std::as_writable_bytes(std::span(all)));
      collectives.gather(std::as_bytes(std::span(record)), ends,
                         std::as_writable_bytes(std::span(records)), 0);
      collectives.barrier();
    }
    EXPECT_EQ(testing::allocations_of_this_thread(), before)
        << "with payloads of " << payload << " bytes";
  }
}

}  // namespace
}  // namespace sluice
