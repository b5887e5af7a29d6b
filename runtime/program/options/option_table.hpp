// The options of one command: names, legal values and help in one table.
//
// Boost.Program_options splits the command line and lays out the help. The table converts values
// itself, strictly: the whole text must be one number of the legal range.
// Every refusal is one line, Error(kUsage). It names the option (and the file it came from), the
// text that was given and what would be legal; for an unknown name it suggests the one that other
// programs call so, or the nearest known one.
//
// Targets are references that must outlive the table; the value of a target when it is added is the
// default. Of an option given twice the last counts, unless it is once(). The command line wins
// over the file, both win over what lay_under() sets.
#pragma once

#include <fmt/core.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <string_view>
#include <system_error>
#include <type_traits>
#include <utility>
#include <vector>

namespace sluice {

using OptionValues = std::vector<std::pair<std::string, std::string>>;  // name, value

// Whether the whole text is one number, which `value` then is.
template <typename Number>
[[nodiscard]] bool parse_whole(std::string_view text, Number& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size();
}

// "" where `name` is not among them.
[[nodiscard]] std::string value_of(const OptionValues& values, std::string_view name);

struct RealRange {
  double low = 0, high = 0;
  bool low_open = false, high_open = false;  // the bound itself is not legal
  [[nodiscard]] bool contains(double value) const;
  [[nodiscard]] std::string text() const;  // "from 0 to below 1"
};

// Bounds of many options.
constexpr int kMaxInt = std::numeric_limits<int>::max();
constexpr RealRange kPositive = {
    .low = 0, .high = std::numeric_limits<double>::infinity(), .low_open = true};

class OptionTable {
  template <typename Number>
  using Words = std::vector<std::pair<std::string, Number>>;  // a word, what it stands for

 public:
  // `usage`: what a user types, e.g. "sluice train [options]"; `about`: paragraphs for the help.
  OptionTable(std::string usage, std::string about);

  // Options added from here on stand under this heading.
  void heading(std::string title) {
    heading_ = std::move(title);
    marks_ = 0;
  }
  // And have these marks, bits whose meaning is the caller's, up to the next heading.
  void mark_from_here(unsigned bits) { marks_ = bits; }
  // Integer: int, std::int64_t or std::uint64_t. `automatic`: a word that stands for 0, e.g.
  // "auto"; `most`: one that stands for `high`. Values that they stand for are shown as the words.
  template <typename Integer>
  OptionTable& add_integer(const std::string& name, Integer& target,
                           std::type_identity_t<Integer> low, std::type_identity_t<Integer> high,
                           const std::string& help, const std::string& automatic = "",
                           const std::string& most = "") {
    Words<Integer> words;
    if (!automatic.empty()) words.emplace_back(automatic, 0);
    if (!most.empty()) words.emplace_back(most, high);
    return add_number(
        name, "N", target, help, words,
        [low, high](Integer value) { return value >= low && value <= high; },
        fmt::format("an integer from {} to {}", low, high));
  }
  // Real: float or double. `automatic` as above; the range need not hold 0 then.
  template <typename Real>
  OptionTable& add_real(const std::string& name, Real& target, const RealRange& range,
                        const std::string& help, const std::string& automatic = "") {
    Words<Real> words;
    if (!automatic.empty()) words.emplace_back(automatic, Real{0});
    return add_number(
        name, "X", target, help, words,
        [range](Real value) { return std::isfinite(value) && range.contains(value); },
        "a number " + range.text());
  }
  // Any text, e.g. a path; `placeholder` (not empty) names it in the help.
  OptionTable& add_text(const std::string& name, std::string& target,
                        const std::string& placeholder, const std::string& help);
  // A text that `take` parses, or throws Error(kUsage) on that names the option; `show` gives it
  // back.
  OptionTable& add_parsed(const std::string& name, const std::string& placeholder,
                          const std::string& help,
                          const std::function<void(const std::string& text)>& take,
                          std::function<std::string()> show);
  // One of the legal words.
  OptionTable& add_choice(const std::string& name, std::string& target,
                          const std::vector<std::string>& legal, const std::string& help);
  // One of the legal words, each with the value that it stands for. No two stand for the same.
  template <typename Value>
  requires(!std::is_same_v<Value, std::string>) OptionTable& add_choice(
      const std::string& name, Value& target,
      const std::vector<std::pair<std::string, std::type_identity_t<Value>>>& legal,
      const std::string& help) {
    std::vector<std::string> words;
    for (const auto& [word, value] : legal) words.push_back(word);
    return add_words(
        name, std::move(words), help,
        [&target, legal](std::size_t index) { target = legal[index].second; },
        [&target, legal] {
          std::size_t index = 0;
          while (legal[index].second != target) ++index;
          return legal[index].first;
        });
  }
  // `target` becomes `value` where the flag is given, and !value where it is given as "false".
  OptionTable& add_flag(const std::string& name, bool& target, const std::string& help,
                        bool value = true);
  // Of the option added last: given twice, it is refused.
  OptionTable& once();
  // Of the option added last: more marks.
  OptionTable& mark(unsigned bits);
  // Adds --config FILE: `key = value` lines with these options' names, '#' starts a comment.
  void allow_config_file() { config_allowed_ = true; }
  // An argument without a name, e.g. "DIR"; required. Several are taken in this order.
  void add_argument(std::string placeholder, std::string& target);

  // Sets the targets. With --help (or -h) anywhere it sets and refuses nothing. --help=man and
  // --help=bash, which the build uses, let help() return its part of the manual page or of the
  // completion.
  void parse(const std::vector<std::string>& arguments);
  // After parse(): sets those of `values` that were not given. `where` stands before the name in a
  // refusal. Throws Error(kUsage) for a name that is no option.
  void lay_under(const OptionValues& values, const std::string& where);

  [[nodiscard]] bool help_wanted() const { return help_wanted_; }
  [[nodiscard]] std::string help() const;
  // Who set an option; a later one wins.
  enum class Source { kNone, kUnder, kFile, kCommandLine };
  [[nodiscard]] Source source_of(std::string_view name) const;
  [[nodiscard]] bool given(std::string_view name) const { return source_of(name) != Source::kNone; }
  // Every option with the value it has now, in the order of the help.
  [[nodiscard]] OptionValues values() const;
  // Whether an option has one of these marks; the options that do.
  [[nodiscard]] bool marked(std::string_view name, unsigned bits) const;
  [[nodiscard]] std::vector<std::string> marked(unsigned bits) const;

 private:
  // Sets the target; returns what is wrong with the text, "" where nothing is.
  using Set = std::function<std::string(const std::string& text)>;
  using Get = std::function<std::string()>;
  struct Entry {
    std::string name, placeholder, help, heading;  // no placeholder: a flag
    Set set;
    Get get;
    unsigned marks = 0;
    Source source = Source::kNone;
    bool once = false;
    [[nodiscard]] std::string help_text() const;  // with the value that it has now
  };
  using Given = std::pair<std::string, std::string>;  // name, value

  OptionTable& add(std::string name, std::string placeholder, std::string help, Set set, Get get);
  // A number that `is_legal`, or a word that stands for one; `legal`: what is said of such numbers.
  template <typename Number, typename IsLegal>
  OptionTable& add_number(const std::string& name, const std::string& placeholder, Number& target,
                          const std::string& help, const Words<Number>& words,
                          const IsLegal& is_legal, const std::string& legal) {
    const auto set = [=, &target](const std::string& text) -> std::string {
      Number value = 0;
      const auto word = std::ranges::find(words, text, &Words<Number>::value_type::first);
      if (word == words.end() && (!parse_whole(text, value) || !is_legal(value))) {
        std::string problem = fmt::format("'{}' is not {}", text, legal);
        for (const auto& [other, stands_for] : words) problem += fmt::format(" or '{}'", other);
        return problem;
      }
      target = word == words.end() ? value : word->second;
      return "";
    };
    return add(name, placeholder, help, set, [&target, words] {
      const auto word = std::ranges::find(words, target, &Words<Number>::value_type::second);
      return word == words.end() ? fmt::format("{}", target) : word->first;
    });
  }
  OptionTable& add_words(const std::string& name, std::vector<std::string> legal, std::string help,
                         std::function<void(std::size_t index)> set, Get get);
  [[nodiscard]] const Entry* find(std::string_view name) const;  // null: none
  [[nodiscard]] std::string program() const;                     // "sluice train"
  [[nodiscard]] std::string part_of_page() const;
  [[nodiscard]] std::string unknown(const char* kind, const std::string& name) const;
  [[nodiscard]] std::vector<Given> split(const std::vector<std::string>& arguments) const;
  void require_known(const OptionValues& values, const std::string& where) const;
  void assign(const Given& given, Source source, const std::string& where);

  std::string usage_, about_, heading_ = "Options";
  unsigned marks_ = 0;
  std::vector<Entry> entries_;
  bool config_allowed_ = false, help_wanted_ = false;
  std::string help_form_;                                        // "": for people
  std::vector<std::pair<std::string, std::string*>> arguments_;  // placeholder, target
};

// The `key = value` lines of an option file of at most 1 MiB, in their order. '#' starts a comment.
// A value that starts with '"' is a JSON string. Throws Error(kUsage) naming the file and the line.
[[nodiscard]] OptionValues read_option_file(const std::string& path);
// The text of a file that read_option_file() reads back. Options with empty values are left out.
// Bytes that are no UTF-8 become U+FFFD where a value has to be quoted.
[[nodiscard]] std::string to_config_text(const OptionValues& options);

// "; did you mean 'train'?" with the one of `known` that is fewest edits away from `text`, and
// `dashes` before it; `otherwise` where none is but for a slip.
[[nodiscard]] std::string suggestion(std::string_view text, const std::vector<std::string>& known,
                                     const char* otherwise, const char* dashes = "");

// As run_guarded() of a body, for a command line: parses it, then prints the help if it was
// requested, else runs `body`.
int run_guarded(OptionTable& table, const std::vector<std::string>& arguments,
                const std::function<void()>& body);

}  // namespace sluice
