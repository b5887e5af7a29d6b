// What depends on the kind of a compute context's device before there is a context. Internal to
// stages/ and runtime/.
#pragma once

#include <cstddef>

#include <sluice/device.hpp>

namespace sluice {

struct OperatorTable;  // stages/compute/operator_table.hpp

// The operators of a kind of device; the CPU's where the build knows no other.
[[nodiscard]] const OperatorTable& operators_for(DeviceKind device);

// Bytes of its memory() that a context takes for itself: scratch of the libraries it holds, and
// what kernels keep on the device from one to the next.
[[nodiscard]] std::size_t library_bytes(DeviceKind device);

}  // namespace sluice
