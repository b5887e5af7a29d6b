#include "runtime/watchdog/watcher.hpp"

#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstring>
#include <ctime>
#include <exception>
#include <filesystem>
#include <limits>
#include <span>
#include <string_view>
#include <system_error>
#include <utility>

#include <sluice/error.hpp>

#include "comm/base/index.hpp"
#include "comm/base/joined.hpp"
#include "comm/base/steady_seconds.hpp"
#include "comm/group/communicator.hpp"
#include "runtime/files/utc_text.hpp"
#include "runtime/process/supervisor_events.hpp"

namespace sluice {
namespace {

namespace fs = std::filesystem;

constexpr double kTicksOfBeat = 4;
// A gap between two ticks beyond which the whole process has stood still, with its clock of others.
constexpr double kPausedTicks = 6, kShortestPause = 0.5;
constexpr double kStatusInterval = 5;
constexpr double kDiskTime = 2;  // to look for the newest save
constexpr std::uint64_t kNoAnswer = std::numeric_limits<std::uint64_t>::max();
// How long a line about a process that has ended waits where an end is expected: the launcher ends
// this process meanwhile.
constexpr double kExpectedEnd = 0.5;
// From the verdict on: for answers and the report; until the driving thread must have acted; until
// a rank ends by itself.
constexpr double kAnswerTime = 2, kActTime = 0.5, kAbortTime = 1.5, kObeyTime = 3;

// What a rank is in for a moment between its steps: the others hear of it at once.
bool is_rare(Doing doing) {
  return doing == Doing::kSettingUp || doing == Doing::kSaving || doing == Doing::kRestoring;
}

std::string time_name() { return utc_text(std::time(nullptr), "%Y%m%dT%H%M%SZ"); }

// One more than the step of the newest save in a directory, 0 where there is none. A save is
// complete before it gets its name. Blocks as long as the disk does; throws nothing.
std::uint64_t newest_save_plus_one(const fs::path& directory) noexcept {
  constexpr std::string_view kPrefix = "step-";
  std::uint64_t newest = 0;
  try {
    std::error_code error;
    for (fs::directory_iterator each(directory, error), end; !error && each != end;
         each.increment(error)) {
      const std::string name = each->path().filename().string();
      if (!name.starts_with(kPrefix)) continue;
      std::uint64_t step = 0;
      const char* const last = name.data() + name.size();
      const auto parsed = std::from_chars(name.data() + kPrefix.size(), last, step);
      if (parsed.ec != std::errc() || parsed.ptr != last || step < newest) continue;
      std::error_code ignored;
      if (fs::exists(each->path() / "state.json", ignored)) newest = step + 1;
    }
  } catch (const std::exception&) {  // out of memory: a report without it
  }
  return newest;
}

double wall_seconds() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

}  // namespace

Watcher::Watcher(WatchedJob job, PipelineOptions::Watch options, std::vector<std::string> addresses)
    : job_(std::move(job)),
      options_(std::move(options)),
      addresses_(std::move(addresses)),
      me_(job_.activity->rank()),
      monitors_(monitors_of(job_.ranks)),
      seen_(job_.ranks.size()),
      sightings_(job_.ranks.size()) {}

void Watcher::begin(Send send) {
  send_ = std::move(send);
  last_tick_ = steady_seconds();
  next_status_ = last_tick_ + kStatusInterval;
  for (std::size_t rank = 0; rank < seen_.size(); ++rank) {
    seen_[rank].heard = last_tick_;
    seen_[rank].sighting.observed = observes(static_cast<int>(rank));
  }
}

bool Watcher::is_monitor(int rank) const {
  return std::binary_search(monitors_.begin(), monitors_.end(), rank);
}

bool Watcher::observes(int rank) const {
  return rank == me_ || (send_ != nullptr && (is_monitor(me_) || is_monitor(rank)));
}

WatchView Watcher::view() const {
  return {.me = me_,
          .monitors = monitors_,
          .ranks = job_.ranks,
          .sightings = sightings_,
          .network_down = network_down_};
}

double Watcher::tick() {
  const double now = steady_seconds(), gap = now - last_tick_;
  last_tick_ = now;
  limits_ = limits_of(options_.timeout, options_.action_timeout, job_.activity->pace());
  const double tick = limits_.beat / kTicksOfBeat;
  if (gap > std::max(kShortestPause, kPausedTicks * tick)) {
    // This process stood still: the others were not silent meanwhile. What they sent is read next.
    for (Seen& each : seen_) each.heard += gap;
  }
  sample(std::min(gap, 2 * tick));
  if (ending_) {
    finish(now);
    return tick;
  }
  refresh(now);
  if (now >= next_beat_ || is_rare(mine_.activity.doing) != rare_sent_) {
    send_status();
    next_beat_ = now + limits_.beat;
  }
  if (const auto verdict = judge(view(), limits_)) {
    if (knows_save(now)) decide(*verdict);
    return tick;
  }
  newest_ = nullptr;  // of a verdict that did not last
  if (leader(view(), limits_) == me_ && is_monitor(me_)) {
    note_ends(now);
    note_silences();
    note_busy(now);
    serve_tables(now);
    write_status(now);
  }
  return tick;
}

void Watcher::sample(double gap) {
  const std::uint64_t before = mine_.activity.moves;
  const bool first = !seen_[at(me_)].sighting.seen;
  mine_.activity = job_.activity->read();
  mine_.still = first || mine_.activity.moves != before ? 0 : mine_.still + gap;
  mine_.saved_plus_one = std::max(mine_.saved_plus_one, job_.activity->saved_plus_one());
  mine_.table_requests = job_.activity->table_requests();
  mine_.expects_end = job_.activity->expects_end() || mine_.activity.doing == Doing::kFailing;
  Seen& self = seen_[at(me_)];
  self.heard = last_tick_;
  self.sighting.seen = true;
  self.sighting.status = mine_;
}

void Watcher::send_status() {
  if (send_ == nullptr) return;
  rare_sent_ = is_rare(mine_.activity.doing);
  mine_.unheard = -1;
  for (std::size_t rank = 0; rank < sightings_.size(); ++rank) {
    const Sighting& each = sightings_[rank];
    // The newest save is rank 0's to know; whoever is left needs it.
    mine_.saved_plus_one = std::max(mine_.saved_plus_one, each.status.saved_plus_one);
    if (mine_.unheard < 0 && each.observed && !each.left && each.silent > limits_.timeout / 2) {
      mine_.unheard = static_cast<int>(rank);
    }
  }
  const auto bytes = object_bytes(mine_);
  for (std::size_t rank = 0; rank < seen_.size(); ++rank) {
    if (static_cast<int>(rank) == me_ || !seen_[rank].sighting.observed) continue;
    send_(static_cast<int>(rank), NoteKind::kStatus, bytes);
  }
}

void Watcher::refresh(double now) {
  bool any_silent = false;
  for (std::size_t rank = 0; rank < seen_.size(); ++rank) {
    Seen& each = seen_[rank];
    sightings_[rank] = each.sighting;
    sightings_[rank].silent = std::max(0.0, now - each.heard);
    sightings_[rank].gone_for = each.sighting.gone ? now - each.gone : 0;
    any_silent = any_silent || (each.sighting.observed && !each.sighting.left &&
                                sightings_[rank].silent > limits_.timeout / 2);
  }
  network_down_ = any_silent && networks_are_down(addresses_);
}

void Watcher::on_note(int rank, NoteKind kind, std::span<const std::byte> contents) {
  Seen& from = seen_[at(rank)];
  from.heard = steady_seconds();
  switch (kind) {
    case NoteKind::kStatus:
      if (contents.size() != sizeof(RankStatus)) return;
      std::memcpy(&from.sighting.status, contents.data(), contents.size());
      from.sighting.seen = true;
      return;
    case NoteKind::kBye:
      from.sighting.left = true;
      return;
    case NoteKind::kVerdict:
      if (send_ != nullptr) send_(rank, NoteKind::kAnswer, {});
      if (!ending_) obey(contents);
      return;
    case NoteKind::kAnswer:
      if (ending_) ending_->unanswered.erase(rank);
      return;
    case NoteKind::kHello:
      return;
  }
}

void Watcher::on_end(int rank) {
  Seen& each = seen_[at(rank)];
  if (each.sighting.left || each.sighting.gone) return;
  each.sighting.gone = true;
  each.gone = steady_seconds();
  if (ending_) {
    ending_->unanswered.erase(rank);
    return;
  }
  sample(0);
  refresh(each.gone);
  // The launcher may end this process within milliseconds.
  const auto there = [&](int monitor) {
    return monitor == me_ || !(sightings_[at(monitor)].left || sightings_[at(monitor)].gone ||
                               lost(sightings_[at(monitor)], limits_));
  };
  const auto first = std::find_if(monitors_.begin(), monitors_.end(), there);
  if (first != monitors_.end() && *first == me_) note_ends(each.gone);
}

bool Watcher::expects_end() const {
  return std::any_of(seen_.begin(), seen_.end(),
                     [](const Seen& each) { return each.sighting.status.expects_end; });
}

void Watcher::note_ends(double now) {
  const double wait = expects_end() || job_.activity->expects_end() ? kExpectedEnd : 0;
  for (std::size_t rank = 0; rank < seen_.size(); ++rank) {
    Seen& each = seen_[rank];
    if (!each.sighting.gone || each.end_noted || now - each.gone < wait) continue;
    each.end_noted = true;
    voice_.say_now(fmt::format(
        "sluice: watchdog: {} is gone: its process ended; last seen in {}; {}\n",
        describe_rank(view(), static_cast<int>(rank)),
        describe_place(each.sighting.status.activity), newest_save(view(), options_.directory)));
    const Verdict verdict{.kind = Verdict::Kind::kLost, .ranks = {static_cast<int>(rank)}};
    voice_.run([event = hang_event(view(), verdict)] { tell_supervisor(event); });
  }
}

void Watcher::note_silences() {
  for (std::size_t rank = 0; rank < seen_.size(); ++rank) {
    Seen& each = seen_[rank];
    const Sighting& now = sightings_[rank];
    if (!now.observed || now.left || now.gone) continue;
    const bool silent = now.silent > limits_.timeout / 2;
    if (silent == each.silence_noted) continue;
    each.silence_noted = silent;
    const std::string who = describe_rank(view(), static_cast<int>(rank));
    note(silent ? fmt::format("{} is silent for {:.1f} s; after {:.1f} s it counts as lost", who,
                              now.silent, limits_.timeout)
                : fmt::format("{} is heard again", who));
  }
}

void Watcher::note_busy(double now) {
  std::vector<int> waiting;
  for (std::size_t rank = 0; rank < sightings_.size(); ++rank) {
    const Sighting& each = sightings_[rank];
    if (each.seen && !each.left && each.status.activity.waits &&
        each.status.still > limits_.timeout / 2) {
      waiting.push_back(static_cast<int>(rank));
    }
  }
  for (std::size_t rank = 0; rank < seen_.size(); ++rank) {
    Seen& each = seen_[rank];
    const RankStatus& status = each.sighting.status;
    const bool outside = status.activity.doing == Doing::kOutside;
    if (!each.sighting.seen || each.sighting.left || each.sighting.gone || status.activity.waits ||
        status.still < limits_.timeout || (outside && waiting.empty())) {
      continue;
    }
    if (each.busy_moves != status.activity.moves) {
      each.busy_moves = status.activity.moves;
      each.next_busy = 0;
    }
    if (each.next_busy > now) continue;
    each.next_busy = now + status.still;  // at twice the time
    constexpr std::size_t kMostShown = 8;
    const std::size_t shown = std::min(waiting.size(), kMostShown);
    note(fmt::format("{} is in {} since {:.0f} s, and is heard{}{}{}",
                     describe_rank(view(), static_cast<int>(rank)), describe_place(status.activity),
                     status.still,
                     waiting.empty()       ? ""
                     : waiting.size() == 1 ? "; this rank waits: "
                                           : "; these ranks wait: ",
                     joined(std::span(waiting).first(shown), ", "),
                     shown < waiting.size() ? ", ..." : ""));
  }
}

void Watcher::serve_tables(double now) {
  bool asked = false;
  for (Seen& each : seen_) {
    asked = asked || each.sighting.status.table_requests != each.tables;
    each.tables = each.sighting.status.table_requests;
  }
  // A launcher passes the signal on to all ranks, whose statuses come within a beat.
  if (asked && table_due_ == 0) table_due_ = now + 1.5 * limits_.beat;
  if (table_due_ == 0 || now < table_due_) return;
  table_due_ = 0;
  voice_.say(fmt::format("sluice: watchdog: step {}; {}\n{}", step_of(view()),
                         newest_save(view(), options_.directory), rank_lines(view(), limits_)));
}

void Watcher::write_status(double now) {
  if (options_.directory.empty() || now < next_status_ || !disk_.idle()) return;
  next_status_ = now + kStatusInterval;
  disk_.replace(fs::path(options_.directory) / "status.json",
                status_json(view(), limits_, options_.directory, wall_seconds(), /*ended=*/false));
}

void Watcher::end() {
  if (options_.directory.empty() || ending_) return;
  sample(0);
  refresh(steady_seconds());
  if (leader(view(), limits_) != me_) return;
  disk_.replace(fs::path(options_.directory) / "status.json",
                status_json(view(), limits_, options_.directory, wall_seconds(), /*ended=*/true));
}

bool Watcher::knows_save(double now) {
  if (options_.directory.empty()) return true;
  if (newest_ == nullptr) {
    newest_ = std::make_shared<std::atomic<std::uint64_t>>(kNoAnswer);
    asked_ = now;
    disk_.run([newest = newest_, directory = fs::path(options_.directory)] {
      *newest = newest_save_plus_one(directory);
    });
  }
  const std::uint64_t answer = *newest_;
  disk_answers_ = answer != kNoAnswer;
  if (!disk_answers_) return now - asked_ > kDiskTime;
  for (Sighting& each : sightings_) each.status.saved_plus_one = answer;
  return true;
}

void Watcher::decide(const Verdict& verdict) {
  const double now = steady_seconds();
  headline_ = headline(view(), verdict);
  culprit_ = verdict.ranks.empty() ? me_ : verdict.ranks.front();
  const std::string report = fmt::format(
      "sluice: error: {}\n{}  {}{}\n", headline_, rank_lines(view(), limits_),
      newest_save(view(), options_.directory), disk_answers_ ? "" : " (the disk does not answer)");
  voice_.say(report);
  voice_.run([event = hang_event(view(), verdict)] { tell_supervisor(event); });
  // The other side of a cut writes the file: this side is the smaller one.
  if (!options_.directory.empty() && !verdict.cut_off) {
    disk_.add_file(options_.directory, "hang-" + time_name(), report);
  }
  ending_ = Ending{.decides = true, .since = now, .interrupted = 0, .unanswered = {}};
  std::string contents(sizeof(culprit_), '\0');
  std::memcpy(contents.data(), &culprit_, sizeof(culprit_));
  contents.append(headline_, 0, kMostNoteBytes - contents.size());
  for (std::size_t rank = 0; rank < seen_.size(); ++rank) {
    const Sighting& each = sightings_[rank];
    if (static_cast<int>(rank) == me_ || !each.observed || each.left || each.gone) continue;
    send_(static_cast<int>(rank), NoteKind::kVerdict, bytes_of(contents));
    if (!lost(each, limits_)) ending_->unanswered.insert(static_cast<int>(rank));
  }
  if (!options_.ends_process) interrupt();
}

void Watcher::obey(std::span<const std::byte> contents) {
  if (contents.size() < sizeof(culprit_)) return;
  std::memcpy(&culprit_, contents.data(), sizeof(culprit_));
  const auto text = contents.subspan(sizeof(culprit_));
  headline_.assign(reinterpret_cast<const char*>(text.data()), text.size());
  ending_ = Ending{.decides = false, .since = steady_seconds(), .interrupted = 0, .unanswered = {}};
  if (!options_.ends_process) interrupt();
}

void Watcher::interrupt() {
  ending_->interrupted = steady_seconds();
  if (options_.ends_process) {
    job_.activity->interrupt_with([acts = acts_, abort = job_.abort] {
      *acts = true;
      abort(exit_code(ErrorCode::kPeer));
    });
    return;
  }
  job_.activity->interrupt_with(
      [error = Error(ErrorCode::kPeer, headline_, culprit_)] { throw Error(error); });
}

void Watcher::finish(double now) {
  if (!options_.ends_process) return;
  const double passed = now - ending_->since;
  if (!ending_->decides) {
    if (passed > kObeyTime) ::_exit(exit_code(ErrorCode::kPeer));
    return;
  }
  const bool told = ending_->unanswered.empty() && voice_.idle() && disk_.idle();
  if (ending_->interrupted == 0) {
    if (told || passed > kAnswerTime) interrupt();
    return;
  }
  // The driving thread may compute, or be inside MPI.
  const double acting = now - ending_->interrupted;
  if (acting > (*acts_ ? kAbortTime : kActTime)) ::_exit(exit_code(ErrorCode::kPeer));
}

}  // namespace sluice
