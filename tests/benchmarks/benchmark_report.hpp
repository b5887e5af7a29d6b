// A benchmark's result: a table for people and JSON for programs, under the machine it ran on.
// Every benchmark prints and saves by it alone.
#pragma once

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include <sluice/error.hpp>

#include "stages/cpu/cpu_report.hpp"

namespace sluice::benchmarks {

inline double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const std::size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

inline std::string processor() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  }
  return "unknown processor";
}

// Rows of one shape; cells are printed as given, values go into the JSON.
class Report {
 public:
  Report(std::string title, std::vector<std::string> columns)
      : title_(std::move(title)), columns_(std::move(columns)) {}

  void row(const std::vector<nlohmann::ordered_json>& values) { rows_.push_back(values); }

  // One more fact that holds for all rows: the GPU's name, the width of the model.
  void fact(const std::string& name, nlohmann::ordered_json value) {
    facts_[name] = std::move(value);
  }

  void print() const {
    fmt::print("{}\n{}, kernels {}, {}\n", title_, processor(), kernel_set(), matmul_library());
    for (const auto& [name, value] : facts_.items()) fmt::print("{} {}\n", name, text(value));
    std::vector<std::size_t> widths;
    for (std::size_t i = 0; i < columns_.size(); ++i) {
      std::size_t width = columns_[i].size();
      for (const auto& row : rows_) width = std::max(width, text(row[i]).size());
      widths.push_back(width + 2);
    }
    for (std::size_t i = 0; i < columns_.size(); ++i) fmt::print("{:>{}}", columns_[i], widths[i]);
    fmt::print("\n");
    for (const auto& row : rows_) {
      for (std::size_t i = 0; i < row.size(); ++i) fmt::print("{:>{}}", text(row[i]), widths[i]);
      fmt::print("\n");
    }
    std::fflush(stdout);
  }

  // Appends one object, in one line, to the file `path`; does nothing where the path is empty.
  void save(const std::string& path) const {
    if (path.empty()) return;
    nlohmann::ordered_json json = {{"benchmark", title_},
                                   {"processor", processor()},
                                   {"kernels", kernel_set()},
                                   {"matmul", matmul_library()}};
    json.update(facts_);
    for (const auto& row : rows_) {
      nlohmann::ordered_json object;
      for (std::size_t i = 0; i < columns_.size(); ++i) object[columns_[i]] = row[i];
      json["rows"].push_back(object);
    }
    std::ofstream file(path, std::ios::app);
    file << json.dump() << "\n";
    if (!file.flush()) throw Error(ErrorCode::kIo, fmt::format("cannot write '{}'", path));
  }

 private:
  // Numbers with four digits, or with all those before the point.
  static std::string text(const nlohmann::ordered_json& value) {
    if (value.is_string()) return value.get<std::string>();
    if (!value.is_number_float()) return value.dump();
    const double number = value.get<double>();
    return std::abs(number) < 9999.5 ? fmt::format("{:.4g}", number)
                                     : fmt::format("{:.0f}", number);
  }
  std::string title_;
  std::vector<std::string> columns_;
  nlohmann::ordered_json facts_ = nlohmann::ordered_json::object();
  std::vector<std::vector<nlohmann::ordered_json>> rows_;
};

// The value after `name` among the arguments, or `otherwise`.
inline std::string argument(int argc, char** argv, const std::string& name,
                            const std::string& otherwise) {
  for (int i = 1; i + 1 < argc; ++i) {
    if (argv[i] == name) return argv[i + 1];
  }
  return otherwise;
}

}  // namespace sluice::benchmarks
