# One .deb of what is installed: cpack -G DEB in a build folder configured with CMAKE_INSTALL_PREFIX=/usr
# and SLUICE_CUDA=off. tests/install/package.sh does all of it and tries the package on a fresh system.
set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_NAME sluice)
set(CPACK_PACKAGE_VENDOR Sluice)
set(CPACK_PACKAGE_CONTACT
    "Sluice maintainers <maintainers@sluice.example>"
    CACHE STRING "Maintainer of the package")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "pipeline-parallel training over MPI")
set(CPACK_PACKAGE_DESCRIPTION
    "Sluice plans, checks and executes pipeline-parallel training over MPI. The package has the program, the
libraries and their headers, for CPUs.")
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_STRIP_FILES ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SECTION science)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_DEPENDS openmpi-bin)
# What a program that links the static libraries needs.
set(CPACK_DEBIAN_PACKAGE_RECOMMENDS
    "libopenmpi-dev, libdnnl-dev, libboost-program-options-dev, libfmt-dev, libssl-dev, zlib1g-dev")
include(CPack)
