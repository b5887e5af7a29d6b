// Watchdogs of ranks that are threads of this process; hangs.py has real processes.
#include "runtime/watchdog/watchdog.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <sluice/error.hpp>

#include "comm/base/index.hpp"
#include "runtime/group/activity.hpp"
#include "runtime/program/doctor/live_status.hpp"
#include "tests/loopback/loopback.hpp"
#include "tests/runtime/temporary_directory.hpp"

namespace sluice {
namespace {

using ::testing::HasSubstr;
using Clock = std::chrono::steady_clock;

constexpr auto kWatchPatience = std::chrono::seconds(30);

PlanOp op(OpKind kind, ActionKind action, int stage, int micro_batch) {
  PlanOp result;
  result.kind = kind;
  result.action = action;
  result.stage = stage;
  result.micro_batch = micro_batch;
  return result;
}

TEST(ActivityBoardTest, AFoldIsOfAVirtualReplica) {
  ActivityBoard board(2, "node3");
  std::array<char, 96> room{};
  board.at(op(OpKind::kFold, ActionKind::kBackward, 2, 5), 17);
  EXPECT_EQ(describe_doing(board.read(), room), "the fold of virtual replica 5 in stage 2");
}

TEST(ActivityBoardTest, NamesARecomputation) {
  ActivityBoard board(2, "node3");
  std::array<char, 96> room{};
  board.at(op(OpKind::kCompute, ActionKind::kRecompute, 2, 5), 17);
  EXPECT_EQ(describe_doing(board.read(), room), "2RECOMPUTE5");
}

TEST(ActivityBoardTest, ShowsWhatTheRankDoes) {
  ActivityBoard board(2, "node3");
  std::array<char, 96> room{};
  EXPECT_EQ(board.read().doing, Doing::kOutside);
  board.enter(Doing::kCalling);
  board.begin_run(Phase::kTrain, 1207);
  board.at(op(OpKind::kCompute, ActionKind::kForward, 2, 5), 17);
  Activity now = board.read();
  EXPECT_EQ(describe_doing(now, room), "2F5");
  EXPECT_EQ(now.step, 1207U);
  EXPECT_EQ(now.op, 17);
  EXPECT_FALSE(now.waits);
  board.begin_wait({WaitSubject::What::kReceive, 1, 3, 4096, 12}, Axis::kPipeline);
  now = board.read();
  EXPECT_TRUE(now.waits);
  EXPECT_EQ(now.axis, Axis::kPipeline);
  EXPECT_EQ(now.subject.peer, 1);
  EXPECT_EQ(now.subject.bytes, 4096U);
  EXPECT_EQ(now.subject.needed_op, 12);
  EXPECT_EQ(describe_doing(now, room), "2F5");
  const std::uint64_t moves = now.moves;
  EXPECT_EQ(board.read().moves, moves) << "nothing moved";
  for (const std::optional<Axis> axis : {std::optional<Axis>(), {Axis::kTensor}}) {
    board.begin_wait({WaitSubject::What::kCollectiveReceive, 1, 3, 4096, 12}, axis);
    EXPECT_EQ(board.read().axis, axis);
  }
  board.end_wait();
  EXPECT_FALSE(board.read().waits);
  EXPECT_GT(board.read().moves, moves);
  const PlannedCollective sum{.axis = CollectiveAxis::kReplica,
                              .kind = CollectiveKind::kReduceScatter,
                              .bytes = std::uint64_t{1} << 40,
                              .type = DType::kF64};
  EXPECT_FALSE(board.read().collective);
  {
    const CollectiveScope scope(&board, sum, 300);
    EXPECT_EQ(board.read().collective, sum);
    EXPECT_EQ(board.read().collectives_begun, 301);
  }
  EXPECT_FALSE(board.read().collective);
  EXPECT_EQ(board.read().collectives_begun, 301) << "it is over, and counts until the op is";
  board.at(op(OpKind::kCompute, ActionKind::kForward, 2, 6), 13);
  EXPECT_EQ(board.read().collectives_begun, 0);
  { const CollectiveScope scope(&board, sum, 0); }
  board.begin_run(Phase::kTrain, 8);
  EXPECT_EQ(board.read().collectives_begun, 0);
}

TEST(ActivityBoardTest, HasRoomForMoreKinds) {
  ActivityBoard board(0, "host");
  const auto kind = static_cast<OpKind>(17);
  const auto action = static_cast<ActionKind>(33);
  board.at(op(kind, action, 3, 5), 0);
  const Activity now = board.read();
  EXPECT_EQ(now.doing, Doing::kOperation);
  EXPECT_EQ(now.kind, kind);
  EXPECT_EQ(now.action, action);
}

TEST(ActivityBoardTest, ShowsOneMomentToOtherThreads) {
  ActivityBoard board(0, "host");
  std::atomic<bool> over = false;
  std::thread reader([&] {
    while (!over) {
      const Activity now = board.read();
      EXPECT_EQ(now.stage % 1000, now.op % 1000);
      EXPECT_EQ(now.micro_batch, now.op);
    }
  });
  for (int i = 0; i < 300'000; ++i) {
    board.at(op(OpKind::kCompute, ActionKind::kForward, i % 1000, i), i);
  }
  over = true;
  reader.join();
}

TEST(ActivityBoardTest, RemembersTheSlowestRecentStep) {
  ActivityBoard board(0, "host");
  for (int step = 0; step < 40; ++step) board.step_ended(step == 10 ? 9 : step == 30 ? 4 : 1);
  EXPECT_EQ(board.pace().steps, 40U);
  EXPECT_EQ(board.pace().slowest, 4);
}

WatchedJob job_of(ActivityBoard& board, int ranks) {
  WatchedJob job{.activity = &board, .abort = {}, .ranks = {}};
  for (int rank = 0; rank < ranks; ++rank) job.ranks.push_back({"host", {rank}, 0});
  return job;
}

// Polls as a wait does, until the watchdog ends it.
std::string wait_for_end(ActivityBoard& board) {
  const auto deadline = Clock::now() + kWatchPatience;
  try {
    while (Clock::now() < deadline) {
      board.poll();
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kPeer);
    return error.what();
  }
  return "no end";
}

TEST(WatchdogTest, EndsTheWaitsOfADeadlockOnAllRanks) {
  const TemporaryDirectory directory;
  run_loopback(3, [&](Communicator& comm) {
    Collectives world(comm, 0, nullptr);
    ActivityBoard board(comm.rank(), "host");
    const Watchdog watchdog(world, job_of(board, 3),
                            {.on = true, .timeout = 1, .directory = directory.path().string()});
    board.begin_run(Phase::kTrain, 7);
    board.at(op(OpKind::kWaitRecv, ActionKind::kRecvForward, comm.rank(), 1), 4);
    board.begin_wait({WaitSubject::What::kReceive, (comm.rank() + 1) % 3, 0, 64, 4},
                     Axis::kPipeline);
    EXPECT_THAT(wait_for_end(board), HasSubstr("deadlock: rank 0 on host (stage 0) waits for"));
    world.barrier();  // no rank leaves while another still waits
  });
  int reports = 0;
  for (const auto& each : std::filesystem::directory_iterator(directory.path())) {
    reports += each.path().filename().string().starts_with("hang-") ? 1 : 0;
  }
  EXPECT_EQ(reports, 1);
}

TEST(WatchdogTest, NamesARankThatHasLeftTheOthersWaiting) {
  run_loopback(2, [&](Communicator& comm) {
    Collectives world(comm, 0, nullptr);
    ActivityBoard board(comm.rank(), "host");
    auto watchdog = std::make_unique<Watchdog>(world, job_of(board, 2),
                                               PipelineOptions::Watch{.on = true, .timeout = 1});
    if (comm.rank() == 1) {
      watchdog.reset();
    } else {
      board.begin_wait({WaitSubject::What::kReceive, 1, 0, 64, -1}, Axis::kPipeline);
      EXPECT_THAT(wait_for_end(board), HasSubstr("rank 1 has destroyed its pipeline"));
    }
    world.barrier();
  });
}

TEST(WatchdogTest, LeavesRanksAloneThatMove) {
  run_loopback(2, [&](Communicator& comm) {
    Collectives world(comm, 0, nullptr);
    ActivityBoard board(comm.rank(), "host");
    const Watchdog watchdog(world, job_of(board, 2), {.on = true, .timeout = 1});
    const auto until = Clock::now() + std::chrono::seconds(3);
    while (Clock::now() < until) {
      board.begin_wait({WaitSubject::What::kReceive, 1 - comm.rank(), 0, 64, -1}, Axis::kPipeline);
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      board.end_wait();
    }
    EXPECT_FALSE(board.interrupted());
    world.barrier();
  });
}

// Before the next beat, so that a rank that stops in a save is not last seen elsewhere.
TEST(WatchdogTest, TellsTheOthersAtOnceOfASave) {
  ActivityBoard board(0, "host");
  std::optional<RankStatus> status;
  Watcher watcher(job_of(board, 2), {.on = true, .timeout = 1000}, {});
  watcher.begin([&](int /*rank*/, NoteKind kind, std::span<const std::byte> contents) {
    ASSERT_EQ(kind, NoteKind::kStatus);
    ASSERT_EQ(contents.size(), sizeof(RankStatus));
    std::memcpy(&status.emplace(), contents.data(), contents.size());
  });
  for (const Doing doing : {Doing::kSettingUp, Doing::kCalling, Doing::kSaving}) {
    board.enter(doing);
    (void)watcher.tick();
    ASSERT_TRUE(status);
    EXPECT_EQ(status->activity.doing, doing);
  }
}

// The doctor's table of a job of two ranks; `shared`: they are the two that share a stage.
std::string table_of_job(bool shared) {
  const TemporaryDirectory directory;
  run_loopback(2, [&](Communicator& comm) {
    Collectives world(comm, 0, nullptr);
    ActivityBoard board(comm.rank(), "host");
    WatchedJob job = job_of(board, 2);
    for (int rank = 0; shared && rank < 2; ++rank) job.ranks[at(rank)].tensor = rank;
    const Watchdog watchdog(world, std::move(job),
                            {.on = true, .timeout = 1, .directory = directory.path().string()});
    board.begin_run(Phase::kTrain, 3);
    board.begin_run(Phase::kEvaluate, 0);
    board.begin_wait({WaitSubject::What::kReceive, 1 - comm.rank(), 0, 64, -1}, Axis::kPipeline);
    board.saved(3);
    world.barrier();
  });
  return live_status(directory.path(), 4e9);
}

TEST(WatchdogTest, WritesAStatusThatTheDoctorReads) {
  const std::string text = table_of_job(false);
  EXPECT_THAT(text, HasSubstr("step       3\n"));
  EXPECT_THAT(text, HasSubstr("the job has ended in order"));
  EXPECT_THAT(text, HasSubstr("step-00000003"));
  EXPECT_THAT(text, HasSubstr("   0  host        0  0         ended\n"));
  EXPECT_THAT(text, HasSubstr("\nrank  host  replica  stages    state\n"));
  EXPECT_THAT(text, HasSubstr("   1  host        0  1         ended\n"));
  const std::string shared = table_of_job(true);
  EXPECT_THAT(shared, HasSubstr("\nrank  host  replica  tensor  stages    state\n"));
  EXPECT_THAT(shared, HasSubstr("   1  host        0       1  1         ended\n"));
}

TEST(WatchdogTest, RefusesLimitsThatCannotWork) {
  const auto refused = [](const PipelineOptions::Watch& watch) {
    try {
      require_sensible(watch);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_EQ(refused({.on = true}), "");
  EXPECT_EQ(refused({.on = true, .timeout = 1, .action_timeout = 5}), "");
  EXPECT_THAT(refused({.on = true, .timeout = 0.5}),
              HasSubstr("the watchdog's timeout is 0.5 s; legal"));
  EXPECT_THAT(refused({.on = true, .timeout = -1}), HasSubstr("timeout is -1 s"));
  EXPECT_THAT(refused({.on = true, .action_timeout = 1e9}),
              HasSubstr("timeout of an action is 1000000000 s"));
  EXPECT_THAT(refused({.on = true, .first_port = 9, .last_port = 8}), HasSubstr("ports are"));
  EXPECT_THAT(refused({.on = true, .first_port = 0, .last_port = 8}), HasSubstr("ports are"));
}

TEST(LiveStatusTest, NamesADirectoryWithoutAJobAndAFileOfAnotherForm) {
  const TemporaryDirectory directory;
  EXPECT_THROW(static_cast<void>(live_status(directory.path(), 0)), Error);
  std::ofstream(directory.path() / "status.json") << "[1]";
  try {
    static_cast<void>(live_status(directory.path(), 0));
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kData);
    EXPECT_THAT(error.what(), HasSubstr("is no status of a job"));
  }
}

}  // namespace
}  // namespace sluice
