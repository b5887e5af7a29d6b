// Backend: what a compute context keeps for the kind of its device, behind one pointer, so that the
// context knows neither kind. Internal to stages/. Each backend derives from it, finds itself again
// in the contexts of its device by a cast (stages/cpu/cpu_backend.hpp,
// stages/cuda_context/context.hpp), and is used as its context is: from one thread.
#pragma once

namespace sluice {

struct OperatorTable;  // stages/compute/operator_table.hpp

class Backend {
 public:
  // The table outlives the backend.
  explicit Backend(const OperatorTable& operators) : operators_(operators) {}
  virtual ~Backend() = default;
  Backend(const Backend&) = delete;
  Backend& operator=(const Backend&) = delete;

  [[nodiscard]] const OperatorTable& operators() const { return operators_; }
  // As in ComputeContext.
  virtual void set_tf32(bool /*allowed*/) {}
  [[nodiscard]] virtual void* native_blas() { return nullptr; }

 private:
  const OperatorTable& operators_;
};

}  // namespace sluice
