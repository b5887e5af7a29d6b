#include "runtime/report/metrics.hpp"

#include <fmt/format.h>

#include <cerrno>
#include <cmath>
#include <nlohmann/json.hpp>
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

}  // namespace

MetricsWriter::MetricsWriter(const std::filesystem::path& path, const std::string& run, bool append)
    : path_(path), append_(append), run_(run) {
  if (!nlohmann::json::parse(run, nullptr, false).is_object()) {
    throw Error(ErrorCode::kInternal, "what describes the run is no JSON object: " + run);
  }
  require_writable_file(path);
}

void MetricsWriter::step(const StepRecord& record) {
  nlohmann::ordered_json json;
  json["step"] = record.step;
  json["loss"] = number(record.loss);
  json["tokens"] = record.tokens;
  json["seconds"] = number(record.seconds);
  json["tokens_per_second"] = number(record.tokens_per_second);
  json["grad_norm"] = number(record.grad_norm);
  json["learning_rate"] = number(record.learning_rate);
  json["bubble_measured"] = number(record.bubble_measured);
  json["bubble_ideal"] = number(record.bubble_ideal);
  json["peak_in_flight"] = record.peak_in_flight;
  json["peak_bytes"] = record.peak_bytes;
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
  if (!out_.is_open())
    out_.open(path_, std::ios::binary | (append_ ? std::ios::app : std::ios::trunc));
  out_ << json << '\n' << std::flush;
  if (!out_) {
    throw_error(ErrorCode::kIo, "cannot write metrics to '{}': {}", path_.string(),
                std::generic_category().message(errno != 0 ? errno : EIO));
  }
}

}  // namespace sluice
