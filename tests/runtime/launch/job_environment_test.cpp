#include "runtime/launch/job_environment.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace sluice::testing {
namespace {

using ::testing::UnorderedElementsAre;

const char* const kOurs[] = {"SLUICE_SUPERVISED=1", "OMPI_SLUICE_SUPERVISED=1"};

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
  const std::vector<std::string> current = {"HOME=/root",
                                            "OMPI_COMM_WORLD_RANK=1",
                                            "OMPI_COMM_WORLD_SIZE=2",
                                            "PMIX_RANK=1",
                                            "PMIX_NAMESPACE=3",
                                            "PMI_RANK=1",
                                            "OMPI_MCA_orte_hnp_uri=x",
                                            "OMPI_MCA_ess=y",
                                            "OMPI_MCA_pmix=^s1",
                                            "OMPI_UNIVERSE_SIZE=2",
                                            "OMPI_MCA_btl=self,tcp",
                                            "OMPI_MCA_initial_wdir=/",
                                            "SLUICE_SUPERVISED=old"};
  EXPECT_THAT(job_environment(current),
              UnorderedElementsAre("HOME=/root", "OMPI_MCA_btl=self,tcp", kOurs[0], kOurs[1]));
}

TEST(JobEnvironmentTest, KnowsTheJobAroundIt) {
  const auto ranks = [](std::vector<std::string> environment) { return ranks_around(environment); };
  EXPECT_EQ(ranks({"PATH=/bin"}), 1);
  EXPECT_EQ(ranks({"OMPI_COMM_WORLD_SIZE=8"}), 8);
  EXPECT_EQ(ranks({"OMPI_COMM_WORLD_SIZE=x"}), 1);
  EXPECT_EQ(ranks({"SLURM_NTASKS=8", "SLURM_PROCID=0"}), 1);
}

}  // namespace
}  // namespace sluice::testing
