// The part of cuBLASLt that Sluice calls. Descriptors are copied when a matmul is put on its
// stream. Refuses what the library refuses, and beyond that what would go wrong only on a GPU:
// operands outside the device's memory or beyond the end of their allocation, a workspace that is
// too small, pointers less aligned than the heuristic was promised. The workspace is filled with
// 0xFF bytes by every matmul, so that nobody relies on what lies there.
#include <cublasLt.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <initializer_list>
#include <optional>

#include "tests/emulated_cuda/control.hpp"
#include "tests/emulated_cuda/matmul.hpp"
#include "tests/emulated_cuda/memory.hpp"
#include "tests/emulated_cuda/stream.hpp"

struct cublasLtContext {
  int device;
};

namespace sluice::emulated {

namespace {

std::atomic<cublasStatus_t> wanted_status = CUBLAS_STATUS_SUCCESS;
std::atomic<int> last_candidate = -1;

constexpr std::uint64_t kAlgorithmMark = 0x534C554943454C54U;
constexpr std::size_t kWorkspaceBytes = 32768;  // taken where the preference allows as much
constexpr std::uint32_t kMostAlignment = 16;    // bytes a kernel can make use of

struct Description {
  std::int32_t compute = CUBLAS_COMPUTE_32F;
  std::int32_t scale = CUDA_R_32F;
  std::int32_t pointer_mode = CUBLASLT_POINTER_MODE_HOST;
  std::int32_t transpose_a = CUBLAS_OP_N;
  std::int32_t transpose_b = CUBLAS_OP_N;
  std::uint32_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  void* bias = nullptr;
  std::int64_t bias_stride = 0;
  void* aux = nullptr;
  std::int64_t aux_leading = 0;
  std::int64_t aux_stride = 0;
  std::int32_t aux_type = -1;
  std::int32_t bias_type = -1;
};

struct Layout {
  std::uint32_t type = CUDA_R_32F;
  std::int32_t order = CUBLASLT_ORDER_COL;
  std::uint64_t rows = 0;
  std::uint64_t columns = 0;
  std::int64_t leading = 0;
  std::int32_t batches = 1;
  std::int64_t batch_stride = 0;
};

struct Preference {
  std::uint64_t workspace = 0;
  std::uint32_t search = 0;
  std::uint32_t reductions = CUBLASLT_REDUCTION_SCHEME_MASK;
  std::uint32_t alignment[4] = {256, 256, 256, 256};  // of A, B, C, D
  float waves = 0;
  std::uint64_t implementations = ~std::uint64_t{0};
};

// What cublasLtMatmulAlgo_t's words hold.
struct Algorithm {
  std::uint64_t mark;
  std::uint64_t workspace;
  std::uint64_t alignment[4];
  std::uint32_t candidate, split;  // its place among those found; blocks that share a sum
};
static_assert(sizeof(Algorithm) <= sizeof(cublasLtMatmulAlgo_t));

template <typename Own, typename Handle>
Own* own(Handle handle) {
  return reinterpret_cast<Own*>(handle);
}

// A field of one of the structs above as an attribute of the library.
struct Field {
  void* data;
  std::size_t bytes;
};

template <typename T>
std::optional<Field> field(T& value) {
  return Field{&value, sizeof value};
}

std::optional<Field> field_of(Description& description, cublasLtMatmulDescAttributes_t attribute) {
  switch (attribute) {
    case CUBLASLT_MATMUL_DESC_COMPUTE_TYPE:
      return field(description.compute);
    case CUBLASLT_MATMUL_DESC_SCALE_TYPE:
      return field(description.scale);
    case CUBLASLT_MATMUL_DESC_POINTER_MODE:
      return field(description.pointer_mode);
    case CUBLASLT_MATMUL_DESC_TRANSA:
      return field(description.transpose_a);
    case CUBLASLT_MATMUL_DESC_TRANSB:
      return field(description.transpose_b);
    case CUBLASLT_MATMUL_DESC_EPILOGUE:
      return field(description.epilogue);
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER:
      return field(description.bias);
    case CUBLASLT_MATMUL_DESC_BIAS_BATCH_STRIDE:
      return field(description.bias_stride);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER:
      return field(description.aux);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD:
      return field(description.aux_leading);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_BATCH_STRIDE:
      return field(description.aux_stride);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE:
      return field(description.aux_type);
    case CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE:
      return field(description.bias_type);
    default:
      return std::nullopt;
  }
}

std::optional<Field> field_of(Layout& layout, cublasLtMatrixLayoutAttribute_t attribute) {
  switch (attribute) {
    case CUBLASLT_MATRIX_LAYOUT_TYPE:
      return field(layout.type);
    case CUBLASLT_MATRIX_LAYOUT_ORDER:
      return field(layout.order);
    case CUBLASLT_MATRIX_LAYOUT_ROWS:
      return field(layout.rows);
    case CUBLASLT_MATRIX_LAYOUT_COLS:
      return field(layout.columns);
    case CUBLASLT_MATRIX_LAYOUT_LD:
      return field(layout.leading);
    case CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT:
      return field(layout.batches);
    case CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET:
      return field(layout.batch_stride);
    default:
      return std::nullopt;
  }
}

std::optional<Field> field_of(Preference& preference,
                              cublasLtMatmulPreferenceAttributes_t attribute) {
  switch (attribute) {
    case CUBLASLT_MATMUL_PREF_SEARCH_MODE:
      return field(preference.search);
    case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES:
      return field(preference.workspace);
    case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK:
      return field(preference.reductions);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES:
      return field(preference.alignment[0]);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES:
      return field(preference.alignment[1]);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES:
      return field(preference.alignment[2]);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES:
      return field(preference.alignment[3]);
    case CUBLASLT_MATMUL_PREF_MAX_WAVES_COUNT:
      return field(preference.waves);
    case CUBLASLT_MATMUL_PREF_IMPL_MASK:
      return field(preference.implementations);
    default:
      return std::nullopt;
  }
}

template <typename Own, typename Attribute>
cublasStatus_t set(Own* object, Attribute attribute, const void* value, std::size_t bytes) {
  if (object == nullptr || value == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
  const std::optional<Field> found = field_of(*object, attribute);
  if (!found) return CUBLAS_STATUS_NOT_SUPPORTED;
  if (found->bytes != bytes) return CUBLAS_STATUS_INVALID_VALUE;
  std::memcpy(found->data, value, bytes);
  return CUBLAS_STATUS_SUCCESS;
}

Matrix matrix_of(const Layout& layout) {
  return {static_cast<cudaDataType>(layout.type),
          static_cast<std::int64_t>(layout.rows),
          static_cast<std::int64_t>(layout.columns),
          layout.leading,
          layout.batches,
          layout.batch_stride};
}

// The matmul but for its pointers and factors.
cublasStatus_t read(const Description& description, const Layout& a, const Layout& b,
                    const Layout& c, const Layout& d, Matmul& matmul) {
  for (const Layout* layout : {&a, &b, &c, &d}) {
    const bool is_type_known = layout->type == CUDA_R_32F || layout->type == CUDA_R_16BF;
    if (!is_type_known || layout->order != CUBLASLT_ORDER_COL) return CUBLAS_STATUS_NOT_SUPPORTED;
    if (layout->leading < static_cast<std::int64_t>(layout->rows) || layout->batches < 1) {
      return CUBLAS_STATUS_INVALID_VALUE;
    }
  }
  const bool tf32 = description.compute == CUBLAS_COMPUTE_32F_FAST_TF32;
  if ((description.compute != CUBLAS_COMPUTE_32F && !tf32) || description.scale != CUDA_R_32F ||
      description.pointer_mode != CUBLASLT_POINTER_MODE_HOST || !is_known(description.epilogue) ||
      a.type != b.type || c.type != d.type || (a.type == CUDA_R_32F && d.type != CUDA_R_32F)) {
    return CUBLAS_STATUS_NOT_SUPPORTED;
  }
  matmul.epilogue = static_cast<cublasLtEpilogue_t>(description.epilogue);
  const auto is_type_of_d = [&](std::int32_t type) {
    return type == -1 || type == static_cast<std::int32_t>(d.type);
  };
  if (!is_type_of_d(description.bias_type) || !is_type_of_d(description.aux_type)) {
    return CUBLAS_STATUS_NOT_SUPPORTED;
  }
  matmul.transpose_a = description.transpose_a != CUBLAS_OP_N;
  matmul.transpose_b = description.transpose_b != CUBLAS_OP_N;
  const std::uint64_t m = matmul.transpose_a ? a.columns : a.rows;
  const std::uint64_t k = matmul.transpose_a ? a.rows : a.columns;
  const std::uint64_t n = matmul.transpose_b ? b.rows : b.columns;
  if (k != (matmul.transpose_b ? b.columns : b.rows) || d.rows != m || d.columns != n ||
      c.rows != m || c.columns != n || a.batches != d.batches || b.batches != d.batches ||
      c.batches != d.batches) {
    return CUBLAS_STATUS_INVALID_VALUE;
  }
  if (uses_aux(matmul.epilogue) && (description.aux_leading < static_cast<std::int64_t>(m) ||
                                    description.aux_leading % 8 != 0)) {
    return CUBLAS_STATUS_NOT_SUPPORTED;
  }
  matmul.a = matrix_of(a);
  matmul.b = matrix_of(b);
  matmul.c = matrix_of(c);
  matmul.d = matrix_of(d);
  matmul.tf32 = tf32;
  matmul.bias = description.bias;
  matmul.bias_stride = description.bias_stride;
  matmul.aux = description.aux;
  matmul.aux_leading = description.aux_leading;
  matmul.aux_stride = description.aux_stride;
  return CUBLAS_STATUS_SUCCESS;
}

std::size_t size_of(cudaDataType type) { return type == CUDA_R_32F ? 4 : 2; }

bool lies_on(int device, const char* name, const void* data, std::int64_t elements,
             cudaDataType type) {
  const Memory memory = memory_of(data, static_cast<std::size_t>(elements) * size_of(type));
  if (memory.kind == MemoryKind::kDevice && memory.device == device && memory.is_inside) {
    return true;
  }
  std::fprintf(stderr,
               "emulated cuda: cublasLtMatmul: %s, %lld elements at %p, is not inside one "
               "allocation of device %d\n",
               name, static_cast<long long>(elements), data, device);
  return false;
}

std::int64_t extent(const Matrix& matrix) {
  if (matrix.rows == 0 || matrix.columns == 0) return 0;
  return (matrix.batches - 1) * matrix.batch_stride + (matrix.columns - 1) * matrix.leading +
         matrix.rows;
}

bool are_operands_on(int device, const Matmul& matmul) {
  const bool uses_bias = reads_bias(matmul.epilogue) || writes_bias(matmul.epilogue);
  const std::int64_t last = matmul.d.batches - 1;
  const std::int64_t bias_length =
      matmul.epilogue == CUBLASLT_EPILOGUE_BGRADB ? matmul.d.columns : matmul.d.rows;
  const std::int64_t aux_extent =
      last * matmul.aux_stride + (matmul.d.columns - 1) * matmul.aux_leading + matmul.d.rows;
  const cudaDataType type = matmul.d.type;
  return lies_on(device, "A", matmul.a_data, extent(matmul.a), matmul.a.type) &&
         lies_on(device, "B", matmul.b_data, extent(matmul.b), matmul.b.type) &&
         (matmul.beta == 0 ||
          lies_on(device, "C", matmul.c_data, extent(matmul.c), matmul.c.type)) &&
         lies_on(device, "D", matmul.d_data, extent(matmul.d), type) &&
         (!uses_bias || lies_on(device, "the bias", matmul.bias,
                                last * matmul.bias_stride + bias_length, type)) &&
         (!uses_aux(matmul.epilogue) ||
          lies_on(device, "the epilogue's aux", matmul.aux, aux_extent, type));
}

bool is_aligned(const void* data, std::uint64_t alignment) {
  return reinterpret_cast<std::uintptr_t>(data) % alignment == 0;
}

template <typename Own, typename Handle>
cublasStatus_t create(Handle* handle, Own* made) {
  *handle = reinterpret_cast<Handle>(made);
  return CUBLAS_STATUS_SUCCESS;
}

template <typename Own, typename Handle>
cublasStatus_t destroy(Handle handle) {
  delete own<Own>(handle);
  return CUBLAS_STATUS_SUCCESS;
}

}  // namespace

void set_cublas_status(cublasStatus_t status) { wanted_status = status; }
int last_matmul_candidate() { return last_candidate; }

}  // namespace sluice::emulated

using namespace sluice::emulated;  // NOLINT(google-build-using-namespace): the C functions below

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
  if (device_count() == 0) return CUBLAS_STATUS_NOT_INITIALIZED;
  if (wanted_status != CUBLAS_STATUS_SUCCESS) return wanted_status;
  *handle = new cublasLtContext{current_device()};
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
  delete handle;
  return CUBLAS_STATUS_SUCCESS;
}

std::size_t cublasLtGetVersion() { return CUBLAS_VERSION; }

std::size_t cublasLtGetCudartVersion() { return CUDART_VERSION; }

const char* cublasLtGetStatusName(cublasStatus_t status) {
  switch (status) {
    case CUBLAS_STATUS_SUCCESS:
      return "CUBLAS_STATUS_SUCCESS";
    case CUBLAS_STATUS_NOT_INITIALIZED:
      return "CUBLAS_STATUS_NOT_INITIALIZED";
    case CUBLAS_STATUS_ALLOC_FAILED:
      return "CUBLAS_STATUS_ALLOC_FAILED";
    case CUBLAS_STATUS_INVALID_VALUE:
      return "CUBLAS_STATUS_INVALID_VALUE";
    case CUBLAS_STATUS_EXECUTION_FAILED:
      return "CUBLAS_STATUS_EXECUTION_FAILED";
    case CUBLAS_STATUS_NOT_SUPPORTED:
      return "CUBLAS_STATUS_NOT_SUPPORTED";
    default:
      return "an unknown status";
  }
}

const char* cublasLtGetStatusString(cublasStatus_t status) { return cublasLtGetStatusName(status); }

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* description,
                                        cublasComputeType_t compute, cudaDataType_t scale) {
  auto* made = new Description;
  made->compute = static_cast<std::int32_t>(compute);
  made->scale = static_cast<std::int32_t>(scale);
  return create(description, made);
}

cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t description) {
  return destroy<Description>(description);
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t description,
                                              cublasLtMatmulDescAttributes_t attribute,
                                              const void* value, std::size_t bytes) {
  return set(own<Description>(description), attribute, value, bytes);
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType type,
                                          std::uint64_t rows, std::uint64_t columns,
                                          std::int64_t leading) {
  auto* made = new Layout;
  made->type = static_cast<std::uint32_t>(type);
  made->rows = rows;
  made->columns = columns;
  made->leading = leading;
  return create(layout, made);
}

cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
  return destroy<Layout>(layout);
}

cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout,
                                                cublasLtMatrixLayoutAttribute_t attribute,
                                                const void* value, std::size_t bytes) {
  return set(own<Layout>(layout), attribute, value, bytes);
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) {
  return create(preference, new Preference);
}

cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
  return destroy<Preference>(preference);
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute,
                                                    const void* value, std::size_t bytes) {
  return set(own<Preference>(preference), attribute, value, bytes);
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle,
                                              cublasLtMatmulDesc_t description,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int wanted,
                                              cublasLtMatmulHeuristicResult_t results[],
                                              int* found) {
  *found = 0;
  if (handle == nullptr) return CUBLAS_STATUS_NOT_INITIALIZED;
  if (wanted < 1) return CUBLAS_STATUS_INVALID_VALUE;
  Matmul matmul;
  const cublasStatus_t status = read(*own<Description>(description), *own<Layout>(a),
                                     *own<Layout>(b), *own<Layout>(c), *own<Layout>(d), matmul);
  if (status != CUBLAS_STATUS_SUCCESS) return status;
  const auto& asked = *own<Preference>(preference);
  Algorithm algorithm = {
      kAlgorithmMark, asked.workspace >= kWorkspaceBytes ? kWorkspaceBytes : 0, {}, 0, 1};
  for (int i = 0; i < 4; ++i) {
    algorithm.alignment[i] = std::clamp<std::uint32_t>(asked.alignment[i], 1, kMostAlignment);
  }
  // All compute the same: large tiles, a sum split over blocks, small tiles, and one that fails.
  constexpr std::array kWaves = {1.0F, 4.0F, 2.0F, 8.0F};
  *found = std::min(wanted, static_cast<int>(kWaves.size()));
  for (int i = 0; i < *found; ++i) {
    algorithm.candidate = static_cast<std::uint32_t>(i);
    algorithm.split = i == 1 ? 2 : 1;
    results[i] = {};
    std::memcpy(&results[i].algo, &algorithm, sizeof algorithm);
    results[i].workspaceSize = algorithm.workspace;
    results[i].state = i == 3 ? CUBLAS_STATUS_NOT_SUPPORTED : CUBLAS_STATUS_SUCCESS;
    results[i].wavesCount = kWaves[static_cast<std::size_t>(i)];
  }
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoConfigGetAttribute(const cublasLtMatmulAlgo_t* algo,
                                                    cublasLtMatmulAlgoConfigAttributes_t attribute,
                                                    void* value, std::size_t bytes,
                                                    std::size_t* written) {
  Algorithm algorithm = {};
  std::memcpy(&algorithm, algo, sizeof algorithm);
  if (attribute != CUBLASLT_ALGO_CONFIG_SPLITK_NUM) return CUBLAS_STATUS_NOT_SUPPORTED;
  if (bytes != sizeof algorithm.split) return CUBLAS_STATUS_INVALID_VALUE;
  std::memcpy(value, &algorithm.split, bytes);
  *written = bytes;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t description,
                              const void* alpha, const void* a, cublasLtMatrixLayout_t a_layout,
                              const void* b, cublasLtMatrixLayout_t b_layout, const void* beta,
                              const void* c, cublasLtMatrixLayout_t c_layout, void* d,
                              cublasLtMatrixLayout_t d_layout, const cublasLtMatmulAlgo_t* algo,
                              void* workspace, std::size_t workspace_bytes, cudaStream_t stream) {
  if (handle == nullptr) return CUBLAS_STATUS_NOT_INITIALIZED;
  if (wanted_status != CUBLAS_STATUS_SUCCESS) return wanted_status;
  if (alpha == nullptr || beta == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
  Matmul matmul;
  const cublasStatus_t status =
      read(*own<Description>(description), *own<Layout>(a_layout), *own<Layout>(b_layout),
           *own<Layout>(c_layout), *own<Layout>(d_layout), matmul);
  if (status != CUBLAS_STATUS_SUCCESS) return status;
  Algorithm algorithm = {kAlgorithmMark, 0, {1, 1, 1, 1}, 0, 1};
  if (algo != nullptr) std::memcpy(&algorithm, algo, sizeof algorithm);
  if (algorithm.mark != kAlgorithmMark || workspace_bytes < algorithm.workspace) {
    return CUBLAS_STATUS_INVALID_VALUE;
  }
  last_candidate = static_cast<int>(algorithm.candidate);
  matmul.alpha = *static_cast<const float*>(alpha);
  matmul.beta = *static_cast<const float*>(beta);
  matmul.a_data = a;
  matmul.b_data = b;
  matmul.c_data = c;
  matmul.d_data = d;
  if (!is_aligned(a, algorithm.alignment[0]) || !is_aligned(b, algorithm.alignment[1]) ||
      !is_aligned(c, algorithm.alignment[2]) || !is_aligned(d, algorithm.alignment[3])) {
    std::fprintf(stderr,
                 "emulated cuda: cublasLtMatmul: an operand is less aligned than the "
                 "heuristic was promised\n");
    return CUBLAS_STATUS_EXECUTION_FAILED;
  }
  cudaStream_t real = resolve(stream);
  if (real == nullptr || device_of(real) != handle->device ||
      !are_operands_on(handle->device, matmul)) {
    return CUBLAS_STATUS_EXECUTION_FAILED;
  }
  if (algorithm.workspace > 0 &&
      !lies_on(handle->device, "the workspace", workspace,
               static_cast<std::int64_t>(algorithm.workspace / sizeof(float)), CUDA_R_32F)) {
    return CUBLAS_STATUS_EXECUTION_FAILED;
  }
  const std::size_t used = algorithm.workspace;
  const cudaError_t put = enqueue(real, [matmul, workspace, used] {
    if (used > 0) std::memset(workspace, 0xFF, used);
    compute(matmul);
  });
  return put == cudaSuccess ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_EXECUTION_FAILED;
}
