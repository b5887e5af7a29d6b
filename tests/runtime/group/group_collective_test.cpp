// Collectives of stages over a group of ranks: results, the order of sums, and what happens where
// ranks make different ones.
#include "runtime/group/group_collective.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include <sluice/error.hpp>
#include <sluice/tensor.hpp>

#include "comm/base/index.hpp"
#include "comm/base/sum_tree.hpp"
#include "comm/group/collectives.hpp"
#include "comm/group/communicator.hpp"
#include "comm/group/control.hpp"
#include "runtime/group/guard.hpp"
#include "tests/comm/group/both_transports.hpp"
#include "tests/runtime/expect_error.hpp"

namespace sluice {
namespace {

// Short ones travel in the first message, which has room for 2032 bytes.
constexpr std::array<std::size_t, 6> kCounts = {0, 1, 3, 255, 256, 100'003};

// Element i of a rank: an order of additions shows.
template <typename T>
T value(int rank, std::size_t i) {
  const auto hash =
      static_cast<std::uint32_t>((i + 1) * 2654435761U + static_cast<std::size_t>(rank) * 40503U);
  return static_cast<T>(1.0 / (1 + hash % 8191U)) * ((hash >> 16U) % 2U == 0 ? T{1} : T{-1000});
}

template <typename T>
std::vector<T> values_of(int rank, std::size_t count) {
  std::vector<T> values(count);
  for (std::size_t i = 0; i < count; ++i) values[i] = value<T>(rank, i);
  return values;
}

template <typename T>
std::vector<T> sums_of(int ranks, std::size_t count) {
  std::vector<T> sums(count);
  for (std::size_t i = 0; i < count; ++i) {
    std::vector<T> terms;
    for (int rank = 0; rank < ranks; ++rank) terms.push_back(value<T>(rank, i));
    add_leaves(terms.size(), [&](auto into, auto from) { terms[into] += terms[from]; });
    sums[i] = terms[0];
  }
  return sums;
}

template <typename T>
Tensor tensor(std::vector<T>& values) {
  const DType type = sizeof(T) == 8 ? DType::kF64 : sizeof(T) == 4 ? DType::kF32 : DType::kU8;
  return {values.data(), {type, {static_cast<std::int64_t>(values.size())}}};
}

template <typename T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

template <typename T>
void expect_sums(Communicator& comm, GroupCollective& group) {
  for (const std::size_t count : kCounts) {
    std::vector<T> values = values_of<T>(comm.rank(), count);
    group.sum(values);
    EXPECT_TRUE(same_bits(values, sums_of<T>(comm.size(), count))) << count;

    std::vector<T> all = values_of<T>(comm.rank(), count * at(comm.size())), mine(count);
    group.reduce_scatter(tensor(all), tensor(mine));
    const std::vector<T> sums = sums_of<T>(comm.size(), all.size());
    const auto first = sums.begin() + static_cast<std::ptrdiff_t>(count) * comm.rank();
    EXPECT_TRUE(same_bits(mine, std::vector<T>(first, first + static_cast<std::ptrdiff_t>(count))))
        << count;
    EXPECT_TRUE(same_bits(all, values_of<T>(comm.rank(), all.size()))) << "only read";
  }
}

SLUICE_COMM_TEST(GroupCollectiveTest, SumsByTheTreeOverTheRanks) {
  Collectives collectives(comm, 0, nullptr);
  GroupCollective group(collectives, "tensor rank");
  expect_sums<float>(comm, group);
  expect_sums<double>(comm, group);
}

// Bytes too, whose parts end anywhere.
template <typename T>
void expect_moves(Communicator& comm, GroupCollective& group) {
  const auto letter = [](int from, int to, std::size_t i) {
    return static_cast<T>((at(from) * 31 + at(to) * 7 + i) % 101);
  };
  for (const std::size_t count : kCounts) {
    const std::size_t ranks = at(comm.size());
    std::vector<T> mine(count), all(count * ranks), send(count * ranks), received(count * ranks);
    for (std::size_t i = 0; i < count; ++i) mine[i] = letter(comm.rank(), 0, i);
    for (std::size_t i = 0; i < send.size(); ++i) {
      send[i] = letter(comm.rank(), static_cast<int>(i / std::max<std::size_t>(count, 1)), i);
    }
    group.all_gather(tensor(mine), tensor(all));
    group.all_to_all(tensor(send), tensor(received));
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < all.size(); ++i) {
      const int from = static_cast<int>(i / count);
      wrong += all[i] != letter(from, 0, i % count) ? 1 : 0;
      wrong +=
          received[i] != letter(from, comm.rank(), at(comm.rank()) * count + i % count) ? 1 : 0;
    }
    EXPECT_EQ(wrong, 0U) << count;
    // In place.
    std::vector<T> whole(count * ranks);
    const auto place = static_cast<std::ptrdiff_t>(count) * comm.rank();
    std::copy(mine.begin(), mine.end(), whole.begin() + place);
    Tensor part = tensor(mine);
    part.data = whole.data() + place;
    group.all_gather(part, tensor(whole));
    EXPECT_TRUE(same_bits(whole, all)) << count;
  }
}

SLUICE_COMM_TEST(GroupCollectiveTest, MovesPartsOfAnyType) {
  Collectives collectives(comm, 0, nullptr);
  GroupCollective group(collectives, "tensor rank");
  expect_moves<float>(comm, group);
  expect_moves<double>(comm, group);
  expect_moves<std::uint8_t>(comm, group);
}

// As a call for each segment.
SLUICE_COMM_TEST(GroupCollectiveTest, MakesEachSegmentByItself) {
  Collectives collectives(comm, 0, nullptr);
  GroupCollective group(collectives, "tensor rank");
  const std::size_t ranks = at(comm.size()), segments = 3;
  for (const std::size_t count : kCounts) {
    std::vector<float> mine(segments * count), all(mine.size() * ranks), sums(mine.size());
    std::vector<float> gathered(all.size()), summed(sums.size());
    const auto values_of = [&](std::vector<float>& values) {
      for (std::size_t i = 0; i < values.size(); ++i) {
        values[i] = static_cast<float>((i * 37 + at(comm.rank()) * 11) % 101) / 3;
      }
    };
    const auto of = [&](std::vector<float>& values, std::size_t segment) {
      const std::size_t size = values.size() / segments;
      return Tensor{values.data() + segment * size, {DType::kF32, Shape{std::int64_t(size)}}};
    };
    values_of(mine);
    for (std::size_t s = 0; s < segments; ++s) group.all_gather(of(mine, s), of(all, s));
    group.all_gather(tensor(mine), tensor(gathered), nullptr, std::int64_t(segments));
    EXPECT_TRUE(same_bits(gathered, all)) << count;
    values_of(all);
    for (std::size_t s = 0; s < segments; ++s) group.reduce_scatter(of(all, s), of(sums, s));
    group.reduce_scatter(tensor(all), tensor(summed), nullptr, std::int64_t(segments));
    EXPECT_TRUE(same_bits(summed, sums)) << count;
  }
}

SLUICE_COMM_TEST(GroupCollectiveTest, TakesTheMemoryThatIsPlanned) {
  const std::size_t ranks = at(comm.size());
  const std::vector<int> one_host(ranks);
  for (const CollectiveKind kind : {CollectiveKind::kSum, CollectiveKind::kAllGather,
                                    CollectiveKind::kReduceScatter, CollectiveKind::kAllToAll}) {
    for (const DType type : {DType::kF32, DType::kF64}) {
      GroupCollective::Memory planned;
      Collectives collectives(comm, 0, nullptr);
      GroupCollective group(collectives, "tensor rank");
      for (const std::size_t values : {1UL, 50'000UL, 7UL}) {
        std::vector<std::byte> in(values * ranks * size_of(type)), out(in);
        if (kind == CollectiveKind::kAllGather) out.resize(in.size() * ranks);
        if (kind == CollectiveKind::kReduceScatter) out.resize(in.size() / ranks);
        group.make({.kind = kind, .type = type, .in = in, .out = out});
        planned.raise({.kind = kind, .bytes = in.size(), .type = type}, ranks);
      }
      const std::size_t firsts = comm.rank() == 0 ? 0 : planned.firsts;
      EXPECT_EQ(group.bytes_held() + firsts, planned.bytes());
      EXPECT_EQ(collectives.sums().bytes_held(),
                HostSums::bytes_for(one_host, comm.rank(), planned.summed));
    }
  }
}

SLUICE_COMM_TEST(GroupCollectiveTest, RefusesSizesThatDoNotFitTheRanks) {
  Collectives collectives(comm, 0, nullptr);
  GroupCollective group(collectives, "tensor rank");
  const std::size_t ranks = at(comm.size());
  std::vector<float> one(1), all(ranks), more(ranks + 1);
  expect_error(ErrorCode::kUsage, {"legal: "},
               [&] { group.all_gather(tensor(one), tensor(more)); });
  expect_error(ErrorCode::kUsage, {"legal: "},
               [&] { group.reduce_scatter(tensor(all), tensor(more)); });
  expect_error(ErrorCode::kUsage, {"legal: "},
               [&] { group.all_to_all(tensor(all), tensor(more)); });
  for (const std::int64_t segments : {0, -1, 2}) {
    expect_error(ErrorCode::kUsage, {"legal: "},
                 [&] { group.all_gather(tensor(one), tensor(all), nullptr, segments); });
  }
  expect_error(ErrorCode::kUsage, {"all-to-all from and to memory that overlaps; legal: apart"},
               [&] { group.all_to_all(tensor(all), tensor(all)); });
  if (ranks > 1) {
    expect_error(ErrorCode::kUsage, {"memory that overlaps"}, [&] {
      group.all_gather({&all[(at(comm.rank()) + 1) % ranks], tensor(one).spec}, tensor(all));
    });
    expect_error(ErrorCode::kUsage, {"legal: a multiple of "},
                 [&] { group.reduce_scatter(tensor(more), tensor(one)); });
  }
  group.all_gather(tensor(one), tensor(all));  // no message is left
}

// A call that the last rank makes, another that the others make, and what each is.
struct Other {
  std::function<void(Collective&)> theirs, ours;
  std::string last, first;
};

SLUICE_COMM_TEST(GroupCollectiveTest, NamesWhatRanksMakeThatDiffers) {
  if (comm.size() == 1) return;
  const std::size_t ranks = at(comm.size());
  std::vector<double> doubles(1), more(1000), most(2000);
  std::vector<float> floats(2), parts(2 * ranks), received(2 * ranks);
  const auto sum = [&](auto& values) { return [&](Collective& group) { group.sum(values); }; };
  const auto gather = [&](Collective& group) { group.all_gather(tensor(floats), tensor(parts)); };
  const auto exchange = [&](Collective& group) {
    group.all_to_all(tensor(parts), tensor(received));
  };
  const auto numbered = [&](int micro_batch) {
    return [&, micro_batch](Collective& group) {
      group.make({.type = DType::kF64,
                  .in = std::as_bytes(std::span(doubles)),
                  .out = std::as_writable_bytes(std::span(doubles)),
                  .stage = 2,
                  .micro_batch = micro_batch,
                  .index = 0});
    };
  };
  const std::string bytes = std::to_string(8 * ranks);
  const std::vector<Other> others = {
      {gather, sum(doubles), "an all-gather of 8 bytes of f32", "a sum of 8 bytes of f64"},
      {sum(floats), sum(doubles), "a sum of 8 bytes of f32", "a sum of 8 bytes of f64"},
      {sum(more), sum(doubles), "a sum of 8000 bytes of f64", "a sum of 8 bytes of f64"},
      {sum(doubles), sum(more), "a sum of 8 bytes of f64", "a sum of 8000 bytes of f64"},
      {sum(most), sum(more), "a sum of 16000 bytes of f64", "a sum of 8000 bytes of f64"},
      {exchange, gather, "an all-to-all of " + bytes + " bytes of f32",
       "an all-gather of 8 bytes of f32"},
      {numbered(1), numbered(0),
       "a sum of 8 bytes of f64, its collective 1 in micro-batch 1 of stage 2",
       "a sum of 8 bytes of f64, its collective 1 in micro-batch 0 of stage 2"}};
  for (const Other& each : others) {
    ControlChannel control(comm);
    const auto messages = comm.duplicate();
    Collectives collectives(*messages, 0, &control);
    GroupCollective group(collectives, "tensor rank");
    const int last = comm.size() - 1;
    expect_error(ErrorCode::kMismatch,
                 {"tensor rank " + std::to_string(last) + " makes " + each.last,
                  ", tensor rank 0 " + each.first, "; legal: the same on all"},
                 [&] {
                   guarded(control, comm.rank(),
                           [&] { (comm.rank() == last ? each.theirs : each.ours)(group); });
                 });
    messages->leave_open(/*by_all=*/true);
  }
}

}  // namespace
}  // namespace sluice
