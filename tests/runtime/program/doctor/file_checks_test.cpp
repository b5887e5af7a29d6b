#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <string>
#include <vector>

#include "comm/base/index.hpp"
#include "runtime/program/doctor/diagnosis.hpp"
#include "runtime/program/doctor/facts.hpp"
#include "tests/loopback/loopback.hpp"
#include "tests/runtime/temporary_directory.hpp"

namespace sluice {
namespace {

using ::testing::HasSubstr;

constexpr double kPatience = 0.05;  // seconds

std::string said_of_files(const std::vector<RankFacts>& facts, bool wrong) {
  std::string text;
  for (const Finding& finding : diagnose_files(facts)) {
    if (finding.wrong == wrong) text += finding.text + "\n";
  }
  return text;
}

// A rank on each of two hosts.
std::vector<RankFacts> two_hosts() {
  std::vector<RankFacts> facts(2);
  for (const int rank : {0, 1}) {
    facts[at(rank)].rank = rank;
    facts[at(rank)].mpi.host = rank == 0 ? "alpha" : "beta";
  }
  return facts;
}

// Each rank gives the directory of its host. Other work may slow this machine's disk: no finding
// here.
std::vector<RankFacts> probe(const std::vector<std::filesystem::path>& directories) {
  std::vector<RankFacts> facts = two_hosts();
  run_loopback(2, [&](Communicator& comm) {
    Collectives collectives(comm, 0, nullptr);
    RankFacts& mine = facts[at(comm.rank())];
    mine.save =
        probe_directory(collectives, {"alpha", "beta"}, directories[at(comm.rank())], kPatience);
    double& speed = mine.save.bytes_per_second;
    if (speed > 0) speed = std::max(speed, 1e9);
  });
  return facts;
}

TEST(DataFactsTest, AreEqualForEqualFilesAlone) {
  const TemporaryDirectory directory;
  const auto one = data_facts(directory.write("a", "12345"));
  EXPECT_EQ(one.problem, "");
  EXPECT_EQ(one.bytes, 5);
  EXPECT_EQ(one.hash, data_facts(directory.write("b", "12345")).hash);
  EXPECT_NE(one.hash, data_facts(directory.write("b", "12346")).hash);
}

TEST(DataFactsTest, OfALargeFileCompareBothEnds) {
  const TemporaryDirectory directory;
  const auto size = static_cast<std::size_t>(3 * kHashedEnd);
  std::string text(size, 'x');
  const std::string hash = data_facts(directory.write("a", text)).hash;
  const auto with = [&](std::size_t offset) {
    std::string other = text;
    other[offset] = 'y';
    return data_facts(directory.write("b", other)).hash;
  };
  EXPECT_NE(with(0), hash);
  EXPECT_NE(with(size - 1), hash);
  EXPECT_EQ(with(size / 2), hash);  // what is not compared; the finding says so
}

TEST(DataFactsTest, SayWhyAFileCannotBeRead) {
  const TemporaryDirectory directory;
  EXPECT_EQ(data_facts(directory.path() / "none").problem, "No such file or directory");
  EXPECT_EQ(data_facts(directory.path()).problem, "Is a directory");
  const auto pipe = directory.path() / "pipe";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_EQ(data_facts(pipe).problem, "it is not a regular file");
  EXPECT_EQ(data_facts(directory.write("empty", "")).problem, "");
}

TEST(FileDiagnosisTest, NamesTheHostWithoutTheData) {
  const TemporaryDirectory directory;
  auto facts = two_hosts();
  for (RankFacts& each : facts) each.data = data_facts(directory.write("t", "text"));
  EXPECT_EQ(said_of_files(facts, true), "");
  EXPECT_THAT(said_of_files(facts, false),
              HasSubstr("looks the same on all hosts (compared: all bytes)"));
  facts[0].data.problem = "No such file or directory";
  EXPECT_THAT(said_of_files(facts, true), HasSubstr("alpha: rank 0 cannot read data file"));
  facts[1].data.problem = facts[0].data.problem;
  EXPECT_THAT(said_of_files(facts, true), HasSubstr("beta: rank 1 cannot read data file"));
}

TEST(FileDiagnosisTest, SaysHowTheDataDiffers) {
  auto facts = two_hosts();
  facts[0].data = {"text.txt", "", 100, "aaaaaaaaaa"};
  facts[1].data = {"text.txt", "", 90, "bbbbbbbbbb"};
  EXPECT_THAT(
      said_of_files(facts, true),
      HasSubstr("data file 'text.txt' differs: 100 bytes, hash aaaaaaaa on alpha, 90 bytes, "
                "hash bbbbbbbb on beta (compared: sizes)"));
  facts[1].data.bytes = 100;
  EXPECT_THAT(said_of_files(facts, true), HasSubstr("(compared: all bytes)"));
  facts[0].data.bytes = facts[1].data.bytes = 100 * kHashedEnd;
  EXPECT_THAT(said_of_files(facts, true), HasSubstr("(compared: size, first and last MiB)"));
}

TEST(DirectoryProbeTest, ASharedDirectoryIsSeenAndLeftAsItWas) {
  const TemporaryDirectory directory;
  const auto path = directory.path() / "runs" / "a";
  const auto facts = probe({path, path});
  EXPECT_EQ(said_of_files(facts, true), "");
  for (const RankFacts& each : facts) {
    EXPECT_EQ(each.save.problem, "");
    EXPECT_GT(each.save.bytes_per_second, 0);
    EXPECT_GE(each.save.seen_after, 0);
  }
  EXPECT_EQ(directory.file_count(), 0);
}

TEST(DirectoryProbeTest, FilesOfOthersStay) {
  const TemporaryDirectory directory;
  (void)directory.write("mine", "x");
  EXPECT_EQ(said_of_files(probe({directory.path(), directory.path()}), true), "");
  EXPECT_EQ(directory.read("mine"), "x");
  EXPECT_EQ(directory.file_count(), 1);
}

TEST(DirectoryProbeTest, NamesTheHostThatDoesNotShareTheDirectory) {
  const TemporaryDirectory one, two;
  const std::string text = said_of_files(probe({one.path(), two.path()}), true);
  EXPECT_THAT(text, HasSubstr("beta: a new file of rank 0 (alpha)"));
  EXPECT_THAT(text, HasSubstr("--save-local"));
  EXPECT_THAT(said_of_files(probe({one.path(), two.path() / "none"}), true),
              HasSubstr("beta: a new file"));
  EXPECT_EQ(one.file_count() + two.file_count(), 0);
}

TEST(DirectoryProbeTest, NamesTheRankThatCannotWrite) {
  const TemporaryDirectory directory;
  const auto file = directory.write("file", "x");
  EXPECT_THAT(said_of_files(probe({file / "runs", file / "runs"}), true),
              HasSubstr("alpha: rank 0 cannot write '" + file.string()));
}

TEST(FileDiagnosisTest, TellsSlowDirectoriesAndCachedNames) {
  auto facts = two_hosts();
  for (RankFacts& each : facts) each.save = {"runs", "", 1e8, 0};
  EXPECT_EQ(said_of_files(facts, true), "");
  EXPECT_THAT(said_of_files(facts, false), HasSubstr("takes 100 MB/s on the slowest host"));
  facts[1].save.seen_after = 3.25;
  EXPECT_THAT(said_of_files(facts, true),
              HasSubstr("beta: a new file in 'runs' is seen after 3.2 s only"));
  EXPECT_THAT(said_of_files(facts, true), HasSubstr("lookupcache=positive"));
  facts[1].save.seen_after = -1;
  EXPECT_THAT(said_of_files(facts, true), HasSubstr("the hosts do not share the directory"));
  facts[1].save.seen_after = 0;
  facts[1].save.bytes_per_second = 5e6;
  EXPECT_THAT(said_of_files(facts, true), HasSubstr("beta: directory 'runs' takes 5 MB/s"));
}

}  // namespace
}  // namespace sluice
