// What the watchdog's thread does: samples this rank, exchanges statuses, judges, and ends the job.
// All calls come from that thread, but for the constructor.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include <sluice/options.hpp>

#include "runtime/group/activity.hpp"
#include "runtime/watchdog/async_writer.hpp"
#include "runtime/watchdog/report.hpp"
#include "runtime/watchdog/rules.hpp"
#include "runtime/watchdog/tcp_link.hpp"

namespace sluice {

struct WatchedJob {
  ActivityBoard* activity = nullptr;  // of this rank; outlives the watchdog
  // Ends all processes with an exit code. Called on the thread that drives the pipeline, within a
  // wait; does not return.
  std::function<void(int code)> abort;
  std::vector<WatchedRank> ranks;  // [rank]
};

class Watcher final : public TcpLink::Listener {
 public:
  // `addresses`: of this host, for networks_are_down().
  Watcher(WatchedJob job, PipelineOptions::Watch options, std::vector<std::string> addresses);

  // Sends a note to a rank, as TcpLink::send().
  using Send = std::function<void(int rank, NoteKind kind, std::span<const std::byte> contents)>;
  // `send` is null in a job of one rank.
  void begin(Send send);
  // Called a few times a beat. The seconds until the next call.
  [[nodiscard]] double tick();
  // The orderly end: the last status.json.
  void end();

  void on_note(int rank, NoteKind kind, std::span<const std::byte> contents) override;
  void on_end(int rank) override;

  [[nodiscard]] const std::vector<int>& monitors() const { return monitors_; }

 private:
  struct Seen {
    double heard = 0;  // times as steady_seconds()
    double gone = 0;   // 0: not
    Sighting sighting;
    std::uint32_t tables = 0;  // requests that were served
    // For notices.
    bool silence_noted = false;
    bool end_noted = false;
    std::uint64_t busy_moves = 0;
    double next_busy = 0;
  };
  // How a hang is ended, from the verdict on.
  struct Ending {
    bool decides = false;  // this rank has written the report
    double since = 0;
    double interrupted = 0;  // when the driving thread was told; 0: not yet
    std::set<int> unanswered;
  };

  void sample(double gap);
  void send_status();
  void refresh(double now);
  [[nodiscard]] bool is_monitor(int rank) const;
  [[nodiscard]] WatchView view() const;
  [[nodiscard]] bool observes(int rank) const;
  [[nodiscard]] bool expects_end() const;
  void note(const std::string& text) { voice_.say("sluice: watchdog: " + text + "\n"); }
  void note_silences();
  void note_busy(double now);
  void note_ends(double now);
  void serve_tables(double now);
  void write_status(double now);
  // Whether the newest save is known, or has been looked for long enough.
  [[nodiscard]] bool knows_save(double now);
  void decide(const Verdict& verdict);
  void obey(std::span<const std::byte> contents);
  void finish(double now);
  void interrupt();

  WatchedJob job_;
  PipelineOptions::Watch options_;
  std::vector<std::string> addresses_;
  int me_;
  std::vector<int> monitors_;
  Send send_;
  AsyncWriter voice_;  // standard error
  AsyncWriter disk_;   // which may hang, while a report has to be heard
  WatchLimits limits_;
  double last_tick_ = 0, next_beat_ = 0, next_status_ = 0, table_due_ = 0;
  RankStatus mine_;
  bool rare_sent_ = false;           // whether the others were told so, see send_status()
  std::vector<Seen> seen_;           // [rank]
  std::vector<Sighting> sightings_;  // [rank], of this tick
  bool network_down_ = false;
  std::optional<Ending> ending_;
  // As ActivityBoard::saved_plus_one(), by the disk, once it answers; null until it is asked.
  std::shared_ptr<std::atomic<std::uint64_t>> newest_;
  double asked_ = 0;  // when the disk was
  bool disk_answers_ = true;
  std::string headline_;
  int culprit_ = -1;
  std::shared_ptr<std::atomic<bool>> acts_ = std::make_shared<std::atomic<bool>>(false);
};

}  // namespace sluice
