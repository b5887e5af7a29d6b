// Every matmul of a GPT-2 block and of the head, as the layers run it, against cuBLASLt called
// bare: the same operands, epilogue and scratch, the first algorithm that its heuristic names. What
// the library's epilogues for the gradients of biases would gain. And how matmuls run beside
// kernels that wait for other ranks.
#include <cublasLt.h>

#include <algorithm>
#include <memory>
#include <type_traits>

#include <sluice/error.hpp>
#include <sluice/operators.hpp>

#include "stages/cuda/cuda_backend.hpp"
#include "stages/cuda/matmul.hpp"
#include "stages/cuda_kernels/kernels.hpp"
#include "tests/benchmarks/gpu/rows.hpp"
#include "tests/benchmarks/gpu/waiting.hpp"

namespace sluice::benchmarks {

namespace {

void require(cublasStatus_t status, const char* what) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  throw Error(ErrorCode::kDevice, fmt::format("{}: {}", what, cublasLtGetStatusName(status)));
}

template <typename Handle, cublasStatus_t (*Destroy)(Handle)>
struct Destroyer {
  using pointer = Handle;
  void operator()(Handle handle) const { Destroy(handle); }
};
template <typename Handle, cublasStatus_t (*Destroy)(Handle)>
using Owned = std::unique_ptr<std::remove_pointer_t<Handle>, Destroyer<Handle, Destroy>>;
using Layout = Owned<cublasLtMatrixLayout_t, cublasLtMatrixLayoutDestroy>;

enum class Direction { kForward, kInput, kWeight };

// One matmul of a linear layer over `rows` rows.
struct LayerMatmul {
  std::string name;
  Direction direction;
  std::int64_t rows, in, out;
  DType result;
  cuda::Epilogue epilogue = cuda::Epilogue::kNone;
  bool bias = false;
  int uses = 1;  // in a step's micro-batch
};

// What the GPU's layers ask for: see stages/cuda/linear.cpp.
cuda::FusedMatmulSpec spec_of(const LayerMatmul& matmul) {
  const std::int64_t rows = matmul.rows, in = matmul.in, out = matmul.out;
  MatmulSpec spec;
  spec.operands = DType::kBf16;
  spec.result = matmul.result;
  spec.bias = matmul.bias;
  const auto shape = [&spec](std::int64_t m, std::int64_t n, std::int64_t k) {
    spec.m = m;
    spec.n = n;
    spec.k = k;
    spec.a.row = k;
    spec.b.row = n;
    spec.c.row = n;
  };
  switch (matmul.direction) {
    case Direction::kForward:  // y = x weightᵀ
      shape(rows, out, in);
      spec.b = {.row = 1, .column = in, .batch = 0};
      break;
    case Direction::kInput:  // dx = dy weight
      shape(rows, in, out);
      break;
    case Direction::kWeight:  // dweight += dyᵀ x
      shape(out, in, rows);
      spec.a = {.row = 1, .column = out, .batch = 0};
      spec.accumulate = true;
      break;
  }
  return {spec, matmul.epilogue};
}

// The library straight, in its own column-major words: c [n, m] = b' a', where a row-major matrix
// is its transpose.
class BareMatmul {
 public:
  struct Options {
    // Split sums meet in f32, in a fixed order: what layers need (stages/cuda/matmul.cpp).
    bool in_order = false;
    // Of the result's type; gets the sums of dy's columns, or of the result's.
    void* bias_gradient = nullptr;
  };
  BareMatmul(ComputeContext& ctx, const LayerMatmul& matmul, const cuda::MatmulOperands& operands,
             const Options& options)
      : ctx_(ctx), operands_(operands), beta_(matmul.direction == Direction::kWeight ? 1.0F : 0) {
    const MatmulSpec spec = spec_of(matmul).matmul;
    cublasLtMatmulDesc_t made = nullptr;
    require(cublasLtMatmulDescCreate(&made, CUBLAS_COMPUTE_32F, CUDA_R_32F), "description");
    description_.reset(made);
    const bool transposes_weight = matmul.direction == Direction::kForward;
    const bool transposes_gradient = matmul.direction == Direction::kWeight;
    set(CUBLASLT_MATMUL_DESC_TRANSA, transposes_weight ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(CUBLASLT_MATMUL_DESC_TRANSB, transposes_gradient ? CUBLAS_OP_T : CUBLAS_OP_N);
    b_ = transposes_weight ? layout(CUDA_R_16BF, spec.k, spec.n)
                           : layout(CUDA_R_16BF, spec.n, spec.k);
    a_ = transposes_gradient ? layout(CUDA_R_16BF, spec.m, spec.k)
                             : layout(CUDA_R_16BF, spec.k, spec.m);
    c_ = layout(spec.result == DType::kBf16 ? CUDA_R_16BF : CUDA_R_32F, spec.n, spec.m);
    set_epilogue(matmul, spec, options.bias_gradient);
    choose_algorithm(options.in_order);
  }

  // Whether the library has an algorithm; else run() throws.
  [[nodiscard]] bool supported() const { return found_ > 0; }

  void run() {
    const float one = 1;
    require(cublasLtMatmul(cuda::backend_of(ctx_).cublas(), description_.get(), &one, operands_.b,
                           b_.get(), operands_.a, a_.get(), &beta_, operands_.c, c_.get(),
                           operands_.c, c_.get(), &algorithm_, cuda::backend_of(ctx_).workspace(),
                           cuda::Context::kWorkspaceBytes,
                           static_cast<cudaStream_t>(ctx_.stream().native())),
            "cublasLtMatmul");
  }

 private:
  template <typename Value>
  void set(cublasLtMatmulDescAttributes_t attribute, const Value& value) {
    require(cublasLtMatmulDescSetAttribute(description_.get(), attribute, &value, sizeof(value)),
            "attribute");
  }
  static Layout layout(cudaDataType_t type, std::int64_t rows, std::int64_t columns) {
    cublasLtMatrixLayout_t made = nullptr;
    require(cublasLtMatrixLayoutCreate(&made, type, static_cast<std::uint64_t>(rows),
                                       static_cast<std::uint64_t>(columns), rows),
            "layout");
    return Layout(made);
  }
  void set_epilogue(const LayerMatmul& matmul, const MatmulSpec& spec, void* bias_gradient) {
    const bool sums = bias_gradient != nullptr;
    cublasLtEpilogue_t epilogue = matmul.bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
    if (sums) epilogue = CUBLASLT_EPILOGUE_BGRADB;  // dy is the library's second operand
    if (matmul.epilogue == cuda::Epilogue::kGelu) epilogue = CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
    if (matmul.epilogue == cuda::Epilogue::kGeluGradient) {
      epilogue = sums ? CUBLASLT_EPILOGUE_DGELU_BGRAD : CUBLASLT_EPILOGUE_DGELU;
    }
    set(CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue);
    if (matmul.bias) set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, operands_.bias);
    if (sums) set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias_gradient);
    if (matmul.epilogue == cuda::Epilogue::kNone) return;
    set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, operands_.aux);
    set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, spec.n);
  }
  void choose_algorithm(bool in_order) {
    cublasLtMatmulPreference_t preference = nullptr;
    require(cublasLtMatmulPreferenceCreate(&preference), "preference");
    const Owned<cublasLtMatmulPreference_t, cublasLtMatmulPreferenceDestroy> owner(preference);
    const std::size_t scratch = cuda::Context::kWorkspaceBytes;
    require(cublasLtMatmulPreferenceSetAttribute(
                preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &scratch, sizeof(scratch)),
            "preference");
    if (in_order) {
      const std::uint32_t scheme = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
      require(cublasLtMatmulPreferenceSetAttribute(
                  preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &scheme, sizeof(scheme)),
              "preference");
    }
    cublasLtMatmulHeuristicResult_t result = {};
    const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
        cuda::backend_of(ctx_).cublas(), description_.get(), b_.get(), a_.get(), c_.get(), c_.get(),
        preference, 1, &result, &found_);
    if (status != CUBLAS_STATUS_NOT_SUPPORTED) require(status, "cublasLtMatmulAlgoGetHeuristic");
    algorithm_ = result.algo;
  }

  ComputeContext& ctx_;
  cuda::MatmulOperands operands_;
  float beta_;
  Owned<cublasLtMatmulDesc_t, cublasLtMatmulDescDestroy> description_;
  Layout a_, b_, c_;
  int found_ = 0;  // algorithms
  cublasLtMatmulAlgo_t algorithm_ = {};
};

// One micro-batch's matmuls, every layer of one kind once.
std::vector<LayerMatmul> layer_matmuls(ComputeContext& ctx, const GpuOptions& options) {
  const TransformerConfig& model = options.model;
  const std::int64_t w = model.width;
  const std::int64_t samples = options.micro_batch != 0 ? options.micro_batch : options.batch / 4;
  const std::int64_t rows = std::max<std::int64_t>(samples, 1) * model.context;
  std::vector<LayerMatmul> matmuls;
  const auto layer = [&](const std::string& name, std::int64_t in, std::int64_t out, bool bias,
                         DType result, int uses) {
    matmuls.push_back(
        {name + " forward", Direction::kForward, rows, in, out, result, {}, bias, uses});
    matmuls.push_back({name + " input gradient",
                       Direction::kInput,
                       rows,
                       in,
                       out,
                       DType::kBf16,
                       {},
                       false,
                       uses});
    matmuls.push_back({name + " weight gradient",
                       Direction::kWeight,
                       rows,
                       in,
                       out,
                       DType::kF32,
                       {},
                       false,
                       uses});
  };
  layer("qkv", w, 3 * w, true, DType::kBf16, model.layers);
  layer("output", w, w, true, DType::kF32, model.layers);  // to the residual stream
  layer("up", w, 4 * w, true, DType::kBf16, model.layers);
  layer("down", 4 * w, w, true, DType::kF32, model.layers);
  layer("head", w, model.vocabulary, false, DType::kBf16, 1);
  // Fused where the layers fuse: as they ask, by whether the library can.
  const auto fuse = [&](const std::string& name, cuda::Epilogue epilogue) {
    for (LayerMatmul& matmul : matmuls) {
      if (matmul.name != name || cuda::backend_of(ctx).compute_capability() < 90) continue;
      LayerMatmul fused = matmul;
      fused.epilogue = epilogue;
      if (cuda::backend_of(ctx).matmuls().supports(spec_of(fused))) matmul = fused;
    }
  };
  fuse("up forward", cuda::Epilogue::kGelu);
  fuse("down input gradient", cuda::Epilogue::kGeluGradient);
  return matmuls;
}

cuda::MatmulOperands operands_of(RandomOperands& memory, const LayerMatmul& matmul) {
  const MatmulSpec spec = spec_of(matmul).matmul;
  cuda::MatmulOperands operands;
  operands.a = memory.make(DType::kBf16, {spec.m, spec.k}).data;
  operands.b = memory.make(DType::kBf16, {spec.k, spec.n}).data;
  operands.c = memory.make(spec.result, {spec.m, spec.n}).data;
  operands.bias = memory.make(spec.result, {spec.n}).data;
  if (matmul.epilogue != cuda::Epilogue::kNone) {
    operands.aux = memory.make(spec.result, {spec.m, spec.n}).data;
  }
  return operands;
}

}  // namespace

void matmuls_row(const GpuOptions& options) {
  ComputeContext ctx(kBenchmarkGpu, 1);
  Report report =
      gpu_report("GPU: matmuls against cuBLASLt called bare",
                 {"matmul", "m x n x k", "TFLOP/s", "bare TFLOP/s", "ratio", "ms per micro-batch"});
  double all = 0, all_bare = 0;
  for (const LayerMatmul& matmul : layer_matmuls(ctx, options)) {
    RandomOperands memory(ctx.device());
    const cuda::MatmulOperands operands = operands_of(memory, matmul);
    const cuda::FusedMatmulSpec spec = spec_of(matmul);
    BareMatmul bare(ctx, matmul, operands, {});
    const std::vector<double> seconds =
        in_turns(ctx, options,
                 {{"ours", [&] { cuda::backend_of(ctx).matmuls().run(spec, operands); }},
                  {"bare", [&] { bare.run(); }}});
    const double flops = spec.matmul.flops();
    report.row({matmul.name,
                fmt::format("{} x {} x {}", spec.matmul.m, spec.matmul.n, spec.matmul.k),
                flops / seconds[0] * 1e-12, flops / seconds[1] * 1e-12, seconds[1] / seconds[0],
                seconds[0] * matmul.uses * 1e3});
    all += seconds[0] * matmul.uses;
    all_bare += seconds[1] * matmul.uses;
  }
  report.row({"all of a micro-batch", "", "", "", all_bare / all, all * 1e3});
  publish(report, options);
}

// The matmul that reads or makes dy, then the sums of its columns by the layers' kernel, against
// the matmul with the library's epilogue, which stores the micro-batch's sums, then an addition.
// Both matmuls take the first algorithm that the heuristic names for sums in a fixed order.
void biases_row(const GpuOptions& options) {
  ComputeContext ctx(kBenchmarkGpu, 1);
  Report report = gpu_report(
      "GPU: gradients of biases in epilogues of matmuls",
      {"model", "matmul", "apart ms", "epilogue ms", "ratio", "gain ms per micro-batch"});
  double gain = 0;  // of weight gradients: two rows are of the same bias
  for (const LayerMatmul& matmul : layer_matmuls(ctx, options)) {
    const bool makes_dy = matmul.epilogue == cuda::Epilogue::kGeluGradient;
    const bool reads_dy =
        matmul.direction == Direction::kWeight && matmul.out != options.model.vocabulary;
    if (!makes_dy && !reads_dy) continue;
    RandomOperands memory(ctx.device());
    const cuda::MatmulOperands operands = operands_of(memory, matmul);
    const cuda::FusedMatmulSpec spec = spec_of(matmul);
    const std::int64_t width = makes_dy ? matmul.in : matmul.out;
    const Tensor sums = memory.make(DType::kF32, {width});
    const Tensor own = memory.make(spec.matmul.result, {width});
    const Tensor dy{const_cast<void*>(makes_dy ? operands.c : operands.a),
                    {DType::kBf16, {matmul.rows, width}}};
    BareMatmul plain(ctx, matmul, operands, {.in_order = true});
    BareMatmul fused(ctx, matmul, operands, {.in_order = true, .bias_gradient = own.data});
    if (!fused.supported()) {
      report.row({options.model_name, matmul.name, "", "not supported", "", ""});
      continue;
    }
    const std::vector<double> seconds = in_turns(ctx, options,
                                                 {{"apart",
                                                   [&] {
                                                     plain.run();
                                                     cuda::sum_columns(ctx, dy, sums);
                                                   }},
                                                  {"epilogue", [&] {
                                                     fused.run();
                                                     add(ctx, own, sums);
                                                   }}});
    const double each = (seconds[0] - seconds[1]) * matmul.uses * 1e3;
    report.row({options.model_name, matmul.name, seconds[0] * 1e3, seconds[1] * 1e3,
                seconds[0] / seconds[1], each});
    if (reads_dy) gain += each;
  }
  report.row({options.model_name, "all weight gradients", "", "", "", gain});
  publish(report, options);
}

// Receives of NCCL that wait take 4 to 8 multiprocessors each (comm/nccl/nccl_transport.cpp). A
// matmul whose kernel has a block for each multiprocessor may then take two waves.
void waiting_row(const GpuOptions& options) {
  ComputeContext ctx(kBenchmarkGpu, 1);
  Report report = gpu_report("GPU: matmuls beside kernels that wait",
                             {"model", "blocks that wait", "ms per micro-batch", "ratio"});
  GpuOptions once = options;
  once.rounds = 1;
  const std::vector<int> counts = {0, 4, 8, 16, 32};
  std::vector<double> all(counts.size());
  for (const LayerMatmul& matmul : layer_matmuls(ctx, options)) {
    RandomOperands memory(ctx.device());
    const cuda::MatmulOperands operands = operands_of(memory, matmul);
    const auto run = [&] { cuda::backend_of(ctx).matmuls().run(spec_of(matmul), operands); };
    run();  // loads its kernel, for which a kernel that waits might have to end
    ctx.stream().synchronize();
    std::vector<std::vector<double>> seconds(counts.size());
    for (int round = 0; round < options.rounds; ++round) {
      for (std::size_t i = 0; i < counts.size(); ++i) {
        const WaitingKernel waiting(ctx.device(), counts[i]);
        seconds[i].push_back(in_turns(ctx, once, {{"beside", run}}).front());
      }
    }
    for (std::size_t i = 0; i < counts.size(); ++i) all[i] += median(seconds[i]) * matmul.uses;
  }
  for (std::size_t i = 0; i < counts.size(); ++i) {
    report.row({options.model_name, counts[i], all[i] * 1e3, all[i] / all[0]});
  }
  publish(report, options);
}

}  // namespace sluice::benchmarks
