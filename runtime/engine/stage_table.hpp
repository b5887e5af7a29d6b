// The stages of one rank with the pools of slots that their ops use. Internal to the engine.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <vector>

#include <sluice/plan.hpp>

#include "runtime/engine/engine_config.hpp"
#include "runtime/engine/slots.hpp"

namespace sluice {

// A stage of this rank.
struct LocalStage {
  StageBinding binding;
  // [BufferKind] Null: kInput of stage 0, and kGradOutput of the last stage. At a local hand-over,
  // kOutput is the next stage's kInput, and kGradInput is the previous stage's kGradOutput.
  std::array<SlotPool*, kBufferKinds> pools = {};
  // The first and the last B or W of a step.
  const PlanOp *first_gradient = nullptr, *last_gradient = nullptr;
  ActionSeconds seconds;
  std::int32_t recomputed = -1;  // micro-batch, up to its B or I; -1: none
  // The first call was; see the engine.
  bool forward_watched = false, backward_watched = false, loss_watched = false;
  std::array<bool, 2> gradients_watched = {};  // in F; in B or W

  [[nodiscard]] SlotPool*& pool(BufferKind kind) { return pools[static_cast<std::size_t>(kind)]; }
};

class StageTable {
 public:
  // Takes the memory of every pool from config.slots. `config` as the engine's; what it points to
  // outlives the table.
  explicit StageTable(const EngineConfig& config);

  [[nodiscard]] std::vector<LocalStage>& stages() { return stages_; }  // ascending
  // The stage of an op of this rank's plan; null where it is not on this rank.
  [[nodiscard]] LocalStage* stage_of(const PlanOp& op) const { return op_stages_[index_of(op)]; }
  // The slot of kind `kind` that an op of this rank's plan names; null where there is none.
  [[nodiscard]] Slot* slot(const PlanOp& op, BufferKind kind) const {
    return op_slots_[index_of(op)][static_cast<std::size_t>(kind)];
  }
  // The slot and peer of a message op; no slot where the op names no slot or no channel.
  struct Message {
    Slot* slot = nullptr;
    int peer = -1;
    int tag = -1;
  };
  [[nodiscard]] const Message& message(const PlanOp& op) const { return messages_[index_of(op)]; }
  // The op of the peer's plan that a wait for a message needs: the start of the send, or the post
  // of the receive; -1: not known.
  [[nodiscard]] std::int32_t needed_op(const PlanOp& op) const { return needed_ops_[index_of(op)]; }
  // A message or compute op whose micro-batch is not below `micro_batches`; null: none.
  [[nodiscard]] const PlanOp* first_op_out_of_range(std::size_t micro_batches) const;
  // The owner of the slots' memory.
  [[nodiscard]] KeepAlive memory() const { return store_; }
  // The number of tensors in all slots: at most that many messages are open at once.
  [[nodiscard]] std::size_t tensors() const { return tensors_; }
  // Whether messages of a GPU go through host memory.
  [[nodiscard]] bool has_staged() const;

 private:
  [[nodiscard]] std::size_t index_of(const PlanOp& op) const {
    return static_cast<std::size_t>(&op - ops_.data());
  }
  [[nodiscard]] LocalStage* find(std::int32_t stage);
  void bind_pools();
  void bind_slots();
  void bind_messages(std::span<const Channel> channels);
  void bind_needed_ops(const Plan& plan, int rank);
  void find_ends();

  std::span<const PlanOp> ops_;
  std::shared_ptr<SlotStore> store_;  // of pools_
  std::deque<SlotPool> pools_;
  std::vector<LocalStage> stages_;
  std::vector<std::int32_t> index_of_stage_;  // [global stage] index into stages_ or -1
  std::vector<LocalStage*> op_stages_;        // [index into ops_]
  std::vector<std::array<Slot*, kBufferKinds>> op_slots_;  // [index into ops_]
  std::vector<Message> messages_;                          // [index into ops_]
  std::vector<std::int32_t> needed_ops_;                   // [index into ops_]
  const PlanOp *lowest_ = nullptr, *highest_ = nullptr;    // by the micro-batch they name
  std::size_t tensors_ = 0;
};

}  // namespace sluice
