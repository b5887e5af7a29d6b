#!/usr/bin/env bash
# matrix.py with Open MPI 5, in a root file system of Debian 13: tests/hosts/matrix_debian13.sh [ROOT]
# Makes ROOT (build/debian13) by debootstrap where it is missing, with this machine's mirror, installs what Sluice needs
# there, builds the program, and trains over two hosts inside it. Needs root, debootstrap and about 2 GiB.
set -euo pipefail
cd "$(dirname "$0")/../.."
root=$(realpath -m "${1:-build/debian13}")

if ! [[ -x $root/bin/bash ]]; then
  sources=(/etc/apt/sources.list /etc/apt/sources.list.d/*)
  mirror=$(cat "${sources[@]}" 2>/dev/null | sed -n -E 's/^(URIs:|deb) +(https?:[^ ]+).*/\2/p' | head -n 1) || true
  mkdir -p "$root"
  debootstrap --variant=minbase trixie "$root" "${mirror:?no Debian mirror in /etc/apt}"
fi
cp -n /etc/apt/apt.conf.d/* "$root/etc/apt/apt.conf.d/" 2>/dev/null || true
mkdir -p "$root/sluice"

# A mount namespace, so that nothing stays mounted whatever happens. Its root is a mount, as hosts need.
exec unshare --mount --propagation private bash -euo pipefail -c '
  mount --bind "$1" "$1"
  mount --rbind /proc "$1/proc"; mount --rbind /sys "$1/sys"; mount --rbind /dev "$1/dev"
  mount --bind "$2" "$1/sluice"
  cp /etc/resolv.conf "$1/etc/resolv.conf"
  mkdir -p "$1/before"
  cd "$1"
  pivot_root . before
  umount -l /before
  exec chroot . bash -euo pipefail -c "
    cd /sluice
    docker/install_dependencies.sh build hosts
    command -v python3 >/dev/null || DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends python3
    cmake -S . -B /var/tmp/sluice-build -G Ninja -DCMAKE_BUILD_TYPE=Release -DSLUICE_CUDA=off -DSLUICE_BUILD_TESTS=OFF \
      -DSLUICE_BUILD_EXAMPLES=OFF
    cmake --build /var/tmp/sluice-build --target sluice
    python3 tests/hosts/matrix.py --build /var/tmp/sluice-build
  "' bash "$root" "$PWD"
