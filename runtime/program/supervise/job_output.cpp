#include "runtime/program/supervise/job_output.hpp"

#include <fmt/core.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>

#include "runtime/files/json_text.hpp"

namespace sluice {
namespace {

using nlohmann::json;

constexpr std::string_view kMark = "sluice-event {";
constexpr std::string_view kTagged = "<stderr>:";  // mpirun --tag-output: "[1,0]<stderr>:"
constexpr std::size_t kMostOfALine = 64U << 10, kFull = 1U << 20;
// A pipe that is ready takes so much without blocking (PIPE_BUF of Linux).
constexpr std::size_t kAtOnce = 4096;

JobEvent event_of(const json& object) {
  using Kind = JobEvent::Kind;
  using Hang = JobEvent::Hang;
  static const std::map<std::string, Kind> kinds = {{"start", Kind::kStart},
                                                    {"step", Kind::kStep},
                                                    {"save", Kind::kSave},
                                                    {"end", Kind::kEnd},
                                                    {"hang", Kind::kHang}};
  static const std::map<std::string, Hang> hangs = {{"busy", Hang::kBusy},
                                                    {"deadlock", Hang::kDeadlock},
                                                    {"lost", Hang::kLost},
                                                    {"ended", Hang::kEnded}};
  JobEvent event;
  event.kind = kinds.at(object.at("event"));
  event.step = object.value("step", std::uint64_t{0});
  event.seconds = object.value("seconds", 0.0);
  if (event.kind == Kind::kHang) event.hang = hangs.at(object.at("kind"));
  event.hosts = object.value("hosts", std::vector<std::string>());
  event.ranks = object.value("ranks", std::vector<int>());
  return event;
}

}  // namespace

std::optional<JobEvent> parse_event(std::string_view text) {
  try {
    const json object = parse_json(text);
    JobEvent event = event_of(object);
    // nlohmann-json converts any number to an unsigned one.
    const auto step = object.find("step");
    const bool fits = step == object.end() || step->is_number_unsigned();
    if (!fits || !std::isfinite(event.seconds) || event.seconds < 0) return std::nullopt;
    return event;
  } catch (const json::exception&) {
    return std::nullopt;
  } catch (const std::out_of_range&) {  // another kind
    return std::nullopt;
  }
}

std::vector<JobEvent> JobOutput::feed(std::string_view piece) {
  std::vector<JobEvent> events;
  while (!piece.empty()) {
    const std::size_t size = std::min(piece.find('\n'), piece.size() - 1) + 1;
    partial_ += piece.substr(0, size);
    piece.remove_prefix(size);
    if (partial_.back() != '\n' && partial_.size() <= kMostOfALine) continue;
    take_line(partial_, events);
    partial_.clear();
  }
  return events;
}

std::vector<JobEvent> JobOutput::finish() {
  return partial_.empty() ? std::vector<JobEvent>() : feed("\n");
}

void JobOutput::take_line(std::string_view line, std::vector<JobEvent>& events) {
  const std::size_t mark = line.find(kMark);
  if (mark != std::string_view::npos) {
    const auto event = parse_event(line.substr(mark + kMark.size() - 1));
    std::string_view before = line.substr(0, mark);
    if (before.starts_with('[') && before.ends_with(kTagged)) before = {};
    if (event) events.push_back(*event);
    if (before.empty()) return;
    if (event) {
      waiting_.append(before) += '\n';
      return;
    }
  }
  waiting_ += line;
}

void JobOutput::say(std::string_view text) { waiting_ += fmt::format("sluice run: {}\n", text); }
bool JobOutput::full() const { return waiting_.size() - written_ >= kFull; }

void JobOutput::write_some() {
  const std::size_t size = std::min(waiting_.size() - written_, kAtOnce);
  if (size == 0) return;
  const ssize_t count = ::write(fd_, waiting_.data() + written_, size);
  if (count < 0 && (errno == EAGAIN || errno == EINTR)) return;
  written_ = count < 0 ? waiting_.size() : written_ + static_cast<std::size_t>(count);
  // What is written goes by the megabyte: text is not moved each time.
  if (written_ < waiting_.size() && written_ < kFull) return;
  waiting_.erase(0, written_);
  written_ = 0;
}

void JobOutput::flush(int wake) {
  while (fd() >= 0) {
    std::array<pollfd, 2> fds = {{{.fd = fd_, .events = POLLOUT, .revents = 0},
                                  {.fd = wake, .events = POLLIN, .revents = 0}}};
    if (::poll(fds.data(), fds.size(), -1) < 0 && errno != EINTR) return;
    if (fds[0].revents != 0) {
      write_some();
    } else if (fds[1].revents != 0) {
      return;
    }
  }
}

}  // namespace sluice
