#include "runtime/program/supervise/hosts.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <numeric>
#include <sstream>

#include <sluice/error.hpp>

#include "comm/base/joined.hpp"
#include "comm/base/throw_error.hpp"
#include "runtime/files/read_file.hpp"
#include "runtime/program/options/option_table.hpp"

namespace sluice {
namespace {

constexpr int kMost = 1'000'000;  // slots of a host, ranks of a job
constexpr std::size_t kMostBytes = 16U << 20;

// A number from 1 to kMost.
std::optional<int> number_in(std::string_view text) {
  int value = 0;
  const bool sound = parse_whole(text, value) && value >= 1 && value <= kMost;
  return sound ? std::optional(value) : std::nullopt;
}

bool is_name(std::string_view text) {
  return !text.empty() && text.front() != '-' && std::ranges::all_of(text, [](unsigned char c) {
    return std::isalnum(c) != 0 || c == '.' || c == '-' || c == '_';
  });
}

// The words of a line; "slots = 4" is one word, as Open MPI reads it.
std::vector<std::string> words_of(const std::string& line) {
  std::string joined;
  for (const char c : line) {
    const bool blank = std::isspace(static_cast<unsigned char>(c)) != 0;
    if (blank && !joined.empty() && joined.back() == '=') continue;
    if (c == '=') {
      while (!joined.empty() && joined.back() == ' ') joined.pop_back();
    }
    joined += blank ? ' ' : c;
  }
  std::istringstream in(joined);
  std::vector<std::string> words;
  for (std::string word; in >> word;) words.push_back(word);
  return words;
}

// "line 3 of the host file 'hosts'"
int slots_in(const std::string& text, const std::string& where) {
  const std::optional<int> slots = number_in(text);
  if (slots) return *slots;
  throw_error(ErrorCode::kData, "{}: '{}' is no number of slots; legal are 1 to {}", where, text,
              kMost);
}

HostLine host_in(const std::vector<std::string>& words, const std::string& content,
                 const std::string& where) {
  HostLine host{words.front(), std::nullopt, {content}};
  host.name.erase(0, host.name.find('@') + 1);  // user@host; npos + 1 is 0
  if (const std::size_t colon = host.name.find(':'); colon != std::string::npos) {
    host.slots = slots_in(host.name.substr(colon + 1), where);
    host.name.resize(colon);
  }
  if (!is_name(host.name)) {
    throw_error(ErrorCode::kData, "{} is no host; legal: one host a line, such as 'node1 slots=4'",
                where);
  }
  for (const std::string& word : words) {
    if (word.starts_with("slots=")) host.slots = slots_in(word.substr(6), where);
  }
  return host;
}

void add_host(std::vector<HostLine>& hosts, HostLine host, const std::string& where) {
  const auto known = std::ranges::find(hosts, host.name, &HostLine::name);
  if (known == hosts.end()) {
    hosts.push_back(std::move(host));
    return;
  }
  const bool counted = known->lines.size() > 1;  // a line for each slot so far
  if (host.slots || (known->slots && !counted)) {
    throw_error(ErrorCode::kData,
                "{} names '{}' again; legal: one line with slots=N, or a line for each slot", where,
                host.name);
  }
  known->lines.push_back(host.lines.front());
  known->slots = static_cast<int>(known->lines.size());
}

Layout layout_in(std::string_view text) {
  while (text.starts_with(' ')) text.remove_prefix(1);
  while (text.ends_with(' ')) text.remove_suffix(1);
  std::vector<int> sizes;
  std::int64_t ranks = 1;
  for (std::string_view rest = text; ranks > 0 && ranks <= kMost;) {
    const std::size_t cross = rest.find('x');
    sizes.push_back(number_in(rest.substr(0, cross)).value_or(0));
    ranks *= sizes.back();
    if (cross == std::string_view::npos) break;
    rest.remove_prefix(cross + 1);
  }
  if (ranks < 1 || ranks > kMost || sizes.size() < 2 || sizes.size() > 3) {
    throw_usage(
        "option --layouts: '{}' is no layout; legal are PIPELINExREPLICAS, such as '4x2', and "
        "PIPELINExREPLICASxTENSOR, of at most {} ranks, with commas between",
        text, kMost);
  }
  return {sizes[0], sizes[1], sizes.size() == 3 ? sizes[2] : 1};
}

}  // namespace

std::vector<HostLine> read_host_file(const std::string& path) {
  std::istringstream in(read_text(path, kMostBytes, ErrorCode::kData));
  std::vector<HostLine> hosts;
  int number = 0;
  for (std::string line; std::getline(in, line);) {
    const std::string where = fmt::format("line {} of the host file '{}'", ++number, path);
    line.resize(std::min(line.size(), line.find('#')));
    const std::vector<std::string> words = words_of(line);
    if (!words.empty()) add_host(hosts, host_in(words, line, where), where);
  }
  if (hosts.empty()) throw_error(ErrorCode::kData, "the host file '{}' names no host", path);
  return hosts;
}

bool same_host(std::string_view a, std::string_view b) {
  if (a == b) return true;
  if (a.size() > b.size()) std::swap(a, b);
  return !a.empty() && b.size() > a.size() && b.substr(0, a.size()) == a && b[a.size()] == '.' &&
         !std::ranges::all_of(a, [](unsigned char c) { return std::isdigit(c) != 0; });
}

std::string to_string(const Layout& layout) {
  return fmt::format("{}x{}{}", layout.pipeline, layout.replicas,
                     layout.tensor == 1 ? "" : fmt::format("x{}", layout.tensor));
}

std::vector<Layout> parse_layouts(std::string_view text) {
  std::vector<Layout> layouts;
  while (true) {
    const std::size_t comma = text.find(',');
    const Layout layout = layout_in(text.substr(0, comma));
    if (std::ranges::find(layouts, layout) != layouts.end()) {
      throw_usage("option --layouts: '{}' is given twice", to_string(layout));
    }
    layouts.push_back(layout);
    if (comma == std::string_view::npos) return layouts;
    text.remove_prefix(comma + 1);
  }
}

void require_division(std::string_view layouts, int Layout::*holders, const DivisionNames& names,
                      int parts) {
  for (const Layout& layout : parse_layouts(layouts)) {
    if (can_divide(parts, layout.*holders)) continue;
    throw_usage(
        "option --layouts: '{}' has {} {}s, which cannot divide the --{} {} of the command; legal "
        "numbers of {}s: {}",
        to_string(layout), layout.*holders, names.holder, names.option, parts, names.holder,
        joined(dividing(parts), ", "));
  }
}

Places::Places(const std::string& host_file, const std::string& layouts)
    : any_fits_(host_file.empty()) {
  if (!host_file.empty()) hosts_ = read_host_file(host_file);
  if (layouts.empty()) return;
  layouts_ = parse_layouts(layouts);
  for (const HostLine& host : hosts_) {
    if (host.slots) continue;
    throw_error(
        ErrorCode::kData,
        "host '{0}' of '{1}' has no number of slots, which --layouts needs; write '{0} slots=N'",
        host.name, host_file);
  }
  if (!choose()) {
    throw_usage("option --layouts: none of '{}' fits the {} slots of '{}'", layouts, slots(),
                host_file);
  }
}

bool Places::leave_out(const std::vector<std::string>& names) {
  std::erase_if(hosts_, [&](const HostLine& host) {
    return std::ranges::find(names, host.name) != names.end();
  });
  return layouts_.empty() || choose();
}

bool Places::choose() {
  const auto found = std::ranges::find_if(
      layouts_, [&](const Layout& layout) { return any_fits_ || layout.ranks() <= slots(); });
  if (found == layouts_.end()) return false;
  layout_ = *found;
  return true;
}

std::vector<std::string> Places::names() const {
  std::vector<std::string> result;
  for (const HostLine& host : hosts_) result.push_back(host.name);
  return result;
}

std::string Places::host_file() const {
  std::string text;
  for (const HostLine& host : hosts_) {
    for (const std::string& line : host.lines) text += line + "\n";
  }
  return text;
}

int Places::slots() const {
  const auto add = [](std::int64_t sum, const HostLine& host) {
    return std::min<std::int64_t>(sum + host.slots.value_or(0), kMost);
  };
  return static_cast<int>(std::accumulate(hosts_.begin(), hosts_.end(), std::int64_t{0}, add));
}

}  // namespace sluice
