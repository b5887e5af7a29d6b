// NcclTransport executes plans: the list of ops, groups included, to the letter.
#include "comm/nccl/nccl_transport.hpp"

#include <gmock/gmock.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <utility>

#include <sluice/error.hpp>
#include <sluice/plan.hpp>
#include <sluice/schedule.hpp>

#include "comm/base/index.hpp"
#include "tests/comm/nccl/nccl_ranks.hpp"
#ifdef SLUICE_EMULATED
#include "tests/emulated_cuda/control.hpp"
#endif

namespace sluice {
namespace {

using testing::OnDevice;
using testing::Rank;

class NcclTransportTest : public testing::NcclRanksTest {};
SLUICE_NCCL_PEERS(NcclTransportTest);

constexpr std::size_t kMessage = 512;  // bytes

// What a tensor holds that `stage` makes, forward or backward.
int code_of(bool forward, int stage, int micro_batch) {
  return (forward ? 1'000'000 : 2'000'000) + 1000 * stage + micro_batch;
}

// Between neighbours in a ring, both ways.
std::vector<NcclTransport::Edge> ring_of(int ranks) {
  std::vector<NcclTransport::Edge> edges;
  for (int rank = 0; rank < ranks; ++rank) {
    edges.push_back({rank, (rank + 1) % ranks});
    edges.push_back({(rank + 1) % ranks, rank});
  }
  return edges;
}

// One rank's part of a plan: messages are real, a computation writes its tensor's code in stream
// order, and what arrived is copied away before its slot is released.
class PlanWalk {
 public:
  PlanWalk(Rank& rank, NcclTransport& transport, const Plan& plan)
      : rank_(rank),
        transport_(transport),
        plan_(plan),
        ops_(plan.ranks[static_cast<std::size_t>(rank.rank())].ops),
        compute_(rank.device),
        written_(rank.device, ops_.size() * kMessage),
        arrived_(rank.device, ops_.size() * kMessage) {
    for (const BufferPool& pool : plan.ranks[static_cast<std::size_t>(rank.rank())].pools) {
      std::vector<Slot>& slots = pools_[{pool.stage, pool.kind}];
      for (int i = 0; i < pool.count; ++i) slots.emplace_back(rank.device);
    }
    std::memset(arrived_.data(), 0, arrived_.size());
  }

  void run() {
    for (std::size_t i = 0; i < ops_.size(); ++i) execute(i);
    compute_.view().synchronize();
    for (const auto& [index, expected] : expected_) {
      const auto* values = reinterpret_cast<const int*>(arrived_.data() + index * kMessage);
      std::size_t wrong = 0;
      for (std::size_t k = 0; k < kMessage / sizeof(int); ++k) wrong += values[k] != expected;
      EXPECT_EQ(wrong, 0U) << to_string(ops_[index]) << " on rank " << rank_.rank() << " got "
                           << values[0] << " for " << expected;
    }
  }
  [[nodiscard]] std::size_t received() const { return expected_.size(); }

 private:
  struct Slot {
    explicit Slot(Device device) : memory(device, kMessage), filled(device), free(device) {}
    Buffer memory;
    Event filled, free;
    NcclTicket ticket;
    [[nodiscard]] std::span<std::byte> bytes() const { return {memory.data(), kMessage}; }
  };

  Slot* slot(const PlanOp& op, BufferKind kind) {
    const auto pool = pools_.find({op.stage, kind});
    if (pool == pools_.end() || op.slot(kind) < 0) return nullptr;
    return &pool->second[static_cast<std::size_t>(op.slot(kind))];
  }

  Slot& message_slot(const PlanOp& op) {
    switch (op.action) {
      case ActionKind::kRecvForward:
        return *slot(op, BufferKind::kInput);
      case ActionKind::kRecvBackward:
        return *slot(op, BufferKind::kGradOutput);
      case ActionKind::kSendForward:
        return *slot(op, BufferKind::kOutput);
      default:
        return *slot(op, BufferKind::kGradInput);
    }
  }

  void execute(std::size_t index) {
    const PlanOp& op = ops_[index];
    switch (op.kind) {
      case OpKind::kPostRecv:
      case OpKind::kStartSend:
        return issue(index);
      case OpKind::kWaitRecv:
      case OpKind::kWaitSend:
        return wait(index);
      case OpKind::kCompute:
        return compute(index);
      case OpKind::kRelease:
        for (const BufferKind kind : {BufferKind::kInput, BufferKind::kGradOutput}) {
          if (Slot* freed = slot(op, kind)) freed->free.record(compute_.view());
        }
        return;
      default:
        FAIL() << to_string(op) << " in a plan without reductions";
    }
  }

  void issue(std::size_t index) {
    const PlanOp& op = ops_[index];
    const Channel& channel = plan_.channels[static_cast<std::size_t>(op.channel)];
    Slot& slot = message_slot(op);
    if (!op.with_previous) transport_.queue().begin_group();
    slot.ticket = op.kind == OpKind::kPostRecv
                      ? transport_.recv(channel.from_rank, slot.bytes(), slot.free)
                      : transport_.send(channel.to_rank, slot.bytes(), slot.filled);
    const bool more = index + 1 < ops_.size() && ops_[index + 1].with_previous;
    if (!more) transport_.queue().end_group();
  }

  void wait(std::size_t index) {
    const PlanOp& op = ops_[index];
    Slot& slot = message_slot(op);
    transport_.queue().wait_issued(slot.ticket, &rank_.control);
    transport_.queue().wait_on(compute_.view(), slot.ticket);
    if (op.kind == OpKind::kWaitSend) return;
    const bool forward = op.action == ActionKind::kRecvForward;
    expected_.push_back(
        {index, code_of(forward, forward ? op.stage - 1 : op.stage + 1, op.micro_batch)});
    copy_async(arrived_.data() + index * kMessage, slot.memory.data(), kMessage, compute_.view());
  }

  void compute(std::size_t index) {
    const PlanOp& op = ops_[index];
    const bool forward = op.action == ActionKind::kForward;
    if (op.action == ActionKind::kBackwardWeight) return;
    Slot* made = slot(op, forward ? BufferKind::kOutput : BufferKind::kGradInput);
    if (made == nullptr) return;  // handed over on this rank
    auto* source = reinterpret_cast<int*>(written_.data() + index * kMessage);
    std::fill_n(source, kMessage / sizeof(int), code_of(forward, op.stage, op.micro_batch));
    copy_async(made->memory.data(), source, kMessage, compute_.view());
    made->filled.record(compute_.view());
  }

  Rank& rank_;
  NcclTransport& transport_;
  const Plan& plan_;
  const std::vector<PlanOp>& ops_;
  Stream compute_;
  HostBuffer written_, arrived_;  // [op]
  std::map<std::pair<int, BufferKind>, std::vector<Slot>> pools_;
  std::vector<std::pair<std::size_t, int>> expected_;  // (op, code)
};

// Every schedule that p ranks and v chunks allow, planned for NCCL's queues.
std::vector<Plan> plans_of(int ranks, int micro_batches, int chunks) {
  std::vector<Plan> plans;
  for (const std::string& name : schedule_names()) {
    try {
      const Schedule lowered =
          lower(generate(name, {ranks, micro_batches, chunks}), {.reduce_grad = false, .tied = {}});
      plans.push_back(make_plan(lowered, {}, {.order = MessageOrder::kGlobal}));
    } catch (const Error&) {
      continue;  // not for this shape
    }
  }
  return plans;
}

std::size_t receives_of(const Plan& plan, int rank) {
  const std::vector<PlanOp>& ops = plan.ranks[static_cast<std::size_t>(rank)].ops;
  return static_cast<std::size_t>(std::count_if(
      ops.begin(), ops.end(), [](const PlanOp& op) { return op.kind == OpKind::kPostRecv; }));
}

void execute_plans(Rank& rank, int micro_batches, int chunks) {
  NcclQueue queue(rank.device, 256, rank.size());
  NcclTransport transport(queue, rank.bootstrap, DeviceMemory(rank.device), ring_of(rank.size()),
                          NcclLabel{"the pipeline"}, &rank.control);
  const std::vector<Plan> plans = plans_of(rank.size(), micro_batches, chunks);
  EXPECT_GE(plans.size(), 2U);
  for (const Plan& plan : plans) {
    SCOPED_TRACE(plan.schedule_name);
    // All ranks are one process: freeing page-locked memory waits for every device of it, and so
    // for messages of ranks that are already at the next plan.
    auto walk = std::make_unique<PlanWalk>(rank, transport, plan);
    rank.bootstrap.barrier();
    walk->run();
    EXPECT_EQ(walk->received(), receives_of(plan, rank.rank()));
    rank.bootstrap.barrier();
    walk.reset();
    rank.bootstrap.barrier();
  }
  queue.finalize(&rank.control);
}

TEST_P(NcclTransportTest, ExecutesEverySchedulesPlan) {
  run([](Rank& rank) { execute_plans(rank, 5, 1); });
}

TEST_P(NcclTransportTest, ExecutesPlansOfSeveralChunksPerRank) {
  run([](Rank& rank) { execute_plans(rank, rank.size(), 2); });
}

#ifdef SLUICE_EMULATED
// What a ring's communicators ask for on GPUs of this size, one for each rank and edge.
std::vector<int> blocks_in_ring(int ranks, int multiprocessors,
                                const std::function<void(const std::function<void(Rank&)>&)>& run) {
  for (int gpu = 0; gpu < ranks; ++gpu) emulated::set_multiprocessors(gpu, multiprocessors);
  const std::size_t before = emulated::most_blocks_asked().size();
  run([](Rank& rank) {
    NcclQueue queue(rank.device, 4, rank.size());
    const NcclTransport transport(queue, rank.bootstrap, DeviceMemory(rank.device),
                                  ring_of(rank.size()), NcclLabel{"the pipeline"}, &rank.control);
    queue.finalize(&rank.control);
  });
  for (int gpu = 0; gpu < ranks; ++gpu) emulated::set_multiprocessors(gpu, 4);
  std::vector<int> asked = emulated::most_blocks_asked();
  asked.erase(asked.begin(), asked.begin() + static_cast<std::ptrdiff_t>(before));
  return asked;
}

TEST_P(NcclTransportTest, ReceivesPostedAheadOccupyAtMostHalfOfTheMultiprocessors) {
  std::size_t communicators = 0;
  for (int rank = 0; rank < GetParam(); ++rank) {
    communicators += at(NcclTransport::communicators(ring_of(GetParam()), rank));
  }
  const bool two = GetParam() <= 2;  // neighbours are one then: two edges at a rank, not four
  const std::map<int, int> blocks = {{132, 8}, {20, two ? 5 : 2}, {4, 1}};
  for (const auto& [multiprocessors, each] : blocks) {
    EXPECT_THAT(blocks_in_ring(GetParam(), multiprocessors, run),
                ::testing::AllOf(::testing::SizeIs(communicators), ::testing::Each(each)))
        << multiprocessors;
  }
}
#endif

// Between neighbours in a ring, both ways: the receive from one waits until that from the other is
// done, which was posted after it.
TEST_P(NcclTransportTest, AReceiveThatWaitsHoldsBackNoOtherEdge) {
  if (GetParam() == 2) return;  // the neighbours are one
  run([](Rank& rank) {
    NcclQueue queue(rank.device, 8, rank.size());
    NcclTransport transport(queue, rank.bootstrap, DeviceMemory(rank.device), ring_of(rank.size()),
                            NcclLabel{"the pipeline"}, &rank.control);
    const OnDevice<int> from_previous(rank.device, std::vector<int>(4, -1));
    const OnDevice<int> from_next(rank.device, std::vector<int>(4, -1));
    const OnDevice<int> own(rank.device, std::vector<int>(4, rank.rank()));
    const auto alone = [&](const auto& operation) {
      queue.begin_group();
      const NcclTicket ticket = operation();
      queue.end_group();
      return ticket;
    };
    const auto receive = [&](int peer, const OnDevice<int>& to) {
      return alone([&] { return transport.recv(peer, to.bytes(), Event()); });
    };
    const auto send = [&](int peer) {
      return alone([&] { return transport.send(peer, own.bytes(), Event()); });
    };
    testing::ThrowingInterrupt limit(100'000, "a message is held back");
    try {
      NcclTicket last = receive(rank.previous(), from_previous);
      NcclTicket first = receive(rank.next(), from_next);
      NcclTicket back = send(rank.previous());
      queue.wait(first, &limit);
      NcclTicket forth = send(rank.next());
      for (NcclTicket* each : {&last, &back, &forth}) queue.wait(*each, &limit);
    } catch (const Error& error) {
      ADD_FAILURE() << error.what();
      return queue.abort();  // before memory is freed, which waits for kernels
    }
    EXPECT_THAT(from_previous.read(), ::testing::Each(rank.previous()));
    EXPECT_THAT(from_next.read(), ::testing::Each(rank.next()));
    queue.finalize(&rank.control);
  });
}

// A message of every rank to every other, all at once: each pair has a class without a rank of its
// own in another pair.
// Who watches the bootstrap communicator hears of its ranks, though two alone make a communicator.
TEST_P(NcclTransportTest, WaitsWhileItIsMadeNameRanksOfAll) {
  class Waits : public Interrupt {
   public:
    explicit Waits(Interrupt& control) : control_(control) {}
    void poll() override { control_.poll(); }
    void begin_wait(const WaitSubject& subject) noexcept override {
      if (subject.peer >= 0 && subject.peer < 64) peers |= std::uint64_t{1} << subject.peer;
    }
    std::uint64_t peers = 0;

   private:
    Interrupt& control_;
  };
  run([](Rank& rank) {
    Waits waits(rank.control);
    NcclQueue queue(rank.device, 4, rank.size());
    const NcclTransport transport(queue, rank.bootstrap, DeviceMemory(rank.device),
                                  ring_of(rank.size()), NcclLabel{"the pipeline"}, &waits);
    queue.finalize(&rank.control);
    const std::uint64_t neighbours = std::uint64_t{1} << rank.next() | std::uint64_t{1}
                                                                           << rank.previous();
    EXPECT_EQ(waits.peers & ~neighbours, 0U) << "of rank " << rank.rank();
  });
}

TEST_P(NcclTransportTest, JoinsAnyTwoRanks) {
  run([](Rank& rank) {
    std::vector<NcclTransport::Edge> edges;
    for (int from = 0; from < rank.size(); ++from) {
      for (int to = 0; to < rank.size(); ++to) {
        if (from != to) edges.push_back({from, to});
      }
    }
    NcclQueue queue(rank.device, 8, rank.size());
    NcclTransport transport(queue, rank.bootstrap, DeviceMemory(rank.device), edges,
                            NcclLabel{"the pipeline"}, &rank.control);
    const OnDevice<int> own(rank.device, std::vector<int>(4, rank.rank()));
    std::vector<OnDevice<int>> arrived;
    for (int peer = 0; peer < rank.size(); ++peer) arrived.emplace_back(rank.device, 4);
    std::vector<NcclTicket> tickets;
    queue.begin_group();
    for (int peer = 0; peer < rank.size(); ++peer) {
      if (peer == rank.rank()) continue;
      tickets.push_back(transport.recv(peer, arrived[at(peer)].bytes(), Event()));
      tickets.push_back(transport.send(peer, own.bytes(), Event()));
    }
    queue.end_group();
    for (NcclTicket& ticket : tickets) queue.wait(ticket, &rank.control);
    for (int peer = 0; peer < rank.size(); ++peer) {
      if (peer == rank.rank()) continue;
      EXPECT_THAT(arrived[at(peer)].read(), ::testing::Each(peer));
    }
    queue.finalize(&rank.control);
  });
}

// One for each direction of a pair.
TEST(NcclEdgesTest, HaveACommunicatorEach) {
  using Edges = std::vector<NcclTransport::Edge>;
  EXPECT_EQ(NcclTransport::communicators(Edges{}, 0), 0);
  const Edges chain = {{0, 1}, {1, 0}, {0, 1}, {1, 2}, {2, 1}};
  EXPECT_EQ(NcclTransport::communicators(chain, 0), 2);
  EXPECT_EQ(NcclTransport::communicators(chain, 1), 4);
}

TEST_P(NcclTransportTest, MakesNothingForAPipelineWithoutEdges) {
  run([](Rank& rank) {
    NcclQueue queue(rank.device, 1, rank.size());
    NcclTransport transport(queue, rank.bootstrap, DeviceMemory(rank.device), {},
                            NcclLabel{"the pipeline"}, nullptr);
    queue.begin_group();
    EXPECT_THROW(static_cast<void>(transport.send(rank.next(), {}, Event())), Error);
    queue.end_group();
    queue.finalize(nullptr);
  });
}

TEST_P(NcclTransportTest, AMessageWithoutCounterpartEndsWithTheErrorNamedOnEveryRank) {
  run([](Rank& rank) {
    ControlChannel control(rank.comm);
    NcclQueue queue(rank.device, 4, rank.size());
    NcclTransport transport(queue, rank.bootstrap, DeviceMemory(rank.device), ring_of(rank.size()),
                            NcclLabel{"the pipeline"}, &control);
    const OnDevice<int> memory(rank.device, std::vector<int>(4, 7));
    // Every rank waits for the message that rank 0 does not send.
    testing::ThrowingInterrupt limit(500, "1RECV_F0 waits for 0SEND_F0 of rank 0");
    const bool last = rank.rank() == rank.size() - 1;
    try {
      if (rank.rank() > 0) {
        queue.begin_group();
        NcclTicket received = transport.recv(rank.rank() - 1, memory.bytes(), Event());
        queue.end_group();
        queue.wait(received, last ? static_cast<Interrupt*>(&limit) : &control);
      } else {
        Waiter waiter(rank.size());
        for (;; waiter.pause()) control.poll();
      }
      ADD_FAILURE() << "a message arrived that no rank sent";
    } catch (const Error& error) {
      EXPECT_STREQ(control.report(error).what(), "1RECV_F0 waits for 0SEND_F0 of rank 0");
    }
    queue.abort();
  });
}

}  // namespace
}  // namespace sluice
