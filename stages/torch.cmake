# LibTorch, which is optional: makes the target Sluice::torch for programs that include <sluice/torch.hpp>.
# The build reads this file, and, installed, find_package(Sluice COMPONENTS torch).
#
# SLUICE_TORCH_DIR: the folder `torch` of an unpacked wheel from PyPI, with include/ and lib/. Empty: the
# system's (Debian: libtorch-dev). off: none. LibTorch's own CMake package is not used: it demands the CUDA
# toolkit that LibTorch was built with.
#
# Needs the target Sluice::stages. SLUICE_TORCH_WANTS_CUDA of the caller says whether GPU code is
# wanted. Sets SLUICE_TORCH_MISSING: empty, or what was not found.
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

set(sluice_torch_place)
if(SLUICE_TORCH_DIR)
  set(sluice_torch_place PATHS ${SLUICE_TORCH_DIR} NO_DEFAULT_PATH)
endif()
find_path(sluice_torch_include ATen/ATen.h ${sluice_torch_place} PATH_SUFFIXES include NO_CACHE)
find_path(sluice_torch_api_include torch/torch.h ${sluice_torch_place}
          PATH_SUFFIXES include/torch/csrc/api/include torch/csrc/api/include NO_CACHE)
find_library(sluice_torch_library torch_cpu ${sluice_torch_place} PATH_SUFFIXES lib NO_CACHE)
find_library(sluice_torch_base_library c10 ${sluice_torch_place} PATH_SUFFIXES lib NO_CACHE)
foreach(sluice_part sluice_torch_include sluice_torch_api_include sluice_torch_library sluice_torch_base_library)
  if(NOT ${sluice_part})
    if(SLUICE_TORCH_DIR)
      set(SLUICE_TORCH_MISSING "SLUICE_TORCH_DIR, ${SLUICE_TORCH_DIR}, has no LibTorch (${sluice_part})")
    else()
      set(SLUICE_TORCH_MISSING
          "LibTorch not found (Debian: libtorch-dev; a wheel: set SLUICE_TORCH_DIR)")
    endif()
    return()
  endif()
endforeach()

add_library(Sluice::torch INTERFACE IMPORTED GLOBAL)
target_include_directories(Sluice::torch SYSTEM INTERFACE ${sluice_torch_include} ${sluice_torch_api_include})
target_link_libraries(Sluice::torch INTERFACE Sluice::stages ${sluice_torch_library} ${sluice_torch_base_library})
# A wheel for CUDA needs libraries of other wheels. The program finds them when it starts, or not at all.
target_link_options(Sluice::torch INTERFACE LINKER:--allow-shlib-undefined)

set(sluice_torch_cuda 0)
if(SLUICE_TORCH_WANTS_CUDA)
  find_library(sluice_torch_cuda_library torch_cuda ${sluice_torch_place} PATH_SUFFIXES lib NO_CACHE)
  find_library(sluice_torch_cuda_base_library c10_cuda ${sluice_torch_place} PATH_SUFFIXES lib NO_CACHE)
  if(sluice_torch_cuda_library AND sluice_torch_cuda_base_library)
    set(sluice_torch_cuda 1)
    # Nothing names a symbol of torch_cuda: it registers its kernels when it is loaded.
    target_link_libraries(
      Sluice::torch INTERFACE ${sluice_torch_cuda_base_library}
                              "-Wl,--no-as-needed,${sluice_torch_cuda_library},--as-needed" CUDA::cudart)
  endif()
endif()
target_compile_definitions(Sluice::torch INTERFACE SLUICE_TORCH_CUDA=${sluice_torch_cuda})
