#include "runtime/options/option_table.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <boost/program_options.hpp>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <sstream>

#include <sluice/error.hpp>

namespace sluice {
namespace {

namespace po = boost::program_options;

[[noreturn]] void refuse(const std::string& message) { throw Error(ErrorCode::kUsage, message); }

template <typename Number>
bool parse_whole(const std::string& text, Number* value) {
  const char* end = text.data() + text.size();
  const auto result = std::from_chars(text.data(), end, *value);
  return result.ec == std::errc() && result.ptr == end;
}

bool contains(const RealRange& range, double value) {
  return (range.low_open ? value > range.low : value >= range.low) &&
         (range.high_open ? value < range.high : value <= range.high);
}

std::string describe(const RealRange& range) {
  const std::string low = fmt::format("{} {}", range.low_open ? "above" : "from", range.low);
  if (std::isinf(range.high)) return low + (range.low_open ? "" : " up");
  return fmt::format("{} {} {}", low, range.high_open ? "to below" : "to", range.high);
}

std::string describe_error(const po::error& error) {
  const auto* named = dynamic_cast<const po::error_with_option_name*>(&error);
  return named != nullptr ? named->what() : error.what();
}

int edit_distance(std::string_view a, std::string_view b) {
  std::vector<int> row(b.size() + 1);
  std::iota(row.begin(), row.end(), 0);
  for (std::size_t i = 0; i < a.size(); ++i) {
    int diagonal = row[0]++;
    for (std::size_t j = 0; j < b.size(); ++j) {
      const int substitute = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({substitute, row[j] + 1, row[j + 1] + 1});
    }
  }
  return row.back();
}

}  // namespace

std::string nearest_name(std::string_view text, const std::vector<std::string>& known) {
  std::string best;
  int best_distance = std::max(2, static_cast<int>(text.size()) / 3) + 1;
  for (const std::string& name : known) {
    const int distance = edit_distance(text, name);
    if (distance < best_distance) {
      best_distance = distance;
      best = name;
    }
  }
  return best;
}

OptionTable::OptionTable(std::string usage, std::string about)
    : usage_(std::move(usage)), about_(std::move(about)) {}

void OptionTable::heading(std::string title) { heading_ = std::move(title); }

OptionTable::Entry& OptionTable::add(std::string name, std::string placeholder, std::string help) {
  Entry& entry = entries_.emplace_back();
  entry.name = std::move(name);
  entry.placeholder = std::move(placeholder);
  entry.help = std::move(help);
  entry.heading = heading_;
  return entry;
}

template <typename Integer>
void OptionTable::add_any_integer(std::string name, Integer& target, Integer low, Integer high,
                                  std::string help, std::string automatic) {
  Entry& entry = add(std::move(name), "N", std::move(help));
  entry.set = [&target, low, high, automatic](const std::string& text, const std::string& where) {
    Integer value = 0;
    if (!automatic.empty() && text == automatic) {
      target = 0;
    } else if (parse_whole(text, &value) && value >= low && value <= high) {
      target = value;
    } else {
      refuse(fmt::format("{}: '{}' is not an integer from {} to {}{}", where, text, low, high,
                         automatic.empty() ? "" : fmt::format(" or '{}'", automatic)));
    }
  };
  entry.get = [&target, automatic] {
    return target == 0 && !automatic.empty() ? automatic : fmt::format("{}", target);
  };
}

void OptionTable::add_integer(std::string name, int& target, int low, int high, std::string help,
                              std::string automatic) {
  add_any_integer(std::move(name), target, low, high, std::move(help), std::move(automatic));
}

void OptionTable::add_integer(std::string name, std::int64_t& target, std::int64_t low,
                              std::int64_t high, std::string help, std::string automatic) {
  add_any_integer(std::move(name), target, low, high, std::move(help), std::move(automatic));
}

void OptionTable::add_integer(std::string name, std::uint64_t& target, std::uint64_t low,
                              std::uint64_t high, std::string help, std::string automatic) {
  add_any_integer(std::move(name), target, low, high, std::move(help), std::move(automatic));
}

template <typename Real>
void OptionTable::add_any_real(std::string name, Real& target, RealRange range, std::string help) {
  Entry& entry = add(std::move(name), "X", std::move(help));
  entry.set = [&target, range](const std::string& text, const std::string& where) {
    Real value = 0;
    if (!parse_whole(text, &value) || !std::isfinite(value) || !contains(range, value)) {
      refuse(fmt::format("{}: '{}' is not a number {}", where, text, describe(range)));
    }
    target = value;
  };
  entry.get = [&target] { return fmt::format("{}", target); };
}

void OptionTable::add_real(std::string name, double& target, RealRange range, std::string help) {
  add_any_real(std::move(name), target, range, std::move(help));
}

void OptionTable::add_real(std::string name, float& target, RealRange range, std::string help) {
  add_any_real(std::move(name), target, range, std::move(help));
}

void OptionTable::add_text(std::string name, std::string& target, std::string placeholder,
                           std::string help) {
  Entry& entry = add(std::move(name), std::move(placeholder), std::move(help));
  entry.set = [&target](const std::string& text, const std::string&) { target = text; };
  entry.get = [&target] { return target; };
}

void OptionTable::add_choice(std::string name, std::string& target, std::vector<std::string> legal,
                             std::string help) {
  Entry& entry = add(std::move(name), fmt::format("{}", fmt::join(legal, "|")), std::move(help));
  entry.set = [&target, legal = std::move(legal), name = entry.name](const std::string& text,
                                                                     const std::string& where) {
    if (std::find(legal.begin(), legal.end(), text) == legal.end()) {
      const std::string near = nearest_name(text, legal);
      refuse(fmt::format("{}: unknown {} '{}'; legal are {}{}", where, name, text,
                         fmt::join(legal, ", "),
                         near.empty() ? "" : fmt::format("; did you mean '{}'?", near)));
    }
    target = text;
  };
  entry.get = [&target] { return target; };
}

void OptionTable::add_flag(std::string name, bool& target, std::string help) {
  Entry& entry = add(std::move(name), "", std::move(help));
  entry.flag = true;
  entry.set = [&target](const std::string& text, const std::string& where) {
    if (text != "true" && text != "false") {
      refuse(fmt::format("{}: '{}' is neither 'true' nor 'false'", where, text));
    }
    target = text == "true";
  };
  entry.get = [&target] { return std::string(target ? "true" : "false"); };
}

void OptionTable::allow_config_file() { config_allowed_ = true; }

void OptionTable::add_argument(std::string placeholder, std::string& target) {
  argument_placeholder_ = std::move(placeholder);
  argument_ = &target;
}

const OptionTable::Entry* OptionTable::find(std::string_view name) const {
  for (const Entry& entry : entries_) {
    if (entry.name == name) return &entry;
  }
  return nullptr;
}

std::string OptionTable::program() const {
  return usage_.substr(0, usage_.find(' ', usage_.find(' ') + 1));
}

std::string OptionTable::unknown(const std::string& kind, const std::string& name) const {
  const char* const dashes = kind == "option" ? "--" : "";
  std::vector<std::string> known;
  for (const Entry& entry : entries_) known.push_back(entry.name);
  if (config_allowed_ && *dashes != '\0') known.emplace_back("config");
  const std::string near = nearest_name(name, known);
  return fmt::format("unknown {} '{}{}'{} '{} --help' lists all", kind, dashes, name,
                     near.empty() ? ";" : fmt::format("; did you mean '{}{}'?", dashes, near),
                     program());
}

std::vector<OptionTable::Given> OptionTable::split(
    const std::vector<std::string>& arguments) const {
  po::options_description known;
  for (const Entry& entry : entries_) {
    if (entry.flag) {
      known.add_options()(entry.name.c_str(), po::bool_switch());
    } else {
      known.add_options()(entry.name.c_str(), po::value<std::string>());
    }
  }
  if (config_allowed_) known.add_options()("config", po::value<std::string>());
  namespace style = po::command_line_style;
  std::vector<Given> result;
  try {
    const po::parsed_options parsed =
        po::command_line_parser(arguments)
            .options(known)
            .style(style::allow_long | style::long_allow_adjacent | style::long_allow_next)
            .allow_unregistered()
            .run();
    for (const po::option& option : parsed.options) {
      if (option.position_key >= 0) {
        result.push_back({"", option.value.front()});
        continue;
      }
      if (option.unregistered) refuse(unknown("option", option.string_key));
      result.push_back({option.string_key, option.value.empty() ? "true" : option.value.front()});
    }
  } catch (const po::error& error) {
    refuse(describe_error(error));
  }
  return result;
}

std::vector<OptionTable::Given> OptionTable::read_config(const std::string& path) const {
  std::ifstream file(path);
  std::error_code ignored;
  if (!file || std::filesystem::is_directory(path, ignored)) {
    refuse(fmt::format("option --config: cannot read file '{}'", path));
  }
  std::vector<Given> result;
  try {
    const po::options_description none;
    for (const po::option& option : po::parse_config_file(file, none, true).options) {
      if (find(option.string_key) == nullptr) {
        refuse(fmt::format("{}: {}", path, unknown("key", option.string_key)));
      }
      result.push_back({option.string_key, option.value.empty() ? "" : option.value.front()});
    }
  } catch (const po::error& error) {
    refuse(fmt::format("{}: {}; legal are 'key = value', '# comment' and blank lines", path,
                       describe_error(error)));
  }
  return result;
}

void OptionTable::assign(const Given& given, Source source) {
  for (Entry& entry : entries_) {
    if (entry.name != given.name) continue;
    entry.set(given.value, source == Source::kFile
                               ? fmt::format("{}: key {}", config_path_, given.name)
                               : fmt::format("option --{}", given.name));
    entry.source = source;
  }
}

void OptionTable::parse(const std::vector<std::string>& arguments) {
  help_wanted_ = std::any_of(arguments.begin(), arguments.end(), [](const std::string& argument) {
    return argument == "--help" || argument == "-h";
  });
  if (help_wanted_) return;
  const std::vector<Given> given = split(arguments);
  for (const Given& each : given) {
    if (each.name == "config") config_path_ = each.value;
  }
  if (!config_path_.empty()) {
    for (const Given& each : read_config(config_path_)) assign(each, Source::kFile);
  }
  bool argument_given = false;
  for (const Given& each : given) {
    if (each.name == "config") continue;
    if (!each.name.empty()) {
      assign(each, Source::kCommandLine);
    } else if (argument_ != nullptr && !argument_given && !each.value.empty()) {
      *argument_ = each.value;
      argument_given = true;
    } else {
      refuse(fmt::format("unexpected argument '{}'; '{} --help' lists what is legal", each.value,
                         program()));
    }
  }
  if (argument_ != nullptr && !argument_given) {
    refuse(fmt::format("{} is missing; usage: {}", argument_placeholder_, usage_));
  }
}

std::string OptionTable::help() const {
  constexpr unsigned kLineLength = 100;
  std::string text = fmt::format("Usage: {}\n\n{}\n", usage_, about_);
  for (std::size_t i = 0; i < entries_.size();) {
    const std::string& title = entries_[i].heading;
    po::options_description group(title, kLineLength, kLineLength / 2);
    for (; i < entries_.size() && entries_[i].heading == title; ++i) {
      const Entry& entry = entries_[i];
      const std::string value = entry.flag ? "" : entry.get();
      const std::string help =
          value.empty() ? entry.help : fmt::format("{} [{}]", entry.help, value);
      if (entry.flag) {
        group.add_options()(entry.name.c_str(), help.c_str());
      } else {
        group.add_options()(entry.name.c_str(),
                            po::value<std::string>()->value_name(entry.placeholder), help.c_str());
      }
    }
    std::ostringstream laid_out;
    laid_out << group;
    text += fmt::format("\n{}", laid_out.str());
  }
  if (config_allowed_) {
    text +=
        "\n--config FILE reads options from a file, one 'key = value' a line, keys as above; "
        "'#' starts\na comment; the command line wins.\n";
  }
  return text;
}

bool OptionTable::given(std::string_view name) const {
  const Entry* entry = find(name);
  return entry != nullptr && entry->source != Source::kNone;
}

bool OptionTable::given_on_command_line(std::string_view name) const {
  const Entry* entry = find(name);
  return entry != nullptr && entry->source == Source::kCommandLine;
}

std::vector<std::pair<std::string, std::string>> OptionTable::values() const {
  std::vector<std::pair<std::string, std::string>> result;
  for (const Entry& entry : entries_) result.emplace_back(entry.name, entry.get());
  return result;
}

}  // namespace sluice
