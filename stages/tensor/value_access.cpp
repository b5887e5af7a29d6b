#include "stages/tensor/value_access.hpp"

#include <utility>

namespace sluice {

void ValueAccess::place(ParameterSet& set, std::byte* values, std::byte* bf16_copies,
                        std::shared_ptr<const void> owner) {
  set.values_ = values;
  set.bf16_copies_ = bf16_copies;
  set.memory_->given = std::move(owner);
}

void ValueAccess::place_gradients(ParameterSet& set, std::byte* grads,
                                  std::shared_ptr<const void> owner) {
  set.grads_ = grads;
  set.memory_->given_grads = std::move(owner);
}

}  // namespace sluice
