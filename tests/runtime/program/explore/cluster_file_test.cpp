#include "runtime/program/explore/cluster_file.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include <sluice/error.hpp>

#include "tests/runtime/expect_error.hpp"
#include "tests/runtime/temporary_directory.hpp"

namespace sluice {
namespace {

// Two replicas of a pipeline of two, pipeline-first, on two hosts.
Cluster cluster() {
  Cluster result;
  result.sluice = "0.3.0";
  result.mpi = "Open MPI v4.1.4";
  result.pipeline = 2;
  result.replicas = 2;
  result.hosts = {{"alpha", 2}, {"beta", 8}};
  result.ranks = {{0, 0, 0}, {1, 0, 1}, {0, 1, 0}, {1, 1, 1}};
  result.links = {{0, 1, 1e-4, 1e9, 5e8, 0.25, "eth0"},
                  {1, 0, 2e-4, 2e9, 0, 0, ""},
                  {2, 3, 3e-4, 1.5e9, 5e8, 1, "eth0"},
                  {0, 2, 1e-6, 8e9, 5e8, 0.5, ""}};
  result.pairs_left_out = 3;
  return result;
}

// The file with the first `from` replaced.
std::string with(const std::string& from, const std::string& to) {
  std::string text = to_json_text(cluster());
  const std::size_t found = text.find(from);
  EXPECT_NE(found, std::string::npos) << from << " in " << text;
  return found == std::string::npos ? text : text.replace(found, from.size(), to);
}

void expect_refusal(const std::string& text, std::initializer_list<std::string> parts) {
  expect_error(ErrorCode::kData, parts, [&] { (void)parse_cluster(text, "c.json"); });
}

TEST(ClusterFileTest, ReadsBackWhatItWrote) {
  const TemporaryDirectory directory;
  const auto path = directory.path() / "c.json";
  write_cluster(path, cluster());
  EXPECT_EQ(read_cluster(path), cluster());
  EXPECT_EQ(directory.file_count(), 1);
}

TEST(ClusterFileTest, StatesFormatAndVersion) {
  const std::string text = to_json_text(cluster());
  EXPECT_EQ(text.find("{\n \"format\": \"sluice-cluster\",\n \"version\": 1,"), 0U) << text;
}

TEST(ClusterFileTest, NamesWhatIsWrong) {
  expect_refusal("", {"'c.json'", "not JSON"});
  expect_refusal(to_json_text(cluster()).substr(0, 200), {"cut off"});
  expect_refusal("[]", {"it is not an object"});
  expect_refusal(with("sluice-cluster", "other"), {"'format' is not 'sluice-cluster'"});
  expect_refusal(with("\"version\": 1", "\"version\": 2"),
                 {"'version' is 2; this Sluice reads version 1"});
  expect_refusal(with("\"version\": 1", "\"version\": \"1\""), {"'version' is \"1\""});
  expect_refusal(with("\"mpi\"", "\"mpl\""), {"'mpl' is not a key of version 1"});
  expect_refusal(with("\"latency_s\": 0.0001,", ""), {"'links[0].latency_s' is missing"});
  expect_refusal(with("\"latency_s\": 0.0001", "\"latency_s\": -1"),
                 {"'links[0].latency_s' is -1; legal is a number from 0 to 1e+06"});
  expect_refusal(with("\"latency_s\": 0.0002", "\"latency_s\": null"),
                 {"'links[1].latency_s' is null"});
  expect_refusal(with("\"latency_s\": 0.0001", "\"latency_s\": 1e999"), {"not JSON"});
  expect_refusal(with("\"bandwidth_bytes_per_s\": 1000000000.0", "\"bandwidth_bytes_per_s\": 0"),
                 {"'links[0].bandwidth_bytes_per_s' is 0; legal is a number from 1 to 1e+18"});
  expect_refusal(with("\"advanced_while_computing\": 0.25", "\"advanced_while_computing\": 1.5"),
                 {"'links[0].advanced_while_computing' is 1.5; legal is a number from 0 to 1"});
  expect_refusal(with("\"over\": \"eth0\"", "\"over\": [1]"),
                 {"'links[0].over' is a list; legal is a text"});
  expect_refusal(with("\"over\": \"eth0\"", "\"over\": \"\", \"more\": 1"),
                 {"'links[0].more' is not a key"});
}

// Two stages that two ranks share.
Cluster shared_cluster() {
  Cluster result = cluster();
  result.replicas = 1;
  result.tensor = 2;
  result.ranks = {{0, 0, 0, 0}, {0, 0, 0, 1}, {1, 0, 1, 0}, {1, 0, 1, 1}};
  result.collectives = {{CollectiveKind::kSum, 1e-4, 1e9}, {CollectiveKind::kAllGather, 5e-5, 2e9}};
  return result;
}

TEST(ClusterFileTest, HasCollectivesOfTensorRanks) {
  const std::string text = to_json_text(shared_cluster());
  EXPECT_EQ(parse_cluster(text, "c.json"), shared_cluster());
  EXPECT_EQ(to_json_text(cluster()).find("tensor"), std::string::npos) << "read by older versions";
  const PipelineLinks links = pipeline_links(shared_cluster());
  ASSERT_EQ(links.links.size(), 1U) << "those of ranks that share a stage are none of a pipeline";
  EXPECT_EQ(links.links[0].from, 0);
  EXPECT_EQ(links.links[0].to, 1);
  EXPECT_DOUBLE_EQ(links.collectives[0].latency, 0.1);
  EXPECT_DOUBLE_EQ(links.collectives[0].bandwidth, 1e6);
  EXPECT_DOUBLE_EQ(links.collectives[1].bandwidth, 2e6);
  const auto refused = [&](const std::string& from, const std::string& to,
                           const std::string& what) {
    std::string wrong = text;
    ASSERT_NE(wrong.find(from), std::string::npos) << from;
    expect_refusal(wrong.replace(wrong.find(from), from.size(), to), {what});
  };
  refused("\"tensor\": 2", "\"tensor\": 1", "'tensor' is 1; legal is a whole number from 2");
  refused("\"tensor\": 2", "\"tensor\": 4", "pipeline 2 x replicas 1 x tensor 4 need 8");
  refused("\"tensor_rank\": 1", "\"tensor_rank\": 2", "'ranks[1].tensor_rank' is 2");
  refused("\"tensor_rank\": 1", "\"tensor_rank\": 0", "are those of an earlier rank");
  refused("\"kind\": \"sum\"", "\"kind\": \"all\"", "'collectives[0].kind' is no kind");
  refused("\"kind\": \"sum\"", "\"kind\": \"all-gather\"", "'collectives[1].kind' stands twice");
  expect_refusal(with("\"pipeline_rank\": 0", "\"pipeline_rank\": 0, \"tensor_rank\": 0"),
                 {"'ranks[0].tensor_rank' stands in a file without 'tensor'"});
  expect_refusal(with("\"pairs_left_out\"", "\"collectives\": [], \"pairs_left_out\""),
                 {"'collectives' stands in a file without 'tensor'"});
}

TEST(ClusterFileTest, NamesWhatDoesNotFit) {
  expect_refusal(with("\"pipeline\": 2", "\"pipeline\": 3"),
                 {"'ranks' has 4 entries; pipeline 3 x replicas 2 need 6"});
  expect_refusal(with("\"pipeline\": 2", "\"pipeline\": 3000000000"), {"'pipeline' is 3000000000"});
  expect_refusal(with("\"replicas\": 2", "\"replicas\": 18446744073709551615"),
                 {"'replicas' is 18446744073709551615"});
  expect_refusal(with("\"host\": \"beta\"", "\"host\": \"gamma\""),
                 {"'ranks[1].host' is not one of 'hosts'"});
  expect_refusal(with("\"name\": \"beta\"", "\"name\": \"alpha\""),
                 {"'hosts[1].name' stands twice"});
  expect_refusal(with("\"rank\": 1", "\"rank\": 2"), {"'ranks[1].rank' is 2"});
  expect_refusal(with("\"pipeline_rank\": 1", "\"pipeline_rank\": 0"),
                 {"'ranks[1].pipeline_rank' and its replica are those of an earlier rank"});
  expect_refusal(with("\"to\": 1", "\"to\": 4"), {"'links[0].to' is 4", "from 0 to 3"});
  expect_refusal(with("\"to\": 1", "\"to\": 0"), {"'links[0].to' is the rank of 'from'"});
  expect_refusal(with("\"from\": 2,\n   \"to\": 3", "\"from\": 0,\n   \"to\": 1"),
                 {"'links[2].to' ends a link that stands twice"});
}

TEST(ClusterFileTest, RefusesAFileThatIsTooLarge) {
  const TemporaryDirectory directory;
  const auto path = directory.write("c.json", "{}");
  std::filesystem::resize_file(path, kLargestClusterFile + 1);  // a hole: no bytes on the disk
  expect_error(ErrorCode::kData, {"c.json", "67108865 bytes"}, [&] { (void)read_cluster(path); });
  expect_error(ErrorCode::kData, {"none.json"},
               [&] { (void)read_cluster(directory.path() / "none.json"); });
}

TEST(ClusterFileTest, TheSlowestReplicaCountsForALinkOfThePipeline) {
  const PipelineLinks links = pipeline_links(cluster());
  ASSERT_EQ(links.links.size(), 2U);
  EXPECT_EQ(links.links[0].from, 0);
  EXPECT_EQ(links.links[0].to, 1);
  EXPECT_DOUBLE_EQ(links.links[0].link.latency, 0.3);    // milliseconds, of the second replica
  EXPECT_DOUBLE_EQ(links.links[0].link.bandwidth, 1e6);  // bytes per millisecond, of the first
  EXPECT_DOUBLE_EQ(links.links[1].link.latency, 0.2);
  EXPECT_DOUBLE_EQ(links.links[1].link.bandwidth, 2e6);
  EXPECT_DOUBLE_EQ(links.slowest.latency, 0.3);
  EXPECT_DOUBLE_EQ(links.slowest.bandwidth, 1e6);
  EXPECT_DOUBLE_EQ(links.replicas.bandwidth, 8e6);
}

TEST(ClusterFileTest, WithoutLinksMessagesTakeNoTime) {
  Cluster none = cluster();
  none.links.clear();
  const PipelineLinks links = pipeline_links(parse_cluster(to_json_text(none), "c.json"));
  EXPECT_TRUE(links.links.empty());
  EXPECT_EQ(links.slowest.latency, 0);
  EXPECT_EQ(links.slowest.bandwidth, 0);
}

}  // namespace
}  // namespace sluice
