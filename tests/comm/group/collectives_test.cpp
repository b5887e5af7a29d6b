#include "comm/group/collectives.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include <sluice/error.hpp>

#include "comm/base/index.hpp"
#include "comm/group/binomial_tree.hpp"
#include "comm/group/communicator.hpp"
#include "comm/group/control.hpp"
#include "tests/comm/group/both_transports.hpp"

namespace sluice {
namespace {

template <typename T>
std::span<std::byte> writable(std::vector<T>& values) {
  return std::as_writable_bytes(std::span(values));
}

// Element i of rank's addend: signs and magnitudes mixed so that the order of a sum shows.
float addend(int rank, std::size_t i) {
  const auto hash =
      static_cast<std::uint32_t>((i + 1) * 2654435761U + static_cast<std::size_t>(rank) * 40503U);
  const float fraction = 1.0F + static_cast<float>(hash % 8191U) / 8191.0F;
  const float sign = (hash >> 16U) % 2U == 0 ? 1.0F : -1.0F;
  return sign * std::ldexp(fraction, static_cast<int>((hash >> 20U) % 12U));
}

// Sum over ranks in the given order of ranks: split at the largest power of two below their number.
float tree_sum(std::span<const int> ranks, std::size_t i) {
  if (ranks.size() == 1) return addend(ranks[0], i);
  const std::size_t half = std::bit_floor(ranks.size() - 1);
  return tree_sum(ranks.first(half), i) + tree_sum(ranks.subspan(half), i);
}

std::vector<int> ascending(int ranks) {
  std::vector<int> order;
  for (int rank = 0; rank < ranks; ++rank) {
    order.push_back(rank);
  }
  return order;
}

SLUICE_COMM_TEST(OrderedSumTest, EqualsTheSumOfTheTreeBitForBit) {
  Collectives collectives(comm, 0, nullptr);
  const std::vector<int> order = ascending(comm.size());
  // Around the number of ranks, around a block, several blocks, a last shard that is short or
  // empty.
  for (const std::size_t count :
       {1UL, 2UL, 3UL, 4UL, 5UL, 6UL, 7UL, 1000UL, 32768UL * 3 + 1, 262147UL}) {
    if (count > 1000 && comm.size() > 8) continue;  // the expected sums take long
    std::vector<float> values(count);
    for (std::size_t i = 0; i < count; ++i) {
      values[i] = addend(comm.rank(), i);
    }
    collectives.ordered_sum(values);
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < count; ++i) {
      wrong += std::bit_cast<std::uint32_t>(values[i]) !=
                       std::bit_cast<std::uint32_t>(tree_sum(order, i))
                   ? 1
                   : 0;
    }
    EXPECT_EQ(wrong, 0U) << "of " << count;
  }
}

// Where the parts of `count` values end, a function of `number` alone: some are empty, others
// large.
std::vector<std::size_t> uneven_ends(int ranks, std::size_t count, std::size_t number) {
  std::vector<std::size_t> ends;
  for (std::size_t i = 0; i + 1 < at(ranks); ++i) {
    const auto hash = static_cast<std::uint32_t>((number * 64 + i + 1) * 2654435761U);
    ends.push_back(hash % 3 == 0 && i > 0 ? ends.back() : hash / 3 % (count + 1));
  }
  std::sort(ends.begin(), ends.end());
  ends.push_back(count);
  return ends;
}

SLUICE_COMM_TEST(OrderedSumTest, HasItsBitsInTwoHalvesOverPartsOfAnySizes) {
  Collectives collectives(comm, 0, nullptr);
  const auto of_rank = [&](std::size_t count) {
    std::vector<float> values(count);
    for (std::size_t i = 0; i < count; ++i) values[i] = addend(comm.rank(), i);
    return values;
  };
  const auto differing = [](std::span<const float> a, std::span<const float> b) {
    return !a.empty() && std::memcmp(a.data(), b.data(), a.size_bytes()) != 0;
  };
  // Nothing, fewer than ranks, one block, several of them.
  for (const std::size_t count : {0UL, 3UL, 1000UL, 32768UL * 3 + 1}) {
    if (count > 1000 && comm.size() > 8) continue;  // as above
    std::vector<float> expected = of_rank(count);
    collectives.ordered_sum(expected);
    for (std::size_t number = 0; number < (comm.size() > 8 ? 3 : 12); ++number) {
      std::vector<std::size_t> ends = uneven_ends(comm.size(), count, number);
      if (number == 0) std::fill(ends.begin(), ends.end(), count);               // all is rank 0's
      if (number == 1) std::fill(ends.begin(), ends.end() - 1, std::size_t{0});  // the last one's
      std::vector<float> values = of_rank(count);
      collectives.ordered_reduce_scatter(values, ends);
      const std::size_t begin = comm.rank() == 0 ? 0 : ends[at(comm.rank() - 1)];
      const std::size_t size = ends[at(comm.rank())] - begin;
      EXPECT_FALSE(differing(std::span(values).subspan(begin, size),
                             std::span(expected).subspan(begin, size)))
          << count << ", " << number;
      std::fill_n(values.begin(), begin, std::nanf(""));
      std::fill(values.begin() + static_cast<std::ptrdiff_t>(begin + size), values.end(),
                std::nanf(""));
      collectives.all_gather_parts(values, ends);
      EXPECT_FALSE(differing(values, expected)) << count << ", " << number;
    }
  }
}

// From rank to rank the parts go by twos.
SLUICE_COMM_TEST(OrderedSumTest, AddsThePartThatIsNamedForEachRank) {
  Collectives collectives(comm, 0, nullptr);
  const std::size_t count = 1001;
  std::vector<float> expected(count);
  for (std::size_t i = 0; i < count; ++i) expected[i] = addend(comm.rank(), i);
  std::vector<float> values = expected;
  collectives.ordered_sum(expected);
  std::vector<int> parts;
  for (int first : {0, 1}) {
    for (int part = first; part < comm.size(); part += 2) parts.push_back(part);
  }
  const std::vector<std::size_t> ends = uneven_ends(comm.size(), count, 2);
  HostSums& sums = collectives.sums();
  sums.wait(sums.start_reduce_scatter(values, ends, nullptr, nullptr, parts));
  const auto part = at(parts[at(comm.rank())]);
  const std::size_t begin = part == 0 ? 0 : ends[part - 1];
  for (std::size_t i = begin; i < ends[part]; ++i) ASSERT_EQ(values[i], expected[i]) << i;
}

// Neighbours on a host, one host with more, ranks in turns, a host each, one for all.
std::vector<std::vector<int>> divisions_into_hosts(int ranks) {
  std::vector<std::vector<int>> all;
  for (const auto& host_of : std::vector<std::function<int(int)>>{
           [](int rank) { return rank / 2; }, [](int rank) { return rank < 3 ? 0 : 1; },
           [](int rank) { return rank % 2; }, [](int rank) { return rank; },
           [](int) { return 0; }}) {
    std::vector<int>& hosts = all.emplace_back();
    for (int rank = 0; rank < ranks; ++rank) hosts.push_back(host_of(rank));
  }
  return all;
}

SLUICE_COMM_TEST(OrderedSumTest, TakesTheMemoryThatIsSaidBefore) {
  for (const std::vector<int>& hosts : divisions_into_hosts(comm.size())) {
    for (const std::size_t count : {1UL, 1000UL, 100'000UL}) {
      if (count > 1000 && comm.size() > 8) continue;  // takes long
      Collectives collectives(comm, 0, nullptr);
      collectives.sums().set_hosts(hosts);
      std::vector<float> values(count, 1);
      collectives.all_gather_parts(values, uneven_ends(comm.size(), count, 0));
      EXPECT_EQ(collectives.sums().bytes_held(), 0U);
      collectives.ordered_sum(values);
      const std::size_t bytes = HostSums::bytes_for(hosts, comm.rank(), count);
      EXPECT_EQ(collectives.sums().bytes_held(), bytes) << count;
      EXPECT_EQ(bytes > 0, comm.size() > 1);
    }
  }
}

SLUICE_COMM_TEST(OrderedSumTest, HasItsBitsOverAnyHosts) {
  Collectives collectives(comm, 0, nullptr);
  const std::size_t count = comm.size() > 8 ? 500 : 32768UL * 2 * at(comm.size()) + 77;
  std::vector<float> expected(count);
  for (std::size_t i = 0; i < count; ++i) expected[i] = addend(comm.rank(), i);
  const std::vector<float> mine = expected;
  collectives.ordered_sum(expected);
  for (const std::vector<int>& hosts : divisions_into_hosts(comm.size())) {
    collectives.sums().set_hosts(hosts);
    for (std::size_t number = 0; number < 3; ++number) {
      const std::vector<std::size_t> ends = uneven_ends(comm.size(), count, number);
      std::vector<float> values = mine;
      collectives.ordered_reduce_scatter(values, ends);
      collectives.all_gather_parts(values, ends);
      EXPECT_TRUE(std::memcmp(values.data(), expected.data(), count * sizeof(float)) == 0);
    }
    std::vector<float> values = mine;
    collectives.ordered_sum(values);
    EXPECT_TRUE(std::memcmp(values.data(), expected.data(), count * sizeof(float)) == 0);
  }
  EXPECT_THROW(collectives.sums().set_hosts(std::vector<int>(at(comm.size() + 1))), Error);
}

// Sums and gathers of several sizes that are on their way at a time, over one host, and over two in
// turns: some ranks make steps now and then, others wait at once.
SLUICE_COMM_TEST(OrderedSumTest, GoesOnBesideOtherCallsUntilItIsDone) {
  Collectives collectives(comm, 0, nullptr);
  HostSums& sums = collectives.sums();
  const std::size_t large = comm.size() > 8 ? 10'001 : 32768UL * 5 * at(comm.size()) + 7;
  const std::vector<std::size_t> counts = {5, 70'001, 0, large, 1, large / 2};
  for (const int hosts_number : {1, 2}) {
    std::vector<int> hosts;
    for (int rank = 0; rank < comm.size(); ++rank) hosts.push_back(rank % hosts_number);
    sums.set_hosts(hosts);
    std::vector<std::vector<float>> values, expected;
    for (const std::size_t count : counts) {
      for (auto* made : {&values, &expected}) {
        std::vector<float>& mine = made->emplace_back(count);
        for (std::size_t i = 0; i < count; ++i) mine[i] = addend(comm.rank(), i);
      }
      collectives.ordered_sum(expected.back());
    }
    std::vector<HostSums::Ticket> tickets;
    double ended = 0;
    for (std::size_t i = 0; i < counts.size(); ++i) {
      if (i % 2 == 0) {
        tickets.push_back(sums.start_sum(values[i], nullptr, &ended));
      } else {
        const std::vector<std::size_t> ends = uneven_ends(comm.size(), counts[i], i);
        sums.start_reduce_scatter(values[i], ends);
        tickets.push_back(sums.start_gather(values[i], ends));
      }
    }
    int number = comm.rank();
    collectives.broadcast(object_bytes(number), 0);  // while they have not been touched
    EXPECT_EQ(number, 0);
    if (comm.rank() % 2 == 0) {
      for (Waiter waiter(comm.local_size()); !sums.done(tickets.back()); waiter.pause()) {
        sums.progress();
      }
    }
    sums.wait(tickets[1]);
    EXPECT_TRUE(sums.done(tickets[0]));
    sums.wait(tickets.back());
    EXPECT_EQ(ended > 0, comm.size() > 1);
    for (std::size_t i = 0; i < counts.size(); ++i) {
      EXPECT_TRUE(sums.done(tickets[i]));
      EXPECT_TRUE(counts[i] == 0 || std::memcmp(values[i].data(), expected[i].data(),
                                                counts[i] * sizeof(float)) == 0);
    }
  }
}

SLUICE_COMM_TEST(OrderedSumTest, RefusesPartsThatAreNone) {
  Collectives collectives(comm, 0, nullptr);
  std::vector<float> values(10);
  const std::vector<std::size_t> good(at(comm.size()), 10);
  std::vector<std::vector<std::size_t>> wrong(3, good);
  wrong[0].push_back(10);  // of one rank more
  wrong[1].back() = 9;     // not all values
  wrong[2].front() = 11;   // beyond the values, and before the one before
  for (const std::vector<std::size_t>& ends : wrong) {
    for (const auto& call :
         {&Collectives::ordered_reduce_scatter, &Collectives::all_gather_parts}) {
      try {
        (collectives.*call)(values, ends, nullptr);
        ADD_FAILURE() << "nothing was thrown";
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::kInternal) << error.what();
      }
    }
  }
  collectives.all_gather_parts(values, good);  // no message is left
}

TEST(OrderedSumInputTest, OtherOrdersGiveOtherBits) {
  // Without this the test above would pass for a sum in any order.
  for (int ranks = 3; ranks <= 5; ++ranks) {
    std::vector<int> rotated = ascending(ranks);
    rotated.push_back(rotated.front());
    rotated.erase(rotated.begin());
    std::size_t differ_rotated = 0;
    for (std::size_t i = 0; i < 1000; ++i) {
      differ_rotated += tree_sum(ascending(ranks), i) != tree_sum(rotated, i) ? 1 : 0;
    }
    EXPECT_GT(differ_rotated, 100U) << ranks;
  }
}

SLUICE_COMM_TEST(CollectivesTest, BroadcastsFromEveryRoot) {
  Collectives collectives(comm, 0, nullptr);
  for (int root = 0; root < comm.size(); ++root) {
    std::vector<int> values(1000, comm.rank());
    collectives.broadcast(writable(values), root);
    EXPECT_EQ(values, std::vector<int>(1000, root));
    collectives.broadcast({}, root);
  }
}

SLUICE_COMM_TEST(CollectivesTest, GathersInTheOrderOfRanks) {
  Collectives collectives(comm, 0, nullptr);
  const auto size = static_cast<std::size_t>(comm.size());
  const std::array<int, 2> mine = {comm.rank(), -comm.rank()};
  for (int root = 0; root < comm.size(); ++root) {
    std::vector<int> all(comm.rank() == root ? 2 * size : 0);
    collectives.gather(std::as_bytes(std::span(mine)), writable(all), root);
    for (std::size_t i = 0; i < all.size(); ++i) {
      EXPECT_EQ(all[i], i % 2 == 0 ? static_cast<int>(i / 2) : -static_cast<int>(i / 2));
    }
  }
  std::vector<int> all(2 * size);
  collectives.all_gather(std::as_bytes(std::span(mine)), writable(all));
  for (std::size_t i = 0; i < all.size(); ++i) {
    EXPECT_EQ(all[i], i % 2 == 0 ? static_cast<int>(i / 2) : -static_cast<int>(i / 2));
  }
}

// Numbers of rank's part; some ranks have none.
std::vector<int> part(int rank) { return std::vector<int>(at(rank * rank % 5), rank); }

SLUICE_COMM_TEST(CollectivesTest, GathersPartsOfDifferentSizes) {
  Collectives collectives(comm, 0, nullptr);
  std::vector<int> expected;
  std::vector<std::size_t> ends;
  for (int rank = 0; rank < comm.size(); ++rank) {
    for (const int value : part(rank)) expected.push_back(value);
    ends.push_back(expected.size() * sizeof(int));
  }
  const std::vector<int> mine = part(comm.rank());
  for (int root = 0; root < comm.size(); ++root) {
    std::vector<int> all(comm.rank() == root ? expected.size() : 0, -1);
    collectives.gather(std::as_bytes(std::span(mine)), ends, writable(all), root);
    EXPECT_TRUE(comm.rank() != root || all == expected) << root;
  }
}

SLUICE_COMM_TEST(CollectivesTest, GathersLongSubtreesInPieces) {
  Collectives collectives(comm, 0, nullptr);
  const std::size_t count = 3 * Collectives::kPieceBytes / sizeof(int) / at(comm.size()) + 1;
  const std::vector<int> mine(count, comm.rank());
  for (const int root : {0, comm.size() - 1}) {
    std::vector<int> all(comm.rank() == root ? count * at(comm.size()) : 0, -1);
    collectives.gather(std::as_bytes(std::span(mine)), writable(all), root);
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < all.size(); ++i) wrong += at(all[i]) != i / count ? 1 : 0;
    EXPECT_EQ(wrong, 0U);
  }
}

SLUICE_COMM_TEST(CollectivesTest, ExchangesEqualPartsAlsoInPieces) {
  Collectives collectives(comm, 0, nullptr);
  const std::size_t ranks = at(comm.size());
  for (const std::size_t part : {0UL, 3UL, Collectives::kPieceBytes / sizeof(int) + 7}) {
    if (part > 1000 && ranks > 8) continue;  // memory
    std::vector<int> send(part * ranks), received(part * ranks, -1);
    for (std::size_t i = 0; i < send.size(); ++i) {
      send[i] = comm.rank() * 1000 + static_cast<int>(i / part);
    }
    collectives.all_to_all(std::as_bytes(std::span(send)), writable(received));
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < received.size(); ++i) {
      wrong += received[i] != static_cast<int>(i / part) * 1000 + comm.rank() ? 1 : 0;
    }
    EXPECT_EQ(wrong, 0U) << part;
  }
  std::vector<std::byte> more(ranks + 1), other(ranks);
  EXPECT_THROW(collectives.all_to_all(more, other), Error);
}

SLUICE_COMM_TEST(CollectivesTest, GathersStringsOfDifferentLengths) {
  Collectives collectives(comm, 0, nullptr);
  // The longest needs several pieces; without a letter there is no second message.
  for (const int letters : {3000, 3'000'000 / comm.size(), 0}) {
    const auto text = [&](int rank) {
      return std::string(at(rank % 5 * letters), static_cast<char>('A' + rank % 26));
    };
    const std::vector<std::string> all = collectives.all_gather_strings(text(comm.rank()));
    ASSERT_EQ(all.size(), at(comm.size()));
    for (int rank = 0; rank < comm.size(); ++rank) EXPECT_TRUE(all[at(rank)] == text(rank));
  }
}

SLUICE_COMM_TEST(CollectivesTest, NobodyLeavesABarrierBeforeTheLastHasCome) {
  Collectives collectives(comm, 0, nullptr);
  const auto notes = comm.duplicate();
  // Every rank in turn comes last: it notifies the others just before it enters.
  for (int last = 0; last < comm.size(); ++last) {
    int notified = 0;
    Request note;
    std::vector<Request> sends;
    const int word = 1;
    if (comm.rank() == last) {
      for (int peer = 0; peer < comm.size(); ++peer) {
        if (peer != last) {
          sends.push_back(notes->start_send(peer, 0, std::as_bytes(std::span(&word, 1))));
        }
      }
    } else {
      note = notes->post_recv(last, 0, std::as_writable_bytes(std::span(&notified, 1)));
    }
    collectives.barrier();
    Waiter waiter(comm.local_size());
    while (note.index != Request::kNone && !notes->test(note)) {
      waiter.pause();
    }
    for (Request& send : sends) {
      while (!notes->test(send)) {
        waiter.pause();
      }
    }
    EXPECT_TRUE(comm.rank() == last || notified == 1);
  }
}

SLUICE_COMM_TEST(CollectivesTest, SendsPointToPointInOrder) {
  if (comm.size() == 1) {
    return;
  }
  Collectives collectives(comm, 0, nullptr);
  const int last = comm.size() - 1;
  for (int i = 0; i < 20; ++i) {
    if (comm.rank() == 0) {
      collectives.send(last, std::as_bytes(std::span(&i, 1)));
    } else if (comm.rank() == last) {
      int value = -1;
      collectives.recv(0, std::as_writable_bytes(std::span(&value, 1)));
      EXPECT_EQ(value, i);
    }
  }
}

SLUICE_COMM_TEST(CollectivesTest, SendsLongMessagesInPieces) {
  Collectives collectives(comm, 0, nullptr);
  std::vector<std::uint32_t> values(2 * Collectives::kPieceBytes / sizeof(std::uint32_t) + 1);
  if (comm.rank() == 0) std::iota(values.begin(), values.end(), 0U);
  collectives.broadcast(writable(values), 0);
  std::vector<std::uint32_t> expected(values.size());
  std::iota(expected.begin(), expected.end(), 0U);
  EXPECT_TRUE(values == expected);
}

SLUICE_COMM_TEST(CollectivesTest, RefusesSizesThatDiffer) {
  if (comm.size() == 1) {
    return;
  }
  const auto copy = comm.duplicate();
  Collectives collectives(*copy, 0, nullptr);
  const int last = comm.size() - 1;
  const std::array<int, 3> three = {1, 2, 3};
  std::array<int, 4> four{};
  if (comm.rank() == 0) {
    collectives.send(last, std::as_bytes(std::span(three)));
  } else if (comm.rank() == last) {
    try {
      collectives.recv(0, std::as_writable_bytes(std::span(four)));
      ADD_FAILURE() << "12 bytes were taken for 16";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kMismatch);
      EXPECT_NE(std::string(error.what()).find("expected 16 bytes from rank 0, got 12"),
                std::string::npos)
          << error.what();
    }
  }
}

SLUICE_COMM_TEST(CollectivesTest, RefuseAPartThatIsNotWhereItEnds) {
  Collectives collectives(comm, 0, nullptr);
  const std::array<int, 2> mine = {};
  std::vector<int> all(at(comm.size()));
  std::vector<std::size_t> ends(all.size());
  std::iota(ends.begin(), ends.end(), std::size_t{1});
  EXPECT_THROW(collectives.gather(std::as_bytes(std::span(mine)), ends, writable(all), 0), Error);
}

// What ends a collective on this rank, as in a job: what it throws is reported to the others, whose
// next wait throws it.
Error ending(ControlChannel& control, const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return control.report(error);
  }
  return {ErrorCode::kInternal, "nothing"};
}

SLUICE_COMM_TEST(CollectivesTest, AGatherOfSizesThatDifferNamesBothEnds) {
  if (comm.size() == 1) return;
  const auto copy = comm.duplicate();
  ControlChannel control(comm);
  Collectives collectives(*copy, 0, &control);
  const int last = comm.size() - 1;
  const std::vector<int> mine(comm.rank() == last ? 2 : 4);
  std::vector<int> all(4 * at(comm.size()));
  const Error error = ending(control, [&] {
    collectives.gather(std::as_bytes(std::span(mine)), writable(all), 0);
    collectives.barrier();
  });
  EXPECT_EQ(error.code(), ErrorCode::kMismatch);
  EXPECT_EQ(std::string(error.what()),
            "rank " + std::to_string(tree_parent(last)) + " expected 16 bytes from rank " +
                std::to_string(last) +
                ", got 8: the ranks disagree about the size of a collective");
  copy->leave_open(/*by_all=*/true);
}

SLUICE_COMM_TEST(CollectivesTest, ASumRefusesPartsThatDiffer) {
  if (comm.size() == 1) return;
  for (const auto& call : {&Collectives::ordered_reduce_scatter, &Collectives::all_gather_parts}) {
    const auto copy = comm.duplicate();
    ControlChannel control(comm);
    Collectives collectives(*copy, 0, &control);
    auto values = std::make_shared<std::vector<float>>(8);
    std::vector<std::size_t> ends(at(comm.size()), 8);
    ends.front() = comm.rank() == 0 ? 4 : 2;
    const Error error = ending(control, [&] {
      (collectives.*call)(*values, ends, values);
      collectives.barrier();
    });
    EXPECT_EQ(error.code(), ErrorCode::kMismatch) << error.what();
    copy->leave_open(/*by_all=*/true);
  }
}

SLUICE_COMM_TEST(CollectivesTest, AGatherEndsOnAllRanksWhereOneFails) {
  if (comm.size() == 1) return;
  for (const int failing : {0, comm.size() / 2, comm.size() - 1}) {
    const auto copy = comm.duplicate();
    ControlChannel control(comm);
    Collectives collectives(*copy, 0, &control);
    const std::vector<int> mine(4);
    std::vector<int> all(4 * at(comm.size()));
    const Error error = ending(control, [&] {
      if (comm.rank() == failing) throw Error(ErrorCode::kIo, "disk full");
      collectives.all_gather(std::as_bytes(std::span(mine)), writable(all));
    });
    EXPECT_STREQ(error.what(), "disk full") << failing;
    copy->leave_open(/*by_all=*/true);
  }
}

// Keeps the last subject; ends a wait for `peer` after a while.
struct Watch : Interrupt {
  explicit Watch(int ended_peer) : peer(ended_peer) {}
  void poll() override {
    if (std::chrono::steady_clock::now() > end) throw Error(ErrorCode::kPeer, "rung");
  }
  void begin_wait(const WaitSubject& what) noexcept override {
    subject = what;
    const std::chrono::milliseconds most(what.peer == peer ? 300 : 60000);
    end = std::chrono::steady_clock::now() + most;
  }
  int peer;
  WaitSubject subject;
  std::chrono::steady_clock::time_point end = std::chrono::steady_clock::time_point::max();
};

SLUICE_COMM_TEST(CollectivesTest, ASumNamesWhomItWaitsFor) {
  if (comm.size() == 1) return;
  const auto copy = comm.duplicate();
  const int last = comm.size() - 1;
  if (comm.rank() == last) return copy->leave_open(/*by_all=*/true);
  Watch watch(last);
  Collectives collectives(*copy, 0, &watch);
  const auto values = std::make_shared<std::vector<float>>(at(comm.size()));
  EXPECT_THROW(collectives.ordered_sum(*values, values), Error);
  EXPECT_EQ(watch.subject.what, WaitSubject::What::kCollectiveReceive);
  EXPECT_EQ(watch.subject.peer, last);
  EXPECT_EQ(watch.subject.bytes, sizeof(float));
  copy->leave_open(/*by_all=*/true);
}

// Whoever looks at the ranks follows peer by peer to the one that does not come.
SLUICE_COMM_TEST(CollectivesTest, AGatherNamesWhomItWaitsFor) {
  if (comm.size() == 1) return;
  const auto copy = comm.duplicate();
  const int last = comm.size() - 1;
  if (comm.rank() == last) return copy->leave_open(/*by_all=*/true);
  std::vector<std::int64_t> all(at(comm.size()));
  bool on_the_way = false;
  int child = last;
  for (int rank = tree_parent(last); !on_the_way && child != 0; rank = tree_parent(rank)) {
    on_the_way = comm.rank() == rank;
    if (!on_the_way) child = rank;
  }
  Watch watch(on_the_way ? child : -1);
  Collectives collectives(*copy, 5, &watch);
  const std::int64_t mine = 1;
  if (on_the_way) {
    EXPECT_THROW(collectives.gather(object_bytes(mine), writable(all), 0), Error);
    EXPECT_EQ(watch.subject.what, WaitSubject::What::kCollectiveReceive);
    EXPECT_EQ(watch.subject.peer, child);
    EXPECT_GE(watch.subject.tag, 5);
    EXPECT_EQ(watch.subject.bytes, sizeof(mine) * at(subtree_end(child, comm.size()) - child));
  } else {
    collectives.gather(object_bytes(mine), writable(all), 0);
  }
  copy->leave_open(/*by_all=*/true);
}

SLUICE_COMM_TEST(CollectivesTest, AreEndedByTheirInterrupt) {
  class Bell : public Interrupt {
   public:
    void poll() override {
      if (++polls_ > 10) {
        throw Error(ErrorCode::kPeer, "rung");
      }
    }

   private:
    int polls_ = 0;
  };
  Bell bell;
  const auto copy = comm.duplicate();
  Collectives collectives(*copy, 0, &bell);
  int value = 0;
  EXPECT_THROW(collectives.recv((comm.rank() + 1) % comm.size(),
                                std::as_writable_bytes(std::span(&value, 1))),
               Error);
}

}  // namespace
}  // namespace sluice
