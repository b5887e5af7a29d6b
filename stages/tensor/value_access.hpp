// Where a set's values and gradients lie that its pipeline has placed. Internal to Sluice.
#pragma once

#include <cstddef>
#include <memory>

#include <sluice/parameter.hpp>

namespace sluice {

struct ValueAccess {
  // Before allocate(), which then takes no memory for values and copies: there is room for all of
  // each, on the device of the set's other memory.
  static void place(ParameterSet& set, std::byte* values, std::byte* bf16_copies,
                    std::shared_ptr<const void> owner);
  // The same of gradients.
  static void place_gradients(ParameterSet& set, std::byte* grads,
                              std::shared_ptr<const void> owner);
};

}  // namespace sluice
