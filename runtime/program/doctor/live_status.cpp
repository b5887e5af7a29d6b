#include "runtime/program/doctor/live_status.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <system_error>

#include "comm/base/throw_error.hpp"
#include "runtime/files/json_text.hpp"
#include "runtime/files/read_file.hpp"

namespace sluice {
namespace {

using Json = nlohmann::json;

constexpr std::size_t kMostBytes = std::size_t{64} << 20;
// The file is replaced every five seconds.
constexpr double kFresh = 15;

std::string age_text(double seconds, bool ended) {
  const std::string age = seconds < 120    ? fmt::format("{:.0f} s", seconds)
                          : seconds < 7200 ? fmt::format("{:.0f} min", seconds / 60)
                                           : fmt::format("{:.0f} h", seconds / 3600);
  if (ended) return fmt::format("the job has ended in order, {} ago", age);
  if (seconds <= kFresh) return fmt::format("as of {} ago", age);
  return fmt::format(
      "written {} ago, though it is replaced every 5 s: the job has ended, or the rank that writes "
      "it has stopped or cannot write here",
      age);
}

std::string table_of(const Json& status, double now) {
  const double age = std::max(0.0, now - status.at("time").get<double>());
  std::string text = fmt::format(
      "step       {}\nstate      {}\nsave       {}\n", status.at("step").get<std::uint64_t>(),
      age_text(age, status.at("ended").get<bool>()), status.at("save").get<std::string>());
  std::size_t width = 4;
  for (const Json& rank : status.at("ranks")) {
    width = std::max(width, rank.at("host").get<std::string>().size());
  }
  const Json& ranks = status.at("ranks");
  const bool shared = !ranks.empty() && ranks.front().contains("tensor");  // by tensor ranks
  text += fmt::format("\n{:>4}  {:<{}}  {:>7}  {}{:<8}  state\n", "rank", "host", width, "replica",
                      shared ? "tensor  " : "", "stages");
  for (const Json& rank : status.at("ranks")) {
    std::string stages;
    for (const Json& stage : rank.at("stages")) {
      stages += fmt::format("{}{}", stages.empty() ? "" : ",", stage.get<int>());
    }
    text += fmt::format("{:>4}  {:<{}}  {:>7}  {}{:<8}  {}\n", rank.at("rank").get<int>(),
                        rank.at("host").get<std::string>(), width, rank.at("replica").get<int>(),
                        shared ? fmt::format("{:>6}  ", rank.at("tensor").get<int>()) : "", stages,
                        rank.at("state").get<std::string>());
  }
  return text;
}

}  // namespace

std::string live_status(const std::filesystem::path& directory, double now) {
  const std::filesystem::path path = directory / "status.json";
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error)) {
    throw_error(ErrorCode::kData,
                "'{}' does not exist: --live wants the directory that 'sluice train --save' writes "
                "to, with a job that runs for five seconds or more and has its watchdog on",
                path.string());
  }
  try {
    return table_of(parse_json(read_text(path, kMostBytes, ErrorCode::kData)), now);
  } catch (const Json::exception& fault) {
    throw_error(ErrorCode::kData, "'{}' is no status of a job: {}", path.string(), fault.what());
  }
}

}  // namespace sluice
