// simulate() with in-order queues of messages, as NCCL's communicators are.
#include <gtest/gtest.h>

#include <stdexcept>
#include <string>

#include <sluice/error.hpp>
#include <sluice/plan.hpp>
#include <sluice/schedule.hpp>
#include <sluice/search.hpp>
#include <sluice/simulate.hpp>

namespace sluice {
namespace {

constexpr double kRounding = 1 + 1e-12;

SimulationTimes with(SimulationTimes times, MessageQueues queues) {
  times.queues = queues;
  return times;
}

// Rank 1 issues the receive of the second activation before it sends the first one on: in unit time
// both happen at once. Stage 0 is slow, so the receive runs until 20, and the send waits for it.
TEST(SimulateLanesTest, APostedReceiveHoldsBackASendThatIsReady) {
  const Schedule schedule = generate("forward-only", {3, 2, 1});
  const SimulationTimes times = {.stages = {{10, 0, 0, 0}, {1, 0, 0, 0}, {1, 0, 0, 0}},
                                 .message = 0};
  const auto start_on_last = [&](MessageQueues queues) {
    return simulate(schedule, with(times, queues)).timeline[2][0].start;
  };
  EXPECT_EQ(start_on_last(MessageQueues::kNone), 11);
  EXPECT_EQ(start_on_last(MessageQueues::kPerPair), 11);
  EXPECT_EQ(start_on_last(MessageQueues::kPerRank), 20);
}

// One message at a time moves through a rank's queue, and takes its latency there.
TEST(SimulateLanesTest, MessagesOfOneQueueFollowEachOther) {
  const Schedule schedule = generate("forward-only", {2, 3, 1});
  const SimulationTimes times = {.stages = {{1, 0, 0, 0}}, .message = 4};
  EXPECT_EQ(simulate(schedule, times).makespan, 1 + 1 + 1 + 4 + 1);
  EXPECT_EQ(simulate(schedule, with(times, MessageQueues::kPerRank)).makespan, 1 + 3 * 4 + 1);
}

TEST(SimulateLanesTest, QueuesOnlyAddToWhatIsWaitedFor) {
  for (const std::string& name : schedule_names()) {
    for (const int p : {1, 2, 3, 5}) {
      for (const int m : {1, 4, 9}) {
        const Schedule schedule = [&] {
          try {
            return generate(name, {p, m, 1});
          } catch (const Error&) {
            return generate(name, {p, m, 2});
          }
        }();
        SimulationTimes times;
        for (int s = 0; s < schedule.placement.stages(); ++s) {
          times.stages.push_back({1 + 0.5 * (s % 3), 1.5 - 0.4 * (s % 2), 0.8, 0.1});
        }
        times.message = 0.25;
        times.bytes = {{.until_input = 3, .until_weight = 2, .output = 1}};
        const Simulation free = simulate(schedule, times);
        const Simulation rank = simulate(schedule, with(times, MessageQueues::kPerRank));
        const Simulation pair = simulate(schedule, with(times, MessageQueues::kPerPair));
        SCOPED_TRACE(name + ' ' + std::to_string(p) + ' ' + std::to_string(m));
        EXPECT_LE(free.makespan, pair.makespan * kRounding);
        EXPECT_LE(pair.makespan, rank.makespan * kRounding);
        EXPECT_EQ(free.messages, rank.messages);
        EXPECT_EQ(free.peak_in_flight, rank.peak_in_flight);
        for (int r = 0; r < p; ++r) {
          const auto i = static_cast<std::size_t>(r);
          EXPECT_NEAR(free.busy[i], rank.busy[i], 1e-9);
        }
        if (p == 1) {
          EXPECT_EQ(free.makespan, rank.makespan);
        }
        const Simulation lowered =
            simulate(lower(schedule, {}), with(times, MessageQueues::kPerRank));
        EXPECT_EQ(lowered.makespan, rank.makespan);
      }
    }
  }
}

TEST(SimulateLanesTest, ASearchRanksByWhatTheQueuesAllow) {
  SearchRequest request;
  request.ranks = 4;
  request.micro_batches = 8;
  request.model.stages = {{1, 1, 1, 0}};
  request.model.message = 0.2;
  request.model.queues = MessageQueues::kPerRank;
  request.effort = 200'000;
  const SearchResult found = search_schedule(request);
  EXPECT_EQ(found.simulation.makespan, simulate(found.schedule, found.times).makespan);
  EXPECT_LE(found.simulation.makespan, found.candidates.front().makespan * kRounding);
  EXPECT_GE(found.simulation.makespan, found.lower_bound);
  request.model.queues = MessageQueues::kNone;
  const SearchResult free = search_schedule(request);
  EXPECT_LE(
      found.simulation.makespan,
      simulate(free.schedule, with(free.times, MessageQueues::kPerRank)).makespan * kRounding);
}

}  // namespace
}  // namespace sluice
