#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>

#include "runtime/report/metrics.hpp"

namespace sluice {
namespace {

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// "0:35", "12:03", "3:07:09"
std::string clock_text(double seconds) {
  constexpr double kMost = 999.0 * 3600;
  const auto whole = static_cast<long>(std::llround(std::clamp(seconds, 0.0, kMost)));
  const long hours = whole / 3600, minutes = whole / 60 % 60, rest = whole % 60;
  return hours > 0 ? fmt::format("{}:{:02}:{:02}", hours, minutes, rest)
                   : fmt::format("{}:{:02}", minutes, rest);
}

}  // namespace

std::string progress_line(const StepRecord& record, std::uint64_t first_step,
                          std::uint64_t last_step, double elapsed) {
  const auto done = static_cast<double>(record.step - first_step + 1);
  const auto left = static_cast<double>(last_step - std::min(record.step, last_step));
  return fmt::format(
      "step {}/{}  loss {:.4f}{}  {:.0f} tokens/s{}  bubble {:.1f} %  {} elapsed  {} left",
      record.step, last_step, record.loss, record.skipped ? ", skipped" : "",
      record.tokens_per_second,
      record.share_of_peak > 0 ? fmt::format("  {:.1f} % of peak", 100 * record.share_of_peak) : "",
      100 * record.bubble_measured, clock_text(elapsed), clock_text(elapsed / done * left));
}

Progress::Progress(std::uint64_t first_step, std::uint64_t last_step, bool terminal,
                   double plain_seconds, std::ostream& out)
    : first_(first_step),
      last_(last_step),
      terminal_(terminal),
      plain_seconds_(plain_seconds),
      started_(now()),
      out_(out) {}

void Progress::step(const StepRecord& record) {
  const double time = now();
  show(progress_line(record, first_, last_, time - started_), time, record.step == last_);
}

void Progress::validation(std::int64_t done, std::int64_t all) {
  const double time = now();
  if (done == all) return clear();
  if (done == 0) {
    validation_started_ = time;
    if (!last_plain_) last_plain_ = time;
    if (terminal_) show(fmt::format("validation 0/{}", all), time, false);
    return;
  }
  const double elapsed = time - validation_started_;
  const double left = elapsed / static_cast<double>(done) * static_cast<double>(all - done);
  show(fmt::format("validation {}/{}  {} elapsed  {} left", done, all, clock_text(elapsed),
                   clock_text(left)),
       time, false);
}

void Progress::show(const std::string& line, double time, bool at_once) {
  if (terminal_) {
    // Spaces cover the rest of a longer line.
    out_ << '\r' << line << std::string(width_ - std::min(width_, line.size()), ' ') << std::flush;
    width_ = line.size();
    return;
  }
  if (last_plain_ && time - *last_plain_ < plain_seconds_ && !at_once) return;
  last_plain_ = time;
  out_ << line << '\n' << std::flush;
}

void Progress::note(const std::string& line) {
  clear();
  out_ << line << '\n' << std::flush;
}

void Progress::finish() {
  if (terminal_ && width_ > 0) out_ << '\n' << std::flush;
  width_ = 0;
}

void Progress::clear() {
  if (terminal_ && width_ > 0) out_ << '\r' << std::string(width_, ' ') << '\r';
  width_ = 0;
}

}  // namespace sluice
