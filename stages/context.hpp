// What making a compute context takes. Internal to stages/ and runtime/.
#pragma once

#include <cstddef>

#include "comm/device.hpp"

namespace sluice {

// Bytes of its memory() that a context takes for itself: scratch of the libraries it holds, and
// what kernels keep on the device from one to the next.
[[nodiscard]] std::size_t library_bytes(DeviceKind device);

}  // namespace sluice
