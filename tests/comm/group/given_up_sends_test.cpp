// What becomes of sends that MPI cannot withdraw, with messages too long for MPI to copy.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <vector>

#include <sluice/error.hpp>

#include "comm/group/collectives.hpp"
#include "tests/comm/group/both_transports.hpp"

namespace sluice {
namespace {

using Bytes = std::vector<std::byte>;
constexpr std::size_t kLong = std::size_t{8} << 20;

// Ends every wait at once.
struct AlwaysFailing : Interrupt {
  void poll() override { throw Error(ErrorCode::kData, "ended"); }
};

void expect_sevens(Communicator& comm, std::size_t bytes, int tag) {
  Bytes got(bytes);
  Request receive = comm.post_recv(0, tag, got);
  EXPECT_EQ(testing::finish(comm, receive).bytes, bytes);
  EXPECT_EQ(std::count(got.begin(), got.end(), std::byte{7}), static_cast<std::ptrdiff_t>(bytes));
}

TEST(GivenUpSendsTest, ReadTheirMemoryUntilTheyAreDone) {
  const auto comm = testing::world().duplicate();
  Collectives others(testing::world(), 0, nullptr);
  if (comm->size() < 2) return;
  if (comm->rank() == 0) {
    auto memory = std::make_shared<Bytes>(kLong, std::byte{7});
    const std::weak_ptr<Bytes> kept = memory;
    Request send = comm->start_send(1, 0, *memory);
    comm->cancel(send);
    comm->keep(std::move(memory));
    EXPECT_FALSE(kept.expired());
    others.barrier();
    for (Waiter waiter(comm->local_size()); !kept.expired(); waiter.pause()) comm->keep(nullptr);
  } else {
    others.barrier();  // only now
    if (comm->rank() == 1) expect_sevens(*comm, kLong, 0);
  }
  others.barrier();
}

TEST(GivenUpSendsTest, OutliveTheirCommunicator) {
  auto comm = testing::world().duplicate();
  Collectives others(testing::world(), 0, nullptr);
  if (comm->size() < 2) return;
  if (comm->rank() == 0) {
    auto memory = std::make_shared<Bytes>(kLong, std::byte{7});
    const std::weak_ptr<Bytes> kept = memory;
    (void)comm->start_send(1, 0, *memory);
    comm->keep(std::move(memory));
    comm.reset();
    EXPECT_FALSE(kept.expired());
  }
  others.barrier();
  if (testing::world().rank() == 1) expect_sevens(*comm, kLong, 0);
  others.barrier();
}

TEST(GivenUpSendsTest, OfACollectiveReadACopy) {
  const auto comm = testing::world().duplicate();
  Collectives others(testing::world(), 0, nullptr);
  if (comm->size() < 2) return;
  for (const std::size_t bytes : {std::size_t{100'000}, kLong}) {
    if (comm->rank() == 0) {
      AlwaysFailing interrupt;
      Collectives collectives(*comm, 0, &interrupt);
      Bytes mine(bytes, std::byte{7});
      EXPECT_THROW(collectives.send(1, mine), Error);
      std::fill(mine.begin(), mine.end(), std::byte{0});
    }
    others.barrier();
    if (comm->rank() == 1) {
      Bytes got(bytes);
      Collectives(*comm, 0, nullptr).recv(0, got);
      EXPECT_EQ(std::count(got.begin(), got.end(), std::byte{7}),
                static_cast<std::ptrdiff_t>(bytes));
    }
    others.barrier();
  }
}

TEST(GivenUpSendsTest, OfASumReadMemoryWhoseOwnerIsNamed) {
  const auto comm = testing::world().duplicate();
  Collectives others(testing::world(), 0, nullptr);
  if (comm->size() < 2) return;
  if (comm->rank() == 0) {
    AlwaysFailing interrupt;
    Collectives collectives(*comm, 0, &interrupt);
    auto values = std::make_shared<std::vector<float>>(kLong);
    const std::weak_ptr<std::vector<float>> kept = values;
    std::vector<float> workspace(collectives.ordered_sum_workspace(values->size()));
    EXPECT_THROW(collectives.ordered_sum(*values, workspace, values), Error);
    values.reset();
    EXPECT_FALSE(kept.expired());
  }
  others.barrier();  // no rank ever receives it
}

}  // namespace
}  // namespace sluice
