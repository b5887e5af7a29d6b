# GPUs: the CUDA toolkit with cuBLASLt, cuDNN and NCCL, or the tests' emulation of it.
#
# Gives the target sluice_cuda (what GPU code of any box links; interface only) and the variables
# SLUICE_WITH_CUDA, SLUICE_WITH_CUDNN, SLUICE_WITH_NCCL (0 or 1), which sources see as macros.
set(SLUICE_CUDA
    auto
    CACHE STRING "GPU code: auto (where the CUDA toolkit is found), on, off, or emulated (for tests)")
set_property(CACHE SLUICE_CUDA PROPERTY STRINGS auto on off emulated)
if(NOT SLUICE_CUDA MATCHES "^(auto|on|off|emulated)$")
  message(FATAL_ERROR "SLUICE_CUDA is '${SLUICE_CUDA}'; legal: auto, on, off, emulated")
endif()

set(SLUICE_WITH_CUDA 0)
set(SLUICE_WITH_CUDNN 0)
set(SLUICE_WITH_NCCL 0)
add_library(sluice_cuda INTERFACE)

# A header and a library beside the toolkit or where NAME_ROOT says: <variable>_INCLUDE, _LIBRARY.
macro(sluice_find_beside_toolkit variable header library)
  find_path(${variable}_INCLUDE ${header} HINTS ${${variable}_ROOT} ENV ${variable}_ROOT
            ${CUDAToolkit_INCLUDE_DIRS} PATH_SUFFIXES include)
  find_library(${variable}_LIBRARY ${library} HINTS ${${variable}_ROOT} ENV ${variable}_ROOT
               ${CUDAToolkit_LIBRARY_DIR} ${CUDAToolkit_LIBRARY_ROOT} PATH_SUFFIXES lib lib64)
endmacro()

if(NOT SLUICE_CUDA STREQUAL off)
  find_package(CUDAToolkit 12.4 QUIET)
  if(CUDAToolkit_FOUND AND TARGET CUDA::cublasLt)
    set(SLUICE_WITH_CUDA 1)
  elseif(NOT SLUICE_CUDA STREQUAL auto)
    message(FATAL_ERROR "SLUICE_CUDA is ${SLUICE_CUDA}, but no CUDA toolkit 12.4 or newer with cuBLASLt "
                        "was found; put nvcc on PATH or set CUDAToolkit_ROOT")
  endif()
endif()

# Machine code runs on its own major version alone, from its minor version up; PTX, compiled when it is
# loaded, on everything newer. Hence one entry per major version that the compiler knows, PTX of the
# newest for what comes after it, and PTX of 9.0 for what lies between (11.0).
set(architectures "80-real;90")
if(CUDAToolkit_VERSION VERSION_GREATER_EQUAL 12.8)
  list(APPEND architectures 100-real 120)
endif()
set(SLUICE_CUDA_ARCHITECTURES
    "${architectures}"
    CACHE STRING "Compute capabilities to compile for; without -real also as PTX for newer ones")

if(SLUICE_WITH_CUDA AND NOT SLUICE_CUDA STREQUAL emulated)
  include(CheckLanguage)
  set(CMAKE_CUDA_ARCHITECTURES ${SLUICE_CUDA_ARCHITECTURES})
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    enable_language(CUDA)
    if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION) # CMake before 3.26 knows nvcc up to C++17
      set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
      set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
    endif()
    set(CMAKE_CUDA_STANDARD 20)
    set(CMAKE_CUDA_STANDARD_REQUIRED ON)
    if(SLUICE_CCACHE AND NOT CMAKE_CUDA_COMPILER_LAUNCHER)
      set(CMAKE_CUDA_COMPILER_LAUNCHER ${SLUICE_CCACHE})
    endif()
  elseif(SLUICE_CUDA STREQUAL on)
    message(FATAL_ERROR "SLUICE_CUDA is on, but the toolkit's compiler nvcc does not work here")
  else()
    set(SLUICE_WITH_CUDA 0)
  endif()
endif()

if(SLUICE_WITH_CUDA)
  sluice_find_beside_toolkit(SLUICE_CUDNN cudnn.h cudnn)
  # NCCL's header alone: the library is opened at run time (comm/nccl_api.hpp).
  find_path(SLUICE_NCCL_INCLUDE nccl.h HINTS ${SLUICE_NCCL_ROOT} ENV SLUICE_NCCL_ROOT
            ${CUDAToolkit_INCLUDE_DIRS} PATH_SUFFIXES include)
  if(SLUICE_NCCL_INCLUDE)
    set(SLUICE_WITH_NCCL 1)
    target_include_directories(sluice_cuda SYSTEM INTERFACE ${SLUICE_NCCL_INCLUDE})
  else()
    message(STATUS "NCCL's header not found (SLUICE_NCCL_ROOT says where): no transport nccl, no sums over "
                   "replicas between GPUs; MPI through host memory remains")
  endif()
  if(SLUICE_CUDA STREQUAL emulated)
    # After the toolkit's own, so that its headers are there; cuDNN is not emulated.
    target_include_directories(sluice_cuda SYSTEM INTERFACE ${CUDAToolkit_INCLUDE_DIRS})
    target_link_libraries(sluice_cuda INTERFACE sluice_emulated_cuda)
    add_subdirectory(tests/emulated_cuda)
  else()
    target_link_libraries(sluice_cuda INTERFACE CUDA::cudart_static CUDA::cublasLt)
    if(SLUICE_CUDNN_INCLUDE AND SLUICE_CUDNN_LIBRARY)
      set(SLUICE_WITH_CUDNN 1)
      target_include_directories(sluice_cuda SYSTEM INTERFACE ${SLUICE_CUDNN_INCLUDE})
      target_link_libraries(sluice_cuda INTERFACE ${SLUICE_CUDNN_LIBRARY})
    else()
      message(STATUS "cuDNN not found (SLUICE_CUDNN_ROOT says where): attention on GPUs runs in "
                     "Sluice's own, slower kernels")
    endif()
  endif()
  message(STATUS "GPUs: CUDA ${CUDAToolkit_VERSION} (${SLUICE_CUDA}), architectures "
                 "${SLUICE_CUDA_ARCHITECTURES}, cuDNN ${SLUICE_WITH_CUDNN}, NCCL ${SLUICE_WITH_NCCL}")
elseif(SLUICE_CUDA STREQUAL auto)
  message(STATUS "GPUs: no CUDA toolkit 12.4 or newer found; building for CPUs alone")
endif()

# What a box with GPU code links privately; an installed Sluice looks the same libraries up.
set(SLUICE_CUDA_LINKS)
if(SLUICE_WITH_CUDA)
  set(SLUICE_CUDA_LINKS $<BUILD_INTERFACE:sluice_cuda> $<INSTALL_INTERFACE:Sluice::cuda>)
endif()

# sluice_cuda_kernels(<target> <files...>): adds .cu files, for nvcc or for the emulation's g++.
function(sluice_cuda_kernels target)
  target_sources(${target} PRIVATE ${ARGN})
  if(SLUICE_CUDA STREQUAL emulated)
    sluice_emulate_kernels(${target} ${ARGN})
  endif()
endfunction()
