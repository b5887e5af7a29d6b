// Sluice's own schedule file: one JSON object, every key below exactly once and no other.
//
//   {"format": "sluice-schedule", "version": 1, "name": "1f1b", "ranks": 2, "stages": 2,
//    "micro_batches": 2, "placement": [0, 1],
//    "lists": [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]}
//
// `placement` gives each stage's rank. `lists` has one list per rank, in the order it runs, of
// compute actions and overlapped pairs in the text form of schedules/schedule.hpp; messages are no
// part of it, lower() adds them. A file without any backward action is a forward-only schedule.
//
// The reader is strict and bounded: it says what it refuses and where, keeps no document tree, and
// beside the text allocates at most 24 bytes per byte of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "schedules/schedule.hpp"

namespace sluice {

inline constexpr int kScheduleFileVersion = 1;

// Bounds of every reader of schedules. A file also has to list at least one action for each pair
// of stage and micro-batch, so what check() allocates is bounded by the file's length as well.
inline constexpr std::size_t kMaxScheduleFileBytes = std::size_t{1} << 27;  // 128 MiB
inline constexpr std::int64_t kMaxScheduleActions = std::int64_t{1} << 23;  // 1024 ranks x 4096
inline constexpr std::size_t kMaxScheduleNameBytes = 200;

// Throws std::invalid_argument, in one line of printable characters: what was wrong, where (byte or
// list and position), and what would be legal. Whether the order can run is for check() to say.
[[nodiscard]] Schedule parse_schedule_json(std::string_view text);

// What parse_schedule_json() reads back as an equal schedule; one line per rank. Throws
// std::invalid_argument for schedules with other than compute actions and for illegal names.
[[nodiscard]] std::string to_schedule_json(const Schedule& schedule);

// The text's first byte that is no blank is '{', as of a JSON file. No CSV starts so.
[[nodiscard]] bool looks_like_json(std::string_view text);

}  // namespace sluice
