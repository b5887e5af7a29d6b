#include "stages/cuda/matmul.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <unordered_map>
#include <utility>

#include <sluice/error.hpp>

#include "stages/cuda_context/check.hpp"
#include "stages/cuda_context/context.hpp"
#include "stages/cuda_context/cublas_lt.hpp"

namespace sluice::cuda {

namespace {

// What one load of the fast kernels takes.
constexpr std::uintptr_t kAlignment = 16;

// An opaque object of the library.
template <typename Handle, auto kDestroy>
struct Destroyer {
  using pointer = Handle;
  void operator()(Handle handle) const { (cublas_lt().*kDestroy)(handle); }
};
template <typename Handle, auto kDestroy>
using Owned = std::unique_ptr<std::remove_pointer_t<Handle>, Destroyer<Handle, kDestroy>>;
using Description = Owned<cublasLtMatmulDesc_t, &CublasLt::MatmulDescDestroy>;
using Layout = Owned<cublasLtMatrixLayout_t, &CublasLt::MatrixLayoutDestroy>;
using Preference = Owned<cublasLtMatmulPreference_t, &CublasLt::MatmulPreferenceDestroy>;

template <typename Value>
void set(const Description& description, cublasLtMatmulDescAttributes_t attribute, Value value) {
  check_cublas(
      cublas_lt().MatmulDescSetAttribute(description.get(), attribute, &value, sizeof(value)),
      "cublasLtMatmulDescSetAttribute");
}

template <typename Value>
void set(const Layout& layout, cublasLtMatrixLayoutAttribute_t attribute, Value value) {
  check_cublas(cublas_lt().MatrixLayoutSetAttribute(layout.get(), attribute, &value, sizeof(value)),
               "cublasLtMatrixLayoutSetAttribute");
}

template <typename Value>
void set(const Preference& preference, cublasLtMatmulPreferenceAttributes_t attribute,
         Value value) {
  check_cublas(
      cublas_lt().MatmulPreferenceSetAttribute(preference.get(), attribute, &value, sizeof(value)),
      "cublasLtMatmulPreferenceSetAttribute");
}

cudaDataType_t library_type(DType dtype) {
  return dtype == DType::kBf16 ? CUDA_R_16BF : CUDA_R_32F;
}

// A row-major operand of rows x columns as the library's column-major matrix, and whether it has
// to be transposed to become the transpose of the operand.
struct Seen {
  Layout layout;
  cublasOperation_t operation;
};

Seen see(std::int64_t rows, std::int64_t columns, const MatmulLayout& layout, std::int64_t batches,
         DType dtype) {
  // With columns next to each other, a row is a column of the transpose. An operand that is itself
  // a transpose has its rows next to each other. Where both strides are 1 there is one row or one
  // column; a leading dimension is at least what stands next to each other.
  const bool transposed = layout.column != 1;
  const std::int64_t inner = transposed ? rows : columns, outer = transposed ? columns : rows;
  const std::int64_t stride = transposed ? layout.column : layout.row;
  cublasLtMatrixLayout_t made = nullptr;
  check_cublas(
      cublas_lt().MatrixLayoutCreate(&made, library_type(dtype), static_cast<std::uint64_t>(inner),
                                     static_cast<std::uint64_t>(outer), std::max(stride, inner)),
      "cublasLtMatrixLayoutCreate");
  Seen seen = {Layout(made), transposed ? CUBLAS_OP_T : CUBLAS_OP_N};
  if (batches > 1) {
    set(seen.layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, static_cast<std::int32_t>(batches));
    set(seen.layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, layout.batch);
  }
  return seen;
}

cublasLtEpilogue_t library_epilogue(const FusedMatmulSpec& spec) {
  const bool bias = spec.matmul.bias;
  switch (spec.epilogue) {
    case Epilogue::kGelu:
      return bias ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX;
    case Epilogue::kGeluGradient:
      return CUBLASLT_EPILOGUE_DGELU;
    case Epilogue::kNone:
      break;
  }
  return bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
}

std::string to_string(const FusedMatmulSpec& spec) {
  constexpr std::array<const char*, 3> kNames = {"", ", GELU", ", gradient through GELU"};
  return sluice::to_string(spec.matmul) + kNames.at(static_cast<std::size_t>(spec.epilogue));
}

[[noreturn]] void fail(const FusedMatmulSpec& spec, std::string_view what) {
  throw Error(ErrorCode::kDevice,
              fmt::format("cuBLASLt cannot compute {}: {}", to_string(spec), what));
}

void check_matmul(const FusedMatmulSpec& spec, cublasStatus_t status) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  check_cublas(status, fmt::format("cuBLASLt cannot compute {}", to_string(spec)));
}

struct Key {
  FusedMatmulSpec spec;
  bool aligned;
  bool tf32;
  friend bool operator==(const Key&, const Key&) = default;
};

struct KeyHash {
  std::size_t operator()(const Key& key) const {
    const auto rest = static_cast<std::size_t>(key.spec.epilogue) << 2 |
                      static_cast<std::size_t>(key.aligned) << 1 |
                      static_cast<std::size_t>(key.tf32);
    return MatmulSpecHash()(key.spec.matmul) * 31 + rest;
  }
};

// One matmul, ready to run. a and b are the row-major operands; the library gets them swapped.
struct Plan {
  Description description;
  Layout a, b, c;
  cublasLtMatmulAlgo_t algorithm = {};
  cublasStatus_t status = CUBLAS_STATUS_NOT_SUPPORTED;  // of the search for an algorithm
};

bool aligned(const MatmulOperands& operands) {
  std::uintptr_t bits = 0;
  for (const void* pointer :
       {operands.a, operands.b, operands.bias, operands.added, static_cast<const void*>(operands.c),
        static_cast<const void*>(operands.aux)}) {
    bits |= reinterpret_cast<std::uintptr_t>(pointer);
  }
  return bits % kAlignment == 0;
}

}  // namespace

struct Matmuls::State {
  explicit State(Context& of) : context(of) {}

  Plan make(const Key& key) const;
  void describe(const Key& key, Plan& plan) const;
  void choose_algorithm(const Key& key, Plan& plan) const;
  const cublasLtMatmulHeuristicResult_t& pick(
      const FusedMatmulSpec& spec,
      std::span<const cublasLtMatmulHeuristicResult_t> candidates) const;
  Plan& find(const FusedMatmulSpec& spec, bool aligned);

  Context& context;
  std::unordered_map<Key, Plan, KeyHash> plans;
};

void Matmuls::State::describe(const Key& key, Plan& plan) const {
  const FusedMatmulSpec& spec = key.spec;
  const MatmulSpec& matmul = spec.matmul;
  const bool rounds = key.tf32 && matmul.operands == DType::kF32;
  cublasLtMatmulDesc_t made = nullptr;
  check_cublas(cublas_lt().MatmulDescCreate(
                   &made, rounds ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F, CUDA_R_32F),
               "cublasLtMatmulDescCreate");
  plan.description.reset(made);
  Seen a = see(matmul.m, matmul.k, matmul.a, matmul.batches, matmul.operands);
  Seen b = see(matmul.k, matmul.n, matmul.b, matmul.batches, matmul.operands);
  Seen c = see(matmul.m, matmul.n, matmul.c, matmul.batches, matmul.result);
  if (c.operation != CUBLAS_OP_N) fail(spec, "the columns of a result stand next to each other");
  plan.a = std::move(a.layout);
  plan.b = std::move(b.layout);
  plan.c = std::move(c.layout);
  set(plan.description, CUBLASLT_MATMUL_DESC_TRANSA, b.operation);
  set(plan.description, CUBLASLT_MATMUL_DESC_TRANSB, a.operation);
  set(plan.description, CUBLASLT_MATMUL_DESC_EPILOGUE, library_epilogue(spec));
  // The search uses only the alignment of these pointers.
  void* place = context.workspace() + (key.aligned ? 0 : size_of(matmul.result));
  if (matmul.bias) set(plan.description, CUBLASLT_MATMUL_DESC_BIAS_POINTER, place);
  if (spec.epilogue != Epilogue::kNone) {
    set(plan.description, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, place);
    set(plan.description, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, matmul.c.row);
  }
}

// Over how many blocks the algorithm splits a sum; the library's -1, its own choice, is the most.
std::uint32_t split_of(const cublasLtMatmulAlgo_t& algorithm) {
  std::uint32_t split = 1;
  std::size_t written = 0;
  check_cublas(cublas_lt().MatmulAlgoConfigGetAttribute(&algorithm, CUBLASLT_ALGO_CONFIG_SPLITK_NUM,
                                                        &split, sizeof(split), &written),
               "cublasLtMatmulAlgoConfigGetAttribute");
  return split;
}

// Which of the library's candidates, its best guess first. In bf16 on Hopper, for a matmul that
// does more than multiply while it stores (b transposed and a not: a layer's forward, with its bias
// and what it adds to; an activation), the one with the most waves, that is the smallest tiles: a
// multiprocessor then has two at once, and stores the results of one while it multiplies for the
// other. Elsewhere they gain nothing in a whole step: there a GPU runs at its limit of power, and
// small tiles take more of it. Sums split over more blocks than in the first guess have more waves
// too, and no smaller tiles.
const cublasLtMatmulHeuristicResult_t& Matmuls::State::pick(
    const FusedMatmulSpec& spec,
    std::span<const cublasLtMatmulHeuristicResult_t> candidates) const {
  constexpr int kHopper = 90;
  const MatmulSpec& matmul = spec.matmul;
  const auto works = [](const cublasLtMatmulHeuristicResult_t& candidate) {
    return candidate.state == CUBLAS_STATUS_SUCCESS;
  };
  const auto first = std::find_if(candidates.begin(), candidates.end(), works);
  if (first == candidates.end()) return candidates.front();
  const auto* picked = &*first;
  const bool stores_much =
      spec.epilogue != Epilogue::kNone || (matmul.b.row == 1 && matmul.a.column == 1);
  if (context.compute_capability() != kHopper || matmul.operands != DType::kBf16 || !stores_much) {
    return *picked;
  }
  for (const auto& each : candidates) {
    if (works(each) && each.wavesCount > picked->wavesCount &&
        split_of(each.algo) <= split_of(first->algo)) {
      picked = &each;
    }
  }
  return *picked;
}

void Matmuls::State::choose_algorithm(const Key& key, Plan& plan) const {
  cublasLtMatmulPreference_t made = nullptr;
  check_cublas(cublas_lt().MatmulPreferenceCreate(&made), "cublasLtMatmulPreferenceCreate");
  const Preference preference(made);
  set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, Context::kWorkspaceBytes);
  // Sums that are split over blocks meet in f32, in a separate step of fixed order.
  set(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
      static_cast<std::uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
  const MatmulSpec& matmul = key.spec.matmul;
  const auto alignment = [&key](DType dtype) {
    return static_cast<std::uint32_t>(key.aligned ? kAlignment : size_of(dtype));
  };
  for (const auto attribute :
       {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES}) {
    set(preference, attribute, alignment(matmul.operands));
  }
  for (const auto attribute :
       {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES}) {
    set(preference, attribute, alignment(matmul.result));
  }
  std::array<cublasLtMatmulHeuristicResult_t, 8> results = {};
  int found = 0;
  plan.status = cublas_lt().MatmulAlgoGetHeuristic(
      context.cublas(), plan.description.get(), plan.b.get(), plan.a.get(), plan.c.get(),
      plan.c.get(), preference.get(), static_cast<int>(results.size()), results.data(), &found);
  if (plan.status == CUBLAS_STATUS_SUCCESS && found == 0) {
    plan.status = CUBLAS_STATUS_NOT_SUPPORTED;
  }
  if (plan.status != CUBLAS_STATUS_SUCCESS) return;
  const auto& picked = pick(key.spec, std::span(results).first(static_cast<std::size_t>(found)));
  plan.status = picked.state;
  plan.algorithm = picked.algo;
}

Plan Matmuls::State::make(const Key& key) const {
  const MatmulSpec& matmul = key.spec.matmul;
  if (matmul.batches != 1 && (matmul.bias || key.spec.epilogue != Epilogue::kNone)) {
    fail(key.spec, "a bias or an activation needs a single matmul");
  }
  Plan plan;
  describe(key, plan);
  choose_algorithm(key, plan);
  return plan;
}

Plan& Matmuls::State::find(const FusedMatmulSpec& spec, bool aligned) {
  const Key key = {spec, aligned, context.tf32()};
  const auto found = plans.find(key);
  return found != plans.end() ? found->second : plans.emplace(key, make(key)).first->second;
}

Matmuls::Matmuls(Context& context) : state_(std::make_unique<State>(context)) {}

Matmuls::~Matmuls() = default;

void Matmuls::run(const FusedMatmulSpec& spec, const MatmulOperands& operands) {
  const MatmulSpec& matmul = spec.matmul;
  if (matmul.batches == 0 || matmul.m == 0 || matmul.n == 0) return;
  if (matmul.k == 0 && matmul.accumulate && operands.added == nullptr) return;
  const Plan& plan = state_->find(spec, aligned(operands));
  check_matmul(spec, plan.status);
  if (matmul.bias) set(plan.description, CUBLASLT_MATMUL_DESC_BIAS_POINTER, operands.bias);
  if (spec.epilogue != Epilogue::kNone) {
    set(plan.description, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, operands.aux);
  }
  const float one = 1, beta = matmul.accumulate ? 1.0F : 0.0F;
  Context& context = state_->context;
  check_matmul(spec, cublas_lt().Matmul(context.cublas(), plan.description.get(), &one, operands.b,
                                        plan.b.get(), operands.a, plan.a.get(), &beta,
                                        operands.added != nullptr ? operands.added : operands.c,
                                        plan.c.get(), operands.c, plan.c.get(), &plan.algorithm,
                                        context.workspace(), Context::kWorkspaceBytes,
                                        static_cast<cudaStream_t>(context.stream().native())));
}

bool Matmuls::supports(const FusedMatmulSpec& spec) {
  return state_->find(spec, true).status == CUBLAS_STATUS_SUCCESS;
}

std::size_t Matmuls::size() const { return state_->plans.size(); }

}  // namespace sluice::cuda
