// The steps of all ranks, carried out in one thread on sums as text.
#include "comm/group/block_steps.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <deque>
#include <functional>
#include <map>
#include <set>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "comm/base/index.hpp"

namespace sluice {
namespace {

using What = BlockStep::What;

// The sum of the ranks [first, first + count), by the definition of the order.
std::string tree(int first, int count) {
  if (count == 1) return std::to_string(first);
  const auto half = static_cast<int>(std::bit_floor(at(count - 1)));
  return "(" + tree(first, half) + "+" + tree(first + half, count - half) + ")";
}

class Job {
 public:
  Job(std::vector<int> hosts, const std::function<BlockSteps(std::span<const int>, int)>& steps_of)
      : hosts_(std::move(hosts)) {
    for (int rank = 0; rank < ranks(); ++rank) {
      Rank& made = ranks_.emplace_back();
      made.steps = steps_of(hosts_, rank);
      made.slots.resize(at(made.steps.slots));
      made.values.resize(hosts_.size());
    }
  }

  [[nodiscard]] int ranks() const { return static_cast<int>(hosts_.size()); }
  std::string& value(int rank, int part) { return ranks_[at(rank)].values[at(part)]; }

  // Each rank goes on until it waits; false: all wait.
  bool run() {
    for (int rank = 0; rank < ranks(); ++rank) {
      for (const BlockStep& step : ranks_[at(rank)].steps.begin) make(rank, step);
    }
    for (bool any = true; any;) {
      any = false;
      for (int rank = 0; rank < ranks(); ++rank) {
        Rank& me = ranks_[at(rank)];
        for (; me.next < me.steps.rest.size() && make(rank, me.steps.rest[me.next]); ++me.next) {
          any = true;
        }
      }
    }
    bool done = true;
    for (const Rank& each : ranks_) done &= each.next == each.steps.rest.size();
    for (const auto& [ends, queue] : messages_) done &= queue.empty();
    return done;
  }

  // [part, host] messages that have come from another host.
  std::map<std::pair<int, int>, int> crossings;

 private:
  struct Message {
    int part;
    std::string text;
  };
  struct Rank {
    BlockSteps steps;
    std::vector<std::string> slots, values;
    std::size_t next = 0;
  };

  std::string& place(int rank, const BlockStep& step, int slot) {
    Rank& me = ranks_[at(rank)];
    return slot == BlockStep::kValues ? me.values[at(step.part)] : me.slots[at(slot)];
  }

  bool make(int rank, const BlockStep& step) {
    switch (step.what) {
      case What::kReceive:
        ++posted_[{step.peer, rank, step.second_hand}];
        return true;
      case What::kSend:
        number_[{rank, step.request}] = sent_[{rank, step.peer, step.second_hand}]++;
        messages_[{rank, step.peer, step.second_hand}].push_back(
            {step.part, place(rank, step, step.place)});
        if (hosts_[at(rank)] != hosts_[at(step.peer)]) {
          ++crossings[{step.part, hosts_[at(rank)] * 100 + hosts_[at(step.peer)]}];
        }
        return true;
      case What::kReceived: {
        std::deque<Message>& queue = messages_[{step.peer, rank, step.second_hand}];
        if (queue.empty()) return false;
        return take(rank, step, queue);
      }
      case What::kAdd:
        place(rank, step, step.place) =
            "(" + place(rank, step, step.left) + "+" + place(rank, step, step.right) + ")";
        return true;
      case What::kSent:  // a large message leaves once its receive is posted
        return number_.at({rank, step.request}) < posted_[{rank, step.peer, step.second_hand}];
    }
    return true;
  }

  // Receives take messages in the order in which they were posted, whichever is waited for first.
  bool take(int rank, const BlockStep& waited, std::deque<Message>& queue) {
    std::size_t earlier = 0;
    for (const BlockStep& step : ranks_[at(rank)].steps.begin) {
      if (step.what != What::kReceive || step.peer != waited.peer ||
          step.second_hand != waited.second_hand) {
        continue;
      }
      if (step.request == waited.request) break;
      if (!taken_.contains({rank, step.request})) ++earlier;
    }
    if (queue.size() <= earlier) return false;
    const auto found = queue.begin() + static_cast<std::ptrdiff_t>(earlier);
    EXPECT_EQ(found->part, waited.part) << "rank " << rank << " from " << waited.peer;
    place(rank, waited, waited.place) = found->text;
    queue.erase(found);
    taken_.insert({{rank, waited.request}, true});
    return true;
  }

  std::vector<int> hosts_;
  std::vector<Rank> ranks_;
  using Ends = std::tuple<int, int, bool>;  // from, to, second-hand
  std::map<Ends, std::deque<Message>> messages_;
  std::map<Ends, int> posted_, sent_;
  std::map<std::pair<int, int>, int> number_;  // [rank, request] of a send, among those of its ends
  std::map<std::pair<int, int>, bool> taken_;
};

// Hosts of up to 9 ranks: one, one each, pairs, threes, in turns, one rank apart from the others.
std::vector<std::vector<int>> arrangements() {
  std::vector<std::vector<int>> made;
  for (int ranks = 2; ranks <= 9; ++ranks) {
    for (const auto& host_of : std::vector<std::function<int(int)>>{
             [](int) { return 0; }, [](int rank) { return rank; },
             [](int rank) { return rank / 2; }, [](int rank) { return rank / 3; },
             [](int rank) { return rank % 2; }, [](int rank) { return rank / 4; },
             [](int rank) { return rank == 1 ? 1 : 0; }}) {
      std::vector<int>& hosts = made.emplace_back();
      for (int rank = 0; rank < ranks; ++rank) hosts.push_back(host_of(rank));
    }
  }
  return made;
}

TEST(BlockStepsTest, SumEveryPartInTheOrderOfTheTree) {
  for (const std::vector<int>& hosts : arrangements()) {
    SCOPED_TRACE(::testing::PrintToString(hosts));
    Job job(hosts, scatter_steps);
    for (int rank = 0; rank < job.ranks(); ++rank) {
      for (int part = 0; part < job.ranks(); ++part) job.value(rank, part) = std::to_string(rank);
    }
    ASSERT_TRUE(job.run());
    for (int part = 0; part < job.ranks(); ++part) {
      EXPECT_EQ(job.value(part, part), tree(0, job.ranks()));
    }
  }
}

TEST(BlockStepsTest, BringEveryPartToAllAndOnceToEachHost) {
  for (const std::vector<int>& hosts : arrangements()) {
    SCOPED_TRACE(::testing::PrintToString(hosts));
    Job job(hosts, gather_steps);
    for (int rank = 0; rank < job.ranks(); ++rank) job.value(rank, rank) = std::to_string(rank);
    ASSERT_TRUE(job.run());
    for (int rank = 0; rank < job.ranks(); ++rank) {
      for (int part = 0; part < job.ranks(); ++part) {
        EXPECT_EQ(job.value(rank, part), std::to_string(part)) << rank;
      }
    }
    const std::set<int> distinct(hosts.begin(), hosts.end());
    EXPECT_EQ(job.crossings.size(), hosts.size() * (distinct.size() - 1));
    for (const auto& [ends, count] : job.crossings) EXPECT_EQ(count, 1) << ends.first;
  }
}

TEST(BlockStepsTest, SendTheSumOfASubtreeOnOneHostAsOneAddend) {
  for (const std::vector<int>& hosts :
       {std::vector<int>{0, 0, 1, 1}, std::vector<int>{0, 0, 0, 0, 1, 1, 1}}) {
    Job job(hosts, scatter_steps);
    ASSERT_TRUE(job.run());
    EXPECT_EQ(job.crossings.size(), hosts.size());  // one for each part
    for (const auto& [ends, count] : job.crossings) EXPECT_EQ(count, 1) << ends.first;
  }
  // The tree adds ranks of two hosts first.
  Job job({0, 1, 0, 1}, scatter_steps);
  ASSERT_TRUE(job.run());
  EXPECT_EQ(job.crossings.size(), 4U);
  for (const auto& [ends, count] : job.crossings) EXPECT_EQ(count, 2) << ends.first;
}

TEST(BlockStepsTest, TheirCrossingsAreThoseOfTheMessages) {
  for (auto* steps_of : {&scatter_steps, &gather_steps}) {
    for (const std::vector<int>& hosts : arrangements()) {
      SCOPED_TRACE(::testing::PrintToString(hosts));
      Job job(hosts, steps_of);
      ASSERT_TRUE(job.run());
      std::size_t messages = 0;
      for (const auto& [ends, count] : job.crossings) messages += at(count);
      EXPECT_EQ(crossings(hosts, *steps_of).size(), messages);
    }
  }
}

TEST(BlockStepsTest, CrossSummedWhereASubtreeIsOnOneHost) {
  struct Expected {
    std::vector<int> hosts;
    std::ptrdiff_t addends, summed, parts;
  };
  for (const auto& [hosts, addends, summed, parts] :
       std::vector<Expected>{{{0}, 0, 0, 0},
                             {{0, 0, 0}, 0, 0, 0},
                             {{0, 0, 1, 1}, 4, 4, 4},
                             {{0, 1, 0, 1}, 8, 0, 4},  // the tree adds ranks of two hosts first
                             {{0, 1, 1, 0}, 8, 0, 4},
                             {{0, 0, 0, 1}, 5, 1, 4},  // three ranks are no subtree of four
                             {{0, 1, 2}, 6, 0, 6},
                             {{0, 1, 2, 3}, 12, 0, 12},
                             {{0, 0, 1, 1, 2, 2}, 12, 12, 12},
                             {{0, 0, 1, 1, 0, 0, 1, 1}, 16, 16, 8}}) {
    SCOPED_TRACE(::testing::PrintToString(hosts));
    const std::vector<Crossing> made = crossings(hosts, scatter_steps);
    EXPECT_EQ(std::ssize(made), addends);
    EXPECT_EQ(std::count_if(made.begin(), made.end(), [](const auto& each) { return each.summed; }),
              summed);
    EXPECT_EQ(std::ssize(crossings(hosts, gather_steps)), parts);
  }
}

TEST(BlockStepsTest, NeedAsManySlotsAsThereAreOtherRanksOnOneHost) {
  EXPECT_EQ(scatter_steps(std::vector<int>(7), 3).slots, 6);
  EXPECT_LT(scatter_steps(std::vector<int>{0, 0, 0, 0, 1, 1, 1, 1}, 3).slots, 16);
  EXPECT_EQ(gather_steps(std::vector<int>{0, 0, 1, 1}, 0).slots, 0);
}

}  // namespace
}  // namespace sluice
