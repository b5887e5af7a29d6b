// What depends on a kind of device and needs no compute context. Internal to stages/ and runtime/.
#pragma once

#include <cstddef>

#include <sluice/device.hpp>

namespace sluice {

struct OperatorTable;  // stages/compute/operator_table.hpp

// The operators of a kind of device; the CPU's in builds without CUDA.
[[nodiscard]] const OperatorTable& operators_for(DeviceKind device);

// Bytes of its memory() that a context uses itself: scratch of libraries, and what kernels keep on
// the device between launches.
[[nodiscard]] std::size_t library_bytes(DeviceKind device);

}  // namespace sluice
