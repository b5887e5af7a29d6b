// What Sluice's own operators, engine and reports use of a ComputeContext beyond its public
// members. Internal to stages/ and runtime/. Threading is that of ComputeContext.
#pragma once

#include <cstddef>
#include <utility>

#include <sluice/compute.hpp>

#include "stages/compute/context_hooks.hpp"

namespace sluice {

struct ContextAccess {
  // What computes here.
  [[nodiscard]] static Backend& backend(const ComputeContext& context) { return *context.backend_; }
  // What measures it; null: nothing.
  [[nodiscard]] static OperatorProfile* profile(const ComputeContext& context) {
    return context.profile_.get();
  }
  // How wait() waits from now on; null: it blocks in CUDA. `how` outlives its use here. Returns
  // what was set before.
  static DeviceWait* set_device_wait(ComputeContext& context, DeviceWait* how) {
    return std::exchange(context.device_wait_, how);
  }
  // Every operator calls progress() of `hook` before it starts; null: none. The hook outlives its
  // use here. No effect on a GPU, whose host does not wait for operators.
  static void set_progress_hook(ComputeContext& context, ProgressHook* hook) {
    context.hook_ = context.device().kind == DeviceKind::kCpu ? hook : nullptr;
  }
  // As workspace() grows; not counted in workspace_peak().
  static void reserve_workspace(ComputeContext& context, std::size_t bytes) {
    context.reserve_workspace(bytes);
  }
  // Frees what workspace() has outgrown. To be called where no kernel of the device waits for
  // another rank: freeing waits for kernels.
  static void free_outgrown(ComputeContext& context) { context.outgrown_.clear(); }
  // Address of the workspace; null before the first call.
  [[nodiscard]] static const std::byte* workspace_place(const ComputeContext& context) {
    return context.workspace_.data();
  }
  // The most that workspace() was asked for so far.
  [[nodiscard]] static std::size_t workspace_peak(const ComputeContext& context) {
    return context.workspace_peak_;
  }
};

}  // namespace sluice
