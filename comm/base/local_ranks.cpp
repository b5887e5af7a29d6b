#include "comm/base/local_ranks.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <string_view>
#include <system_error>

#include "comm/base/cores.hpp"
#include "comm/base/joined.hpp"

namespace sluice {
namespace {

namespace fs = std::filesystem;

std::string contents_of(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

// The number that all of `text` is; -1 where it is none.
int number_in(std::string_view text) {
  int number = 0;
  const char* const end = text.data() + text.size();
  const auto [last, error] = std::from_chars(text.data(), end, number);
  return error == std::errc() && last == end ? number : -1;
}

// Of an environment as /proc has it, with a zero byte after each variable.
std::string value_of(std::string_view name, const std::string& environment) {
  std::size_t first = 0;
  while (first < environment.size()) {
    const std::string_view entry = environment.c_str() + first;
    if (entry.starts_with(name) && entry.substr(name.size()).starts_with('=')) {
      return std::string(entry.substr(name.size() + 1));
    }
    first += entry.size() + 1;
  }
  return "";
}

}  // namespace

std::vector<LocalRank> local_ranks() {
  constexpr const char* kJob = "PMIX_NAMESPACE";
  const char* const job = std::getenv(kJob);
  std::map<int, LocalRank> ranks;
  std::error_code error;
  fs::directory_iterator entry("/proc", error);
  for (; job != nullptr && !error && entry != fs::directory_iterator(); entry.increment(error)) {
    const int process = number_in(entry->path().filename().string());
    if (process < 0) continue;
    const std::string environment = contents_of(entry->path() / "environ");
    const int rank = number_in(value_of("PMIX_RANK", environment));
    if (rank < 0 || value_of(kJob, environment) != job) continue;
    // "4242 (name) T ...", where the name may hold anything.
    const std::string stat = contents_of(entry->path() / "stat");
    const std::size_t name_end = stat.rfind(") ");
    if (name_end == std::string::npos) continue;  // it has just ended
    const LocalRank found{.rank = rank, .process = process, .state = stat[name_end + 2]};
    const auto known = ranks.try_emplace(rank, found).first;
    if (found.stopped()) known->second = found;
  }
  std::vector<LocalRank> result;
  for (const auto& [rank, each] : ranks) result.push_back(each);
  return result;
}

std::string silence_on_host(const std::vector<LocalRank>& ranks, int size) {
  const bool whole = launcher_info().local_size == size && !ranks.empty();
  std::vector<std::string> parts;
  int next = 0;
  const auto add_missing = [&](int end) {
    for (; whole && next < end; ++next) parts.push_back(fmt::format("rank {} does not run", next));
  };
  for (const LocalRank& each : ranks) {
    add_missing(each.rank);
    next = each.rank + 1;
    if (!each.stopped()) continue;
    parts.push_back(fmt::format("rank {} (process {}) is stopped (state {})", each.rank,
                                each.process, each.state));
  }
  add_missing(size);
  if (parts.empty()) return whole ? "all ranks are on this host, and none is stopped" : "";
  return joined(parts, ", ");
}

}  // namespace sluice
