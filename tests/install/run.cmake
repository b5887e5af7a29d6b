# Builds and runs the project CONSUMER against Sluice, in one of three ways:
#   WAY=installed     BUILD is installed below itself. The headers installed are the public ones of
#                     SOURCE and no others, and all of them go into one source. Where CUDA_COMPILER is
#                     given, CONSUMER also builds CUDA_STAGE, for CUDA_ARCHITECTURE.
#   WAY=build_tree    find_package() finds the folder BUILD itself
#   WAY=subdirectory  add_subdirectory() of SOURCE
# The third way compiles all of Sluice's libraries, as fast as can be.
set(build ${BUILD}/consumer/${WAY})
file(REMOVE_RECURSE ${build})

function(run)
  execute_process(COMMAND ${ARGV} COMMAND_ERROR_IS_FATAL ANY)
endfunction()

# configure(<folder> <options...>): CONSUMER in build/<folder>.
function(configure folder)
  run(${CMAKE_COMMAND} -S ${CONSUMER} -B ${build}/${folder} -G ${GENERATOR}
      -DCMAKE_CXX_COMPILER=${COMPILER} -DCMAKE_CXX_COMPILER_LAUNCHER=${LAUNCHER} ${ARGN})
endfunction()

# refused(<regex> <options...>): configuring CONSUMER ends with an error like this.
function(refused what)
  execute_process(
    COMMAND ${CMAKE_COMMAND} -S ${CONSUMER} -B ${build}/refused -G ${GENERATOR}
            -DCMAKE_CXX_COMPILER=${COMPILER} ${ARGN}
    RESULT_VARIABLE status ERROR_VARIABLE said OUTPUT_QUIET)
  string(REGEX REPLACE "[ \n]+" " " said "${said}")
  if(status EQUAL 0 OR NOT said MATCHES "${what}")
    message(FATAL_ERROR "expected an error like '${what}', got ${status}: ${said}")
  endif()
endfunction()

set(main ${CONSUMER}/main.cpp)
set(options -DCMAKE_BUILD_TYPE=Release)
if(WAY STREQUAL subdirectory)
  # Without a build type first: Sluice leaves it empty.
  configure(. -DSLUICE_SOURCE=${SOURCE})
  list(APPEND options -DCMAKE_UNITY_BUILD=ON -DCMAKE_CXX_FLAGS_RELEASE=-O0)
  if(CUDA_ARCHITECTURE)
    list(APPEND options -DSLUICE_CUDA_ARCHITECTURES=${CUDA_ARCHITECTURE})
  endif()
elseif(WAY STREQUAL build_tree)
  list(APPEND options -DSluice_DIR=${BUILD})
else()
  set(prefix ${BUILD}/install)
  file(REMOVE_RECURSE ${prefix})
  run(${CMAKE_COMMAND} --install ${BUILD} --prefix ${prefix})
  file(GLOB_RECURSE found RELATIVE ${prefix}/include ${prefix}/include/*)
  file(GLOB public ${SOURCE}/*/include/sluice/* ${SOURCE}/*/*/include/sluice/*)
  list(TRANSFORM public REPLACE ".*/include/" "")
  list(SORT found)
  list(SORT public)
  if(NOT found STREQUAL public)
    message(FATAL_ERROR "installed: ${found}; public: ${public}")
  endif()
  set(everything)
  foreach(header ${found})
    if(NOT header STREQUAL "sluice/torch.hpp") # needs LibTorch
      string(APPEND everything "#include <${header}>\n")
    endif()
  endforeach()
  file(WRITE ${build}/every_header.cpp "${everything}")
  list(APPEND options -DEVERY_HEADER=${build}/every_header.cpp -DCMAKE_PREFIX_PATH=${prefix})
  if(CUDA_COMPILER)
    list(APPEND options -DCUDA_STAGE=${CUDA_STAGE} -DCMAKE_CUDA_COMPILER=${CUDA_COMPILER}
         -DCMAKE_CUDA_ARCHITECTURES=${CUDA_ARCHITECTURE} -DCMAKE_CUDA_COMPILER_LAUNCHER=${LAUNCHER})
  endif()
endif()

configure(. ${options})
run(${CMAKE_COMMAND} --build ${build})
run(${MPIEXEC} -n 2 ${build}/consumer)

if(WAY STREQUAL subdirectory)
  run(${CMAKE_COMMAND} --install ${build} --prefix ${build}/nothing)
  file(GLOB_RECURSE found ${build}/nothing/*)
  execute_process(COMMAND ${CMAKE_CTEST_COMMAND} --test-dir ${build} -N OUTPUT_VARIABLE tests)
  if(found OR NOT tests MATCHES "Total Tests: 0")
    message(FATAL_ERROR "Sluice installed '${found}' or brought tests: ${tests}")
  endif()
  file(REMOVE_RECURSE ${build})
elseif(WAY STREQUAL installed)
  if(EXISTS ${prefix}/bin/sluice)
    run(${prefix}/bin/sluice --version)
  endif()
  # The programs of the guide, from where it is installed.
  set(consumer ${CONSUMER})
  set(CONSUMER ${prefix}/share/doc/sluice/examples)
  configure(examples -DCMAKE_BUILD_TYPE=Release -DCMAKE_PREFIX_PATH=${prefix})
  run(${CMAKE_COMMAND} --build ${build}/examples)
  run(${MPIEXEC} -n 2 ${build}/examples/two_stage_mlp)
  set(CONSUMER ${consumer})
  # Plans need no other library.
  set(others)
  foreach(package MPI OpenMP Boost fmt OpenSSL ZLIB nlohmann_json CUDAToolkit Threads)
    list(APPEND others -DCMAKE_DISABLE_FIND_PACKAGE_${package}=ON)
  endforeach()
  configure(plans -DPLANS_ALONE=ON -DCMAKE_PREFIX_PATH=${prefix} ${others})
  run(${CMAKE_COMMAND} --build ${build}/plans)
  run(${build}/plans/plans)
  file(WRITE ${build}/unknown/CMakeLists.txt "cmake_minimum_required(VERSION 3.25)\nproject(unknown CXX)\n"
       "find_package(Sluice REQUIRED COMPONENTS runtime schedule)\n")
  set(CONSUMER ${build}/unknown)
  refused("Sluice has no component 'schedule'; legal are schedules, search, runtime"
          -DCMAKE_PREFIX_PATH=${prefix})
  file(WRITE ${build}/unknown/CMakeLists.txt "cmake_minimum_required(VERSION 3.25)\nproject(unknown CXX)\n"
       "find_package(Sluice 0.1 REQUIRED)\n")
  refused("compatible with requested version \"0.1\"" -DCMAKE_PREFIX_PATH=${prefix})

  # The prefix moves, and a program finds it by pkg-config.
  file(RENAME ${prefix} ${build}/moved)
  file(GLOB_RECURSE pc ${build}/moved/*/sluice.pc)
  cmake_path(GET pc PARENT_PATH folder)
  set(ENV{PKG_CONFIG_PATH} ${folder})
  foreach(kind cflags libs)
    execute_process(COMMAND pkg-config --static --${kind} sluice OUTPUT_VARIABLE flags COMMAND_ERROR_IS_FATAL ANY)
    separate_arguments(${kind} UNIX_COMMAND "${flags}")
  endforeach()
  run(${LAUNCHER} ${COMPILER} ${cflags} -c ${main} -o ${build}/by_pkg_config.o)
  cmake_path(GET folder PARENT_PATH folder) # for libsluice, where that was built
  run(${COMPILER} ${build}/by_pkg_config.o ${libs} -Wl,-rpath,${folder} -o ${build}/by_pkg_config)
  run(${MPIEXEC} -n 2 ${build}/by_pkg_config)
endif()
