# What is installed, and the CMake package Sluice, which also finds the targets in the build folder.
# Export sets: SluiceSchedules needs nothing else; SluiceRuntime needs it, MPI and the other libraries.
set(SLUICE_PACKAGE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/Sluice)
configure_package_config_file(runtime/SluiceConfig.cmake.in SluiceConfig.cmake
                              INSTALL_DESTINATION ${SLUICE_PACKAGE_DIR})
write_basic_package_version_file(SluiceConfigVersion.cmake COMPATIBILITY SameMinorVersion)
foreach(set SluiceSchedules SluiceRuntime)
  export(EXPORT ${set} NAMESPACE Sluice:: FILE ${PROJECT_BINARY_DIR}/${set}.cmake)
  install(EXPORT ${set} NAMESPACE Sluice:: DESTINATION ${SLUICE_PACKAGE_DIR})
endforeach()
install(FILES ${PROJECT_BINARY_DIR}/SluiceConfig.cmake ${PROJECT_BINARY_DIR}/SluiceConfigVersion.cmake
        DESTINATION ${SLUICE_PACKAGE_DIR})
if(TARGET sluice)
  install(TARGETS sluice RUNTIME)
endif()
