// A vocabulary that shards divide: not on a GPU so far.
#include "comm/base/throw_error.hpp"
#include "stages/cuda_kernels/kernels.hpp"

namespace sluice::cuda {

namespace {

[[noreturn]] void refuse_parts() {
  throw_usage("shards run on CPUs alone; legal on a GPU: 1 shard, of 1 rank");
}

}  // namespace

void embedding_part_forward(ComputeContext& /*ctx*/, const Tensor& /*tokens*/,
                            std::int64_t /*first*/, const Tensor& /*table*/,
                            const Tensor& /*values*/) {
  refuse_parts();
}

void embedding_part_backward_weight(ComputeContext& /*ctx*/, const Tensor& /*tokens*/,
                                    std::int64_t /*first*/, const Tensor& /*dout*/,
                                    const Tensor& /*dtable*/, const Tensor& /*dpositions*/,
                                    Write /*write*/) {
  refuse_parts();
}

void panel_maxima(ComputeContext& /*ctx*/, const LogitPanels& /*panels*/, const Tensor& /*targets*/,
                  float* /*maxima*/) {
  refuse_parts();
}

void panel_sums(ComputeContext& /*ctx*/, const LogitPanels& /*panels*/, const Tensor& /*targets*/,
                bool /*gradient*/, float* /*maxima*/, float* /*sums*/, float* /*found*/) {
  refuse_parts();
}

void panel_losses(ComputeContext& /*ctx*/, const LogitPanels& /*panels*/, const Tensor& /*targets*/,
                  StepValue<double> /*scale*/, bool /*gradient*/, const float* /*shifts*/,
                  float* /*found*/, double* /*losses*/) {
  refuse_parts();
}

}  // namespace sluice::cuda
