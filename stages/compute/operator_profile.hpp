// Times of a context's operators. Internal to stages/: operators.hpp's functions call it. One
// thread uses it, as its context.
#pragma once

#include <cstddef>
#include <map>
#include <span>
#include <string_view>
#include <vector>

#include <sluice/compute.hpp>
#include <sluice/operators.hpp>
#include <sluice/tensor.hpp>

#include "stages/compute/internal_operators.hpp"

namespace sluice {

// Bytes of an operand: of tensors and of what lists them. Other parameters have none.
[[nodiscard]] inline double operand_bytes(const Tensor& tensor) {
  return tensor.data == nullptr ? 0 : static_cast<double>(tensor.spec.bytes());
}
[[nodiscard]] inline double operand_bytes(const Conversion& each) {
  return operand_bytes(each.from) + operand_bytes(each.to);
}
[[nodiscard]] inline double operand_bytes(std::span<const float> vector) {
  return static_cast<double>(vector.size_bytes());
}
[[nodiscard]] inline double operand_bytes(std::span<const std::int64_t> /*sizes*/) { return 0; }
[[nodiscard]] inline double operand_bytes(const LogitPanels& panels) {
  return operand_bytes(panels.logits);
}
[[nodiscard]] double operand_bytes(const NormGradients& gradients);
template <typename Each>
[[nodiscard]] double operand_bytes(std::span<const Each> list) {
  double bytes = 0;
  for (const Each& each : list) bytes += operand_bytes(each);
  return bytes;
}
template <typename Other>
[[nodiscard]] double operand_bytes(const Other& /*operand*/) {
  return 0;
}

// Values and state of that type, which are read and written, gradients, and bf16 copies.
[[nodiscard]] double update_bytes(std::span<const UpdateRun> runs, DType state);

class OperatorProfile {
 public:
  // The context outlives this.
  explicit OperatorProfile(ComputeContext& context);

  // Around each call. `name` lives for ever. begin() waits for the device now and then, as
  // ComputeContext::wait() does.
  void begin();
  void end(std::string_view name, double bytes, double flops);

  // Longest first. Waits for the device.
  [[nodiscard]] std::vector<OperatorTime> times();

 private:
  struct Sum {
    std::int64_t calls = 0;
    double seconds = 0, bytes = 0, flops = 0;
  };
  // A call whose events are not read yet.
  struct Open {
    Sum* sum = nullptr;
    Event start, stop;
  };

  void read_events();

  ComputeContext& context_;
  double started_ = 0;                    // on a CPU
  std::vector<Open> open_;                // on a GPU; events are made once and used again
  std::size_t count_ = 0;                 // of open_ in use
  std::map<std::string_view, Sum> sums_;  // nodes stay where they are
};

}  // namespace sluice
