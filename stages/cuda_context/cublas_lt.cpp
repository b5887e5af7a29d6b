#include "stages/cuda_context/cublas_lt.hpp"

#include <dlfcn.h>
#include <fmt/core.h>

#include <cstring>

#include <sluice/error.hpp>

#define SLUICE_TEXT_OF(value) #value
#define SLUICE_TEXT(value) SLUICE_TEXT_OF(value)

namespace sluice::cuda {

CublasLt::CublasLt(const char* file) {
#ifdef SLUICE_CUBLASLT_LINKED
#define SLUICE_LINK(name) name = &::cublasLt##name
  SLUICE_CUBLASLT_FUNCTIONS(SLUICE_LINK);
  if (file == nullptr) return;
#endif
  void* const library = dlopen(file, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (library == nullptr) {
    throw Error(ErrorCode::kDevice,
                fmt::format("cuBLASLt is missing: {} (install libcublas of the CUDA toolkit {}.{})",
                            dlerror(), CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10));
  }
  const auto find = [&](auto& pointer, const char* name) {
    void* const symbol = dlsym(library, name);
    if (symbol == nullptr) {
      throw Error(ErrorCode::kDevice,
                  fmt::format("cuBLASLt in {} cannot be used: it has no {}", file, name));
    }
    static_assert(sizeof(symbol) == sizeof(pointer));
    std::memcpy(&pointer, &symbol, sizeof(symbol));
  };
#define SLUICE_FIND(name) find(this->name, "cublasLt" #name)
  SLUICE_CUBLASLT_FUNCTIONS(SLUICE_FIND);
}

const CublasLt& cublas_lt() {
#ifdef SLUICE_CUBLASLT_LINKED
  static const CublasLt library(nullptr);
#else
#define SLUICE_FILE "libcublasLt.so." SLUICE_TEXT(CUBLAS_VER_MAJOR)
  static const CublasLt library = [] {
    try {
      return CublasLt(SLUICE_FILE);
    } catch (const Error&) {
      return CublasLt(SLUICE_CUBLASLT_FOLDER "/" SLUICE_FILE);
    }
  }();
#endif
  return library;
}

}  // namespace sluice::cuda
