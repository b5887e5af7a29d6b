# What is installed, and the CMake package Sluice, which also finds the targets in the build folder.
# Export sets: SluiceSchedules needs nothing else; SluiceRuntime needs it, MPI and the other libraries.
set(SLUICE_PACKAGE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/Sluice)
configure_package_config_file(runtime/SluiceConfig.cmake.in SluiceConfig.cmake
                              INSTALL_DESTINATION ${SLUICE_PACKAGE_DIR})
write_basic_package_version_file(SluiceConfigVersion.cmake COMPATIBILITY SameMinorVersion)
get_property(boxes GLOBAL PROPERTY SLUICE_BOXES)
if(SLUICE_SHARED)
  include(runtime/shared.cmake)
endif()
foreach(set SluiceSchedules SluiceRuntime)
  export(EXPORT ${set} NAMESPACE Sluice:: FILE ${PROJECT_BINARY_DIR}/${set}.cmake)
  install(EXPORT ${set} NAMESPACE Sluice:: DESTINATION ${SLUICE_PACKAGE_DIR})
endforeach()
install(FILES ${PROJECT_BINARY_DIR}/SluiceConfig.cmake ${PROJECT_BINARY_DIR}/SluiceConfigVersion.cmake
        DESTINATION ${SLUICE_PACKAGE_DIR})
# The program, the one that it becomes, and what their option tables make: the manual page and the completion for bash.
if(TARGET sluice)
  install(TARGETS sluice RUNTIME)
  install(TARGETS sluice_job RUNTIME DESTINATION ${CMAKE_INSTALL_LIBEXECDIR}/sluice)
  add_custom_command(
    OUTPUT ${PROJECT_BINARY_DIR}/sluice.1 ${PROJECT_BINARY_DIR}/sluice.bash
    COMMAND sluice --help=man > ${PROJECT_BINARY_DIR}/sluice.1
    COMMAND sluice --help=bash > ${PROJECT_BINARY_DIR}/sluice.bash
    DEPENDS sluice sluice_job # whose options they show
    VERBATIM)
  add_custom_target(sluice_pages ALL DEPENDS ${PROJECT_BINARY_DIR}/sluice.1 ${PROJECT_BINARY_DIR}/sluice.bash)
  install(FILES ${PROJECT_BINARY_DIR}/sluice.1 DESTINATION ${CMAKE_INSTALL_MANDIR}/man1)
  install(
    FILES ${PROJECT_BINARY_DIR}/sluice.bash
    DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions
    RENAME sluice)
endif()

# The same for pkg-config. The libraries in the order of a static link: a box before those that it links.
list(REVERSE boxes)
list(TRANSFORM boxes PREPEND -lsluice_)
list(JOIN boxes " " SLUICE_PC_LIBS)
# Not libcrypto.pc: --static would ask for what OpenSSL's own static library links.
set(SLUICE_PC_REQUIRES fmt)
set(definitions $<TARGET_PROPERTY:sluice_runtime,INTERFACE_COMPILE_DEFINITIONS>)
set(SLUICE_PC_CFLAGS "-D$<JOIN:${definitions}, -D>")
foreach(folder IN LISTS MPI_C_INCLUDE_DIRS)
  string(APPEND SLUICE_PC_CFLAGS " -I${folder}")
endforeach()
set(SLUICE_PC_PRIVATE_LIBS
    ${SLUICE_DNNL_LIBRARY} -L$<TARGET_FILE_DIR:Boost::program_options> -lboost_program_options
    -L$<TARGET_FILE_DIR:OpenSSL::Crypto> -lcrypto -lz ${MPI_C_LIBRARIES} ${OpenMP_CXX_FLAGS} ${CMAKE_THREAD_LIBS_INIT})
if(SLUICE_WITH_CUDA)
  list(APPEND SLUICE_PC_PRIVATE_LIBS $<TARGET_FILE:CUDA::cudart_static> ${SLUICE_CUDNN_LIBRARY}
       -ldl -lrt)
endif()
list(JOIN SLUICE_PC_PRIVATE_LIBS " " SLUICE_PC_PRIVATE_LIBS)
list(JOIN SLUICE_PC_REQUIRES ", " SLUICE_PC_REQUIRES)
if(SLUICE_SHARED) # it knows its own libraries; a program calls MPI too
  list(JOIN MPI_C_LIBRARIES " " SLUICE_PC_LIBS)
  string(PREPEND SLUICE_PC_LIBS "-lsluice ")
  set(SLUICE_PC_REQUIRES)
  set(SLUICE_PC_PRIVATE_LIBS)
endif()
file(RELATIVE_PATH SLUICE_PREFIX_FROM_PC /${CMAKE_INSTALL_LIBDIR}/pkgconfig /) # a prefix can be moved
string(REGEX REPLACE "/$" "" SLUICE_PREFIX_FROM_PC ${SLUICE_PREFIX_FROM_PC})
configure_file(runtime/sluice.pc.in sluice.pc.in @ONLY)
file(GENERATE OUTPUT sluice.pc INPUT ${PROJECT_BINARY_DIR}/sluice.pc.in)
install(FILES ${PROJECT_BINARY_DIR}/sluice.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
# The guide with its programs, and the pages that it refers to.
install(FILES runtime/copyright CHANGELOG.md DESTINATION ${CMAKE_INSTALL_DOCDIR})
install(DIRECTORY examples DESTINATION ${CMAKE_INSTALL_DOCDIR})
foreach(folder comm runtime schedules stages)
  install(FILES ${folder}/README.md DESTINATION ${CMAKE_INSTALL_DOCDIR}/${folder})
endforeach()
install(FILES runtime/ARCHITECTURE.md runtime/program/explore/schedule_output.schema.json
        DESTINATION ${CMAKE_INSTALL_DOCDIR}/runtime)
if(PROJECT_IS_TOP_LEVEL)
  include(runtime/package.cmake)
endif()
