// Lazy loading in the emulation: a module holds the one kernel it was asked for by, and a kernel
// runs whether or not it was loaded; what is loaded and launched when is for tests to ask.
#pragma once

#include <cuda_runtime_api.h>

#include <set>
#include <string>

namespace sluice::emulated {

// Whether cuFuncLoad was called for this kernel while `device` was the current one.
[[nodiscard]] bool is_loaded(const void* kernel, int device);
// Kernels for which that is so.
[[nodiscard]] int count_loaded(int device);
// Forgets them, on all devices.
void unload_all();

// By name, the kernels launched on any device since the process began or since they were forgotten.
[[nodiscard]] std::set<std::string> launched_kernels();
void forget_launches();
void note_launch(const char* name);

// What launching a kernel on the device and asking for its attributes answer from now on, as
// cudaErrorNoKernelImageForDevice where a program has no code for it. cudaSuccess at the start.
void set_kernel_status(int device, cudaError_t status);
[[nodiscard]] cudaError_t kernel_status(int device);

// What cudaDriverGetVersion says from now on, 12040 for 12.4; functions that are newer are not
// found, and before 12.0 no device is. As CUDART_VERSION at the start.
void set_driver_version(int version);

}  // namespace sluice::emulated
