#include "runtime/files/trace.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>
#include <nlohmann/json.hpp>

#include <sluice/schedule.hpp>

#include "runtime/files/atomic_file.hpp"
#include "runtime/files/json_text.hpp"

namespace sluice {
namespace {

constexpr std::array<const char*, 6> kTrackNames = {"planned",  "compute", "sends",
                                                    "receives", "sums",    "moves"};
// Thread numbers: (track + 1) * kMostLanes + lane. None is 0, which viewers use for the idle task.
constexpr std::size_t kMostLanes = 100'000;

// A trace event in whole nanoseconds. Times are rounded once, so neighbours that touch still touch.
struct Slice {
  std::int64_t start = 0, end = 0;
  const TraceEvent* event = nullptr;
  std::size_t lane = 0;
};

// Where a slice is drawn.
struct DrawnSlice {
  std::int64_t start = 0, end = 0;  // nanoseconds
  int pid = 0;
  std::size_t tid = 0;
};

// [trace][event]
using DrawnSlices = std::vector<std::vector<DrawnSlice>>;

std::int64_t nanoseconds(double seconds) { return std::llround(seconds * 1e9); }

// The slices of one track, each in the first lane whose last slice has ended.
std::vector<Slice> slices_of(const RankTrace& trace, TraceTrack track) {
  std::vector<Slice> slices;
  for (const TraceEvent& event : trace.events) {
    if (event.track != track) continue;
    const std::int64_t start = nanoseconds(event.start);
    slices.push_back({start, std::max(start, nanoseconds(event.end)), &event});
  }
  std::stable_sort(slices.begin(), slices.end(),
                   [](const Slice& a, const Slice& b) { return a.start < b.start; });
  std::vector<std::int64_t> lane_ends;
  for (Slice& slice : slices) {
    while (slice.lane < lane_ends.size() && lane_ends[slice.lane] > slice.start) ++slice.lane;
    if (slice.lane == lane_ends.size()) lane_ends.push_back(0);
    lane_ends[slice.lane] = slice.end;
  }
  return slices;
}

// Microseconds with three decimals, as the format defines.
std::string microseconds(std::int64_t ns) {
  return fmt::format("{}{}.{:03}", ns < 0 ? "-" : "", std::abs(ns) / 1000, std::abs(ns) % 1000);
}

// The events of the JSON array, with commas between them.
class EventList {
 public:
  EventList(const std::function<void(std::string_view)>& put, std::string_view layers) : put_(put) {
    put_text(kTraceBegin);
    put_text("\"ms\",");
    if (!layers.empty()) text_ += fmt::format("\"layers\":{},", layers);
    put_text("\"traceEvents\":[");
  }
  template <typename... Args>
  void put(fmt::format_string<Args...> format, Args&&... args) {
    put_text(first_ ? "\n" : ",\n");
    first_ = false;
    text_ += fmt::format(format, std::forward<Args>(args)...);
    if (text_.size() >= kFlushBytes) flush();
  }
  void finish() {
    put_text("\n]}\n");
    flush();
  }

 private:
  static constexpr std::size_t kFlushBytes = std::size_t{1} << 20;

  void put_text(std::string_view text) { text_ += text; }
  void flush() {
    put_(text_);
    text_.clear();
  }

  const std::function<void(std::string_view)>& put_;
  std::string text_;
  bool first_ = true;
};

void put_metadata(EventList& out, int pid, std::size_t tid, const char* what,
                  const nlohmann::json& args) {
  out.put("{{\"ph\":\"M\",\"pid\":{},\"tid\":{},\"name\":\"{}\",\"args\":{}}}", pid, tid, what,
          dump_json(args, -1, InvalidUtf8::replace));
}

void put_slice(EventList& out, int pid, std::size_t tid, const Slice& slice) {
  const TraceEvent& event = *slice.event;
  const Action action{.kind = static_cast<ActionKind>(event.action),
                      .stage = event.stage,
                      .micro_batch = event.micro_batch};
  out.put(
      "{{\"ph\":\"X\",\"pid\":{},\"tid\":{},\"ts\":{},\"dur\":{},\"name\":\"{}\","
      "\"cat\":\"{}\",\"args\":{{\"stage\":{},\"micro_batch\":{}}}}}",
      pid, tid, microseconds(slice.start), microseconds(slice.end - slice.start), to_string(action),
      kTrackNames[static_cast<std::size_t>(event.track)], event.stage, event.micro_batch);
}

void put_track(EventList& out, const RankTrace& trace, std::size_t track,
               std::vector<DrawnSlice>& drawn) {
  const std::vector<Slice> slices = slices_of(trace, static_cast<TraceTrack>(track));
  std::size_t lanes = 0;
  for (const Slice& slice : slices) lanes = std::max(lanes, slice.lane + 1);
  const std::size_t base = (track + 1) * kMostLanes;
  for (std::size_t lane = 0; lane < lanes; ++lane) {
    const std::string name =
        lane == 0 ? kTrackNames[track] : fmt::format("{} {}", kTrackNames[track], lane + 1);
    put_metadata(out, trace.rank, base + lane, "thread_name", {{"name", name}});
    put_metadata(out, trace.rank, base + lane, "thread_sort_index", {{"sort_index", base + lane}});
  }
  for (const Slice& slice : slices) {
    put_slice(out, trace.rank, base + slice.lane, slice);
    drawn[static_cast<std::size_t>(slice.event - trace.events.data())] = {
        slice.start, slice.end, trace.rank, base + slice.lane};
  }
}

// Returns where each event of the rank is drawn.
std::vector<DrawnSlice> put_rank(EventList& out, const RankTrace& trace) {
  std::vector<DrawnSlice> drawn(trace.events.size());
  put_metadata(out, trace.rank, 0, "process_name", {{"name", trace.label}});
  put_metadata(out, trace.rank, 0, "process_sort_index", {{"sort_index", trace.rank}});
  for (std::size_t track = 0; track < kTrackNames.size(); ++track) {
    put_track(out, trace, track, drawn);
  }
  return drawn;
}

// Viewers bind a flow event to the slice of its thread that began last, in order of time and then
// of the file. So arrows come after all slices. One starts a little before its slice ends, as the
// next slice may begin there and Perfetto rounds down to nanoseconds. Where clocks disagree it
// starts no later than it ends, since Perfetto drops an end that comes first.
void put_arrow(EventList& out, const DrawnSlices& drawn, const TraceArrow& arrow, std::size_t id) {
  constexpr std::int64_t kBeforeEnd = 2;  // nanoseconds
  const DrawnSlice& from = drawn[arrow.from.trace][arrow.from.event];
  const DrawnSlice& to = drawn[arrow.to.trace][arrow.to.event];
  const std::int64_t leaves = std::max(from.start, std::min(from.end - kBeforeEnd, to.start));
  constexpr const char* kCommon = "\"name\":\"message\",\"cat\":\"message\"";
  out.put("{{\"ph\":\"s\",\"id\":{},\"pid\":{},\"tid\":{},\"ts\":{},{}}}", id, from.pid, from.tid,
          microseconds(leaves), kCommon);
  out.put("{{\"ph\":\"f\",\"bp\":\"e\",\"id\":{},\"pid\":{},\"tid\":{},\"ts\":{},{}}}", id, to.pid,
          to.tid, microseconds(to.start), kCommon);
}

void put_counter(EventList& out, const std::vector<RankTrace>& ranks, const TraceCounter& counter) {
  const int rank = ranks[counter.trace].rank;
  const nlohmann::json name = counter.name;
  for (const auto& [time, value] : counter.values) {
    out.put("{{\"ph\":\"C\",\"pid\":{},\"ts\":{},\"name\":{},\"args\":{{\"value\":{}}}}}", rank,
            microseconds(nanoseconds(time)), dump_json(name), value);
  }
}

}  // namespace

void write_trace(const std::function<void(std::string_view)>& put,
                 const std::vector<RankTrace>& ranks, const std::vector<TraceArrow>& arrows,
                 const std::vector<TraceCounter>& counters, std::string_view layers) {
  EventList events(put, layers);
  DrawnSlices drawn;
  for (const RankTrace& trace : ranks) drawn.push_back(put_rank(events, trace));
  for (std::size_t id = 0; id < arrows.size(); ++id) {
    put_arrow(events, drawn, arrows[id], id + 1);
  }
  for (const TraceCounter& each : counters) put_counter(events, ranks, each);
  events.finish();
}

void write_trace(const std::filesystem::path& path, const std::vector<RankTrace>& ranks,
                 const std::vector<TraceArrow>& arrows, std::string_view layers) {
  AtomicFile file(path);
  write_trace([&file](std::string_view text) { file.write(text); }, ranks, arrows, {}, layers);
  file.commit();
}

}  // namespace sluice
