// Models of several shards run on CPUs alone (NetworkStage::describe() refuses a GPU).
#include "comm/base/throw_error.hpp"
#include "stages/cuda_kernels/kernels.hpp"

namespace sluice::cuda {

namespace {

[[noreturn]] void refuse() {
  throw_usage("shards run on CPUs alone; legal on a GPU: 1 shard, of 1 rank");
}

}  // namespace

void sum_of_shards(ComputeContext& /*ctx*/, const Tensor& /*x*/, const Tensor& /*weight*/,
                   std::span<const std::int64_t> /*sizes*/, bool /*backward*/,
                   const Tensor& /*bias*/, const Tensor& /*residual*/, const Tensor& /*y*/) {
  refuse();
}

std::size_t sum_of_shards_workspace(ComputeContext& /*ctx*/, std::int64_t /*rows*/,
                                    std::int64_t /*width*/, std::size_t /*shards*/,
                                    DType /*operands*/, DType /*result*/) {
  refuse();
}

void finish_sum(ComputeContext& /*ctx*/, const Tensor& /*sum*/, const Tensor& /*bias*/,
                const Tensor& /*residual*/, const Tensor& /*y*/) {
  refuse();
}

void embedding_part_forward(ComputeContext& /*ctx*/, const Tensor& /*tokens*/,
                            std::int64_t /*first*/, const Tensor& /*table*/,
                            const Tensor& /*values*/) {
  refuse();
}

void embedding_part_backward_weight(ComputeContext& /*ctx*/, const Tensor& /*tokens*/,
                                    std::int64_t /*first*/, const Tensor& /*dout*/,
                                    const Tensor& /*dtable*/, const Tensor& /*dpositions*/,
                                    Write /*write*/) {
  refuse();
}

void panel_maxima(ComputeContext& /*ctx*/, const LogitPanels& /*panels*/, const Tensor& /*targets*/,
                  float* /*maxima*/) {
  refuse();
}

void panel_sums(ComputeContext& /*ctx*/, const LogitPanels& /*panels*/, const Tensor& /*targets*/,
                bool /*gradient*/, float* /*maxima*/, float* /*sums*/, float* /*found*/) {
  refuse();
}

void panel_losses(ComputeContext& /*ctx*/, const LogitPanels& /*panels*/, const Tensor& /*targets*/,
                  StepValue<double> /*scale*/, bool /*gradient*/, const float* /*shifts*/,
                  float* /*found*/, double* /*losses*/) {
  refuse();
}

}  // namespace sluice::cuda
