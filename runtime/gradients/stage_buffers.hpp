// Buffers of this rank's stages (ParameterSet::add_buffer): kept while a step may still be refused,
// equal over replicas after it. Internal to the pipeline.
#pragma once

#include <span>
#include <vector>

#include <sluice/device.hpp>

#include "runtime/engine/engine_config.hpp"
#include "runtime/job/host_mirror.hpp"
#include "runtime/job/job_context.hpp"

namespace sluice {

class StageBuffers {
 public:
  // Everything outlives it. Takes the memory of a copy.
  StageBuffers(JobContext& job, ComputeContext& compute, HostMirror& mirror,
               std::span<const StageBinding> stages);

  // Both in stream order: keeps the present values, and brings them back.
  void keep();
  void restore();
  // The kept value of a buffer; `value` itself where it is no buffer's.
  [[nodiscard]] Tensor kept(const Tensor& value) const;
  // Collective over this rank's replicas: what Parameter::across asks for. Passes through the host.
  void join();

 private:
  struct Kept {
    ParameterSet* set = nullptr;
    Buffer copy;
  };
  JobContext& job_;
  ComputeContext& compute_;
  HostMirror& mirror_;
  std::vector<Kept> kept_;  // of stages that have buffers
};

}  // namespace sluice
