// The buffers of one rank while verify() replays its list: which slots there are, and what each
// holds. Every check that fails notes its reason in a Refusal and returns false or null.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <sluice/plan.hpp>

#include "schedules/model/index.hpp"
#include "schedules/model/text.hpp"

namespace sluice {

inline constexpr std::array kAllBuffers = {BufferKind::kInput, BufferKind::kOutput,
                                           BufferKind::kGradOutput, BufferKind::kGradInput,
                                           BufferKind::kState};

// Why a list is refused.
struct Refusal {
  std::string why;

  // Always false. `text` makes the reason, outside the paths that every op takes.
  template <class Text>
  [[gnu::cold, gnu::noinline]] bool object(const Text& text) {
    why = text();
    return false;
  }
};

enum class ReplayState : std::uint8_t { kFree, kPosted, kFilled, kSending };
inline constexpr std::array<std::string_view, 4> kReplayStateNames = {
    "free", "posted and not waited for", "filled", "being sent"};

struct ReplaySlot {
  ReplayState state = ReplayState::kFree;
  std::int32_t micro_batch = -1;
};

[[nodiscard]] inline bool holds(const ReplaySlot& slot, ReplayState state, const PlanOp& op) {
  return slot.state == state && slot.micro_batch == op.micro_batch;
}

// "the slot is ..., it must be `required` with `micro_batch`"; -1: any micro-batch.
[[nodiscard]] inline std::string not_in(const ReplaySlot& slot, ReplayState required,
                                        std::int32_t micro_batch) {
  std::string text = "the slot is " + std::string(kReplayStateNames[at(slot.state)]);
  if (slot.micro_batch >= 0) text += concat(" with micro-batch ", slot.micro_batch);
  text += ", it must be " + std::string(kReplayStateNames[at(required)]);
  if (micro_batch >= 0) text += concat(" with micro-batch ", micro_batch);
  return text;
}

class BufferReplay {
 public:
  // All outlive this. `own` are the rank's stages; a stage is named by its index there, -1: not one
  // of them.
  BufferReplay(const std::vector<int>& own, Refusal& refusal)
      : refusal_(refusal), stages_(own.size()) {
    for (std::size_t i = 0; i < own.size(); ++i) {
      for (const BufferKind kind : kAllBuffers) {
        Pool& pool = stages_[i].pools[at(kind)];
        pool.stage = own[i];
        pool.kind = kind;
        stages_[i].written[at(kind)] = &pool;
      }
      if (i == 0 || own[i - 1] + 1 != own[i]) continue;
      // Both stages are on this rank: each writes into the other's pool.
      stages_[i - 1].written[at(BufferKind::kOutput)] = &stages_[i].pools[at(BufferKind::kInput)];
      stages_[i].written[at(BufferKind::kGradInput)] =
          &stages_[i - 1].pools[at(BufferKind::kGradOutput)];
    }
  }
  BufferReplay(const BufferReplay&) = delete;

  bool add_pool(const BufferPool& pool, int own) {
    const auto object = [&](const std::string& why) {
      return refusal_.object(
          [&] { return concat("pool ", name_of(pool.kind), " of stage ", pool.stage, why); });
    };
    if (own < 0) return object(" belongs to no stage of this rank");
    Pool& added = stages_[at(own)].pools[at(pool.kind)];
    if (added.count != 0) return object(" is listed twice");
    if (pool.count < 1) {
      return object(concat(" has ", pool.count, " slots; at least 1 is needed"));
    }
    added.offset = slots_.size();
    added.count = pool.count;
    slots_.resize(slots_.size() + at(pool.count));
    return true;
  }

  static constexpr unsigned mask(BufferKind kind) { return 1U << static_cast<unsigned>(kind); }

  // The op names a slot of each kind in `required` and of no other.
  bool check_named(const PlanOp& op, unsigned required) {
    unsigned named = 0;
    for (const BufferKind kind : kAllBuffers) named |= op.slot(kind) >= 0 ? mask(kind) : 0U;
    if (named == required) return true;
    return refusal_.object([&] {
      std::size_t kind = 0;
      while (((named ^ required) & mask(kAllBuffers[kind])) == 0) ++kind;
      return ((named & mask(kAllBuffers[kind])) != 0 ? "it names a slot it has no use for: "
                                                     : "it names no slot for its ") +
             std::string(name_of(kAllBuffers[kind]));
    });
  }

  // The slot of the stage's own pool that the op names; null where there is none.
  ReplaySlot* find(const PlanOp& op, int own, BufferKind kind) {
    return find(stages_[at(own)].pools[at(kind)], op.slot(kind));
  }

  // The slot, filled with the op's micro-batch; null where it is not.
  ReplaySlot* read(const PlanOp& op, int own, BufferKind kind, const char* verb = " is read: ") {
    ReplaySlot* slot = find(op, own, kind);
    if (slot == nullptr || holds(*slot, ReplayState::kFilled, op)) return slot;
    refusal_.object([&] {
      return std::string(name_of(kind)) + verb +
             not_in(*slot, ReplayState::kFilled, op.micro_batch);
    });
    return nullptr;
  }

  // Writes the stage's own pool or, at a local hand-over, the neighbour's.
  bool write(const PlanOp& op, int own, BufferKind kind) {
    ReplaySlot* slot = find(*stages_[at(own)].written[at(kind)], op.slot(kind));
    if (slot == nullptr) return false;
    if (slot->state != ReplayState::kFree) {
      return refusal_.object([&] {
        return std::string(name_of(kind)) + " is written: " + not_in(*slot, ReplayState::kFree, -1);
      });
    }
    *slot = ReplaySlot{ReplayState::kFilled, op.micro_batch};
    return true;
  }

  // Every slot that the op names.
  bool release(const PlanOp& op, int own) {
    bool any = false;
    for (const BufferKind kind : kAllBuffers) {
      if (op.slot(kind) < 0) continue;
      any = true;
      ReplaySlot* slot = read(op, own, kind, " is released: ");
      if (slot == nullptr) return false;
      *slot = ReplaySlot{};
    }
    return any || refusal_.object([] { return "no slot is named"; });
  }

  // At the list's end.
  bool check_all_free() {
    for (const Stage& stage : stages_) {
      for (const Pool& pool : stage.pools) {
        for (std::int32_t i = 0; i < pool.count; ++i) {
          const ReplaySlot& slot = slots_[pool.offset + at(i)];
          if (slot.state == ReplayState::kFree) continue;
          return refusal_.object([&] {
            return concat(name_of(pool.kind), '[', i, "] of stage ", pool.stage, " is still ",
                          kReplayStateNames[at(slot.state)], " with micro-batch ", slot.micro_batch,
                          " at the end");
          });
        }
      }
    }
    return true;
  }

 private:
  struct Pool {
    std::size_t offset = 0;  // into slots_
    std::int32_t count = 0;
    std::int32_t stage = -1;
    BufferKind kind = BufferKind::kInput;
  };

  struct Stage {
    std::array<Pool, kBufferKinds> pools;
    std::array<const Pool*, kBufferKinds> written{};  // by compute ops
  };

  ReplaySlot* find(const Pool& pool, std::int32_t index) {
    if (index >= 0 && index < pool.count) return &slots_[pool.offset + at(index)];
    refusal_.object([&] {
      return concat(name_of(pool.kind), '[', index, "] does not exist; stage ", pool.stage, " has ",
                    pool.count, " such slots");
    });
    return nullptr;
  }

  Refusal& refusal_;
  std::vector<Stage> stages_;
  std::vector<ReplaySlot> slots_;
};

}  // namespace sluice
