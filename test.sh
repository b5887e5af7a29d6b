#!/usr/bin/env bash
# Installs what is missing, builds everything and runs the tests.
#
#   ./test.sh [options passed on to ctest]         e.g. ./test.sh -R schedules
#
# Without options it leaves out what takes long and .ci/run has too: several hosts, kills and failing disks, other
# projects that use Sluice, odd numbers of ranks, the scripts for GPUs; and what needs a GPU where there is none. With
# options it leaves out nothing: ./test.sh -L . runs all. Ends with ctest's own summary and its exit code. SLUICE_TEST_TARGET in
# the environment names one target to build in place of everything.
set -euo pipefail
cd "$(dirname "$0")"

docker/install_dependencies.sh build data test

# Tests compare with reference libraries and read machine code of GPUs; where PyPI's packages for that
# cannot be had, those tests are skipped by name.
python=$PWD/build/venv/bin/python
install_packages() {
  [[ -x $python ]] || python3 -m venv build/venv
  timeout 120 build/venv/bin/pip install --quiet --disable-pip-version-check --retries 1 "$@" </dev/null ||
    echo "test.sh: no Python packages $*; their tests skip"
}
"$python" -c 'import numpy, safetensors, tokenizers' 2>/dev/null ||
  install_packages numpy safetensors tokenizers==0.23.3
if command -v nvcc /usr/local/cuda/bin/nvcc >/dev/null &&
  ! compgen -G 'build/venv/lib/python*/site-packages/nvidia/*/bin/cuobjdump' >/dev/null; then
  install_packages nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm
fi
if "$python" -c 'import numpy, safetensors' 2>/dev/null; then export SLUICE_TEST_PYTHON=$python; fi

cmake --preset release -DSLUICE_BUILD_TESTS=ON -DSLUICE_BUILD_EXAMPLES=ON
cmake --build --preset release ${SLUICE_TEST_TARGET:+--target "$SLUICE_TEST_TARGET"}
printf 'test.sh: installing and building took %d s\n' "$SECONDS"
if (($# == 0)); then
  left_out='hosts|faults|install|more'
  nvidia-smi -L >/dev/null 2>&1 || left_out+='|gpu'
  set -- -LE "^($left_out)$"
fi
exec ctest --test-dir build/release --output-on-failure --parallel $((2 * $(nproc))) "$@" # the start of MPI waits more than it computes
