# libsluice: the objects of all boxes in one shared library, of which only what public headers declare is
# visible. The package has a target without objects per box. The program and the tests use internal
# functions and link the static boxes.
set(objects)
foreach(box IN LISTS boxes)
  list(APPEND objects $<TARGET_OBJECTS:sluice_${box}>)
endforeach()
foreach(set baseline avx2 avx512)
  if(TARGET sluice_kernels_${set})
    list(APPEND objects $<TARGET_OBJECTS:sluice_kernels_${set}>)
  endif()
endforeach()
add_library(sluice_shared SHARED ${objects})
set_target_properties(
  sluice_shared
  PROPERTIES OUTPUT_NAME sluice
             EXPORT_NAME shared
             LINKER_LANGUAGE CXX
             VERSION ${PROJECT_VERSION}
             SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})
target_compile_features(sluice_shared INTERFACE cxx_std_20)
# The boxes' own libraries; of the boxes nothing is missing any more.
target_link_libraries(sluice_shared PRIVATE sluice_runtime sluice_search)
target_link_options(sluice_shared PRIVATE -Wl,--no-undefined -Wl,--exclude-libs,ALL)
install(TARGETS sluice_shared EXPORT SluiceSchedules)

foreach(box IN LISTS boxes)
  get_target_property(headers sluice_${box} HEADER_SET)
  if(NOT headers)
    continue()
  endif()
  get_target_property(folders sluice_${box} HEADER_DIRS)
  get_target_property(package sluice_${box} SLUICE_PACKAGE)
  get_target_property(links sluice_${box} INTERFACE_LINK_LIBRARIES)
  get_target_property(definitions sluice_${box} INTERFACE_COMPILE_DEFINITIONS)
  list(FILTER links EXCLUDE REGEX "LINK_ONLY|NOTFOUND")
  list(FILTER definitions EXCLUDE REGEX NOTFOUND)
  list(TRANSFORM links REPLACE "^Sluice::(.*)$" "sluice_\\1_of_shared")
  list(TRANSFORM links REPLACE "^sluice_error_of_shared$" Sluice::error) # a header alone
  add_library(sluice_${box}_of_shared INTERFACE)
  set_target_properties(sluice_${box}_of_shared PROPERTIES EXPORT_NAME ${box} VERIFY_INTERFACE_HEADER_SETS OFF)
  target_sources(sluice_${box}_of_shared INTERFACE FILE_SET HEADERS BASE_DIRS ${folders} FILES ${headers})
  target_link_libraries(sluice_${box}_of_shared INTERFACE sluice_shared ${links})
  target_compile_definitions(sluice_${box}_of_shared INTERFACE ${definitions})
  install(
    TARGETS sluice_${box}_of_shared
    EXPORT ${package}
    FILE_SET HEADERS DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
endforeach()
