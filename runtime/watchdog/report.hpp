// What the watchdog tells people and programs: the merged report of a hang, the table of ranks,
// status.json, and the event for a supervisor.
#pragma once

#include <cstdint>
#include <string>

#include "runtime/watchdog/rules.hpp"

namespace sluice {

// "2F5 of step 1207", "a save, after step 1200", "the pipeline, between two actions, in step 7".
[[nodiscard]] std::string describe_place(const Activity& activity);

// "rank 2 on node3 (stage 2)".
[[nodiscard]] std::string describe_rank(const WatchView& view, int rank);

// One line, the culprit first: "rank 2 on node3 (stage 2) is lost: silent for 31 s; last seen in
// 2F5 of step 1207".
[[nodiscard]] std::string headline(const WatchView& view, const Verdict& verdict);

// A line per rank: what it does, since when, and what it waits for from whom. Ranks that are lost
// or have ended are named so.
[[nodiscard]] std::string rank_lines(const WatchView& view, const WatchLimits& limits);

// "newest complete save: run/step-00001200", or that none is known. `directory`: of saves; empty:
// none are made.
[[nodiscard]] std::string newest_save(const WatchView& view, const std::string& directory);

// The step that most ranks are in.
[[nodiscard]] std::uint64_t step_of(const WatchView& view);

// One JSON object on one line, for tell_supervisor().
[[nodiscard]] std::string hang_event(const WatchView& view, const Verdict& verdict);

// The contents of status.json. `time`: seconds since 1970. `ended`: in order; then this rank's step
// counts, as what the others sent is older.
[[nodiscard]] std::string status_json(const WatchView& view, const WatchLimits& limits,
                                      const std::string& directory, double time, bool ended);

}  // namespace sluice
