#!/usr/bin/env bash
# Builds the .deb, installs it on a fresh Debian, and builds and runs the outside program there.
#
#   tests/install/package.sh [bookworm|trixie]
#
# Needs root, the package sources of this machine and debootstrap, which it installs. The suite is this machine's by
# default; for another one the package is built on a system of that suite, without a compiler cache. Leaves
# build/package-SUITE/*.deb. Exit code 2: wrong use.
set -euo pipefail
cd "$(dirname "$0")/../.."

own=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
suite=${1-$own}
if [[ $suite != bookworm && $suite != trixie ]]; then
  echo "package.sh: unknown suite '$suite'; legal are bookworm and trixie" >&2
  exit 2
fi
if [[ $(id -u) != 0 ]]; then
  echo "package.sh: a fresh system needs root: debootstrap, chroot and mounts" >&2
  exit 2
fi
docker/install_dependencies.sh images build
unset OPENBLAS_CORETYPE
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
work=$(mktemp -d /var/tmp/sluice-package-XXXXXX)

unmount() {
  local folder
  for folder in "$work"/*/{proc,sys,dev/shm,dev/pts,dev}; do
    if mountpoint -q "$folder"; then umount "$folder"; fi
  done
}
finish() {
  unmount
  rm -rf --one-file-system "$work"
}
trap finish EXIT

step() {
  printf '\n== %s (%d s)\n' "$1" "$SECONDS"
}

# Where this machine gets Debian's packages; empty: where debootstrap does by itself.
mirror() {
  apt-get indextargets --format '$(SITE)' 'Created-By: Packages' 2>/dev/null | grep -m 1 '/debian/*$' || true
}

# make_system NAME: a fresh system in $work/NAME, with the package sources of this machine.
make_system() {
  local root=$work/$1
  # shellcheck disable=SC2046
  debootstrap --variant=minbase "$suite" "$root" $(mirror) >"$work/debootstrap.log"
  apt-config dump | grep '^Acquire::' >"$root/etc/apt/apt.conf.d/99machine" || true
  mount --bind /dev "$root/dev"
  mount -t tmpfs tmpfs "$root/dev/shm"
  mount -t devpts devpts "$root/dev/pts" || true
  mount --bind /sys "$root/sys"
  mount -t proc proc "$root/proc"
  inside "$1" apt-get update -qq
}

# inside NAME COMMAND...
inside() {
  local root=$work/$1
  shift
  env DEBIAN_FRONTEND=noninteractive chroot "$root" "$@"
}

configure=(cmake -G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_INSTALL_PREFIX=/usr -DSLUICE_CUDA=off
  -DSLUICE_BUILD_TESTS=OFF -DSLUICE_BUILD_EXAMPLES=OFF)
build=build/package-$suite
mkdir -p "$build"
step "Package for $suite"
if [[ $suite == "$own" ]]; then
  "${configure[@]}" -S . -B "$build" >/dev/null
  cmake --build "$build" | tail -n 1
  (cd "$build" && cpack -G DEB)
else
  make_system builder
  mkdir "$work/builder/src"
  git ls-files -z | xargs -0 cp --parents -t "$work/builder/src"
  inside builder /src/docker/install_dependencies.sh build >/dev/null
  inside builder apt-get install -y -qq --no-install-recommends file dpkg-dev >/dev/null
  inside builder "${configure[@]}" -S /src -B /build >/dev/null
  inside builder cmake --build /build | tail -n 1
  inside builder sh -c 'cd /build && cpack -G DEB'
  cp "$work"/builder/build/*.deb "$build"
fi
deb=$(ls "$build"/sluice_*.deb)
dpkg-deb --info "$deb" | grep -E 'Version|Depends|Recommends|Maintainer|Size'
dpkg-deb --contents "$deb" | grep '/usr/share/doc/sluice/copyright$'

step "A fresh $suite"
make_system fresh
cp "$deb" "$work/fresh/tmp/sluice.deb"
cp -r tests/install "$work/fresh/tmp/consumer"
inside fresh apt-get install -y -qq --no-install-recommends g++ cmake make pkg-config >"$work/apt.log"
inside fresh apt-get install -y -qq /tmp/sluice.deb >>"$work/apt.log" 2>&1
inside fresh sluice --version
inside fresh sluice doctor --self-test

step "The outside program there"
inside fresh cmake -S /tmp/consumer -B /tmp/built -DCMAKE_BUILD_TYPE=Release >/dev/null
inside fresh cmake --build /tmp/built | tail -n 1
inside fresh mpirun --oversubscribe -n 2 /tmp/built/consumer
inside fresh sh -ec 'mpicxx /tmp/consumer/main.cpp $(pkg-config --static --cflags --libs sluice) -o /tmp/by_pkg_config'
inside fresh mpirun --oversubscribe -n 2 /tmp/by_pkg_config
inside fresh apt-get purge -y -qq sluice >/dev/null
if inside fresh sh -c 'ls -d /usr/share/doc/sluice /usr/include/sluice /usr/lib/*/cmake/Sluice' 2>/dev/null; then
  echo "package.sh: removing the package left files" >&2
  exit 1
fi
printf '\n%s passed on a fresh %s, %d s\n' "$deb" "$suite" "$SECONDS"
