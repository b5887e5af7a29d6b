// The functions of cuBLASLt. The library is opened at run time, not linked, as NCCL is
// (comm/nccl/nccl_api.hpp): it has 540 MB, and a build for GPUs runs on hosts without it and
// without a GPU. The tests' emulation is linked.
#pragma once

#include <cublasLt.h>

// A line for each function that Sluice calls, by its name after cublasLt.
#define SLUICE_CUBLASLT_FUNCTIONS(Each) \
  Each(Create);                         \
  Each(Destroy);                        \
  Each(GetVersion);                     \
  Each(GetStatusName);                  \
  Each(Matmul);                         \
  Each(MatmulAlgoConfigGetAttribute);   \
  Each(MatmulAlgoGetHeuristic);         \
  Each(MatmulDescCreate);               \
  Each(MatmulDescDestroy);              \
  Each(MatmulDescSetAttribute);         \
  Each(MatmulPreferenceCreate);         \
  Each(MatmulPreferenceDestroy);        \
  Each(MatmulPreferenceSetAttribute);   \
  Each(MatrixLayoutCreate);             \
  Each(MatrixLayoutDestroy);            \
  Each(MatrixLayoutSetAttribute)

namespace sluice::cuda {

struct CublasLt {
// NOLINTNEXTLINE(bugprone-macro-parentheses): a name is declared.
#define SLUICE_POINTER(name) decltype(&::cublasLt##name) name = nullptr
  SLUICE_CUBLASLT_FUNCTIONS(SLUICE_POINTER);
#undef SLUICE_POINTER

  // Opens `file` as dlopen finds it, and never unloads it; null: the linked library. Throws
  // Error(kDevice), one line, if it is missing or lacks a function.
  explicit CublasLt(const char* file);
};

// The library that the build's toolkit has, opened at the first call. Thread-safe; throws as above,
// and then tries again at the next call.
[[nodiscard]] const CublasLt& cublas_lt();

}  // namespace sluice::cuda
