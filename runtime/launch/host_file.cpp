#include "runtime/launch/host_file.hpp"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <sstream>

#include <sluice/error.hpp>

#include "comm/base/throw_error.hpp"

namespace sluice {
namespace {

constexpr int kMostSlots = 1'000'000;
constexpr std::size_t kMostBytes = 16U << 20;

std::string read_text(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::error_code ignored;
  if (!in || std::filesystem::is_directory(path, ignored)) {
    throw_error(ErrorCode::kData, "cannot read the host file '{}'", path);
  }
  std::string text(kMostBytes + 1, '\0');
  in.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<std::size_t>(in.gcount()));
  if (text.size() > kMostBytes) {
    throw_error(ErrorCode::kData, "the host file '{}' has more than {} bytes", path, kMostBytes);
  }
  return text;
}

bool is_name(std::string_view text) {
  return !text.empty() && text.front() != '-' &&
         std::all_of(text.begin(), text.end(), [](unsigned char c) {
           return std::isalnum(c) != 0 || c == '.' || c == '-' || c == '_';
         });
}

std::optional<int> slots_in(std::string_view text) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  if (value < 1 || value > kMostSlots) return std::nullopt;
  return value;
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

class Reader {
 public:
  explicit Reader(const std::string& path) : path_(path) {}

  void line(const std::string& text) {
    ++number_;
    const std::string content = text.substr(0, text.find('#'));
    const std::vector<std::string> words = words_of(content);
    if (words.empty()) return;
    std::string name = words.front();
    name.erase(0, name.find('@') + 1);  // user@host; npos + 1 is 0
    std::optional<int> slots;
    if (const std::size_t colon = name.find(':'); colon != std::string::npos) {
      slots = number_of(name.substr(colon + 1));
      name.resize(colon);
    }
    if (!is_name(name)) {
      throw_error(ErrorCode::kData,
                  "line {} of the host file '{}' is no host; legal: one host a line, such as "
                  "'node1 slots=4'",
                  number_, path_);
    }
    for (const std::string& word : words) {
      if (word.starts_with("slots=")) slots = number_of(word.substr(6));
    }
    add(name, slots, content);
  }

  std::vector<HostLine> hosts() && { return std::move(hosts_); }

 private:
  int number_of(const std::string& text) const {
    const std::optional<int> slots = slots_in(text);
    if (!slots) {
      throw_error(ErrorCode::kData,
                  "line {} of the host file '{}': '{}' is no number of slots; legal are 1 to {}",
                  number_, path_, text, kMostSlots);
    }
    return *slots;
  }

  void add(const std::string& name, std::optional<int> slots, const std::string& content) {
    const auto known = std::find_if(hosts_.begin(), hosts_.end(),
                                    [&](const HostLine& host) { return host.name == name; });
    if (known == hosts_.end()) {
      hosts_.push_back({name, slots, {content}});
      return;
    }
    const bool counted = known->lines.size() > 1;  // a line for each slot so far
    if (slots || (known->slots && !counted)) {
      throw_error(
          ErrorCode::kData,
          "line {} of the host file '{}' names '{}' again; legal: one line with slots=N, or "
          "a line for each slot",
          number_, path_, name);
    }
    known->lines.push_back(content);
    known->slots = static_cast<int>(known->lines.size());
  }

  const std::string& path_;
  int number_ = 0;
  std::vector<HostLine> hosts_;
};

}  // namespace

std::vector<HostLine> read_host_file(const std::string& path) {
  std::istringstream in(read_text(path));
  Reader reader(path);
  for (std::string line; std::getline(in, line);) reader.line(line);
  std::vector<HostLine> hosts = std::move(reader).hosts();
  if (hosts.empty()) {
    throw_error(ErrorCode::kData, "the host file '{}' names no host", path);
  }
  return hosts;
}

std::string host_file_text(std::span<const HostLine> hosts) {
  std::string text;
  for (const HostLine& host : hosts) {
    for (const std::string& line : host.lines) text += line + "\n";
  }
  return text;
}

bool same_host(std::string_view a, std::string_view b) {
  if (a == b) return true;
  if (a.size() > b.size()) std::swap(a, b);
  return !a.empty() && b.size() > a.size() && b.substr(0, a.size()) == a && b[a.size()] == '.' &&
         !std::all_of(a.begin(), a.end(), [](unsigned char c) { return std::isdigit(c) != 0; });
}

}  // namespace sluice
