// Timelines as Chrome-trace JSON, which Perfetto opens: one process per rank with a track each for
// the planned compute, compute, sends, receives and sums over replicas. Complete events ("ph": "X")
// of one track have to nest, which messages in flight together do not: a track that needs them gets
// more lanes, each a thread named after its track ("sends", "sends 2"), and as few as there are
// events at once.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace sluice {

// kSums: REDUCE_GRAD at its place in the list, as long as it keeps the rank; a sum that runs beside
// computation takes next to nothing there.
enum class TraceTrack : std::uint8_t { kPlanned, kCompute, kSends, kReceives, kSums };

// 24 bytes and no text, so that recording allocates nothing; the name is made when written.
struct TraceEvent {
  double start = 0, end = 0;  // seconds since the trace's origin, same on all ranks
  std::uint8_t action = 0;    // ActionKind's number
  TraceTrack track = TraceTrack::kCompute;
  std::int16_t stage = 0;
  std::int32_t micro_batch = -1;
};

// Ranks gather events as bytes.
static_assert(sizeof(TraceEvent) == 24 && std::is_trivially_copyable_v<TraceEvent>);

struct RankTrace {
  int rank = 0;
  std::string label;  // "rank 1: replica 0, stage 1"
  std::vector<TraceEvent> events;
};

// Event names are the schedule's text form ("2F0"), categories the tracks' names; times keep
// nanoseconds. Throws Error(kIo) naming the path, Error(kInternal) for an event that has no finite
// times or no action.
void write_trace(const std::filesystem::path& path, const std::vector<RankTrace>& ranks);
// The same text in pieces, in order, to wherever `put` takes it.
void write_trace(const std::function<void(std::string_view)>& put,
                 const std::vector<RankTrace>& ranks);

}  // namespace sluice
