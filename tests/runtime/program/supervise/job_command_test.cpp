#include "runtime/program/supervise/job_command.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sluice/error.hpp>

#include "tests/runtime/expect_error.hpp"

namespace sluice::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::UnorderedElementsAre;

const char* const kOurs[] = {"SLUICE_SUPERVISED=1", "OMPI_SLUICE_SUPERVISED=1"};

TEST(JobCommandTest, ReplacesPlaceholdersOnce) {
  const JobCommand command(
      {"mpirun", "-n", "{ranks}", "--hostfile={hostfile}", "{ranks}{replicas}"});
  EXPECT_THAT(command.fill({{"ranks", "{replicas}"}, {"hostfile", "/tmp/h"}, {"replicas", "2"}}),
              ElementsAre("mpirun", "-n", "{replicas}", "--hostfile=/tmp/h", "{replicas}2"));
  EXPECT_TRUE(command.uses("ranks"));
  EXPECT_TRUE(command.uses("hostfile"));
  EXPECT_FALSE(command.uses("pipeline"));
}

TEST(JobCommandTest, LeavesOtherBracesAlone) {
  const std::vector<std::string> words = {"sh",
                                          "-c",
                                          "awk '{print}' ${ranks} {}",
                                          R"({"a":{"b":1}})",
                                          "{",
                                          "}{",
                                          "{Ranks}",
                                          "{a b}",
                                          "{p}",
                                          "$",
                                          "{x,y}",
                                          "{{"};
  const JobCommand command(words);
  EXPECT_EQ(command.fill({}), words);
  EXPECT_FALSE(command.uses("ranks"));
}

TEST(JobCommandTest, KnowsTheNumberOfAnOption) {
  const auto of = [](const char* last) {
    return JobCommand({"mpirun", "sluice", "--virtual-replicas", last})
        .number_of("virtual-replicas");
  };
  EXPECT_EQ(of("8"), 8);
  EXPECT_EQ(of("--virtual-replicas=12"), 12);
  for (const char* none : {"$R", "0", "-4", "8x", ""}) EXPECT_EQ(of(none), std::nullopt) << none;
  EXPECT_EQ(JobCommand({"sh", "-c", "exec sluice train --virtual-replicas 4 --save a"})
                .number_of("virtual-replicas"),
            4);
  EXPECT_EQ(JobCommand({"--virtual-replicas", "4", "--virtual-replicas=auto"})
                .number_of("virtual-replicas"),
            std::nullopt);
  EXPECT_EQ(JobCommand({"train", "--virtual-replicas-of", "4"}).number_of("virtual-replicas"),
            std::nullopt);
  EXPECT_EQ(JobCommand({"train", "--tensor", "2", "--tensor-shards=8"}).number_of("tensor-shards"),
            8);
  EXPECT_EQ(JobCommand({"train", "--replicas", "4"}).number_of("virtual-replicas"), std::nullopt);
}

TEST(JobCommandTest, RefusesWhatIsNearlyAPlaceholder) {
  for (const char* word :
       {"{rank}", "x{hosts}", "{host-file}", "{pipelines}", "{replica}", "{pipe}"}) {
    expect_error(ErrorCode::kUsage, {"unknown placeholder"}, [&] {
      (void)JobCommand({"mpirun", word});
    });
  }
  expect_error(ErrorCode::kUsage, {"did you mean 'hostfile'?"}, [] {
    (void)JobCommand({"mpirun", "{hosts}"});
  });
}

TEST(JobCommandTest, RefusesACommandThatIsMissing) {
  expect_error(ErrorCode::kUsage, {"the command is missing"}, [] { (void)JobCommand({}); });
  expect_error(ErrorCode::kUsage, {"the command is missing"}, [] { (void)JobCommand({""}); });
}

TEST(JobEnvironmentTest, KeepsWhatAUserSets) {
  const std::vector<std::string> current = {"PATH=/bin",
                                            "OMPI_MCA_btl=^tcp",
                                            "OMPI_MCA_orte_tmpdir_base=/x",
                                            "PRTE_MCA_a=1",
                                            "PMIX_MCA_b=2",
                                            "OMPI_ALLOW_RUN_AS_ROOT=1",
                                            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
                                            "EMPTY=",
                                            "SLURM_PROCID=0"};
  std::vector<std::string> wanted = current;
  wanted.insert(wanted.end(), std::begin(kOurs), std::end(kOurs));
  EXPECT_EQ(job_environment(current), wanted);
}

TEST(JobEnvironmentTest, DropsWhatALauncherGivesToItsRanks) {
  const std::vector<std::string> current = {
      "HOME=/root", "PMIX_RANK=1",          "PMIX_NAMESPACE=3",      "PMI_RANK=0",
      "PMI_SIZE=1", "OMPI_UNIVERSE_SIZE=2", "OMPI_MCA_btl=self,tcp", "SLUICE_SUPERVISED=old"};
  EXPECT_THAT(job_environment(current),
              UnorderedElementsAre("HOME=/root", "OMPI_MCA_btl=self,tcp", kOurs[0], kOurs[1]));
}

TEST(JobEnvironmentTest, RefusesThatOfARank) {
  for (const char* entry : {"OMPI_COMM_WORLD_SIZE=1", "OMPI_COMM_WORLD_SIZE=8", "PMI_SIZE=2",
                            "MV2_COMM_WORLD_SIZE=2"}) {
    const std::vector<std::string> current = {"PATH=/bin", entry};
    expect_error(ErrorCode::kUsage, {"'sluice run' is a rank of an MPI job"},
                 [&] { (void)job_environment(current); });
  }
  const std::vector<std::string> slurm = {"SLURM_NTASKS=8", "SLURM_PROCID=0"};
  EXPECT_EQ(job_environment(slurm).size(), 4U);
}

}  // namespace
}  // namespace sluice::testing
