#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include <sluice/plan.hpp>
#include <sluice/schedule.hpp>
#include <sluice/schedule_file.hpp>
#include <sluice/simulate.hpp>

#include "tests/schedules/files/file_tools.hpp"
#include "tests/schedules/hand_made.hpp"

namespace sluice {
namespace {

using ::testing::AllOf;
using testing::complaint_about;
using ::testing::HasSubstr;
using testing::refusal;
using testing::same_steps;
using testing::sample;
using testing::text_of;

PytorchCsv parsed(const std::string& text, CsvAlphabet alphabet = CsvAlphabet::kDetect) {
  return parse_pytorch_csv(text, "test", alphabet);
}

std::string csv_refusal(const std::string& text, CsvAlphabet alphabet = CsvAlphabet::kDetect) {
  return refusal([&] { (void)parsed(text, alphabet); });
}

TEST(PytorchCsvTest, ReadsIdleCellsAndOverlappedPairs) {
  const PytorchCsv csv = parsed(sample("overlapped_v.csv"));
  EXPECT_EQ(csv.schedule.name, "test");
  EXPECT_EQ(csv.schedule.placement, Placement::v_shape(2));
  EXPECT_EQ(csv.schedule.micro_batches, 2);
  EXPECT_EQ(csv.alphabet, CsvAlphabet::kCurrent);
  EXPECT_EQ(csv.messages, 0);
  EXPECT_EQ(text_of(csv.schedule.ranks[1]), "1F0 2F0 (1F1;2B0)OVERLAP_F_B 1B0 2F1 2I1 1I1 1W1 2W1");
  EXPECT_EQ(complaint_about(csv.schedule), "");
}

TEST(PytorchCsvTest, ChecksMessagesThenDropsThemAndKeepsSharding) {
  const PytorchCsv csv = parsed(sample("every_message_cell.csv"));
  EXPECT_EQ(csv.messages, 8);
  EXPECT_EQ(csv.waits, 0);
  EXPECT_EQ(csv.alphabet, CsvAlphabet::kNoWaits);
  EXPECT_EQ(csv.sharding, 6);
  EXPECT_EQ(text_of(csv.schedule.ranks[0]), "0F0 0F1 0I0 0W0 0UNSHARD 0RESHARD 0B1 0REDUCE_GRAD");
  EXPECT_EQ(text_of(csv.schedule.ranks[1]), "1UNSHARD 1F0 1I0 1W0 1F1 1B1 1RESHARD 1REDUCE_GRAD");
  EXPECT_EQ(complaint_about(csv.schedule), "");
}

TEST(PytorchCsvTest, DetectsTheOlderAlphabet) {
  const PytorchCsv csv = parsed(sample("older_alphabet.csv"));
  EXPECT_EQ(csv.alphabet, CsvAlphabet::kOlder);
  EXPECT_EQ(text_of(csv.schedule.ranks[0]), "0F0 0F1 0I0 0W0 0B1");
  EXPECT_EQ(complaint_about(csv.schedule), "");
  // Halves only, with an overlapped pair.
  const PytorchCsv halves = parsed("0F0,(0F1;0B0)OVERLAP_F_B,0W0,0B1,0W1");
  EXPECT_EQ(halves.alphabet, CsvAlphabet::kOlder);
  EXPECT_EQ(text_of(halves.schedule.ranks[0]), "0F0 (0F1;0I0)OVERLAP_F_B 0W0 0I1 0W1");
  EXPECT_EQ(parsed("0F0,0B0").alphabet, CsvAlphabet::kCurrent);
}

TEST(PytorchCsvTest, AStatedAlphabetIsNotDetected) {
  EXPECT_EQ(text_of(parsed("0F0,0B0", CsvAlphabet::kOlder).schedule.ranks[0]), "0F0 0I0");
  EXPECT_THAT(csv_refusal("0F0,0BW0", CsvAlphabet::kCurrent),
              AllOf(HasSubstr("row 1, column 2"), HasSubstr("unknown kind 'BW'")));
  EXPECT_THAT(csv_refusal("0F0,0I0,0W0", CsvAlphabet::kOlder),
              AllOf(HasSubstr("row 1, column 2"), HasSubstr("has I")));
}

TEST(PytorchCsvTest, RefusesAMixOfAlphabets) {
  EXPECT_THAT(csv_refusal("0F0,0BW0\n1F0,1I0,1W0"),
              AllOf(HasSubstr("row 1, column 2"), HasSubstr("row 2, column 2")));
}

TEST(PytorchCsvTest, TakesTheWholeCellOrNamesRowAndColumn) {
  for (const char* cell : {"0F0x",         "0F",
                           "F0",           "0f0",
                           " 0F0",         "0F0 ",
                           "\"0F0\"",      "0F00",
                           "-1F0",         "0F0>1",
                           "0F0@1",        "(0F0)",
                           "(0F0;0B0)",    "0OPTIMIZER",
                           "0REDUCE_TIED", "0RECOMPUTE0",
                           "0F0\r",        "0F99999999999",
                           "\x01",         "\357\273\2770F0"}) {
    const std::string message = csv_refusal("0F0,0B0\n1F0,," + std::string(cell) + ",1B0");
    EXPECT_THAT(message, HasSubstr("row 2, column 3")) << cell;
    for (const char c : message) EXPECT_TRUE(c >= ' ' && c <= '~') << cell;
  }
}

TEST(PytorchCsvTest, LineEndsMayBeMissingLineFeedOrBoth) {
  const PytorchCsv plain = parsed("0F0,0B0\n1F0,1B0\n");
  EXPECT_TRUE(same_steps(parsed("0F0,0B0\r\n1F0,1B0\r\n").schedule, plain.schedule));
  EXPECT_TRUE(same_steps(parsed("0F0,0B0\n1F0,1B0").schedule, plain.schedule));
}

TEST(PytorchCsvTest, EveryRankComputesAndEveryStageHasOneRank) {
  EXPECT_THAT(csv_refusal(""), HasSubstr("the text is empty"));
  EXPECT_THAT(csv_refusal("0F0,0B0\n\n"), HasSubstr("row 2, column 1: the row computes nothing"));
  EXPECT_THAT(csv_refusal("0F0,0B0\n0F1,0B1"),
              AllOf(HasSubstr("row 2, column 1"), HasSubstr("row 1 computes stage 0")));
  EXPECT_THAT(csv_refusal("0F0,0B0\n2F0,2B0"), HasSubstr("no row computes stage 1"));
}

TEST(PytorchCsvTest, RefusesIndicesWithoutActionsBeforeAllocatingForThem) {
  EXPECT_THAT(csv_refusal("2000000000F0"), HasSubstr("row 1, column 1"));
  EXPECT_THAT(csv_refusal("0F2000000000"), HasSubstr("row 1, column 1"));
  EXPECT_THAT(csv_refusal("0F5000000"), HasSubstr("only 1 compute actions"));
}

TEST(PytorchCsvTest, RefusesMessagesThatDoNotPairNamingTheirCell) {
  EXPECT_THAT(csv_refusal("0F0,,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0"),
              AllOf(HasSubstr("row 2, column 1"), HasSubstr("1RECV_F0")));
  EXPECT_THAT(csv_refusal("0F0,,0SEND_F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0"),
              HasSubstr("row 1, column 4"));
}

TEST(PytorchCsvTest, ReadsBackEverythingItWrites) {
  std::vector<Schedule> schedules = testing::all_hand_made();
  for (const char* name : {"gpipe", "1f1b", "forward-only"}) {
    schedules.push_back(generate(name, {3, 5, 1}));
  }
  for (const Schedule& schedule : schedules) {
    LowerOptions no_reductions;
    no_reductions.reduce_grad = false;
    no_reductions.keep_pairs = true;
    for (const CsvAlphabet alphabet :
         {CsvAlphabet::kCurrent, CsvAlphabet::kNoWaits, CsvAlphabet::kOlder}) {
      const std::string compute = to_pytorch_csv(schedule, alphabet);
      EXPECT_TRUE(same_steps(parsed(compute, alphabet).schedule, schedule)) << compute;
      const std::string comms = to_pytorch_csv(lower(schedule, no_reductions), alphabet);
      const PytorchCsv back = parsed(comms, alphabet);
      EXPECT_TRUE(same_steps(back.schedule, schedule)) << comms;
      EXPECT_EQ(back.messages > 0, schedule.placement.ranks() > 1);
    }
  }
}

// Sharded parameters are none here: a schedule with and without them is planned, proven and timed
// alike.
TEST(PytorchCsvTest, PlanProofAndSimulationPassOverSharding) {
  const Schedule sharded = parsed(sample("every_message_cell.csv")).schedule;
  Schedule plain = sharded;
  for (auto& steps : plain.ranks) {
    std::erase_if(steps, [](const Step& step) { return is_sharding(step.action.kind); });
  }
  EXPECT_EQ(lower(sharded, {}).ranks, lower(plain, {}).ranks);
  EXPECT_EQ(complaint_about(sharded), "");
  const SimulationTimes times = {.stages = {StageTimes{}}, .message = 0.5};
  EXPECT_EQ(simulate(sharded, times).makespan, simulate(plain, times).makespan);
  EXPECT_EQ(peak_in_flight(sharded), peak_in_flight(plain));
  EXPECT_EQ(draw_svg(sharded, simulate(sharded, times)), draw_svg(plain, simulate(plain, times)));
  EXPECT_TRUE(same_steps(parse_schedule_json(to_schedule_json(sharded)).schedule, sharded));
  EXPECT_TRUE(same_steps(parsed(to_pytorch_csv(sharded)).schedule, sharded));
}

// What PyTorch 2.15 dumps of its own schedules (tests/schedules/files/pytorch_live.py).
class PytorchDumpTest : public ::testing::TestWithParam<const char*> {};

TEST_P(PytorchDumpTest, IsReadAndWrittenBackAsPytorchWroteIt) {
  const std::string text = sample(GetParam());
  const PytorchCsv csv = parsed(text);
  EXPECT_EQ(csv.alphabet, CsvAlphabet::kCurrent);
  EXPECT_EQ(complaint_about(csv.schedule), "");
  EXPECT_GT(csv.waits, csv.messages / 2);
  LowerOptions options;
  options.reduce_grad = false;
  options.keep_sharding = options.keep_pairs = true;
  const std::string ours = to_pytorch_csv(lower(csv.schedule, options));
  const PytorchCsv again = parsed(ours);
  EXPECT_TRUE(same_steps(again.schedule, csv.schedule));
  EXPECT_EQ(again.messages, csv.messages);
  EXPECT_EQ(again.waits, csv.waits);
}

INSTANTIATE_TEST_SUITE_P(All, PytorchDumpTest,
                         ::testing::Values("pytorch_2_15/looped_bfs.csv",
                                           "pytorch_2_15/interleaved.csv",
                                           "pytorch_2_15/interleaved_zero_bubble.csv",
                                           "pytorch_2_15/zbv.csv", "pytorch_2_15/dualpipev.csv"),
                         [](const auto& instance) {
                           const std::string name(instance.param);
                           return name.substr(name.find('/') + 1,
                                              name.find('.') - name.find('/') - 1);
                         });

TEST(PytorchCsvTest, WaitsComeAfterWhatTheyWaitFor) {
  const std::string second = "\n1RECV_F0,1F0,1B0,1SEND_B0,1WAIT_SEND_B0";
  EXPECT_EQ(parsed("0F0,0SEND_F0,0RECV_B0,0B0,0WAIT_SEND_F0" + second).waits, 2);
  EXPECT_THAT(csv_refusal("0F0,0WAIT_SEND_F0,0SEND_F0,0RECV_B0,0B0" + second),
              AllOf(HasSubstr("row 1, column 2"), HasSubstr("does not come before it")));
  EXPECT_THAT(csv_refusal("0F0,0SEND_F0,0RECV_B0,0B0,0WAIT_SEND_F0,0WAIT_SEND_F0" + second),
              HasSubstr("row 1, column 6"));
  EXPECT_THAT(csv_refusal("0F0,0SEND_F0,0RECV_B0,0B0" + second), HasSubstr("1 of 2 sends"));
  EXPECT_THAT(csv_refusal("0F0,0SEND_F0,0RECV_B0,0WAIT_RECV_B0,0B0" + second),
              AllOf(HasSubstr("row 1, column 4"), HasSubstr("waits for no send")));
  EXPECT_THAT(csv_refusal("0F0,0WAIT_F0,0B0"), HasSubstr("row 1, column 2"));
  EXPECT_THAT(csv_refusal("0F0,0WAIT_,0B0"), HasSubstr("row 1, column 2"));
  EXPECT_THAT(csv_refusal("0F0,0BW0,0REDUCE_GRAD,0WAIT_REDUCE_GRAD"),
              HasSubstr("this alphabet does not have"));
  const std::string two = "0F0,1F0,1B0,0B0,";
  EXPECT_EQ(parsed(two + "1REDUCE_GRAD,1WAIT_REDUCE_GRAD,0REDUCE_GRAD,0WAIT_REDUCE_GRAD").waits, 2);
  EXPECT_EQ(parsed(two + "1REDUCE_GRAD,0REDUCE_GRAD").sharding, 2);
  EXPECT_THAT(csv_refusal(two + "1REDUCE_GRAD,0REDUCE_GRAD,1WAIT_REDUCE_GRAD,0WAIT_REDUCE_GRAD"),
              AllOf(HasSubstr("row 1, column 6"), HasSubstr("one stage at a time")));
  EXPECT_THAT(csv_refusal(two + "1REDUCE_GRAD,1WAIT_REDUCE_GRAD,0REDUCE_GRAD"),
              HasSubstr("1 of 2 REDUCE_GRAD"));
}

TEST(PytorchCsvTest, OlderVersionsGetNoWaits) {
  LowerOptions messages;
  messages.reduce_grad = false;
  const Schedule lowered = lower(generate("zb-v", {2, 3, 1}), messages);
  EXPECT_THAT(to_pytorch_csv(lowered), HasSubstr("WAIT_SEND_F"));
  for (const CsvAlphabet alphabet : {CsvAlphabet::kNoWaits, CsvAlphabet::kOlder}) {
    const std::string text = to_pytorch_csv(lowered, alphabet);
    EXPECT_THAT(text, ::testing::Not(HasSubstr("WAIT")));
    EXPECT_EQ(parsed(text).alphabet, alphabet);
  }
}

TEST(PytorchCsvTest, WritesNothingPytorchHasNoNameFor) {
  EXPECT_THAT(refusal([] {
                (void)to_pytorch_csv(lower(generate("gpipe", {1, 1, 1}), {}));
              }),
              HasSubstr("0OPTIMIZER"));
}

}  // namespace
}  // namespace sluice
