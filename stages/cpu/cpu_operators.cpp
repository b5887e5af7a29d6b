#include "stages/cpu/cpu_operators.hpp"

namespace sluice::cpu {

const OperatorTable& cpu_operators() {
  static const OperatorTable table = {
      linear_operators(),    embedding_operators(), norm_operators(),
      attention_operators(), rotary_operators(),    query_key_norm_operators(),
      element_operators(),   loss_operators(),      update_operators(),
  };
  return table;
}

}  // namespace sluice::cpu
