// Lazy loading in the emulation: a module holds the one kernel it was asked for by, and a kernel
// runs whether or not it was loaded; what is loaded when is for tests to ask.
#pragma once

namespace sluice::emulated {

// Whether cuFuncLoad was called for this kernel while `device` was the current one.
[[nodiscard]] bool is_loaded(const void* kernel, int device);
// Kernels for which that is so.
[[nodiscard]] int count_loaded(int device);
// Forgets them, on all devices.
void unload_all();

// What cudaDriverGetVersion says from now on, 12040 for 12.4; functions that are newer are not
// found. As CUDART_VERSION at the start.
void set_driver_version(int version);

}  // namespace sluice::emulated
