// Timelines as Chrome-trace JSON, which Perfetto opens: one process per rank with a track each for
// the planned compute, compute, sends, receives and sums over replicas. Complete events ("ph": "X")
// of one thread must nest, but concurrent messages do not. So a track has as many lanes as it has
// concurrent events, each a thread named after the track ("sends", "sends 2").
//
// A message is a flow from one event to another, which viewers draw as an arrow: a pair of flow
// events ("ph": "s" and "f") with one id, each inside the slice that it belongs to. For the end
// "bp": "e" says so; without, a viewer takes the next slice.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace sluice {

// How a file with a timeline begins.
inline constexpr std::string_view kTraceBegin = "{\"displayTimeUnit\":";

// kSums: REDUCE_GRAD of a stage. In host memory, from the start of its first sum, which may lie
// within the last backward, to the end of the last. On a GPU at its place in the list, for as long
// as it occupies the stream: a sum that runs concurrently with computation takes almost no time
// there. kMoves: OFFLOAD and FETCH, while a thread moves the state.
enum class TraceTrack : std::uint8_t { kPlanned, kCompute, kSends, kReceives, kSums, kMoves };

// 24 bytes and no text, so that recording allocates nothing; the name is made when written.
struct TraceEvent {
  double start = 0, end = 0;  // seconds; in a file since the trace's origin, same on all ranks
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

// One of the events that write_trace() gets.
struct TraceEventPlace {
  std::size_t trace = 0;  // index of its RankTrace
  std::size_t event = 0;  // index in RankTrace::events
};

// A message: made by the event `from`, used by the event `to`.
struct TraceArrow {
  TraceEventPlace from, to;
};

// A curve of a rank: a value from each time on, as counter events ("ph": "C").
struct TraceCounter {
  std::size_t trace = 0;  // index of its RankTrace
  std::string name;
  std::vector<std::pair<double, std::int64_t>> values;  // seconds, value
};

// `layers`: a JSON value as text, which becomes the file's member of that name; empty: none.
// Event names are the schedule's text form ("2F0"), categories the tracks' names; times keep
// nanoseconds. Requires: events have finite times and an action, arrows are between them. Throws
// Error(kIo) naming the path.
void write_trace(const std::filesystem::path& path, const std::vector<RankTrace>& ranks,
                 const std::vector<TraceArrow>& arrows = {}, std::string_view layers = {});
// The same text in pieces, in order, to `put`.
void write_trace(const std::function<void(std::string_view)>& put,
                 const std::vector<RankTrace>& ranks, const std::vector<TraceArrow>& arrows = {},
                 const std::vector<TraceCounter>& counters = {}, std::string_view layers = {});

}  // namespace sluice
