#!/usr/bin/env bash
# matrix.py with Open MPI 5, on a bare Debian 13: installs what Sluice needs there, builds the program, and trains over
# two hosts inside it. Needs root and about 2 GiB.
set -euo pipefail
cd "$(dirname "$0")/../.."

tests/bare_root.sh --suite trixie --bind "$PWD:/sluice" bash -euo pipefail -c '
  cd /sluice
  docker/install_dependencies.sh build hosts
  DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends python3
  cmake -S . -B /var/tmp/sluice-build -G Ninja -DCMAKE_BUILD_TYPE=Release -DSLUICE_CUDA=off -DSLUICE_BUILD_TESTS=OFF \
    -DSLUICE_BUILD_EXAMPLES=OFF
  cmake --build /var/tmp/sluice-build --target sluice
  python3 tests/hosts/matrix.py --build /var/tmp/sluice-build'
