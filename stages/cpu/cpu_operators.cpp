#include "stages/cpu/cpu_operators.hpp"

#include "stages/cpu/operator_parts.hpp"

namespace sluice {

const OperatorTable& cpu_operators() {
  static const OperatorTable table = {
      cpu::linear_operators(),    cpu::embedding_operators(), cpu::norm_operators(),
      cpu::attention_operators(), cpu::rotary_operators(),    cpu::element_operators(),
      cpu::loss_operators(),      cpu::update_operators(),
  };
  return table;
}

}  // namespace sluice
