// The engine's stages of one rank with the pools of slots that their ops name. Internal to the
// engine.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "runtime/engine.hpp"
#include "runtime/slots.hpp"
#include "schedules/plan.hpp"

namespace sluice {

// A stage of this rank.
struct LocalStage {
  StageBinding binding;
  SlotPool* input = nullptr;        // own kInput; null on stage 0
  SlotPool* output = nullptr;       // own kOutput, or the next stage's kInput at a local hand-over
  SlotPool* grad_output = nullptr;  // own kGradOutput; null on the last stage
  SlotPool* grad_input = nullptr;   // own kGradInput, or the previous stage's kGradOutput
  SlotPool* state = nullptr;
  const PlanOp* last_gradient = nullptr;  // the last op of a step that adds to its gradients
  ActionSeconds seconds;

  [[nodiscard]] SlotPool* pool(BufferKind kind) const;
};

class StageTable {
 public:
  // Allocates every pool. `config` as the engine's; what it points to outlives the table.
  explicit StageTable(const EngineConfig& config);

  [[nodiscard]] std::vector<LocalStage>& stages() { return stages_; }  // ascending
  // The stage of an op of this rank's plan; null where it is not on this rank.
  [[nodiscard]] LocalStage* stage_of(const PlanOp& op) const {
    return op_stages_[static_cast<std::size_t>(&op - ops_.data())];
  }
  // The slot a message op of this rank's plan means; null where it names no channel or no slot.
  [[nodiscard]] Slot* message_slot(const PlanOp& op) const {
    return message_slots_[static_cast<std::size_t>(&op - ops_.data())];
  }
  // Tensors that all slots hold together: at most that many messages are open at once.
  [[nodiscard]] std::size_t tensors() const { return tensors_; }

 private:
  [[nodiscard]] LocalStage* find(std::int32_t stage);
  void bind_pools(int stages);
  void bind_messages(std::size_t channels);
  void find_last_gradients();

  std::span<const PlanOp> ops_;
  std::vector<SlotPool> pools_;
  std::vector<LocalStage> stages_;
  std::vector<std::int32_t> index_of_stage_;  // [global stage] index into stages_ or -1
  std::vector<LocalStage*> op_stages_;        // [index into ops_]
  std::vector<Slot*> message_slots_;          // [index into ops_]
  std::size_t tensors_ = 0;
};

}  // namespace sluice
