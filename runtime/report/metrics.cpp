#include "runtime/report/metrics.hpp"

#include <fmt/format.h>

#include <cerrno>
#include <cmath>
#include <nlohmann/json.hpp>
#include <string_view>
#include <system_error>
#include <utility>

#include <sluice/error.hpp>

#include "comm/base/throw_error.hpp"
#include "runtime/files/writable.hpp"

namespace sluice {
namespace {

nlohmann::ordered_json number(double value) {
  if (std::isfinite(value)) return value;
  return std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf";
}

// Whether `line` is one of MetricsWriter's; its step.
bool is_metrics_line(const std::string& line, std::uint64_t* step) {
  const auto json = nlohmann::json::parse(line, nullptr, false);
  if (!json.is_object()) return false;
  const auto found = json.find("step");
  if (found == json.end() || !found->is_number_unsigned()) return false;
  *step = found->get<std::uint64_t>();
  return true;
}

// The lines of a file, one after the other, in bounded memory.
class Lines {
 public:
  explicit Lines(const std::filesystem::path& path) : in_(path, std::ios::binary) {}

  // False at the end of the file. A line beyond kLongest ends the file. `complete`: a newline ended
  // it.
  bool next(std::string* line, bool* complete) {
    line->clear();
    *complete = false;
    std::streambuf* const bytes = in_.rdbuf();
    for (int byte = 0; line->size() < kLongest && (byte = bytes->sbumpc()) != kEnd;) {
      *complete = byte == '\n';
      if (*complete) return true;
      line->push_back(static_cast<char>(byte));
    }
    return !line->empty();
  }

 private:
  static constexpr std::size_t kLongest = std::size_t{4} << 20;
  static constexpr int kEnd = std::char_traits<char>::eof();

  std::ifstream in_;
};

// Bytes up to the first line of a step after `last`, or up to an incomplete line. Complete lines
// that are not MetricsWriter's stay with those before them. Throws Error(kIo) where the file does
// not begin as metrics do.
std::uintmax_t bytes_to_keep(const std::filesystem::path& path, std::uint64_t last) {
  constexpr std::string_view kBegin = R"({"step":)";
  Lines lines(path);
  std::uintmax_t kept = 0;
  std::string line;
  bool complete = false;
  while (lines.next(&line, &complete)) {
    std::uint64_t step = 0;
    const bool known = complete && is_metrics_line(line, &step);
    // A crash can cut the first line short.
    const std::string_view begin = std::string_view(line).substr(0, kBegin.size());
    if (kept == 0 && !known && (complete || begin != kBegin.substr(0, begin.size()))) {
      throw_error(ErrorCode::kIo,
                  "'{}' holds no metrics: its first line is no JSON object with a step; "
                  "give --metrics another file, or remove this one",
                  path.string());
    }
    if (!complete || (known && step > last)) break;
    kept += line.size() + 1;
  }
  return kept;
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

}  // namespace

MetricsWriter::MetricsWriter(const std::filesystem::path& path, const std::string& run,
                             std::optional<std::uint64_t> resumed)
    : path_(path), run_(run) {
  if (!nlohmann::json::parse(run, nullptr, false).is_object()) {
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
  json["tokens"] = record.tokens;
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
  line(json.dump());
}

void MetricsWriter::validation(std::uint64_t step, double val_loss) {
  nlohmann::ordered_json json;
  json["step"] = step;
  json["val_loss"] = number(val_loss);
  line(json.dump());
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

}  // namespace sluice
