// The CSV files of torch.distributed.pipelining (`_dump_csv`, `_load_csv`): one row per rank, one
// action per cell, an empty cell where the rank idles; rows end in LF or CR LF.
//
// Cells are `0F0`, `2I1`, `2W1`, `1B3`, `0SEND_F0`, `1RECV_F0`, `2SEND_B2`, `1RECV_B2`, `1UNSHARD`,
// `1RESHARD`, `0REDUCE_GRAD`, `(0F7;7B3)OVERLAP_F_B`. Files before PyTorch 2.6 write `B` for the
// input half of a backward and `BW` for the whole. Unlike PyTorch's parser, which takes a prefix of
// a cell, this one takes the whole cell or refuses the file, naming row and column (both from 1).
//
// The placement is what the rows say: a stage belongs to the rank whose row computes it. Bounds are
// those of schedules/schedule_file.hpp: beside the text at most 24 bytes per byte of it are
// allocated.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "schedules/schedule.hpp"

namespace sluice {

enum class CsvAlphabet : std::uint8_t {
  kDetect,   // kOlder where a cell has BW, or W without any I
  kCurrent,  // F I W B, B the whole backward
  kOlder,    // F B W BW, B the input half
};

struct PytorchCsv {
  Schedule schedule;  // compute actions only
  CsvAlphabet alphabet = CsvAlphabet::kCurrent;
  std::int64_t messages = 0;       // SEND and RECV cells, checked and dropped: lower() adds ours
  std::int64_t other_dropped = 0;  // UNSHARD, RESHARD and REDUCE_GRAD cells, dropped
};

// `name` becomes the schedule's. Whether a file without messages can run is for check() to say; one
// with messages has passed check() with them. Throws std::invalid_argument in one line.
[[nodiscard]] PytorchCsv parse_pytorch_csv(std::string_view text, std::string_view name,
                                           CsvAlphabet alphabet = CsvAlphabet::kDetect);

// What PyTorch's loader (of the version that has the alphabet, kDetect: current) and
// parse_pytorch_csv() read back; rows end in LF, without idle cells. Messages, where the schedule
// has them, are written. Throws std::invalid_argument for kinds PyTorch has no name for.
[[nodiscard]] std::string to_pytorch_csv(const Schedule& schedule,
                                         CsvAlphabet alphabet = CsvAlphabet::kCurrent);

}  // namespace sluice
