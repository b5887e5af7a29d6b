// A CUDA stage of your own: matmuls by cuBLASLt with Sluice's stream, handle and scratch, and a
// kernel for the loss. As many layers y = x Wᵀ as there are ranks (they may share a GPU) learn to
// turn the order of eight numbers round.   mpirun -n 2 custom_cuda_stage
#include <cublasLt.h>

#include <cstdio>

#include <sluice/cuda.hpp>
#include <sluice/pipeline.hpp>
#include <sluice/program.hpp>
#include <sluice/stage.hpp>
using namespace sluice;
using Tensors = std::span<const Tensor>;
constexpr int kWidth = 8, kThreads = 128;
constexpr std::size_t kScratch = std::size_t{32} << 20;  // that a matmul may use

void need(cublasStatus_t s) {
  if (s != CUBLAS_STATUS_SUCCESS) throw Error(ErrorCode::kDevice, cublasLtGetStatusName(s));
}
// A row-major [rows, columns] is the library's column-major [columns, rows].
cublasLtMatrixLayout_t layout_of(const Tensor& t) {
  cublasLtMatrixLayout_t layout = nullptr;
  const auto rows = std::uint64_t(t.shape()[0]), columns = std::uint64_t(t.shape()[1]);
  need(cublasLtMatrixLayoutCreate(&layout, CUDA_R_32F, columns, rows, t.shape()[1]));
  return layout;
}
// c = a b + beta c in the library's words, a and b transposed where op says so. A stage that is to
// be fast keeps the descriptors and an algorithm from prepare() on.
void matmul(ComputeContext& ctx, cublasOperation_t op_a, const Tensor& a, cublasOperation_t op_b,
            const Tensor& b, float beta, const Tensor& c) {
  cublasLtMatmulDesc_t what = nullptr;
  need(cublasLtMatmulDescCreate(&what, CUBLAS_COMPUTE_32F, CUDA_R_32F));
  need(cublasLtMatmulDescSetAttribute(what, CUBLASLT_MATMUL_DESC_TRANSA, &op_a, sizeof op_a));
  need(cublasLtMatmulDescSetAttribute(what, CUBLASLT_MATMUL_DESC_TRANSB, &op_b, sizeof op_b));
  const cublasLtMatrixLayout_t la = layout_of(a), lb = layout_of(b), lc = layout_of(c);
  const float one = 1;
  need(cublasLtMatmul(static_cast<cublasLtHandle_t>(ctx.native_blas()), what, &one, a.data, la,
                      b.data, lb, &beta, c.data, lc, c.data, lc, nullptr, ctx.workspace(kScratch),
                      kScratch, static_cast<cudaStream_t>(ctx.stream().native())));
  for (const auto& layout : {la, lb, lc}) need(cublasLtMatrixLayoutDestroy(layout));
  need(cublasLtMatmulDescDestroy(what));
}
struct Layer : Stage {
  ParameterSet set;
  Parameter& w;
  explicit Layer(const std::string& name)
      : w(set.add(name, Shape{kWidth, kWidth}, Init::normal(0.3))) {}
  StageDescription describe(std::span<const TensorSpec> in, ComputeContext&) const override {
    return {.outputs = {in[0]}, .operator_bytes = kScratch};
  }
  // Runs each matmul once: a library loads its kernels then; later, while NCCL runs, that may
  // wait for ever. Kernels of a source that includes <sluice/cuda.hpp> are loaded anyway.
  void prepare(const StageSetup& s) override {
    const DeviceMemory& memory = s.compute->memory();
    for (const std::vector<TensorSpec>& in : s.input_sizes) {
      const Buffer of_x = memory.allocate(in[0].bytes(), DeviceMemory::Use::kTemporary);
      const Buffer of_y = memory.allocate(in[0].bytes(), DeviceMemory::Use::kTemporary);
      fill_zero_async(of_x.data(), of_x.size(), s.compute->stream());
      const Tensor x{of_x.data(), in[0]}, y{of_y.data(), in[0]};
      StageContext ctx{.compute = *s.compute, .inputs = {&x, 1}};
      forward(ctx, {&x, 1}, {&y, 1});
      if (s.trains) backward(ctx, {&y, 1}, {&x, 1});
      s.compute->stream().synchronize();  // before the operands go
    }
    set.zero_grads(s.compute->stream());
  }
  ParameterSet* parameters() override { return &set; }
  void forward(StageContext& ctx, Tensors x, Tensors y) override {
    matmul(ctx.compute, CUBLAS_OP_T, w.value, CUBLAS_OP_N, x[0], 0, y[0]);
  }
  void backward(StageContext& ctx, Tensors dy, Tensors dx) override {
    matmul(ctx.compute, CUBLAS_OP_N, ctx.inputs[0], CUBLAS_OP_T, dy[0], 1, w.grad);
    if (!dx.empty()) matmul(ctx.compute, CUBLAS_OP_N, w.value, CUBLAS_OP_N, dy[0], 0, dx[0]);
  }
};
// One block: *sum = the squared differences; y becomes their gradient times `scale`.
__global__ void squared_error(float* y, const float* target, int count, float scale, double* sum) {
  __shared__ double sums[kThreads];
  const int mine = static_cast<int>(threadIdx.x);
  sums[mine] = 0;
  for (int i = mine; i < count; i += kThreads) {
    y[i] -= target[i];
    sums[mine] += static_cast<double>(y[i]) * y[i];
    y[i] *= 2 * scale;
  }
  for (int near = kThreads / 2; near > 0; near /= 2) {
    __syncthreads();
    if (mine < near) sums[mine] += sums[mine + near];
  }
  if (mine == 0) *sum = sums[0];
}
struct LastLayer : Layer, LossStage {
  using Layer::Layer;
  void loss(StageContext& ctx, Tensors y, Tensors target, double* sum) override {
    const auto stream = static_cast<cudaStream_t>(ctx.compute.stream().native());
    cuda::launch("squared error", squared_error, {dim3(1), dim3(kThreads)}, stream,  // or <<< >>>
                 y[0].as<float>(), target[0].as<float>(), static_cast<int>(y[0].elements()),
                 static_cast<float>(ctx.loss_scale), sum);
  }
  double target_weight(Tensors target) const override { return double(target[0].elements()); }
};
int main(int argc, char** argv) {
  return run_main(argc, argv, [](World& world) {
    std::vector<float> unit(kWidth * kWidth), turned(kWidth * kWidth);
    for (int i = 0; i < kWidth; ++i) unit[i * (kWidth + 1)] = turned[(i + 1) * (kWidth - 1)] = 1;
    const Batch batch{{view(unit, {kWidth, kWidth})}, {view(turned, {kWidth, kWidth})}};
    const TensorSpec row{DType::kF32, {kWidth}};  // a sample
    PipelineOptions options;
    options.shape = {.micro_batches = 2, .micro_batch_size = kWidth / 2};
    options.devices.choices = parse_devices("cuda");
    options.training.learning_rate = {.peak = 0.05, .steps = 200};
    const StageFactory make_stage = [](int stage, int stages) -> std::unique_ptr<Stage> {
      const std::string name = std::to_string(stage) + ".weight";
      if (stage + 1 == stages) return std::make_unique<LastLayer>(name);
      return std::make_unique<Layer>(name);
    };
    Pipeline pipeline(world, make_stage, {.inputs = {row}, .targets = {row}}, options);
    double loss = 0;
    for (int step = 0; step < 200; ++step) loss = pipeline.train_step(batch).loss;
    if (world.rank() == 0) std::printf("loss %.4f\n", loss);
  });
}
