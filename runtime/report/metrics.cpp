#include "runtime/report/metrics.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <nlohmann/json.hpp>
#include <string_view>
#include <system_error>
#include <utility>

#include <sluice/error.hpp>

#include "comm/base/steady_seconds.hpp"
#include "comm/base/throw_error.hpp"
#include "runtime/files/json_text.hpp"
#include "runtime/files/writable.hpp"

namespace sluice {
namespace {

nlohmann::ordered_json number(double value) {
  if (std::isfinite(value)) return value;
  return std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf";
}

// Whether `line` is one of MetricsWriter's; its step.
bool is_metrics_line(const std::string& line, std::uint64_t* step) {
  const auto json = parse_json(line, NoJson::kDiscard);
  if (!json.is_object()) return false;
  const auto found = json.find("step");
  if (found == json.end() || !found->is_number_unsigned()) return false;
  *step = found->get<std::uint64_t>();
  return true;
}

// Bytes up to the first line of a step after `last`, or up to an incomplete line. Complete lines
// that are not MetricsWriter's stay with those before them. Throws Error(kIo) where the file does
// not begin as metrics do.
std::uintmax_t bytes_to_keep(const std::filesystem::path& path, std::uint64_t last) {
  constexpr std::string_view kBegin = R"({"step":)";
  std::ifstream in(path, std::ios::binary);
  std::string line(kBegin.size(), ' ');
  in.read(line.data(), std::ssize(line));
  line.resize(static_cast<std::size_t>(in.gcount()));
  bool foreign = !kBegin.starts_with(line);  // a crash can cut the first line short
  in.clear();
  in.seekg(0);
  std::uintmax_t kept = 0;
  while (!foreign && std::getline(in, line)) {
    std::uint64_t step = 0;
    const bool complete = !in.eof(), known = complete && is_metrics_line(line, &step);
    foreign = kept == 0 && complete && !known;
    if (foreign) break;
    if (!complete || (known && step > last)) break;
    kept += line.size() + 1;
  }
  if (!foreign) return kept;
  throw_error(ErrorCode::kIo,
              "'{}' holds no metrics: its first line is no JSON object with a step; "
              "give --metrics another file, or remove this one",
              path.string());
}

// Ranks whose driver answered.
nlohmann::ordered_json gpus_json(const std::vector<GpuState>& gpus) {
  constexpr std::uint64_t kMebi = std::uint64_t{1} << 20;
  nlohmann::ordered_json all = nlohmann::ordered_json::array();
  for (std::size_t rank = 0; rank < gpus.size(); ++rank) {
    const GpuState& gpu = gpus[rank];
    if (gpu.known == 0) continue;
    all.push_back({{"rank", rank},
                   {"watts", gpu.watts},
                   {"limit_watts", gpu.limit_watts},
                   {"sm_mhz", gpu.sm_mhz},
                   {"celsius", gpu.celsius},
                   {"memory_mib", gpu.memory_used / kMebi},
                   {"held_back", names_of_reasons(gpu.held_back)}});
  }
  return all;
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

MetricsWriter::MetricsWriter(const std::filesystem::path& path, const std::string& run,
                             std::optional<std::uint64_t> resumed)
    : path_(path), run_(run) {
  if (!parse_json(run, NoJson::kDiscard).is_object()) {
    throw Error(ErrorCode::kInternal, "what describes the run is no JSON object: " + run);
  }
  require_writable_file(path);
  std::error_code ignored;
  if (std::filesystem::is_regular_file(path, ignored)) {
    const std::uintmax_t kept = bytes_to_keep(path, resumed.value_or(0));
    if (resumed) kept_ = kept;
  }
}

void MetricsWriter::step(const StepRecord& record) {
  nlohmann::ordered_json json;
  json["step"] = record.step;
  json["loss"] = number(record.loss);
  json["tokens"] = static_cast<std::int64_t>(record.targets);
  json["seconds"] = number(record.seconds);
  json["tokens_per_second"] = number(record.tokens_per_second);
  if (record.flops > 0) json["flops"] = number(record.flops);
  if (record.share_of_peak > 0) json["share_of_peak"] = number(record.share_of_peak);
  json["grad_norm"] = number(record.grad_norm);
  json["learning_rate"] = number(record.learning_rate);
  json["bubble_measured"] = number(record.bubble_measured);
  json["bubble_ideal"] = number(record.bubble_ideal);
  json["peak_in_flight"] = record.peak_in_flight;
  json["peak_bytes"] = record.peak_bytes;
  if (record.skipped) json["skipped"] = true;
  if (!record.stragglers.empty()) json["stragglers"] = record.stragglers;
  if (!record.gpus.empty()) json["gpus"] = gpus_json(record.gpus);
  line(dump_json(json));
}

void MetricsWriter::validation(std::uint64_t step, double val_loss) {
  nlohmann::ordered_json json;
  json["step"] = step;
  json["val_loss"] = number(val_loss);
  line(dump_json(json));
}

void MetricsWriter::line(std::string json) {
  if (!run_.empty()) {
    json.pop_back();  // the brace
    json += fmt::format(",\"run\":{}}}", std::exchange(run_, {}));
  }
  errno = 0;
  if (!out_.is_open()) {
    std::error_code error;
    if (kept_) std::filesystem::resize_file(path_, *kept_, error);
    if (error) {
      throw_error(ErrorCode::kIo, "cannot cut '{}' to {} bytes: {}", path_.string(), *kept_,
                  error.message());
    }
    // Emptied first, then appended to: a program that empties the file meanwhile leaves no hole.
    if (!kept_) std::ofstream(path_, std::ios::binary | std::ios::trunc);
    out_.open(path_, std::ios::binary | std::ios::app);
  }
  out_ << json << '\n' << std::flush;
  if (!out_) {
    throw_error(ErrorCode::kIo, "cannot write metrics to '{}': {}", path_.string(),
                std::generic_category().message(errno != 0 ? errno : EIO));
  }
}

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
      started_(steady_seconds()),
      out_(out) {}

void Progress::step(const StepRecord& record) {
  const double time = steady_seconds();
  show(progress_line(record, first_, last_, time - started_), time, record.step == last_);
}

void Progress::validation(std::int64_t done, std::int64_t all) {
  const double time = steady_seconds();
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
