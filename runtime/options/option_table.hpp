// The options of one command: names, legal values and help in one table.
//
// Boost.Program_options splits the command line and the configuration file and lays out the help;
// values are converted here, strictly: the whole text must be one number of the legal range. Every
// refusal is one line, Error(kUsage), that names the option (and the file it came from), what it
// was and what would be legal; an unknown name is answered with the nearest known one.
//
// Targets are references that must outlive the table; their value when they are added is the
// default. Of an option given twice the last counts, and the command line wins over the file.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace sluice {

struct RealRange {
  double low = 0, high = 0;
  bool low_open = false, high_open = false;  // the bound itself is not legal
};

class OptionTable {
 public:
  // `usage`: what a user types, e.g. "sluice train [options]"; `about`: paragraphs for the help.
  OptionTable(std::string usage, std::string about);

  // Options added from here on stand under this heading.
  void heading(std::string title);
  // `automatic`: a word that stands for 0, e.g. "auto"; it is the default shown where `target` is
  // 0.
  void add_integer(std::string name, int& target, int low, int high, std::string help,
                   std::string automatic = "");
  void add_integer(std::string name, std::int64_t& target, std::int64_t low, std::int64_t high,
                   std::string help, std::string automatic = "");
  void add_integer(std::string name, std::uint64_t& target, std::uint64_t low, std::uint64_t high,
                   std::string help, std::string automatic = "");
  void add_real(std::string name, double& target, RealRange range, std::string help);
  void add_real(std::string name, float& target, RealRange range, std::string help);
  // Any text, e.g. a path; `placeholder` names it in the help.
  void add_text(std::string name, std::string& target, std::string placeholder, std::string help);
  void add_choice(std::string name, std::string& target, std::vector<std::string> legal,
                  std::string help);
  void add_flag(std::string name, bool& target, std::string help);
  // Adds --config FILE: `key = value` lines with these options' names, '#' starts a comment.
  void allow_config_file();
  // One argument without a name, e.g. "DIR"; required.
  void add_argument(std::string placeholder, std::string& target);

  // Sets the targets. With --help (or -h) anywhere nothing is set and nothing refused.
  void parse(const std::vector<std::string>& arguments);

  [[nodiscard]] bool help_wanted() const { return help_wanted_; }
  [[nodiscard]] std::string help() const;
  [[nodiscard]] bool given(std::string_view name) const;
  [[nodiscard]] bool given_on_command_line(std::string_view name) const;
  // Every option with the value it has now, in the order of the help.
  [[nodiscard]] std::vector<std::pair<std::string, std::string>> values() const;

 private:
  enum class Source { kNone, kFile, kCommandLine };
  struct Entry {
    std::string name, placeholder, help, heading;
    bool flag = false;
    std::function<void(const std::string& text, const std::string& where)> set;
    std::function<std::string()> get;
    Source source = Source::kNone;
  };
  struct Given {
    std::string name, value;
  };

  Entry& add(std::string name, std::string placeholder, std::string help);
  template <typename Integer>
  void add_any_integer(std::string name, Integer& target, Integer low, Integer high,
                       std::string help, std::string automatic);
  template <typename Real>
  void add_any_real(std::string name, Real& target, RealRange range, std::string help);
  [[nodiscard]] const Entry* find(std::string_view name) const;
  [[nodiscard]] std::string program() const;  // "sluice train"
  [[nodiscard]] std::string unknown(const std::string& kind, const std::string& name) const;
  [[nodiscard]] std::vector<Given> split(const std::vector<std::string>& arguments) const;
  [[nodiscard]] std::vector<Given> read_config(const std::string& path) const;
  void assign(const Given& given, Source source);

  std::string usage_, about_, heading_ = "Options";
  std::vector<Entry> entries_;
  bool config_allowed_ = false;
  std::string config_path_;
  std::string argument_placeholder_;
  std::string* argument_ = nullptr;
  bool help_wanted_ = false;
};

// The one of `known` that is fewest edits away from `text`, or "" where none is near.
[[nodiscard]] std::string nearest_name(std::string_view text,
                                       const std::vector<std::string>& known);

}  // namespace sluice
