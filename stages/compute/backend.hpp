// Backend: what a compute context keeps for its kind of device, so that the context depends on no
// kind. Internal to stages/. Each backend derives from it. Its operators cast a context's backend
// to their own type (stages/cpu/cpu_backend.hpp, stages/cuda_context/context.hpp). One thread uses
// a backend, as its context.
#pragma once

#include <string>

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
  [[nodiscard]] virtual std::string arithmetic(int /*threads*/) const { return {}; }

 private:
  const OperatorTable& operators_;
};

}  // namespace sluice
