// The standard error of a job, piece by piece: what is shown, and what it says about the job.
//
// Three kinds of text come together there. Events of `sluice train` are never shown. What the
// launcher says about the job is not shown either, unless `verbose`: blocks between two lines of 74
// dashes, and a few lines whose form is known. It is kept for explanation(). Anything else is shown
// as it comes, in whole lines; a line of more than 64 KiB in pieces. A block that does not close
// within a second, or is longer than 64 KiB, is no block of a launcher and is shown.
//
// Texts are those of Open MPI 4.1 and 5, and of OpenSSH. A text that is not known is no error.
#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/launch/job_events.hpp"

namespace sluice {

struct KilledRank {
  int rank = 0;
  std::string host;
  int signal = 0;
};

// What the launcher and the ranks said, besides events.
struct JobFindings {
  std::vector<std::string> lost_hosts;  // that mpirun or ssh no longer reaches; each once
  std::optional<KilledRank> killed;     // the first one
  bool launcher_ends = false;           // the launcher says that it ends the job
  std::string error;                    // the first line "sluice: error: ..."
};

class JobText {
 public:
  using Show = std::function<void(std::string_view text)>;
  using OnEvent = std::function<void(const JobEvent& event)>;

  JobText(bool verbose, Show show, OnEvent on_event);

  // `now`: seconds of a clock that does not go back.
  void feed(std::string_view bytes, double now);
  // Shows a block that has waited too long. To be called when wait() seconds have passed.
  void tick(double now);
  // Seconds until tick() has something to do; none: nothing waits.
  [[nodiscard]] std::optional<double> wait(double now) const;
  // No more text comes. A last line without an end counts.
  void finish();

  [[nodiscard]] const JobFindings& findings() const { return findings_; }
  // What was not shown, for the case that nothing else explains the end; at most 16 KiB.
  [[nodiscard]] const std::string& explanation() const { return hidden_; }

 private:
  void line(std::string_view text, double now);  // with its '\n'
  void outside(std::string_view text);
  void close_block();
  void show_block();
  void hide(std::string_view text);
  void look_at_block(std::string_view block);
  void look_at_line(std::string_view text);
  void lose(std::string_view host);

  bool verbose_;
  Show show_;
  OnEvent on_event_;
  std::string partial_;   // a line that has not ended
  bool passing_ = false;  // the rest of a line that is too long: shown, not looked at
  std::string block_;     // since its first line of dashes
  double block_since_ = 0;
  std::string hidden_;
  JobFindings findings_;
};

}  // namespace sluice
