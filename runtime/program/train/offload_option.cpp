#include "runtime/program/train/offload_option.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <iterator>
#include <string_view>
#include <utility>
#include <vector>

#include "comm/base/throw_error.hpp"

namespace sluice {
namespace {

using OffloadTo = PipelineOptions::Offload::To;

// What can be offloaded.
constexpr std::pair<std::string_view, OffloadTo PipelineOptions::Offload::*> kOffloads[] = {
    {"activations", &PipelineOptions::Offload::activations},
    {"optimizer", &PipelineOptions::Offload::optimizer}};
// Where it goes; behind '=' a directory.
constexpr std::pair<std::string_view, OffloadTo> kOffloadPlaces[] = {
    {"host", OffloadTo::kHost},
    {"disk=", OffloadTo::kDisk},
    {"disk-cached=", OffloadTo::kCachedDisk}};

[[noreturn]] void refuse_offload(const std::string& text, const char* why) {
  throw_usage(
      "option --offload: '{}' {}; legal are none, activations:WHERE, optimizer:WHERE or "
      "activations,optimizer:WHERE, to disk=DIR, disk-cached=DIR, or activations of GPUs to host",
      text, why);
}

// The one with which the text goes on, and a mark after it.
const auto* offload_at(std::string_view text) {
  const auto* const found = std::ranges::find_if(kOffloads, [&](const auto& each) {
    return text.starts_with(each.first) && text.size() > each.first.size() &&
           (text[each.first.size()] == ',' || text[each.first.size()] == ':');
  });
  return found == std::end(kOffloads) ? nullptr : found;
}

}  // namespace

PipelineOptions::Offload parse_offload(const std::string& text) {
  PipelineOptions::Offload offload;
  if (text == "none") return offload;
  std::vector<OffloadTo PipelineOptions::Offload::*> named;
  std::string_view rest = text;
  do {
    const auto* const what = offload_at(rest);
    if (what == nullptr) refuse_offload(text, "is not legal");
    if (offload.*(what->second) != OffloadTo::kNowhere ||
        std::ranges::count(named, what->second) > 0)
      refuse_offload(text, "names something twice");
    named.push_back(what->second);
    const bool more = rest[what->first.size()] == ',';
    rest.remove_prefix(what->first.size() + 1);
    if (more) continue;
    std::size_t end = rest.find(',');
    while (end != rest.npos && offload_at(rest.substr(end + 1)) == nullptr)
      end = rest.find(',', end + 1);
    const std::string_view where = rest.substr(0, end);
    const auto* const place = std::ranges::find_if(kOffloadPlaces, [&](const auto& each) {
      return each.first.ends_with('=') ? where.starts_with(each.first) && where != each.first
                                       : where == each.first;
    });
    if (place == std::end(kOffloadPlaces)) refuse_offload(text, "is not legal");
    const std::string_view last = where.substr(where.rfind(',') + 1);
    if (std::ranges::any_of(kOffloads, [&](const auto& each) { return each.first == last; })) {
      refuse_offload(text, "names no place");
    }
    for (const auto each : named) offload.*each = place->second;
    named.clear();
    const std::string directory(where.substr(place->first.size()));
    if (!directory.empty() && !offload.directory.empty() && directory != offload.directory)
      refuse_offload(text, "names two directories, where one is for all");
    if (!directory.empty()) offload.directory = directory;
    rest = end == rest.npos ? std::string_view() : rest.substr(end + 1);
  } while (!rest.empty());
  if (!named.empty()) refuse_offload(text, "names no place");
  return offload;
}

std::string text_of(const PipelineOptions::Offload& offload) {
  std::string text;
  for (const auto& [place, to] : kOffloadPlaces) {
    std::string names;
    for (const auto& [name, what] : kOffloads) {
      if (offload.*what == to) names += (names.empty() ? "" : ",") + std::string(name);
    }
    if (names.empty()) continue;
    text += fmt::format("{}{}:{}{}", text.empty() ? "" : ",", names, place,
                        place.ends_with('=') ? offload.directory : "");
  }
  return text.empty() ? "none" : text;
}

}  // namespace sluice
