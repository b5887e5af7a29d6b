// Schedules read from files and written to them: Sluice's own format, and PyTorch's. Both readers
// are strict and bounded: they say what they refuse and where, and allocate at most 64 bytes per
// byte of the text in addition to it. Functions are pure and thread-safe.
//
// Sluice's own file is one JSON object, every key below exactly once and no other, but for
// `made_for`, which may be missing:
//
//   {"format": "sluice-schedule", "version": 1, "name": "1f1b", "ranks": 2, "stages": 2,
//    "micro_batches": 2, "placement": [0, 1],
//    "made_for": {"first_layer": [0, 4, 8], "makespan": 47.2, "bubble": 0.23,
//                 "milliseconds": true},
//    "lists": [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]}
//
// `placement` gives each stage's rank. `lists` has one list per rank, in the order it runs, of
// compute actions, overlapped pairs, UNSHARD, RESHARD and REDUCE_GRAD in the text form of
// <sluice/schedule.hpp>; messages are no part of it, lower() adds them. A file without any backward
// action is a forward-only schedule. `made_for` is what a search wrote beside its result (MadeFor);
// all of its keys are there.
//
// PyTorch's are the CSV files of torch.distributed.pipelining (`_dump_csv`, `_load_csv`): one row
// per rank, one action per cell, an empty cell where the rank idles; rows end in LF or CR LF. Cells
// are `0F0`, `2I1`, `2W1`, `1B3`, `0SEND_F0`, `1RECV_F0`, `2SEND_B2`, `1RECV_B2`, `1UNSHARD`,
// `1RESHARD`, `0REDUCE_GRAD`, `(0F7;7B3)OVERLAP_F_B`, and since 2.15 `0WAIT_SEND_F0`,
// `2WAIT_SEND_B2`, `0WAIT_REDUCE_GRAD`. Files before PyTorch 2.6 write `B` for the
// input half of a backward and `BW` for the whole. Unlike PyTorch's parser, which takes a prefix of
// a cell, this one takes the whole cell or refuses the file, naming row and column (both from 1).
// The placement is what the rows say: a stage belongs to the rank whose row computes it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <sluice/schedule.hpp>

#pragma GCC visibility push(default)
namespace sluice {

inline constexpr int kScheduleFileVersion = 1;

// Bounds of every reader of schedules. A file also has to list at least one action for each pair
// of stage and micro-batch, so what check() allocates is bounded by the file's length as well.
inline constexpr std::size_t kMaxScheduleFileBytes = std::size_t{1} << 27;  // 128 MiB
inline constexpr std::int64_t kMaxScheduleActions = std::int64_t{1} << 23;  // 1024 ranks x 4096
inline constexpr std::size_t kMaxScheduleNameBytes = 200;

// What a search found a schedule for, and what it promises.
struct MadeFor {
  // Stage s owns layers [first_layer[s], first_layer[s + 1]); empty: the model was cut anywhere.
  std::vector<int> first_layer;
  double makespan = 0;        // of a step, simulated
  double bubble = 0;          // Simulation::bubble_makespan
  bool milliseconds = false;  // the makespan's unit; else that of the costs the search was given
  friend bool operator==(const MadeFor&, const MadeFor&) = default;
};

struct ScheduleFile {
  Schedule schedule;
  std::optional<MadeFor> made_for;
};

// Throws Error(kUsage), in one line of printable characters: what was wrong, where (byte or
// list and position), and what would be legal. check() says whether the order can run.
[[nodiscard]] ScheduleFile parse_schedule_json(std::string_view text);

// What parse_schedule_json() reads back as equal; one line per rank. Throws
// Error(kUsage) for schedules with other actions, for illegal names, and for a
// `made_for` that parse_schedule_json() refuses.
[[nodiscard]] std::string to_schedule_json(const Schedule& schedule,
                                           const std::optional<MadeFor>& made_for = {});

enum class CsvAlphabet : std::uint8_t {
  kDetect,   // kOlder where a cell has BW, or W without any I; else as the waits are
  kCurrent,  // F I W B, B the whole backward; each message and sum has a wait (PyTorch 2.15)
  kNoWaits,  // the same without waits (2.6 to 2.14)
  kOlder,    // F B W BW, B the input half, without waits
};

struct PytorchCsv {
  Schedule schedule;  // compute actions, UNSHARD, RESHARD, REDUCE_GRAD
  CsvAlphabet alphabet = CsvAlphabet::kCurrent;
  std::int64_t messages = 0;  // SEND and RECV cells, checked and dropped: lower() adds its own
  std::int64_t waits = 0;     // likewise
  std::int64_t sharding = 0;  // UNSHARD, RESHARD and REDUCE_GRAD cells, kept
};

// `name` becomes the schedule's. check() says whether a file without messages can run; one
// with messages has passed check() with them. A wait has to follow its send or sum, and where the
// file has waits for messages, or for sums, each of these has one. At most one sum of a rank is
// under way. Throws Error(kUsage) in one line.
[[nodiscard]] PytorchCsv parse_pytorch_csv(std::string_view text, std::string_view name,
                                           CsvAlphabet alphabet = CsvAlphabet::kDetect);

// What PyTorch's loader (of the version that has the alphabet, kDetect: current) and
// parse_pytorch_csv() read back; rows end in LF, without idle cells. Messages, where the schedule
// has them, are written. So are waits in the current alphabet, where PyTorch itself places them: of
// an activation after that micro-batch's backward, of the rest at the row's end, of a sum right
// after it. Throws Error(kUsage) for kinds PyTorch has no name for.
[[nodiscard]] std::string to_pytorch_csv(const Schedule& schedule,
                                         CsvAlphabet alphabet = CsvAlphabet::kCurrent);

// The text's first byte that is no blank is '{', as of a JSON file. No CSV starts so.
[[nodiscard]] bool looks_like_json(std::string_view text);

}  // namespace sluice
#pragma GCC visibility pop
