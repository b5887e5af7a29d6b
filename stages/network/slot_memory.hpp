// Memory of the layers of a stage. Each slot has what the layers keep of a micro-batch, and the
// outputs of all layers but the last, which lies in the plan's buffer. Gradients of outputs live
// from the input gradient to the weight gradient: in each slot where the schedule splits the two,
// otherwise in one area that all layers and micro-batches share.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include <sluice/compute.hpp>
#include <sluice/layers.hpp>

namespace sluice {

class SlotMemory {
 public:
  // Of one layer, in bytes.
  struct Need {
    LayerMemory layer;
    std::size_t output = 0;          // 0 for the last layer
    std::size_t input_gradient = 0;  // 0 for the first one
  };

  // What describe() says of layers with these needs, for one size of micro-batch: all but outputs,
  // operators and notes.
  [[nodiscard]] static StageDescription describe(std::span<const Need> needs);

  // needs: the largest of every layer. Allocates, and touches every page.
  void prepare(std::span<const Need> needs, int slots, bool split, ComputeContext& compute);

  [[nodiscard]] bool fits(std::size_t layer, const Need& need) const;
  [[nodiscard]] int slots() const { return slots_; }
  [[nodiscard]] bool split() const { return split_; }
  // Memory of a call of the layer, without its input.
  [[nodiscard]] LayerCall call(StageContext& ctx, std::size_t layer) const;
  // Of a layer that has one.
  [[nodiscard]] std::byte* output(int slot, std::size_t layer) const;
  [[nodiscard]] std::byte* input_gradient(int slot, std::size_t layer) const;

 private:
  // Offsets within a slot, or in the shared area.
  struct Place {
    std::size_t until_input = 0, until_weight = 0, output = 0, gradients = 0, input_gradient = 0;
    Need need;
  };
  [[nodiscard]] std::size_t gradients_of(int slot) const {
    return split_ ? static_cast<std::size_t>(slot) * slot_gradients_ : 0;
  }

  int slots_ = 0;
  bool split_ = true;
  std::vector<Place> places_;
  std::size_t slot_state_ = 0, slot_gradients_ = 0;
  Buffer state_, gradients_, scratch_;
};

}  // namespace sluice
