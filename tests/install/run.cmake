# Installs BUILD below itself, then configures, builds and runs CONSUMER against that prefix. Where
# CUDA_COMPILER is given, CONSUMER also builds CUDA_STAGE, for CUDA_ARCHITECTURE. The headers installed
# are the public ones of SOURCE and no others, and all of them go into one source.
function(run)
  execute_process(COMMAND ${ARGV} COMMAND_ERROR_IS_FATAL ANY)
endfunction()

set(prefix ${BUILD}/install)
file(REMOVE_RECURSE ${prefix} ${BUILD}/consumer)
set(cuda)
if(CUDA_COMPILER)
  set(cuda -DCUDA_STAGE=${CUDA_STAGE} -DCMAKE_CUDA_COMPILER=${CUDA_COMPILER}
           -DCMAKE_CUDA_ARCHITECTURES=${CUDA_ARCHITECTURE} -DCMAKE_CUDA_COMPILER_LAUNCHER=${LAUNCHER})
endif()
run(${CMAKE_COMMAND} --install ${BUILD} --prefix ${prefix})

file(GLOB_RECURSE installed RELATIVE ${prefix}/include ${prefix}/include/*)
file(GLOB public ${SOURCE}/*/include/sluice/*)
list(TRANSFORM public REPLACE ".*/include/" "")
list(SORT installed)
list(SORT public)
if(NOT installed STREQUAL public)
  message(FATAL_ERROR "installed: ${installed}; public: ${public}")
endif()
set(everything)
foreach(header ${installed})
  if(NOT header STREQUAL "sluice/torch.hpp") # needs LibTorch
    string(APPEND everything "#include <${header}>\n")
  endif()
endforeach()
file(WRITE ${BUILD}/every_header.cpp "${everything}")

run(${CMAKE_COMMAND} -S ${CONSUMER} -B ${BUILD}/consumer -G ${GENERATOR} -DCMAKE_BUILD_TYPE=Release
    -DEVERY_HEADER=${BUILD}/every_header.cpp -DCMAKE_PREFIX_PATH=${prefix}
    -DCMAKE_CXX_COMPILER=${COMPILER} -DCMAKE_CXX_COMPILER_LAUNCHER=${LAUNCHER} ${cuda})
run(${CMAKE_COMMAND} --build ${BUILD}/consumer)
run(${BUILD}/consumer/consumer)
run(${prefix}/bin/sluice --version)
