#include "runtime/program/options/option_table.hpp"

#include <array>
#include <boost/program_options.hpp>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <sstream>

#include "comm/base/joined.hpp"
#include "comm/base/throw_error.hpp"
#include "runtime/files/json_text.hpp"
#include "runtime/process/process.hpp"
#include "runtime/program/options/option_pages.hpp"

namespace sluice {
namespace {

namespace po = boost::program_options;

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

std::string_view trimmed(std::string_view text) {
  constexpr std::string_view kBlank = " \t\r\n";
  const std::size_t first = text.find_first_not_of(kBlank);
  if (first == std::string_view::npos) return "";
  return text.substr(first, text.find_last_not_of(kBlank) + 1 - first);
}

// An option, with the value that it then has, and what other programs call it.
constexpr std::array kNamesElsewhere = std::to_array<std::array<std::string_view, 2>>({
    {"learning-rate", "lr max-lr"},
    {"final-learning-rate-share", "min-lr"},
    {"learning-rate-decay", "lr-decay-style lr-scheduler lr-scheduler-type"},
    {"warmup", "warmup-steps warmup-iters lr-warmup-iters"},
    {"weight-decay", "wd"},
    {"beta1", "adam-beta1"},
    {"beta2", "adam-beta2"},
    {"epsilon", "adam-eps"},
    {"clip", "grad-clip clip-grad max-grad-norm"},
    {"pipeline", "pp pipeline-parallel-size pipeline-model-parallel-size"},
    {"tensor", "tp tensor-parallel-size tensor-model-parallel-size"},
    {"chunks", "vpp num-layers-per-virtual-pipeline-stage"},
    {"replicas", "dp data-parallel-size"},
    {"micro-batches", "grad-accum gradient-accumulation-steps"},
    {"batch-size", "gbs global-batch-size train-batch-size"},
    {"micro-batch-size", "mbs per-device-train-batch-size"},
    {"context", "seq-len seq-length max-seq-len block-size"},
    {"steps", "max-steps max-iters train-iters num-steps"},
    {"layers", "num-layers n-layer"},
    {"heads", "num-attention-heads n-head"},
    {"kv-heads", "num-query-groups num-key-value-heads"},
    {"width", "hidden-size n-embd d-model"},
    {"mlp-width", "ffn-hidden-size intermediate-size"},
    {"vocabulary", "vocab-size"},
    {"precision bf16", "bf16 fp16"},
    {"precision tf32", "tf32"},
    {"recompute block", "activation-checkpointing gradient-checkpointing"},
    {"resume", "load resume-from-checkpoint"},
    {"weights", "init-from"},
    {"save", "output-dir"},
    {"save-every", "save-steps save-interval"},
    {"validate-every", "eval-interval eval-steps"},
    {"tokens", "max-new-tokens"},
});

// The option that other programs call `name`; empty where they do not.
std::string_view name_here(std::string_view name) {
  for (const auto& [ours, elsewhere] : kNamesElsewhere) {
    for (std::string_view rest = elsewhere; !rest.empty();) {
      const std::string_view first = rest.substr(0, rest.find(' '));
      if (first == name) return ours;
      rest.remove_prefix(std::min(rest.size(), first.size() + 1));
    }
  }
  return "";
}

constexpr std::size_t kMostConfigBytes = std::size_t{1} << 20;
constexpr std::size_t kConfigPieceBytes = std::size_t{1} << 12;

// The value in what follows '=' on a line: up to a comment, or a JSON string. None if the string is
// malformed.
std::optional<std::string> value_of(std::string_view text) {
  if (!text.starts_with('"')) return std::string(trimmed(text.substr(0, text.find('#'))));
  std::size_t end = 1;
  while (end < text.size() && text[end] != '"') end += text[end] == '\\' ? 2 : 1;
  if (end >= text.size()) return std::nullopt;
  const std::string_view rest = trimmed(text.substr(end + 1));
  const auto value = parse_json(text.substr(0, end + 1), NoJson::kDiscard);
  if (value.is_discarded() || !(rest.empty() || rest.front() == '#')) return std::nullopt;
  return value.get<std::string>();
}

// Without a placeholder: a flag, which takes no value.
void add_to(po::options_description& group, const std::string& name, const std::string& placeholder,
            const std::string& help) {
  if (placeholder.empty()) {
    group.add_options()(name.c_str(), help.c_str());
  } else {
    group.add_options()(name.c_str(), po::value<std::string>()->value_name(placeholder),
                        help.c_str());
  }
}

}  // namespace

std::string value_of(const OptionValues& values, std::string_view name) {
  const auto found = std::ranges::find(values, name, &OptionValues::value_type::first);
  return found == values.end() ? "" : found->second;
}

OptionValues read_option_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::error_code ignored;
  if (!file || std::filesystem::is_directory(path, ignored)) {
    throw_usage("option --config: cannot read file '{}'", path);
  }
  std::string content;  // in pieces: most files are far smaller than the most that is read
  for (std::size_t read = 0; file && read <= kMostConfigBytes; content.resize(read)) {
    content.resize(read + kConfigPieceBytes);
    file.read(content.data() + read, kConfigPieceBytes);
    read += static_cast<std::size_t>(file.gcount());
  }
  if (content.size() > kMostConfigBytes) {
    throw_usage("option --config: '{}' has more than {} bytes", path, kMostConfigBytes);
  }
  // Not Boost's reader: its message for a line with "%invalid_line%" in it never ends.
  OptionValues result;
  std::istringstream lines(content);
  std::string line;
  for (int number = 1; std::getline(lines, line); ++number) {
    const std::string_view text = trimmed(line);
    if (text.empty() || text.front() == '#') continue;
    const std::size_t equals = text.find('=');
    if (equals >= text.find('#')) {
      throw_usage("{}: line {} is '{}'; legal are 'key = value', '# comment' and blank lines", path,
                  number, text.substr(0, 100));
    }
    std::optional<std::string> value = value_of(trimmed(text.substr(equals + 1)));
    if (!value) {
      throw_usage("{}: line {} is '{}'; what starts with '\"' must be a JSON string", path, number,
                  text.substr(0, 100));
    }
    result.emplace_back(trimmed(text.substr(0, equals)), std::move(*value));
  }
  return result;
}

std::string to_config_text(const OptionValues& options) {
  std::string text;
  for (const auto& [name, value] : options) {
    if (value.empty()) continue;
    const bool plain = value_of(value) == value && value.find('\n') == std::string::npos;
    text += fmt::format("{} = {}\n", name,
                        plain ? value : dump_json(nlohmann::json(value), -1, InvalidUtf8::replace));
  }
  return text;
}

std::string suggestion(std::string_view text, const std::vector<std::string>& known,
                       const char* otherwise, const char* dashes) {
  const std::string* best = nullptr;
  // An edit in ten letters, or two that exchange letters: more gives another word.
  const int most = 1 + static_cast<int>(text.size()) / 10;
  int best_distance = std::max(2, most) + 1;
  for (const std::string& name : known) {
    // The lengths alone demand so many edits; this bounds the time for a long text.
    const auto least = std::max(text.size(), name.size()) - std::min(text.size(), name.size());
    if (least >= static_cast<std::size_t>(best_distance)) continue;
    const int distance = edit_distance(text, name);
    if (distance >= best_distance) continue;
    const bool exchanged =
        least == 0 && std::is_permutation(text.begin(), text.end(), name.begin());
    if (distance > most && !exchanged) continue;
    best_distance = distance;
    best = &name;
  }
  return best == nullptr ? otherwise : fmt::format("; did you mean '{}{}'?", dashes, *best);
}

bool RealRange::contains(double value) const {
  return (low_open ? value > low : value >= low) && (high_open ? value < high : value <= high);
}

std::string RealRange::text() const {
  const std::string above = fmt::format("{} {}", low_open ? "above" : "from", low);
  if (std::isinf(high)) return above + (low_open ? "" : " up");
  return fmt::format("{} {} {}", above, high_open ? "to below" : "to", high);
}

OptionTable::OptionTable(std::string usage, std::string about)
    : usage_(std::move(usage)), about_(std::move(about)) {}

OptionTable& OptionTable::add(std::string name, std::string placeholder, std::string help, Set set,
                              Get get) {
  entries_.push_back({std::move(name), std::move(placeholder), std::move(help), heading_,
                      std::move(set), std::move(get), marks_});
  return *this;
}

OptionTable& OptionTable::once() {
  entries_.back().once = true;
  return *this;
}

OptionTable& OptionTable::mark(unsigned bits) {
  entries_.back().marks |= bits;
  return *this;
}

OptionTable& OptionTable::add_text(const std::string& name, std::string& target,
                                   const std::string& placeholder, const std::string& help) {
  return add_parsed(
      name, placeholder, help, [&target](const std::string& text) { target = text; },
      [&target] { return target; });
}

OptionTable& OptionTable::add_parsed(const std::string& name, const std::string& placeholder,
                                     const std::string& help,
                                     const std::function<void(const std::string& text)>& take,
                                     std::function<std::string()> show) {
  const auto set = [take](const std::string& text) {
    take(text);
    return std::string();
  };
  return add(name, placeholder, help, set, std::move(show));
}

OptionTable& OptionTable::add_choice(const std::string& name, std::string& target,
                                     const std::vector<std::string>& legal,
                                     const std::string& help) {
  const auto set = [&target, legal](std::size_t index) { target = legal[index]; };
  return add_words(name, legal, help, set, [&target] { return target; });
}

OptionTable& OptionTable::add_words(const std::string& name, std::vector<std::string> legal,
                                    std::string help, std::function<void(std::size_t index)> set,
                                    Get get) {
  const std::string placeholder = joined(legal, "|");
  const auto set_word = [name, legal = std::move(legal),
                         set = std::move(set)](const std::string& text) -> std::string {
    const auto found = std::ranges::find(legal, text);
    if (found == legal.end()) {
      return fmt::format("unknown {} '{}'; legal are {}{}", name, text, joined(legal, ", "),
                         suggestion(text, legal, ""));
    }
    set(static_cast<std::size_t>(found - legal.begin()));
    return "";
  };
  return add(name, placeholder, std::move(help), set_word, std::move(get));
}

OptionTable& OptionTable::add_flag(const std::string& name, bool& target, const std::string& help,
                                   bool value) {
  const auto set = [&target, value](const std::string& text) -> std::string {
    if (text != "true" && text != "false") {
      return fmt::format("'{}' is neither 'true' nor 'false'", text);
    }
    target = (text == "true") == value;
    return "";
  };
  return add(name, "", help, set,
             [&target, value] { return std::string(target == value ? "true" : "false"); });
}

const OptionTable::Entry* OptionTable::find(std::string_view name) const {
  const auto found = std::ranges::find(entries_, name, &Entry::name);
  return found == entries_.end() ? nullptr : &*found;
}

void OptionTable::add_argument(std::string placeholder, std::string& target) {
  arguments_.emplace_back(std::move(placeholder), &target);
}

std::string OptionTable::program() const {
  return usage_.substr(0, usage_.find(' ', usage_.find(' ') + 1));
}

std::string OptionTable::unknown(const char* kind, const std::string& name) const {
  const bool option = std::string_view(kind) == "option";
  const char* const dashes = option ? "--" : "";
  if (const std::string_view here = name_here(name); find(here.substr(0, here.find(' ')))) {
    return fmt::format("unknown {} '{}{}'; did you mean '{}{}'? '{} --help' lists all", kind,
                       dashes, name, dashes, here, program());
  }
  std::vector<std::string> known;
  for (const Entry& entry : entries_) known.push_back(entry.name);
  if (config_allowed_ && option) known.emplace_back("config");
  return fmt::format("unknown {} '{}{}'{} '{} --help' lists all", kind, dashes, name,
                     suggestion(name, known, ";", dashes), program());
}

std::vector<OptionTable::Given> OptionTable::split(
    const std::vector<std::string>& arguments) const {
  po::options_description known;
  for (const Entry& entry : entries_) add_to(known, entry.name, entry.placeholder, "");
  if (config_allowed_) add_to(known, "config", "FILE", "");
  // Boost's messages replace such names for ever.
  for (const std::string& argument : arguments) {
    const std::string name = argument.substr(0, argument.find('='));
    if (!name.starts_with("--") || name.find('%') == std::string::npos) continue;
    throw_usage("{}", unknown("option", name.substr(2)));
  }
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
      const bool named = option.position_key < 0;
      if (named && option.unregistered) throw_usage("{}", unknown("option", option.string_key));
      result.emplace_back(named ? option.string_key : "",
                          option.value.empty() ? "true" : option.value.front());
    }
  } catch (const po::error& error) {
    throw_usage("{}", error.what());
  }
  return result;
}

void OptionTable::require_known(const OptionValues& values, const std::string& where) const {
  for (const auto& [name, value] : values) {
    if (find(name) == nullptr) throw_usage("{}: {}", where, unknown("key", name));
  }
}

void OptionTable::assign(const Given& given, Source source, const std::string& where) {
  for (Entry& entry : entries_) {
    if (entry.name != given.first) continue;
    if (entry.once && entry.source == source && entry.get() != given.second) {
      throw_usage("{}{}: '{}' after '{}'; legal is one", where, given.first, given.second,
                  entry.get());
    }
    const std::string problem = entry.set(given.second);
    if (!problem.empty()) throw_usage("{}{}: {}", where, given.first, problem);
    entry.source = source;
  }
}

void OptionTable::parse(const std::vector<std::string>& arguments) {
  for (const std::string& argument : arguments) {
    const bool page = argument == "--help=man" || argument == "--help=bash";
    if (page) help_form_ = argument.substr(argument.find('=') + 1);
    help_wanted_ = help_wanted_ || page || argument == "--help" || argument == "-h";
  }
  if (help_wanted_) return;
  const std::vector<Given> given = split(arguments);
  std::string config;
  for (const auto& [name, value] : given) {
    if (name == "config") config = value;
  }
  if (!config.empty()) {
    const OptionValues values = read_option_file(config);
    require_known(values, config);
    for (const Given& each : values) assign(each, Source::kFile, config + ": key ");
  }
  std::size_t taken = 0;
  for (const Given& each : given) {
    const auto& [name, value] = each;
    if (!name.empty()) {
      assign(each, Source::kCommandLine, "option --");
    } else if (taken < arguments_.size() && !value.empty()) {
      *arguments_[taken++].second = value;
    } else {
      throw_usage("unexpected argument '{}'; '{} --help' lists what is legal", value, program());
    }
  }
  if (taken < arguments_.size()) {
    throw_usage("{} is missing; usage: {}", arguments_[taken].first, usage_);
  }
}

void OptionTable::lay_under(const OptionValues& values, const std::string& where) {
  require_known(values, where);
  for (const Given& each : values) {
    if (source_of(each.first) <= Source::kUnder) assign(each, Source::kUnder, where + ": key ");
  }
}

std::string OptionTable::Entry::help_text() const {
  const std::string value = placeholder.empty() ? "" : get();
  return value.empty() ? help : fmt::format("{} [{}]", help, value);
}

std::string OptionTable::part_of_page() const {
  std::vector<OptionLine> lines;
  for (const Entry& entry : entries_) {
    lines.push_back({entry.heading, entry.name, entry.placeholder, entry.help_text()});
  }
  if (config_allowed_) {
    lines.push_back({"From a file", "config", "FILE",
                     "options from a file, one 'key = value' a line, keys as above; '#' starts a "
                     "comment; the command line wins"});
  }
  // The name has two words or three: "sluice schedule compare".
  const std::string name =
      usage_.substr(0, usage_.find_first_of("[-ABCDEFGHIJKLMNOPQRSTUVWXYZ") - 1);
  return help_form_ == "man" ? man_section(name, usage_, about_, lines)
                             : bash_branch(name, !arguments_.empty(), lines);
}

std::string OptionTable::help() const {
  if (!help_form_.empty()) return part_of_page();
  constexpr unsigned kLineLength = 100;
  std::ostringstream text;
  text << "Usage: " << usage_ << "\n\n" << about_ << '\n';
  for (std::size_t i = 0; i < entries_.size();) {
    const std::string& title = entries_[i].heading;
    po::options_description group(title, kLineLength, kLineLength / 2);
    for (; i < entries_.size() && entries_[i].heading == title; ++i) {
      add_to(group, entries_[i].name, entries_[i].placeholder, entries_[i].help_text());
    }
    text << '\n' << group;
  }
  if (config_allowed_) {
    text << "\n--config FILE reads options from a file, one 'key = value' a line, keys as above; "
            "'#' starts\na comment; the command line wins.\n";
  }
  return text.str();
}

OptionTable::Source OptionTable::source_of(std::string_view name) const {
  const Entry* const entry = find(name);
  return entry == nullptr ? Source::kNone : entry->source;
}

bool OptionTable::marked(std::string_view name, unsigned bits) const {
  const Entry* const entry = find(name);
  return entry != nullptr && (entry->marks & bits) != 0;
}

std::vector<std::string> OptionTable::marked(unsigned bits) const {
  std::vector<std::string> names;
  for (const Entry& entry : entries_) {
    if ((entry.marks & bits) != 0) names.push_back(entry.name);
  }
  return names;
}

OptionValues OptionTable::values() const {
  OptionValues result;
  for (const Entry& entry : entries_) result.emplace_back(entry.name, entry.get());
  return result;
}

int run_guarded(OptionTable& table, const std::vector<std::string>& arguments,
                const std::function<void()>& body) {
  return run_guarded([&] {
    table.parse(arguments);
    if (table.help_wanted()) {
      fmt::print("{}", table.help());
    } else {
      body();
    }
  });
}

}  // namespace sluice
