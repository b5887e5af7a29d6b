// A benchmark's result: a table for people and JSON for programs, under the machine it ran on.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "stages/compute.hpp"

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

  // One more fact about where it was measured, such as the GPU's name.
  void machine(const std::string& name, nlohmann::ordered_json value) {
    machine_[name] = std::move(value);
  }

  void print() const {
    fmt::print("{}\n{}, kernels {}, {}\n", title_, processor(), kernel_set(), matmul_library());
    for (const auto& [name, value] : machine_.items()) fmt::print("{} {}\n", name, text(value));
    std::vector<std::size_t> widths;
    for (std::size_t i = 0; i < columns_.size(); ++i) {
      std::size_t width = std::max<std::size_t>(columns_[i].size(), 20);
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

  // Appends one object to `path`, if there is one.
  void save(const std::string& path) const {
    if (path.empty()) return;
    nlohmann::ordered_json json = {{"benchmark", title_},
                                   {"processor", processor()},
                                   {"kernels", kernel_set()},
                                   {"matmul", matmul_library()}};
    json.update(machine_);
    for (const auto& row : rows_) {
      nlohmann::ordered_json object;
      for (std::size_t i = 0; i < columns_.size(); ++i) object[columns_[i]] = row[i];
      json["rows"].push_back(object);
    }
    std::ofstream(path, std::ios::app) << json.dump() << "\n";
  }

 private:
  static std::string text(const nlohmann::ordered_json& value) {
    if (value.is_string()) return value.get<std::string>();
    if (value.is_number_float()) return fmt::format("{:.4g}", value.get<double>());
    return value.dump();
  }
  std::string title_;
  std::vector<std::string> columns_;
  nlohmann::ordered_json machine_ = nlohmann::ordered_json::object();
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
