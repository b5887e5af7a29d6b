#!/usr/bin/env bash
# Builds the .deb, installs it on a bare Debian, and builds and runs the outside program there.
#
#   tests/install/package.sh [bookworm|trixie]
#
# Needs root and the package sources of this machine. The suite is this machine's by default; for another one the
# package is built on a system of that suite. Leaves build/package-SUITE/*.deb. Exit code 2: wrong use.
set -euo pipefail
cd "$(dirname "$0")/../.."

own=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
suite=${1-$own}
tests/bare_root.sh --suite "$suite" >/dev/null # refuses what it cannot do
package=$PWD/build/package-$suite
rm -rf "$package"
mkdir -p "$package"

step() {
  printf '\n== %s (%d s)\n' "$1" "$SECONDS"
}

# bare SCRIPT: on a bare Debian, where /sluice has the sources.
bare() {
  tests/bare_root.sh --suite "$suite" --bind "$PWD:/sluice" --bind "$package:/package" \
    env DEBIAN_FRONTEND=noninteractive bash -euo pipefail -c "$1"
}

step "Package for $suite"
build='
  cmake -G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_INSTALL_PREFIX=/usr -DSLUICE_CUDA=off \
    -DSLUICE_BUILD_TESTS=OFF -DSLUICE_BUILD_EXAMPLES=OFF -S "$sources" -B "$folder" >/dev/null
  cmake --build "$folder" | tail -n 1
  cd "$folder"
  cpack -G DEB'
if [[ $suite == "$own" ]]; then
  docker/install_dependencies.sh build
  sources=$PWD folder=$package bash -euo pipefail -c "$build"
else
  bare "
    /sluice/docker/install_dependencies.sh build >/dev/null
    apt-get install -y -qq --no-install-recommends file dpkg-dev >/dev/null
    sources=/sluice folder=/build
    $build
    cp *.deb /package"
fi
deb=$(ls "$package"/sluice_*.deb)
dpkg-deb --info "$deb" | grep -E 'Version|Depends|Recommends|Maintainer|Size'
dpkg-deb --contents "$deb" | grep '/usr/share/doc/sluice/copyright$'

step "A bare $suite, and the outside program there"
bare '
  export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
  apt-get update -qq
  apt-get install -y -qq --no-install-recommends g++ cmake make pkg-config >/dev/null
  apt-get install -y -qq /package/sluice_*.deb >/dev/null 2>&1
  sluice --version
  sluice doctor --self-test
  cmake -S /sluice/tests/install -B /tmp/built -DCMAKE_BUILD_TYPE=Release >/dev/null
  cmake --build /tmp/built | tail -n 1
  mpirun --oversubscribe -n 2 /tmp/built/consumer
  mpicxx /sluice/tests/install/main.cpp $(pkg-config --static --cflags --libs sluice) -o /tmp/by_pkg_config
  mpirun --oversubscribe -n 2 /tmp/by_pkg_config
  apt-get purge -y -qq sluice >/dev/null
  if ls -d /usr/share/doc/sluice /usr/include/sluice /usr/lib/*/cmake/Sluice 2>/dev/null; then
    echo "package.sh: removing the package left files" >&2
    exit 1
  fi'
printf '\n%s passed on a bare %s, %d s\n' "$deb" "$suite" "$SECONDS"
