// Feeds arbitrary bytes to the reader of cluster files, as `sluice schedule --cluster` does. What
// it accepts must read back equal, and its links must be ones that simulate() takes.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "runtime/program/explore/cluster_file.hpp"
#include "tests/fuzz/fuzz_tools.hpp"

namespace sluice {
namespace {

void feed(std::string_view text) {
  Cluster cluster;
  if (!accepts({ErrorCode::kData}, [&] { cluster = parse_cluster(text, "c.json"); })) return;
  require(parse_cluster(to_json_text(cluster), "again.json") == cluster);
  for (const RankLink& each : pipeline_links(cluster).links) {
    require(each.from >= 0 && each.from < cluster.pipeline && each.from != each.to);
    require(each.to >= 0 && each.to < cluster.pipeline);
    require(each.link.latency >= 0 && each.link.bandwidth > 0);
  }
}

}  // namespace
}  // namespace sluice

// The name is libFuzzer's.
// NOLINTNEXTLINE(readability-identifier-naming)
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  sluice::feed(sluice::as_text(data, size));
  return 0;
}
