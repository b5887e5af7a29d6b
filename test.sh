#!/usr/bin/env bash
# Installs what is missing, builds everything and runs every test.
#
#   ./test.sh [options passed on to ctest]         e.g. ./test.sh -R schedules
#
# Ends with ctest's own summary and its exit code.
set -euo pipefail
cd "$(dirname "$0")"

docker/install_dependencies.sh build data test

# Tests compare with reference libraries, which come from PyPI; where they cannot be had, those tests
# are skipped by name.
python=$PWD/build/venv/bin/python
if ! [[ -x $python ]] || ! "$python" -c 'import numpy, safetensors, tokenizers' 2>/dev/null; then
  python3 -m venv build/venv
  timeout 120 build/venv/bin/pip install --quiet --disable-pip-version-check --retries 1 \
    numpy safetensors tokenizers==0.23.3 </dev/null ||
    echo "test.sh: no Python packages safetensors and tokenizers; their tests skip"
fi
if "$python" -c 'import numpy, safetensors' 2>/dev/null; then export SLUICE_TEST_PYTHON=$python; fi

cmake --preset release -DSLUICE_BUILD_TESTS=ON -DSLUICE_BUILD_EXAMPLES=ON
cmake --build --preset release
exec ctest --test-dir build/release --output-on-failure --parallel "$(nproc)" "$@"
