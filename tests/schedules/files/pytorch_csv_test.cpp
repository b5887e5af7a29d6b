#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include <sluice/generate.hpp>
#include <sluice/plan.hpp>
#include <sluice/schedule_file.hpp>

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

std::string refusal_of(const std::string& text, CsvAlphabet alphabet = CsvAlphabet::kDetect) {
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

TEST(PytorchCsvTest, ChecksMessagesThenDropsAllThatIsNotCompute) {
  const PytorchCsv csv = parsed(sample("every_message_cell.csv"));
  EXPECT_EQ(csv.messages, 8);
  EXPECT_EQ(csv.other_dropped, 6);
  EXPECT_EQ(text_of(csv.schedule.ranks[0]), "0F0 0F1 0I0 0W0 0B1");
  EXPECT_EQ(text_of(csv.schedule.ranks[1]), "1F0 1I0 1W0 1F1 1B1");
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
  EXPECT_THAT(refusal_of("0F0,0BW0", CsvAlphabet::kCurrent),
              AllOf(HasSubstr("row 1, column 2"), HasSubstr("unknown kind 'BW'")));
  EXPECT_THAT(refusal_of("0F0,0I0,0W0", CsvAlphabet::kOlder),
              AllOf(HasSubstr("row 1, column 2"), HasSubstr("has I")));
}

TEST(PytorchCsvTest, RefusesAMixOfAlphabets) {
  EXPECT_THAT(refusal_of("0F0,0BW0\n1F0,1I0,1W0"),
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
    const std::string message = refusal_of("0F0,0B0\n1F0,," + std::string(cell) + ",1B0");
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
  EXPECT_THAT(refusal_of(""), HasSubstr("the file is empty"));
  EXPECT_THAT(refusal_of("0F0,0B0\n\n"), HasSubstr("row 2, column 1: the row computes nothing"));
  EXPECT_THAT(refusal_of("0F0,0B0\n0F1,0B1"),
              AllOf(HasSubstr("row 2, column 1"), HasSubstr("row 1 computes stage 0")));
  EXPECT_THAT(refusal_of("0F0,0B0\n2F0,2B0"), HasSubstr("no row computes stage 1"));
}

TEST(PytorchCsvTest, RefusesIndicesWithoutActionsBeforeAllocatingForThem) {
  EXPECT_THAT(refusal_of("2000000000F0"), HasSubstr("row 1, column 1"));
  EXPECT_THAT(refusal_of("0F2000000000"), HasSubstr("row 1, column 1"));
  EXPECT_THAT(refusal_of("0F5000000"), HasSubstr("only 1 compute actions"));
}

TEST(PytorchCsvTest, RefusesMessagesThatDoNotPairNamingTheirCell) {
  EXPECT_THAT(refusal_of("0F0,,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0"),
              AllOf(HasSubstr("row 2, column 1"), HasSubstr("1RECV_F0")));
  EXPECT_THAT(refusal_of("0F0,,0SEND_F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0"),
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
    for (const CsvAlphabet alphabet : {CsvAlphabet::kCurrent, CsvAlphabet::kOlder}) {
      const std::string compute = to_pytorch_csv(schedule, alphabet);
      EXPECT_TRUE(same_steps(parsed(compute, alphabet).schedule, schedule)) << compute;
      const std::string comms = to_pytorch_csv(lower(schedule, no_reductions), alphabet);
      const PytorchCsv back = parsed(comms, alphabet);
      EXPECT_TRUE(same_steps(back.schedule, schedule)) << comms;
      EXPECT_EQ(back.messages > 0, schedule.placement.ranks() > 1);
    }
  }
}

TEST(PytorchCsvTest, WritesNothingPytorchHasNoNameFor) {
  EXPECT_THAT(refusal([] {
                (void)to_pytorch_csv(lower(generate("gpipe", {1, 1, 1}), {}));
              }),
              HasSubstr("0OPTIMIZER"));
}

// The files PyTorch ships as test data, where this machine has them: SLUICE_PYTORCH_SCHEDULES in
// the environment, or the CMake variable of that name, names their folder.
class PytorchFilesTest : public ::testing::TestWithParam<const char*> {
 protected:
  static std::string folder() {
    const char* const named = std::getenv("SLUICE_PYTORCH_SCHEDULES");
    return named != nullptr ? named : SLUICE_PYTORCH_SCHEDULES;
  }
  void SetUp() override {
    text_ = testing::contents(folder() + "/" + GetParam());
    if (text_.empty()) GTEST_SKIP() << "no " << GetParam() << " in " << folder();
  }
  std::string text_;
};

TEST_P(PytorchFilesTest, LoadsChecksPlansAndVerifies) {
  const PytorchCsv csv = parse_pytorch_csv(text_, GetParam());
  EXPECT_EQ(csv.alphabet, CsvAlphabet::kCurrent);
  EXPECT_EQ(csv.messages > 0, std::string(GetParam()).find("comms") != std::string::npos);
  EXPECT_EQ(complaint_about(csv.schedule), "");
  EXPECT_TRUE(same_steps(parsed(to_pytorch_csv(csv.schedule)).schedule, csv.schedule));
  EXPECT_TRUE(is_exact(csv.schedule));
}

INSTANTIATE_TEST_SUITE_P(All, PytorchFilesTest,
                         ::testing::Values("zb1p_2rank_2stagep_compute.csv",
                                           "zb1p_2rank_2stagep_comms.csv",
                                           "dualpipev_4rank_10mb.csv"),
                         [](const auto& instance) {
                           const std::string name(instance.param);
                           return name.substr(0, name.find('.'));
                         });

}  // namespace
}  // namespace sluice
