# GPUs: the CUDA toolkit with cuBLASLt, cuDNN and NCCL, or the tests' emulation of it.
#
# Defines the interface target Sluice::cuda, which all GPU code links (SluiceConfig.cmake defines it for an
# installed Sluice), and the variables
# SLUICE_WITH_CUDA, SLUICE_WITH_CUDNN and SLUICE_WITH_NCCL (0 or 1), which are macros in sources.
set(sluice_cuda_default off)
if(PROJECT_IS_TOP_LEVEL)
  set(sluice_cuda_default auto)
endif()
set(SLUICE_CUDA
    ${sluice_cuda_default}
    CACHE STRING "GPU code: auto (where the CUDA toolkit is found), on, off, or emulated (for tests)")
set_property(CACHE SLUICE_CUDA PROPERTY STRINGS auto on off emulated)
if(NOT SLUICE_CUDA MATCHES "^(auto|on|off|emulated)$")
  message(FATAL_ERROR "SLUICE_CUDA is '${SLUICE_CUDA}'; legal: auto, on, off, emulated")
endif()

set(SLUICE_WITH_CUDA 0)
set(SLUICE_WITH_CUDNN 0)
set(SLUICE_WITH_NCCL 0)
add_library(Sluice::cuda INTERFACE IMPORTED GLOBAL)

# A header and a library next to the toolkit or under NAME_ROOT: <variable>_INCLUDE, _LIBRARY.
macro(sluice_find_beside_toolkit variable header library)
  find_path(${variable}_INCLUDE ${header} HINTS ${${variable}_ROOT} ENV ${variable}_ROOT
            ${CUDAToolkit_INCLUDE_DIRS} PATH_SUFFIXES include)
  find_library(${variable}_LIBRARY ${library} HINTS ${${variable}_ROOT} ENV ${variable}_ROOT
               ${CUDAToolkit_LIBRARY_DIR} ${CUDAToolkit_LIBRARY_ROOT} PATH_SUFFIXES lib lib64)
endmacro()

# sluice_without_cuda(<what is missing> <remedy>): reports why there is no GPU code; an error unless
# SLUICE_CUDA is auto. Sets the caller's SLUICE_WITH_CUDA to 0. A function, because CMake would parse a
# macro's arguments, which contain a compiler's output, a second time.
function(sluice_without_cuda missing helps)
  if(SLUICE_CUDA STREQUAL auto)
    message(STATUS "GPUs: none, ${missing}. Building for CPUs alone: the program will refuse --device "
                   "cuda. What helps: ${helps}")
  else()
    message(FATAL_ERROR "SLUICE_CUDA is ${SLUICE_CUDA}, but ${missing}. What helps: ${helps}")
  endif()
  set(SLUICE_WITH_CUDA 0 PARENT_SCOPE)
endfunction()

if(NOT SLUICE_CUDA STREQUAL off)
  set(oldest_toolkit 12.4)
  # The module of CMake 3.25 fails on a toolkit without nvToolsExt, such as CUDA 13, unless the project
  # accepts an older CMake.
  set(minimum_required ${CMAKE_MINIMUM_REQUIRED_VERSION})
  set(CMAKE_MINIMUM_REQUIRED_VERSION 3.24)
  find_package(CUDAToolkit ${oldest_toolkit} QUIET)
  set(CMAKE_MINIMUM_REQUIRED_VERSION ${minimum_required})
  # Newer CMake (3.31, not 3.25) does not report where a toolkit lies that it rejects.
  if(NOT CUDAToolkit_BIN_DIR AND CUDAToolkit_VERSION)
    find_program(nvcc nvcc HINTS ${CUDAToolkit_ROOT} ENV CUDAToolkit_ROOT PATHS /usr/local/cuda
                 PATH_SUFFIXES bin NO_CACHE)
    if(nvcc)
      cmake_path(GET nvcc PARENT_PATH CUDAToolkit_BIN_DIR)
    endif()
  endif()
  find_path(SLUICE_CUBLASLT_INCLUDE cublasLt.h HINTS ${CUDAToolkit_INCLUDE_DIRS}
                                                     ${CUDAToolkit_MATH_INCLUDE_DIR})
  if(NOT CUDAToolkit_BIN_DIR)
    sluice_without_cuda(
      "no CUDA toolkit was found: no nvcc on PATH, in CUDAToolkit_ROOT or in /usr/local/cuda"
      "a toolkit ${oldest_toolkit} or newer there")
  elseif(NOT CUDAToolkit_VERSION)
    sluice_without_cuda("the nvcc in ${CUDAToolkit_BIN_DIR} does not say its version"
                        "another toolkit, with its nvcc on PATH or in CUDAToolkit_ROOT")
  elseif(CUDAToolkit_VERSION VERSION_LESS oldest_toolkit)
    sluice_without_cuda(
      "the CUDA toolkit in ${CUDAToolkit_BIN_DIR} is ${CUDAToolkit_VERSION}, older than ${oldest_toolkit}"
      "a newer one, with its nvcc on PATH or in CUDAToolkit_ROOT")
  elseif(NOT CUDAToolkit_FOUND)
    sluice_without_cuda(
      "the CUDA toolkit ${CUDAToolkit_VERSION} in ${CUDAToolkit_BIN_DIR} lacks cuda_runtime.h or libcudart"
      "its packages of the runtime and its headers (cuda-cudart-dev)")
  elseif(NOT TARGET CUDA::cublasLt OR NOT SLUICE_CUBLASLT_INCLUDE)
    sluice_without_cuda(
      "the CUDA toolkit ${CUDAToolkit_VERSION} in ${CUDAToolkit_BIN_DIR} lacks cuBLASLt, its header or its library"
      "its package (libcublas-dev)")
  else()
    set(SLUICE_WITH_CUDA 1)
  endif()
endif()

# nvcc's first complaint about an empty program, in <result>; empty where it has none.
function(sluice_ask_nvcc nvcc result)
  set(source ${CMAKE_CURRENT_BINARY_DIR}/CMakeFiles/sluice_empty.cu)
  file(WRITE ${source} "")
  execute_process(COMMAND ${nvcc} -std=c++20 -c ${source} -o ${source}.o RESULT_VARIABLE status
                  OUTPUT_VARIABLE said ERROR_VARIABLE said)
  set(complaint)
  if(NOT status EQUAL 0)
    string(REGEX MATCH "[^\n]*error[^\n]*" complaint "${said}")
    if(NOT complaint)
      string(REGEX MATCH "[^\n]+" complaint "${said}")
    endif()
    if(NOT complaint)
      set(complaint "${status}")
    endif()
  endif()
  set(${result} "${complaint}" PARENT_SCOPE)
endfunction()

# Machine code runs on its major version alone, from its minor version up. PTX is compiled when loaded
# and runs on everything newer. Hence one entry per major version that the compiler knows, PTX of the
# newest for later GPUs, and PTX of 9.0 for those between (11.0).
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
  # The compiler of the toolkit that was found, unless CUDACXX names another.
  if(NOT DEFINED ENV{CUDACXX} AND CUDAToolkit_NVCC_EXECUTABLE)
    set(ENV{CUDACXX} ${CUDAToolkit_NVCC_EXECUTABLE})
  endif()
  if(NOT CMAKE_CUDA_COMPILER) # it failed last time and may work now
    unset(CMAKE_CUDA_COMPILER CACHE)
  endif()
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
  elseif(CUDAToolkit_NVCC_EXECUTABLE)
    sluice_ask_nvcc(${CUDAToolkit_NVCC_EXECUTABLE} complaint)
    if(NOT complaint)
      set(complaint "CMake's own trial is in ${CMAKE_BINARY_DIR}/CMakeFiles")
    endif()
    sluice_without_cuda(
      "the toolkit's compiler ${CUDAToolkit_NVCC_EXECUTABLE} does not work here (${complaint})"
      "a toolkit that works, or a C++ compiler that this one accepts, in CUDAHOSTCXX")
  else()
    sluice_without_cuda("the CUDA toolkit in ${CUDAToolkit_BIN_DIR} has no compiler nvcc"
                        "its package (cuda-nvcc)")
  endif()
endif()

if(SLUICE_WITH_CUDA)
  sluice_find_beside_toolkit(SLUICE_CUDNN cudnn.h cudnn)
  # NCCL's header alone: the library is opened at run time (comm/nccl/nccl_api.hpp).
  find_path(SLUICE_NCCL_INCLUDE nccl.h HINTS ${SLUICE_NCCL_ROOT} ENV SLUICE_NCCL_ROOT
            ${CUDAToolkit_INCLUDE_DIRS} PATH_SUFFIXES include)
  if(SLUICE_NCCL_INCLUDE)
    set(SLUICE_WITH_NCCL 1)
    target_include_directories(Sluice::cuda SYSTEM INTERFACE ${SLUICE_NCCL_INCLUDE})
  else()
    message(STATUS "NCCL's header not found (SLUICE_NCCL_ROOT says where): no transport nccl and no sums "
                   "over replicas by it; MPI remains, from GPU to GPU where it reads their memory "
                   "and else through host memory")
  endif()
  if(SLUICE_CUDA STREQUAL emulated)
    # After the toolkit's own, so that its headers are there; cuDNN is not emulated.
    target_include_directories(Sluice::cuda SYSTEM INTERFACE ${CUDAToolkit_INCLUDE_DIRS})
    target_link_libraries(Sluice::cuda INTERFACE sluice_emulated_cuda)
    add_subdirectory(tests/emulated_cuda)
  else()
    target_link_libraries(Sluice::cuda INTERFACE CUDA::cudart_static)
    if(SLUICE_CUDNN_INCLUDE AND SLUICE_CUDNN_LIBRARY)
      set(SLUICE_WITH_CUDNN 1)
      target_include_directories(Sluice::cuda SYSTEM INTERFACE ${SLUICE_CUDNN_INCLUDE})
      target_link_libraries(Sluice::cuda INTERFACE ${SLUICE_CUDNN_LIBRARY})
    else()
      message(STATUS "cuDNN not found (SLUICE_CUDNN_ROOT says where): attention on GPUs runs in "
                     "Sluice's own, slower kernels")
    endif()
  endif()
  message(STATUS "GPUs: CUDA ${CUDAToolkit_VERSION} (${SLUICE_CUDA}), architectures "
                 "${SLUICE_CUDA_ARCHITECTURES}, cuDNN ${SLUICE_WITH_CUDNN}, NCCL ${SLUICE_WITH_NCCL}")
endif()

# Private links of a library with GPU code, and of a program that calls cuBLASLt itself: Sluice opens it at run
# time (stages/cuda_context/cublas_lt.hpp).
set(SLUICE_CUDA_LINKS)
set(SLUICE_CUBLASLT)
if(SLUICE_WITH_CUDA)
  set(SLUICE_CUDA_LINKS Sluice::cuda)
  if(NOT SLUICE_CUDA STREQUAL emulated)
    set(SLUICE_CUBLASLT CUDA::cublasLt)
  endif()
endif()

# sluice_cuda_kernels(<target> <files...>): adds .cu files, for nvcc or for the emulation's g++.
function(sluice_cuda_kernels target)
  target_sources(${target} PRIVATE ${ARGN})
  if(SLUICE_CUDA STREQUAL emulated)
    sluice_emulate_kernels(${target} ${ARGN})
  endif()
endfunction()
