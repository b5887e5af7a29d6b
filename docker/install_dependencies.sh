#!/usr/bin/env bash
# The one list of packages Sluice needs, installed through apt on Debian 12, Debian 13 and Ubuntu
# 24.04; for train.sh, test.sh, .ci/run and the images.
#
#   docker/install_dependencies.sh [GROUP...]      groups: build data test hosts check runtime bare
#                                                images torch; none: the first five
#
# Installs only what dpkg does not know as installed: with nothing missing it never calls apt, so it
# needs no network and no rights. Otherwise it runs as root or through sudo and asks nothing.
# Exit code 2: wrong use or a system it cannot help on.
set -euo pipefail

# Such as "debian-12" or "ubuntu-24.04".
# shellcheck source=/dev/null
system=$(. /etc/os-release && echo "$ID-${VERSION_ID:-}")

packages_of() {
  case $1 in
    # The library, the program and the examples.
    build) echo g++ cmake ninja-build ccache openmpi-bin libopenmpi-dev libdnnl-dev \
      libboost-dev libboost-program-options-dev nlohmann-json3-dev libfmt-dev libssl-dev libxxhash-dev zlib1g-dev ;;
    # The text that train.sh learns.
    data) echo bible-kjv bible-kjv-text ;;
    # Tests and benchmarks, and the pictures of an example; Boost.Context for the threads of a block in tests/emulated_cuda,
    # xz for what `tests/gpu_check.sh pack` makes.
    test) echo libgtest-dev libgmock-dev libboost-context-dev pkg-config python3 python3-venv \
      python3-jsonschema python3-yaml xz-utils ca-certificates dataset-fashion-mnist ;;
    # Hosts as network namespaces. Not in `test`: on a system with systemd, services such as sshd start.
    hosts) echo iproute2 openssh-client openssh-server procps slurm-wlm munge ;;
    # What an image has beside the program and its libraries: mpirun, and SSH between hosts.
    runtime) echo openmpi-bin openssh-client openssh-server libnss-wrapper ;;
    # A bare Debian to try things in: tests/bare_root.sh.
    bare) echo debootstrap ;;
    # Images without a container engine: docker/test.sh.
    images) echo buildah ca-certificates ;;
    # LibTorch, for <sluice/torch.hpp>: 470 MB, which no other part of Sluice needs.
    torch) echo libtorch-dev ;;
    # What .ci/run needs. Formatting and static checks: the sources are formatted with version 14; clang-tidy knows
    # std::source_location from 15 on, and wants an omp.h of its own version; clang for sanitizers and fuzzing.
    check) if [[ $system == debian-12 ]]; then
      echo git python3 clang-format-14 clang-tidy-16 libomp-16-dev clang-16 libclang-rt-16-dev llvm-16
    else
      echo git python3 clang-format clang-tidy libomp-dev clang libclang-rt-dev llvm
    fi ;;
    *) return 1 ;;
  esac
}

installed() {
  [[ $(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null) == installed ]]
}

# Whether apt could install $1 (virtual packages have no candidate).
available() {
  local candidate
  candidate=$(apt-cache policy "$1" 2>/dev/null | sed -n 's/^ *Candidate: //p')
  [[ -n $candidate && $candidate != '(none)' ]]
}

as_root() {
  if [[ $(id -u) == 0 ]]; then
    env DEBIAN_FRONTEND=noninteractive "$@"
  elif command -v sudo >/dev/null; then
    sudo env DEBIAN_FRONTEND=noninteractive "$@"
  else
    echo "install_dependencies: to install '${missing[*]}' run this as root or install sudo" >&2
    exit 2
  fi
}

apt_get() {
  as_root apt-get -qq -o Dpkg::Use-Pty=0 -o DPkg::Lock::Timeout=300 "$@" </dev/null
}

# Ubuntu keeps the MPI and oneDNN packages in its component `universe`.
enable_universe() {
  if ! available libdnnl-dev && [[ $system == ubuntu-* ]]; then
    apt_get install -y --no-install-recommends software-properties-common
    as_root add-apt-repository -y universe </dev/null
    apt_get update
  fi
}

if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
  echo "install_dependencies: this system has no apt; install the packages listed in $0 by hand" >&2
  exit 2
fi

if (($# == 0)); then set -- build data test hosts check; fi
missing=()
for group in "$@"; do
  if ! list=$(packages_of "$group"); then
    echo "install_dependencies: unknown group '$group'; legal are build, data, test, hosts, check, runtime," \
      "bare, images and torch" >&2
    exit 2
  fi
  for package in $list; do
    if ! installed "$package"; then missing+=("$package"); fi
  done
done
if ((${#missing[@]} == 0)); then exit 0; fi

echo "Installing ${missing[*]}"
apt_get update
enable_universe
apt_get install -y --no-install-recommends "${missing[@]}"
