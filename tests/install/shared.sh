#!/usr/bin/env bash
# Builds libsluice, the shared library, installs it, and builds and runs the outside program against it.
#
#   tests/install/shared.sh [folder of the build; default: build/shared]
#
# Compiles every library once more, with hidden visibility.
set -euo pipefail
cd "$(dirname "$0")/../.."
unset OPENBLAS_CORETYPE
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
build=$(realpath -m "${1-build/shared}")
cmake -S . -B "$build" -G Ninja -DSLUICE_SHARED=ON -DSLUICE_CUDA=off -DSLUICE_BUILD_PROGRAM=OFF \
  -DSLUICE_BUILD_TESTS=OFF -DSLUICE_BUILD_EXAMPLES=OFF >/dev/null
cmake --build "$build" | tail -n 1
cmake -DWAY=installed -DBUILD="$build" -DSOURCE="$PWD" -DCONSUMER="$PWD/tests/install" -DCOMPILER="$(command -v c++)" \
  -DLAUNCHER="$(command -v ccache || true)" -DGENERATOR=Ninja -DMPIEXEC="$(command -v mpirun)" -P tests/install/run.cmake

# The programs use it, and it shows public names alone.
installed=$build/consumer/installed
library=$(ls "$installed"/moved/*/libsluice.so)
for program in consumer plans/plans by_pkg_config; do
  readelf -d "$installed/$program" | grep 'NEEDED.*libsluice.so.0'
done
if ls "$installed"/moved/*/libsluice_*.a 2>/dev/null; then exit 1; fi
names=$(nm -DC --defined-only "$library")
grep 'sluice::Pipeline::train_step' <<<"$names"
if grep -E 'sluice::(OptionTable|Collectives|SaveLock)' <<<"$names"; then
  echo "shared.sh: $library shows internal names" >&2
  exit 1
fi
printf '\nlibsluice works, %d s\n' "$SECONDS"
