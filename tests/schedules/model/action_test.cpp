#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <stdexcept>
#include <string>

#include <sluice/error.hpp>
#include <sluice/schedule.hpp>

namespace sluice {
namespace {

std::string action_refusal(std::string_view text) {
  try {
    (void)parse_step(text);
  } catch (const Error& error) {
    return error.what();
  }
  return "accepted";
}

TEST(ActionTest, EveryKindSurvivesTextAndBack) {
  for (int kind = 0; kind <= static_cast<int>(ActionKind::kRecompute); ++kind) {
    for (const int stage : {0, 7, 1023}) {
      for (const int micro_batch : {0, 10, 2147483647}) {
        Action action;
        action.kind = static_cast<ActionKind>(kind);
        action.stage = stage;
        if (has_micro_batch(action.kind)) action.micro_batch = micro_batch;
        EXPECT_EQ(parse_action(to_string(action)), action) << to_string(action);
      }
    }
  }
}

TEST(ActionTest, PrintsStageKindAndMicroBatch) {
  EXPECT_EQ(to_string(Action{ActionKind::kForward, 2, 0}), "2F0");
  EXPECT_EQ(to_string(Action{ActionKind::kSendBackward, 3, 1}), "3SEND_B1");
  EXPECT_EQ(to_string(Action{ActionKind::kReduceGrad, 0, -1}), "0REDUCE_GRAD");
  EXPECT_EQ(to_string(Action{static_cast<ActionKind>(99), 3, 1}), "3?");
}

TEST(ActionTest, OverlappedPairSurvivesTextAndBack) {
  const std::string text = "(0F7;7B3)OVERLAP_F_B";
  const Step step = parse_step(text);
  EXPECT_EQ(step.action, parse_action("0F7"));
  ASSERT_TRUE(step.overlapped.has_value());
  EXPECT_EQ(*step.overlapped, parse_action("7B3"));
  EXPECT_EQ(to_string(step), text);
}

TEST(ActionTest, RefusesTextThatDoesNotMatchToItsEnd) {
  for (const char* text : {"",
                           " ",
                           "F0",
                           "-1F0",
                           "+1F0",
                           "0F0x",
                           "0F0 ",
                           " 0F0",
                           "0F",
                           "0RECOMPUTE",
                           "0F-1",
                           "3SEND_B",
                           "01F0",
                           "0F00",
                           "0REDUCE_GRAD1",
                           "0OPTIMIZER0",
                           "2147483648F0",
                           "0F99999999999",
                           "0x1F0",
                           "0F0>1",
                           "0SEND_F0>1",
                           "0F0@1",
                           "0f0",
                           "(0F0;1B0)",
                           "(0F0)OVERLAP_F_B",
                           "(0F0;1B0)OVERLAP",
                           "(0F0;1B0;2B0)OVERLAP_F_B",
                           "(0F0;1SEND_B0)OVERLAP_F_B",
                           "((0F0;1B0)OVERLAP_F_B;0F0)OVERLAP_F_B"}) {
    EXPECT_NE(action_refusal(text), "accepted") << "'" << text << "'";
  }
}

TEST(ActionTest, RefusalNamesTheTextThePartAndWhatIsLegal) {
  EXPECT_THAT(
      action_refusal("1Q2"),
      ::testing::AllOf(::testing::HasSubstr("'1Q2'"), ::testing::HasSubstr("unknown kind 'Q'"),
                       ::testing::HasSubstr("F B I W SEND_F"),
                       ::testing::HasSubstr("legal is <stage><KIND>[micro_batch]")));
  EXPECT_THAT(action_refusal("0F0x"), ::testing::HasSubstr("unexpected 'x' after F"));
  EXPECT_THAT(action_refusal("3SEND_B"), ::testing::HasSubstr("SEND_B needs a micro-batch index"));
  EXPECT_THAT(action_refusal("0REDUCE_GRAD1"), ::testing::HasSubstr("takes no micro-batch"));
}

}  // namespace
}  // namespace sluice
