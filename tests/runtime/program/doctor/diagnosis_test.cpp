#include "runtime/program/doctor/diagnosis.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <vector>

#include <sluice/error.hpp>

#include "tests/loopback/loopback.hpp"

namespace sluice {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

// A healthy job: `ranks` ranks on one host with a core each.
std::vector<RankFacts> job(int ranks) {
  std::vector<RankFacts> facts(static_cast<std::size_t>(ranks));
  for (int rank = 0; rank < ranks; ++rank) {
    RankFacts& each = facts[static_cast<std::size_t>(rank)];
    each.rank = rank;
    each.mpi.local_size = ranks;
    each.mpi.host = "alpha";
    each.mpi.cores = 1;
    each.host_cores = ranks;
    each.mpi.library = "Open MPI v4.1.4";
    each.mpi.thread_level = "funneled";
    each.kernel_set = "avx512";
    each.matmul_library = "oneDNN (avx512_core_amx)";
    each.limits.shared_memory_bytes = std::int64_t{1} << 30;
  }
  return facts;
}

// All findings that are wrong (or that are not), one a line.
std::string said(const std::vector<RankFacts>& facts, bool wrong) {
  std::string text;
  for (const Finding& finding : diagnose(facts)) {
    if (finding.wrong == wrong) text += finding.text + "\n";
  }
  return text;
}

TEST(DiagnosisTest, FindsNothingWrongWithAHealthyJob) {
  EXPECT_EQ(said(job(1), true), "");
  EXPECT_EQ(said(job(4), true), "");
  EXPECT_THAT(said(job(4), false), HasSubstr("asynchronous progress"));
  EXPECT_THAT(said(job(4), false), HasSubstr("InfiniBand"));
  EXPECT_THAT(said(job(4), false), HasSubstr("--oversubscribe"));
}

TEST(DiagnosisTest, SaysWhatTensorRanksOnSeveralHostsCost) {
  auto facts = job(4);
  const auto costs = [](double latency) {
    CollectiveCosts all;
    all[0] = {latency, 1 << 20};
    return all;
  };
  const std::vector<TensorGroup> groups = {{{0, 1}, costs(0.5)}, {{2, 3}, costs(1)}};
  EXPECT_TRUE(diagnose_tensor_groups(facts, groups).empty());
  EXPECT_TRUE(diagnose_tensor_groups(facts, {}).empty());
  facts[3].mpi.host = "beta";
  const auto findings = diagnose_tensor_groups(facts, groups);
  ASSERT_EQ(findings.size(), 1U);
  EXPECT_TRUE(findings[0].wrong);
  EXPECT_THAT(findings[0].text,
              HasSubstr("ranks 2, 3 share stages, and are on 2 hosts (alpha, beta): a sum of 1 MiB "
                        "takes 2000.00 ms, 1500.00 ms within a host"));
  const auto unmeasured = diagnose_tensor_groups(facts, {{{0, 1}, {}}, {{2, 3}, {}}});
  ASSERT_EQ(unmeasured.size(), 1U);
  EXPECT_TRUE(unmeasured[0].wrong);
  EXPECT_THAT(unmeasured[0].text,
              AllOf(HasSubstr("ranks 2, 3 share stages"), Not(HasSubstr("1 MiB"))));
}

TEST(DiagnosisTest, NamesHostsWithMoreRanksThanCores) {
  auto facts = job(4);
  for (RankFacts& each : facts) each.host_cores = 2;
  EXPECT_THAT(said(facts, true), HasSubstr("alpha: 4 ranks share 2 cores"));
}

TEST(DiagnosisTest, KnowsThatBindingTakesThreadsTheirCores) {
  auto facts = job(2);
  for (RankFacts& each : facts) each.threads = 2;
  EXPECT_THAT(said(facts, true), HasSubstr("--bind-to none"));
  for (RankFacts& each : facts) each.threads = 3;
  EXPECT_THAT(said(facts, true), HasSubstr("at most --threads 2"));
  for (RankFacts& each : facts) each.mpi.cores = 3;
  EXPECT_EQ(said(facts, true), "");
}

TEST(DiagnosisTest, ReportsVariablesThatChangeResults) {
  auto facts = job(2);
  facts[1].environment = {{"OPENBLAS_CORETYPE", "Haswell"}, {"OMP_NUM_THREADS", "8"}};
  EXPECT_THAT(said(facts, true), HasSubstr("OPENBLAS_CORETYPE=Haswell is set (rank 1)"));
  EXPECT_THAT(said(facts, true), Not(HasSubstr("OMP_NUM_THREADS")));
  EXPECT_THAT(said(facts, false), HasSubstr("--threads decides"));
}

TEST(DiagnosisTest, ReportsRanksThatComputeDifferently) {
  auto facts = job(3);
  facts[2].kernel_set = "avx2";
  EXPECT_THAT(said(facts, true), HasSubstr("kernel sets differ: rank 0 on alpha has 'avx512', "
                                           "rank 2 on alpha has 'avx2'"));
}

TEST(DiagnosisTest, WarnsOfAnUnusedFastNetworkOnlyBetweenHosts) {
  auto facts = job(2);
  for (RankFacts& each : facts) each.network.fast = true;
  EXPECT_EQ(said(facts, true), "");
  facts[1].mpi.host = "beta";
  EXPECT_THAT(said(facts, true), HasSubstr("--mca pml ucx"));
  for (RankFacts& each : facts) each.mpi.components = "pml=ucx";
  EXPECT_EQ(said(facts, true), "");
}

TEST(DiagnosisTest, WarnsOfLittleSharedMemory) {
  auto facts = job(8);
  for (RankFacts& each : facts) each.limits.shared_memory_bytes = std::int64_t{64} << 20;
  EXPECT_THAT(said(facts, true), HasSubstr("/dev/shm has 64 MiB free"));
}

TEST(DiagnosisTest, SaysThatNcclHasOneCore) {
  auto facts = job(2);
  facts[1].limits.cores = {1};
  EXPECT_THAT(said(facts, false), Not(HasSubstr("NCCL")));
  for (RankFacts& each : facts) each.device_identity = "0000:0" + std::to_string(each.rank);
  const std::string text = said(facts, false);
  EXPECT_EQ(text.find("rank 1 is bound to one core, which NCCL's threads share") != text.npos,
            SLUICE_WITH_NCCL == 1)
      << text;
}

TEST(DiagnosisTest, CountsTheSharedMemoryOfNcclBetweenHosts) {
  auto facts = job(2);
  for (RankFacts& each : facts) {
    each.limits.shared_memory_bytes = std::int64_t{150} << 20;
    each.device_identity = "0000:0" + std::to_string(each.rank);
  }
  EXPECT_THAT(said(facts, true), Not(HasSubstr("/dev/shm")));
  facts[1].mpi.host = "beta";
  for (RankFacts& each : facts) each.mpi.local_size = 1;
  const std::string text = said(facts, true);
  EXPECT_EQ(text.find("beta: /dev/shm has 150 MiB free, 1 rank needs about 158;") != text.npos,
            SLUICE_WITH_NCCL == 1)
      << text;
}

TEST(DiagnosisTest, SaysWhyMpiCarriesNothingFromGpuToGpu) {
  auto facts = job(2);
  for (RankFacts& each : facts) each.no_device_messages = "MPI is not CUDA-aware";
  EXPECT_THAT(said(facts, false), Not(HasSubstr("GPU")));
  for (RankFacts& each : facts) each.device_identity = "0000:0" + std::to_string(each.rank);
  EXPECT_THAT(said(facts, false),
              HasSubstr("MPI carries no messages from GPU to GPU (MPI is not CUDA-aware)"));
  for (RankFacts& each : facts) each.no_device_messages.clear();
  EXPECT_THAT(said(facts, false), Not(HasSubstr("from GPU to GPU")));
}

TEST(DiagnosisTest, SaysWhereBf16IsNotFaster) {
  auto facts = job(2);
  EXPECT_THAT(said(facts, false), Not(HasSubstr("bf16")));
  facts[1].mpi.host = "beta";
  facts[1].native_bf16 = false;
  EXPECT_THAT(said(facts, false), HasSubstr("beta: the CPU has no instructions (AMX)"));
  facts[1].device = "cuda:0";
  EXPECT_THAT(said(facts, false), Not(HasSubstr("bf16")));
}

TEST(DiagnosisTest, NamesRanksThatAreBoundToOneCore) {
  auto facts = job(2);
  for (RankFacts& each : facts) {
    each.host_cores = 4;
    each.limits.cores = {0, 1};
  }
  EXPECT_THAT(said(facts, true), HasSubstr("alpha: ranks 0 and 1 are both bound to core 0, 1, "
                                           "although the host has 4 cores for 2 ranks"));
  EXPECT_THAT(said(facts, true), HasSubstr("--map-by slot:PE=1"));
  facts[1].limits.cores = {2, 3};
  EXPECT_EQ(said(facts, true), "");
  for (RankFacts& each : facts) each.limits.cores = {0, 1, 2, 3};  // not bound
  EXPECT_EQ(said(facts, true), "");
  for (RankFacts& each : facts) each.limits.cores = {0};
  facts[1].mpi.host = "beta";  // core 0 of another host
  EXPECT_EQ(said(facts, true), "");
}

TEST(DiagnosisTest, WarnsOfLittleLockedMemoryWhereAFastNetworkNeedsIt) {
  auto facts = job(1);
  facts[0].limits.locked_memory_bytes = std::int64_t{64} << 10;
  EXPECT_EQ(said(facts, true), "");
  facts[0].network.fast = true;
  EXPECT_THAT(said(facts, true), HasSubstr("may lock only 64 KiB"));
  EXPECT_THAT(said(facts, true), HasSubstr("memlock unlimited"));
  facts[0].limits.locked_memory_bytes = -1;
  EXPECT_EQ(said(facts, true), "");
}

TEST(DiagnosisTest, NamesAHostWhoseClockIsWrong) {
  auto facts = job(2);
  facts[1].mpi.host = "beta";
  facts[1].clock_ahead = 0.4;
  EXPECT_EQ(said(facts, true), "");
  facts[1].clock_ahead = 86400;
  EXPECT_THAT(said(facts, true), HasSubstr("beta: its clock is 86400.0 s ahead of that of alpha"));
  facts[1].clock_ahead = -3;
  EXPECT_THAT(said(facts, true), HasSubstr("beta: its clock is 3.0 s behind that of alpha"));
  facts[1].clock_error = 5;
  EXPECT_EQ(said(facts, true), "");
}

TEST(DiagnosisTest, NamesALauncherThatTheMpiLibraryDoesNotMeet) {
  auto facts = job(1);
  facts[0].launcher = {.processes = 4, .pmix = "", .pmix_of = "4.2.2"};
  EXPECT_THAT(said(facts, true), HasSubstr("started 4 processes, but each is a job of 1: its PMIx "
                                           "(of an unknown version)"));
  facts = job(4);
  facts[0].launcher = {.processes = 4, .pmix = "4.1.0", .pmix_of = "4.2.2"};
  EXPECT_THAT(said(facts, false), Not(HasSubstr("PMIx")));
  facts[0].launcher.pmix = "3.1.5";
  EXPECT_EQ(said(facts, true), "");
  EXPECT_THAT(said(facts, false), HasSubstr("the launcher has PMIx 3.1.5"));
}

TEST(DiagnosisTest, SaysWhatASplitTreeOfSumsSendsAndWhichOrderSendsLess) {
  // Four replicas, in orders of two hosts.
  const auto replicas = [](std::vector<int> ranks) {
    return make_topology({1, 4, 1}, std::move(ranks));
  };
  std::vector<RankDevice> devices(4);
  for (const std::size_t rank : {1U, 3U}) devices[rank].machine = "beta";
  const Topology in_turns = replicas({0, 1, 2, 3}), aligned = replicas({0, 2, 1, 3});
  EXPECT_TRUE(diagnose_sums(aligned, devices, {{"pipeline-first", in_turns}}).empty());
  const auto found = [&](const std::vector<std::pair<std::string, Topology>>& others) {
    const std::vector<Finding> findings = diagnose_sums(in_turns, devices, others);
    return findings.size() == 1 ? findings[0] : Finding{};
  };
  const Finding avoidable = found({{"auto", aligned}, {"replica-first", aligned}});
  EXPECT_TRUE(avoidable.wrong);
  EXPECT_THAT(avoidable.text,
              HasSubstr("a sum sends 8 addends between hosts where 4 would do, each "
                        "1/4 of a rank's gradients: 1.50 times the bytes (values "
                        "of replicas 0, 1, 2, 3 cross unsummed)"));
  EXPECT_THAT(avoidable.text, HasSubstr("'--rank-order auto' avoids it"));
  EXPECT_FALSE(found({{"auto", in_turns}, {"replica-first", aligned}}).wrong);
  EXPECT_THAT(found({{"auto", in_turns}}).text, HasSubstr("no --rank-order sends fewer"));
  for (RankDevice& each : devices) each.device.kind = DeviceKind::kCuda;
  EXPECT_TRUE(diagnose_sums(in_turns, devices, {{"auto", aligned}}).empty());
}

TEST(DiagnosisTest, FactsOfABuildThatLacksSomeAreRead) {
  const RankFacts facts = rank_facts_from_json(R"({"rank": 3, "more": [1]})");
  EXPECT_EQ(facts.rank, 3);
  EXPECT_EQ(facts.device, "cpu");
}

TEST(DiagnosisTest, FactsSurviveTheWayToRankZero) {
  RankFacts facts = job(3)[2];
  facts.environment = {{"OMP_NUM_THREADS", "\"8\"\n"}};
  facts.network.fast = true;
  facts.native_bf16 = false;
  facts.no_device_messages = "not tried";
  facts.network.interfaces = {{"eth0", "10.0.0.1", "10.0.0.0/24", 1000}};
  facts.network.connections = {{"10.0.0.1:1", "10.0.0.2:2"}};
  facts.limits = {{0, 3}, 65536, 7};
  facts.data = {"t", "no", 5, "abc"};
  facts.save = {"d", "", 1.5, 0.25};
  EXPECT_EQ(rank_facts_from_json(to_json_text(facts)).no_device_messages, "not tried");
  EXPECT_EQ(to_json_text(rank_facts_from_json(to_json_text(facts))), to_json_text(facts));
  EXPECT_EQ(rank_facts_from_json(to_json_text(facts)).environment, facts.environment);
  EXPECT_FALSE(rank_facts_from_json(to_json_text(facts)).native_bf16);
}

}  // namespace
}  // namespace sluice
