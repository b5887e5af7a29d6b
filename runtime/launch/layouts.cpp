#include "runtime/launch/layouts.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cstdint>

#include "comm/base/throw_error.hpp"

namespace sluice {
namespace {

constexpr int kMostOfAPart = 100'000;
constexpr std::int64_t kMostRanks = 1'000'000;

std::string_view trimmed(std::string_view text) {
  while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
  while (!text.empty() && text.back() == ' ') text.remove_suffix(1);
  return text;
}

std::optional<int> part_of(std::string_view text) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  if (value < 1 || value > kMostOfAPart) return std::nullopt;
  return value;
}

Layout parse_one(std::string_view text) {
  const std::size_t cross = text.find('x');
  const auto pipeline = part_of(text.substr(0, cross));
  const auto replicas =
      cross == std::string_view::npos ? std::nullopt : part_of(text.substr(cross + 1));
  if (!pipeline || !replicas || std::int64_t{*pipeline} * *replicas > kMostRanks) {
    throw_usage(
        "option --layouts: '{}' is no layout; legal are PIPELINExREPLICAS, such as '4x2', with "
        "numbers from 1 to {} and at most {} ranks, with commas between",
        text, kMostOfAPart, kMostRanks);
  }
  return {*pipeline, *replicas};
}

}  // namespace

std::string to_string(const Layout& layout) {
  return fmt::format("{}x{}", layout.pipeline, layout.replicas);
}

std::vector<Layout> parse_layouts(std::string_view text) {
  std::vector<Layout> layouts;
  while (true) {
    const std::size_t comma = text.find(',');
    const Layout layout = parse_one(trimmed(text.substr(0, comma)));
    if (std::find(layouts.begin(), layouts.end(), layout) != layouts.end()) {
      throw_usage("option --layouts: '{}' is given twice", to_string(layout));
    }
    layouts.push_back(layout);
    if (comma == std::string_view::npos) return layouts;
    text.remove_prefix(comma + 1);
  }
}

std::optional<int> slots_of(std::span<const HostLine> hosts) {
  std::int64_t slots = 0;
  for (const HostLine& host : hosts) {
    if (!host.slots) return std::nullopt;
    slots += *host.slots;
  }
  return static_cast<int>(std::min<std::int64_t>(slots, kMostRanks));
}

std::optional<Layout> first_that_fits(std::span<const Layout> layouts, std::optional<int> slots) {
  const auto fits = [&](const Layout& layout) { return !slots || layout.ranks() <= *slots; };
  const auto found = std::find_if(layouts.begin(), layouts.end(), fits);
  if (found == layouts.end()) return std::nullopt;
  return *found;
}

}  // namespace sluice
