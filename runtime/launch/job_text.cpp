#include "runtime/launch/job_text.hpp"

#include <algorithm>
#include <cctype>
#include <charconv>

namespace sluice {
namespace {

constexpr std::size_t kDashes = 74;
constexpr std::size_t kMostOfALine = 64U << 10, kMostOfABlock = 64U << 10, kMostHidden = 16U << 10;
constexpr double kBlockSeconds = 1;

bool is_frame(std::string_view line) {
  while (!line.empty() && (line.back() == '\n' || line.back() == '\r')) line.remove_suffix(1);
  return line.size() == kDashes &&
         std::all_of(line.begin(), line.end(), [](char c) { return c == '-'; });
}

bool has(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

// The word behind `part`; empty where it is missing.
std::string_view word_after(std::string_view text, std::string_view part) {
  const std::size_t found = text.find(part);
  if (found == std::string_view::npos) return {};
  text.remove_prefix(found + part.size());
  std::size_t size = 0;
  while (size < text.size() && std::isspace(static_cast<unsigned char>(text[size])) == 0) ++size;
  return text.substr(0, size);
}

std::optional<int> number_after(std::string_view text, std::string_view part) {
  const std::string_view word = word_after(text, part);
  int value = 0;
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
  if (error != std::errc() || value < 0) return std::nullopt;
  return value;
}

// "[node1:1234] 3 more processes have sent help message ...", "mpirun: Forwarding signal 10 to job"
bool is_launcher_line(std::string_view line) {
  const std::size_t close = line.find("] ");
  if (line.starts_with("[") && close != std::string_view::npos) {
    const std::string_view rest = line.substr(close + 2);
    return (has(rest, " more process") && has(rest, " sent help message ")) ||
           rest.starts_with("Set MCA parameter \"orte_base_help_aggregate\"") ||
           rest.starts_with("PMIX ERROR: ");
  }
  // mpirun, mpiexec, orterun and prterun are one program.
  const std::size_t colon = line.find(": Forwarding signal ");
  return colon != std::string_view::npos &&
         line.substr(0, colon).find(' ') == std::string_view::npos;
}

}  // namespace

JobText::JobText(bool verbose, Show show, OnEvent on_event)
    : verbose_(verbose), show_(std::move(show)), on_event_(std::move(on_event)) {}

void JobText::feed(std::string_view bytes, double now) {
  while (!bytes.empty()) {
    const std::size_t end = bytes.find('\n');
    const bool whole = end != std::string_view::npos;
    const std::string_view piece = bytes.substr(0, whole ? end + 1 : bytes.size());
    bytes.remove_prefix(piece.size());
    if (passing_) {
      show_(piece);
      passing_ = !whole;
    } else if (whole && partial_.empty()) {
      line(piece, now);
    } else {
      partial_ += piece;
      if (whole) {
        line(partial_, now);
        partial_.clear();
      } else if (partial_.size() > kMostOfALine) {
        show_block();
        show_(partial_);
        partial_.clear();
        passing_ = true;
      }
    }
  }
}

void JobText::line(std::string_view text, double now) {
  if (const auto [before, json] = event_in(text); !json.empty()) {
    const auto event = parse_event(json);
    if (event) on_event_(*event);
    if (before.empty()) return;
    if (event) return show_(std::string(before) + '\n');
  }
  if (!is_frame(text)) {
    if (block_.empty()) return outside(text);
    // What ranks and ssh say may come between the lines of the launcher.
    if (text.starts_with("sluice: ") || text.starts_with("ssh: ")) return outside(text);
    block_ += text;
    if (block_.size() > kMostOfABlock) show_block();
    return;
  }
  const bool closes = !block_.empty();
  if (!closes) block_since_ = now;
  block_ += text;
  if (closes) close_block();
}

void JobText::outside(std::string_view text) {
  look_at_line(text);
  if (!verbose_ && is_launcher_line(text)) return hide(text);
  show_(text);
}

void JobText::close_block() {
  look_at_block(block_);
  if (verbose_) return show_block();
  hide(block_);
  block_.clear();
}

void JobText::show_block() {
  if (block_.empty()) return;
  show_(block_);
  block_.clear();
}

void JobText::hide(std::string_view text) {
  hidden_ += text.substr(0, kMostHidden - std::min(hidden_.size(), kMostHidden));
}

void JobText::tick(double now) {
  if (!block_.empty() && now - block_since_ >= kBlockSeconds) show_block();
}

std::optional<double> JobText::wait(double now) const {
  if (block_.empty()) return std::nullopt;
  return std::max(0.0, block_since_ + kBlockSeconds - now);
}

void JobText::finish() {
  if (!partial_.empty()) {
    partial_ += '\n';
    line(partial_, block_since_);
    partial_.clear();
  }
  show_block();
}

void JobText::look_at_block(std::string_view block) {
  if (has(block, "lost communication with a remote daemon")) {
    findings_.launcher_ends = true;
    const std::size_t daemon = block.find("Remote daemon");
    if (daemon != std::string_view::npos) lose(word_after(block.substr(daemon), " on node "));
  }
  std::string text(block);
  std::replace(text.begin(), text.end(), '\n', ' ');  // Open MPI 5 breaks lines anywhere
  if (has(text, " noticed that process rank ")) {
    findings_.launcher_ends = true;
    const auto rank = number_after(text, " process rank ");
    const auto signal = number_after(text, " exited on signal ");
    if (rank && signal && !findings_.killed) {
      findings_.killed = {*rank, std::string(word_after(text, " on node ")), *signal};
    }
  }
  if (has(text, "MPI_ABORT was invoked") || has(text, "process returned a non-zero exit code") ||
      has(text, "exited with non-zero status, thus causing")) {
    findings_.launcher_ends = true;
  }
}

void JobText::look_at_line(std::string_view text) {
  if (findings_.error.empty() && text.starts_with("sluice: error: ")) {
    findings_.error = text.substr(0, text.find_last_not_of("\r\n") + 1);
  }
  if (text.starts_with("ssh: connect to host ")) lose(word_after(text, "ssh: connect to host "));
  if (text.starts_with("ssh: Could not resolve hostname ")) {
    lose(word_after(text, "ssh: Could not resolve hostname "));
  }
}

void JobText::lose(std::string_view host) {
  while (!host.empty() && (host.back() == ':' || host.back() == '.')) host.remove_suffix(1);
  auto& hosts = findings_.lost_hosts;
  if (host.empty() || std::find(hosts.begin(), hosts.end(), host) != hosts.end()) return;
  hosts.emplace_back(host);
}

}  // namespace sluice
