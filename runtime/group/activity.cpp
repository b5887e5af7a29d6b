#include "runtime/group/activity.hpp"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <thread>
#include <tuple>
#include <utility>

#include <sluice/schedule.hpp>

namespace sluice {
namespace {

constexpr std::uint64_t kStepBits = 56;
constexpr std::uint64_t kInCollective = std::uint64_t{1} << 63;

// [Doing]
constexpr std::array kDoings = {"its own program",
                                "the making of the pipeline",
                                "the pipeline, between two actions",
                                "the loading of a batch",
                                "an action",
                                "the comparison of replicas",
                                "a save",
                                "the loading of a save",
                                "the end of the pipeline",
                                "the report of an error"};
static_assert(kDoings.size() == static_cast<std::size_t>(Doing::kFailing) + 1);

// The boards of this process. Boards beyond these have no lines in signal handlers.
constexpr std::size_t kMostBoards = 64;
constinit std::array<std::atomic<ActivityBoard*>, kMostBoards> boards = {};
constinit std::atomic<int> lookers = 0;  // in for_each() now

template <std::size_t kSize>
void put(std::array<char, kSize>& field, std::string_view text) {
  const std::size_t size = std::min(text.size(), kSize - 1);
  std::memcpy(field.data(), text.data(), size);
  field[size] = '\0';
}

}  // namespace

static_assert(std::atomic<ActivityBoard*>::is_always_lock_free);
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);
static_assert(std::atomic<double>::is_always_lock_free);

const char* in_words(ActionKind kind) noexcept {
  switch (kind) {
    case ActionKind::kForward:
      return "forward";
    case ActionKind::kBackwardInput:
      return "input gradient";
    case ActionKind::kBackwardWeight:
      return "weight gradient";
    case ActionKind::kRecompute:
      return "recomputation";
    default:
      return "backward";
  }
}

std::string_view describe_doing(const Activity& activity, std::array<char, 96>& into) noexcept {
  if (activity.doing != Doing::kOperation) return kDoings[static_cast<std::size_t>(activity.doing)];
  if (activity.kind == OpKind::kOptimizer) return "the update of parameters";
  if (activity.kind == OpKind::kReduceTied) return "the sum over tied parameters";
  if (activity.kind == OpKind::kFold) {
    const int size =
        std::snprintf(into.data(), into.size(), "the fold of virtual replica %d in stage %d",
                      activity.micro_batch, activity.stage);
    return {into.data(), static_cast<std::size_t>(size)};
  }
  const std::string_view name = name_of(activity.action);
  int size = std::snprintf(into.data(), into.size(), "%d%.*s", activity.stage,
                           static_cast<int>(name.size()), name.data());
  if (activity.micro_batch >= 0) {
    size += std::snprintf(into.data() + size, into.size() - static_cast<std::size_t>(size), "%d",
                          activity.micro_batch);
  }
  return {into.data(), static_cast<std::size_t>(size)};
}

ActivityBoard::ActivityBoard(int rank, std::string_view host) : rank_(rank) {
  put(host_, host);
  for (; place_ < kMostBoards; ++place_) {
    ActivityBoard* none = nullptr;
    if (boards[place_].compare_exchange_strong(none, this)) break;
  }
}

ActivityBoard::~ActivityBoard() {
  if (place_ == kMostBoards) return;
  boards[place_] = nullptr;
  while (lookers > 0) std::this_thread::yield();
}

void ActivityBoard::for_each(Look look, void* with) noexcept {
  ++lookers;
  for (std::atomic<ActivityBoard*>& each : boards) {
    if (ActivityBoard* const board = each) look(*board, with);
  }
  --lookers;
}

void ActivityBoard::set_stages(std::string_view stages) noexcept { put(stages_, stages); }

void ActivityBoard::enter(Doing doing) noexcept {
  doing_ = doing;
  write([&](Words& words) {
    words[0].store(pack(doing, OpKind::kCompute, ActionKind::kForward, 0, -1),
                   std::memory_order_relaxed);
  });
}

void ActivityBoard::begin_run(Phase phase, std::uint64_t step) noexcept {
  ++run_;
  if (phase == Phase::kTrain) step_ = step;
  write([&](Words& words) {
    words[1].store(pair(0, static_cast<std::int32_t>(run_)), std::memory_order_relaxed);
    words[6].store(0, std::memory_order_relaxed);
    words[2].store(static_cast<std::uint64_t>(phase) << kStepBits | step_,
                   std::memory_order_relaxed);
  });
}

void ActivityBoard::begin_wait(const WaitSubject& subject, std::optional<Axis> axis) noexcept {
  write([&](Words& words) {
    words[3].store(std::uint64_t{1} << 63 | static_cast<std::uint64_t>(subject.what) << 40 |
                       static_cast<std::uint64_t>(axis ? 1 + static_cast<int>(*axis) : 0) << 32 |
                       static_cast<std::uint32_t>(subject.peer),
                   std::memory_order_relaxed);
    words[4].store(pair(subject.tag, subject.needed_op), std::memory_order_relaxed);
    words[5].store(subject.bytes, std::memory_order_relaxed);
  });
}

void ActivityBoard::end_wait() noexcept {
  write([&](Words& words) { words[3].store(0, std::memory_order_relaxed); });
}

void ActivityBoard::begin_collective(const PlannedCollective& collective,
                                     std::int32_t index) noexcept {
  write([&](Words& words) {
    words[6].store(kInCollective | static_cast<std::uint64_t>(collective.axis) << 48 |
                       static_cast<std::uint64_t>(collective.kind) << 40 |
                       static_cast<std::uint64_t>(collective.type) << 32 |
                       static_cast<std::uint32_t>(index + 1),
                   std::memory_order_relaxed);
    words[7].store(collective.bytes, std::memory_order_relaxed);
  });
}

void ActivityBoard::end_collective() noexcept {
  write([](Words& words) {
    words[6].store(words[6].load(std::memory_order_relaxed) & ~kInCollective,
                   std::memory_order_relaxed);
  });
}

void ActivityBoard::step_ended(double seconds) noexcept {
  const std::uint64_t steps = steps_.load(std::memory_order_relaxed);
  recent_[steps % recent_.size()].store(seconds, std::memory_order_relaxed);
  steps_.store(steps + 1, std::memory_order_release);
}

StepPace ActivityBoard::pace() const noexcept {
  StepPace pace{.steps = steps_.load(std::memory_order_acquire)};
  for (const auto& each : recent_) {
    pace.slowest = std::max(pace.slowest, each.load(std::memory_order_relaxed));
  }
  return pace;
}

Activity ActivityBoard::read() const noexcept {
  std::array<std::uint64_t, std::tuple_size_v<Words>> words{};
  std::uint64_t begun = 0;
  do {  // repeats only when another write begins meanwhile
    begun = sequence_.load(std::memory_order_acquire);
    const Words& copy = copies_[begun % copies_.size()];
    for (std::size_t i = 0; i < words.size(); ++i) {
      words[i] = copy[i].load(std::memory_order_relaxed);
    }
    std::atomic_thread_fence(std::memory_order_acquire);
  } while (sequence_.load(std::memory_order_relaxed) != begun);
  Activity activity;
  const auto bits = [&](int from, int until) {
    return words[0] >> from & ((std::uint64_t{1} << (until - from)) - 1);
  };
  activity.doing = static_cast<Doing>(bits(kDoingShift, 64));
  activity.kind = static_cast<OpKind>(bits(kKindShift, kDoingShift));
  activity.action = static_cast<ActionKind>(bits(kActionShift, kKindShift));
  activity.stage = static_cast<std::int32_t>(words[0] >> 32 & 0xffff);
  activity.micro_batch = static_cast<std::int32_t>(words[0]);
  activity.op = static_cast<std::int32_t>(words[1] >> 32);
  activity.run = static_cast<std::uint32_t>(words[1]);
  activity.phase = static_cast<Phase>(words[2] >> kStepBits);
  activity.step = words[2] & ((std::uint64_t{1} << kStepBits) - 1);
  activity.waits = words[3] >> 63 != 0;
  activity.subject.what = static_cast<WaitSubject::What>(words[3] >> 40 & 0xff);
  if (const auto axis = words[3] >> 32 & 0xff; axis > 0)
    activity.axis = static_cast<Axis>(axis - 1);
  activity.subject.peer = static_cast<std::int32_t>(words[3]);
  activity.subject.tag = static_cast<std::int32_t>(words[4] >> 32);
  activity.subject.needed_op = static_cast<std::int32_t>(words[4]);
  activity.subject.bytes = words[5];
  activity.collectives_begun = static_cast<std::int32_t>(words[6]);
  if ((words[6] & kInCollective) != 0) {
    activity.collective = {.axis = static_cast<CollectiveAxis>(words[6] >> 48 & 0xff),
                           .kind = static_cast<CollectiveKind>(words[6] >> 40 & 0xff),
                           .bytes = words[7],
                           .type = static_cast<DType>(words[6] >> 32 & 0xff)};
  }
  activity.moves = begun / copies_.size();
  return activity;
}

void ActivityBoard::interrupt_with(std::function<void()> act) {
  if (interrupted()) return;
  act_ = std::move(act);
  interrupted_.store(true, std::memory_order_release);
}

}  // namespace sluice
