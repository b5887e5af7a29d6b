// What a rank does now, readable by other threads and by signal handlers without its help.
//
// One thread writes: the one that drives the pipeline. A write is a few stores, without a lock, an
// allocation or a look at the clock. Any thread reads at any time and gets the state of one moment;
// a reader that samples often enough knows since when it lasts. How the watchdog ends the waits of
// the writing thread is here too: it leaves a text, which the next poll of any wait acts on.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include <sluice/plan.hpp>
#include <sluice/stage.hpp>

#include "comm/group/topology.hpp"
#include "comm/group/waiter.hpp"

namespace sluice {

enum class Doing : std::uint8_t {
  kOutside,    // the program does not call the pipeline
  kSettingUp,  // makes the pipeline
  kCalling,    // in a call of the pipeline, at what has no name here
  kLoading,    // waits for its data source
  kOperation,  // an op of the plan
  kComparing,  // replicas and tied copies
  kSaving,
  kRestoring,
  kClosing,
  kFailing,  // reports an error to the other ranks
};

struct Activity {
  Doing doing = Doing::kOutside;
  // With kOperation; `op` numbers the ops of the rank's plan.
  OpKind kind = OpKind::kCompute;
  ActionKind action = ActionKind::kForward;
  std::int32_t stage = 0, micro_batch = -1, op = 0;  // of a fold, `micro_batch`: virtual replica
  std::uint32_t run = 0;  // counts executions of plans: the same on all ranks
  Phase phase = Phase::kTrain;
  std::uint64_t step = 0;    // 0: before the first
  bool waits = false;        // for what `subject` says, whose peer is a rank of the job
  std::optional<Axis> axis;  // of the group that waits; none: the whole job
  WaitSubject subject;
  // That in which the rank is, and how many of the op it has begun, this one among them.
  std::optional<PlannedCollective> collective;
  std::int32_t collectives_begun = 0;
  std::uint64_t moves = 0;  // grows with every change
};

// "2F5", "2RECV_F5", "the fold of virtual replica 1 in stage 2", "the update of parameters", "a
// save", "its own program". Allocates nothing: writes into `into`, and returns the part that it
// used.
[[nodiscard]] std::string_view describe_doing(const Activity& activity,
                                              std::array<char, 96>& into) noexcept;

// Of a compute action: "forward", "input gradient", ...
[[nodiscard]] const char* in_words(ActionKind kind) noexcept;

// How fast a job goes, for a limit that fits it.
struct StepPace {
  std::uint64_t steps = 0;  // that ended
  double slowest = 0;       // seconds, of the last 16 steps
};

class ActivityBoard {
 public:
  // Who this is, for lines of signal handlers. `stages`: "stage 2" or "stages 2, 6".
  ActivityBoard(int rank, std::string_view host);
  ~ActivityBoard();

  // By the writing thread.
  void set_stages(std::string_view stages) noexcept;
  void enter(Doing doing) noexcept;
  [[nodiscard]] Doing doing() const noexcept { return doing_; }
  // Of an evaluation or an inference `step` does not count: the last training step stays.
  void begin_run(Phase phase, std::uint64_t step) noexcept;
  void at(const PlanOp& op, std::int32_t index) noexcept {
    doing_ = Doing::kOperation;
    write([&](Words& words) {
      words[0].store(pack(Doing::kOperation, op.kind, op.action, op.stage, op.micro_batch),
                     std::memory_order_relaxed);
      words[1].store(pair(index, static_cast<std::int32_t>(run_)), std::memory_order_relaxed);
      words[6].store(0, std::memory_order_relaxed);
    });
  }
  void begin_wait(const WaitSubject& subject, std::optional<Axis> axis) noexcept;
  void end_wait() noexcept;
  // `index`: its place among the op's collectives, from 0.
  void begin_collective(const PlannedCollective& collective, std::int32_t index) noexcept;
  void end_collective() noexcept;
  void step_ended(double seconds) noexcept;
  // The newest complete save; the same number may come again.
  void saved(std::uint64_t step) noexcept { saved_.store(step + 1); }

  // By any thread, and in signal handlers.
  [[nodiscard]] Activity read() const noexcept;
  [[nodiscard]] StepPace pace() const noexcept;
  // 0: nothing is saved; else one more than the step.
  [[nodiscard]] std::uint64_t saved_plus_one() const noexcept { return saved_.load(); }
  [[nodiscard]] int rank() const noexcept { return rank_; }
  [[nodiscard]] const char* host() const noexcept { return host_.data(); }
  [[nodiscard]] const char* stages() const noexcept { return stages_.data(); }
  // Times that somebody asked this process for the table of ranks.
  [[nodiscard]] std::uint32_t table_requests() const noexcept { return requests_.load(); }
  void request_table() noexcept { ++requests_; }
  // The process may end soon because somebody asked for it, and that is no accident.
  void expect_end() noexcept { expects_end_ = true; }
  [[nodiscard]] bool expects_end() const noexcept { return expects_end_; }

  // `act` is what the next poll of the writing thread does, on that thread; it throws or ends the
  // process. Once; by the watchdog's thread.
  void interrupt_with(std::function<void()> act);
  [[nodiscard]] bool interrupted() const noexcept {
    return interrupted_.load(std::memory_order_acquire);
  }
  // By the writing thread; returns unless interrupted.
  void poll() {
    if (interrupted()) [[unlikely]]
      act_();
  }

  // Calls `look` for each board of this process that is there now; for signal handlers. A board
  // whose destructor runs meanwhile stays until this returns.
  using Look = void (*)(ActivityBoard& board, void* with) noexcept;
  static void for_each(Look look, void* with) noexcept;

 private:
  using Words = std::array<std::atomic<std::uint64_t>, 8>;
  // Bits of the first word above those of stage and micro-batch.
  static constexpr int kActionShift = 48, kKindShift = 54, kDoingShift = 59;
  static_assert(static_cast<int>(ActionKind::kRecompute) < 1 << (kKindShift - kActionShift));
  static_assert(static_cast<int>(OpKind::kReshard) < 1 << (kDoingShift - kKindShift));
  static_assert(static_cast<int>(Doing::kFailing) < 1 << (64 - kDoingShift));

  [[nodiscard]] static constexpr std::uint64_t pair(std::int32_t high, std::int32_t low) {
    return std::uint64_t{static_cast<std::uint32_t>(high)} << 32 | static_cast<std::uint32_t>(low);
  }
  [[nodiscard]] static constexpr std::uint64_t pack(Doing doing, OpKind kind, ActionKind action,
                                                    std::int32_t stage, std::int32_t micro_batch) {
    return static_cast<std::uint64_t>(doing) << kDoingShift |
           static_cast<std::uint64_t>(kind) << kKindShift |
           static_cast<std::uint64_t>(action) << kActionShift |
           static_cast<std::uint64_t>(stage & 0xffff) << 32 |
           static_cast<std::uint32_t>(micro_batch);
  }
  // A sequence lock over two copies: `change` stores the same into each, one after the other, and
  // readers take the copy that no write is at. A reader therefore never waits for a writer that
  // its own signal handler, or the system, has stopped.
  template <typename Change>
  void write(const Change& change) noexcept {
    const std::uint64_t begun = sequence_.load(std::memory_order_relaxed);
    for (std::size_t copy = 0; copy < copies_.size(); ++copy) {
      sequence_.store(begun + copy + 1, std::memory_order_release);
      std::atomic_thread_fence(std::memory_order_release);
      change(copies_[copy]);
    }
  }

  // Odd while the first copy is written; even afterwards, also while the second is.
  alignas(64) std::atomic<std::uint64_t> sequence_ = 0;
  std::array<Words, 2> copies_ = {};
  Doing doing_ = Doing::kOutside;  // of the writing thread
  std::uint32_t run_ = 0;
  std::atomic<bool> interrupted_ = false;
  std::function<void()> act_;
  std::atomic<std::uint64_t> saved_ = 0, steps_ = 0;
  std::array<std::atomic<double>, 16> recent_ = {};
  std::atomic<std::uint32_t> requests_ = 0;
  std::atomic<bool> expects_end_ = false;
  int rank_;
  std::array<char, 256> host_ = {};
  std::array<char, 128> stages_ = {};
  std::size_t place_ = 0;   // among the process's boards
  std::uint64_t step_ = 0;  // of training, of the writing thread
};

// A collective within an op. `board` may be null.
class CollectiveScope {
 public:
  CollectiveScope(ActivityBoard* board, const PlannedCollective& collective,
                  std::int32_t index) noexcept
      : board_(board) {
    if (board_ != nullptr) board_->begin_collective(collective, index);
  }
  ~CollectiveScope() {
    if (board_ != nullptr) board_->end_collective();
  }
  CollectiveScope(const CollectiveScope&) = delete;
  CollectiveScope& operator=(const CollectiveScope&) = delete;

 private:
  ActivityBoard* board_;
};

// Says what the writing thread does while this exists; afterwards it does what it did before.
class ActivityScope {
 public:
  ActivityScope(ActivityBoard& board, Doing doing) noexcept
      : board_(board), before_(board.doing()) {
    board_.enter(doing);
  }
  ~ActivityScope() { board_.enter(before_); }
  ActivityScope(const ActivityScope&) = delete;
  ActivityScope& operator=(const ActivityScope&) = delete;

 private:
  ActivityBoard& board_;
  Doing before_;
};

}  // namespace sluice
