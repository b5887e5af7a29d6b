// Metrics (JSON lines) and progress (one terminal line), both written by rank 0.
#pragma once

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <optional>
#include <string>
#include <vector>

#include <sluice/pipeline.hpp>

#include "comm/device/gpu_monitor.hpp"

namespace sluice {

struct StepRecord : StepReport {
  double tokens_per_second = 0;
  // Floating-point operations a second by training_flops(), of all ranks, and their share of what
  // the job's GPUs reach at most; 0: not known.
  double flops = 0, share_of_peak = 0;
  double bubble_ideal = 0;      // simulated, uniform stages
  std::vector<int> stragglers;  // ranks of the job, as runtime/report/stragglers.hpp
  std::vector<GpuState> gpus;   // [rank of the job]; empty: not read after this step
};

// One JSON object a line, flushed per line; a failed write throws Error(kIo) naming the path.
// Floats have the digits that give the same double back; JSON has no NaN and infinities,
// so they are the strings "nan", "inf" and "-inf" (which Python's float() reads).
class MetricsWriter {
 public:
  // Opens the file with the first line; a run that ends before leaves it unchanged. An existing
  // file is replaced. After `resumed` steps of an earlier run it is continued: complete lines of
  // these steps stay, the rest from the first other line on goes. Throws Error(kIo) naming the path
  // where it cannot be written, or where the file to continue has other contents than metrics.
  // Pipes and devices are appended to. `run` (a JSON object as text) becomes the last field of the
  // first line written, "run": options, instruction set, kernel set, libraries.
  MetricsWriter(const std::filesystem::path& path, const std::string& run,
                std::optional<std::uint64_t> resumed = std::nullopt);
  void step(const StepRecord& record);
  void validation(std::uint64_t step, double val_loss);

 private:
  void line(std::string json);

  std::ofstream out_;  // open from the first line on
  std::filesystem::path path_;
  std::optional<std::uintmax_t> kept_;  // bytes of the file that stay; nothing: it is replaced
  std::string run_;                     // until the first line is written
};

// "step 120/2000  loss 2.3456  8421 tokens/s  bubble 11.2 %  0:35 elapsed  9:08 left", and "45.6 %
// of peak" after the tokens where the peak is known. The time
// left is the number of steps left times the mean of steps `first_step` to `record.step`, which
// took `elapsed` seconds.
[[nodiscard]] std::string progress_line(const StepRecord& record, std::uint64_t first_step,
                                        std::uint64_t last_step, double elapsed);

// One updating line on a terminal, plain lines (at most one every `plain_seconds`) elsewhere; the
// last step always shows. Steps are those of StepRecord, first and last inclusive. `out` outlives
// this.
class Progress {
 public:
  Progress(std::uint64_t first_step, std::uint64_t last_step, bool terminal,
           double plain_seconds = 5, std::ostream& out = std::cout);
  void step(const StepRecord& record);
  // `done` of `all` windows of a validation, which begins with 0 and ends with `all`.
  void validation(std::int64_t done, std::int64_t all);
  void note(const std::string& line);  // a line of its own, e.g. a validation loss
  void finish();                       // leaves the line on the screen and the cursor below it
  ~Progress() { finish(); }            // before an error is printed
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

 private:
  void show(const std::string& line, double time, bool at_once);
  void clear();

  std::uint64_t first_, last_;
  bool terminal_;
  double plain_seconds_, started_;
  double validation_started_ = 0;
  std::optional<double> last_plain_;  // none shown yet
  std::size_t width_ = 0;             // of the line on the terminal
  std::ostream& out_;
};

}  // namespace sluice
