# LibTorch, which is optional: makes the target Sluice::torch for programs that include <sluice/torch.hpp>.
# The build reads this file, and, installed, find_package(Sluice COMPONENTS torch).
#
# SLUICE_TORCH_DIR: the folder `torch` of an unpacked wheel from PyPI, with include/ and lib/. Empty: the
# system's (Debian: libtorch-dev). off: none. LibTorch's own CMake package is not used: it demands the CUDA
# toolkit that LibTorch was built with.
#
# Needs the target Sluice::stages. `cuda` in the caller: whether GPU code is wanted. Sets
# SLUICE_TORCH_MISSING: empty, or what was not found.
set(SLUICE_TORCH_DIR
    ""
    CACHE STRING "LibTorch: the folder torch of an unpacked wheel; empty: the system's; off: none")

set(SLUICE_TORCH_MISSING)
if(TARGET Sluice::torch)
  return()
elseif(SLUICE_TORCH_DIR STREQUAL "off")
  set(SLUICE_TORCH_MISSING "SLUICE_TORCH_DIR is off")
  return()
endif()

set(torch_place)
if(SLUICE_TORCH_DIR)
  set(torch_place PATHS ${SLUICE_TORCH_DIR} NO_DEFAULT_PATH)
endif()
find_path(torch_include ATen/ATen.h ${torch_place} PATH_SUFFIXES include NO_CACHE)
find_path(torch_api_include torch/torch.h ${torch_place}
          PATH_SUFFIXES include/torch/csrc/api/include torch/csrc/api/include NO_CACHE)
find_library(torch_library torch_cpu ${torch_place} PATH_SUFFIXES lib NO_CACHE)
find_library(torch_base_library c10 ${torch_place} PATH_SUFFIXES lib NO_CACHE)
foreach(part torch_include torch_api_include torch_library torch_base_library)
  if(NOT ${part})
    if(SLUICE_TORCH_DIR)
      set(SLUICE_TORCH_MISSING "SLUICE_TORCH_DIR, ${SLUICE_TORCH_DIR}, has no LibTorch (${part})")
    else()
      set(SLUICE_TORCH_MISSING
          "LibTorch not found (Debian: libtorch-dev; a wheel: set SLUICE_TORCH_DIR)")
    endif()
    return()
  endif()
endforeach()

add_library(Sluice::torch INTERFACE IMPORTED GLOBAL)
target_include_directories(Sluice::torch SYSTEM INTERFACE ${torch_include} ${torch_api_include})
target_link_libraries(Sluice::torch INTERFACE Sluice::stages ${torch_library} ${torch_base_library})
# A wheel for CUDA needs libraries of other wheels. The program finds them when it starts, or not at all.
target_link_options(Sluice::torch INTERFACE LINKER:--allow-shlib-undefined)

set(torch_cuda 0)
if(cuda)
  find_library(torch_cuda_library torch_cuda ${torch_place} PATH_SUFFIXES lib NO_CACHE)
  find_library(torch_cuda_base_library c10_cuda ${torch_place} PATH_SUFFIXES lib NO_CACHE)
  if(torch_cuda_library AND torch_cuda_base_library)
    set(torch_cuda 1)
    # Nothing names a symbol of torch_cuda: it registers its kernels when it is loaded.
    target_link_libraries(
      Sluice::torch INTERFACE ${torch_cuda_base_library}
                              "-Wl,--no-as-needed,${torch_cuda_library},--as-needed" CUDA::cudart)
  endif()
endif()
target_compile_definitions(Sluice::torch INTERFACE SLUICE_TORCH_CUDA=${torch_cuda})
