// A value that differs from step to step: the host has it while it issues the step's work, and work
// that was recorded once and is replayed in later steps (comm/device.hpp, Graph) finds the step's
// own where kernels read it.
#pragma once

namespace sluice {

template <typename T>
struct StepValue {
  constexpr StepValue(T of_this_step = T{}, const T* kernels_read = nullptr)  // NOLINT: a T is one
      : value(of_this_step), on_device(kernels_read) {}
  constexpr operator T() const { return value; }  // NOLINT: and it is a T

  T value;
  // Memory of the device that holds `value` when the work put on the stream runs. Null: `value`
  // holds for as long as the work may run.
  const T* on_device;
};

}  // namespace sluice
