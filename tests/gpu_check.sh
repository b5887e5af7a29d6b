#!/usr/bin/env bash
# What only a machine with a GPU can tell, in commands of under nine minutes each:
#
#   tests/gpu_check.sh build-and-test    configures, builds and runs the tests labelled gpu
#   tests/gpu_check.sh check             whether this card computes what it should, in at most six
#                                        minutes: operators against double precision, gradients of
#                                        whole models against PyTorch's, losses of 200 steps against
#                                        stored ones, bits of 1 and 4 ranks, of tensor ranks
#                                        and of graphs, tokens/s against the card's stored rows, two
#                                        processes over NCCL
#   tests/gpu_check.sh nccl [RANKS]      NCCL between 2 processes, or 4, that share the first card:
#                                        messages, sums, order, bits, dying and stopped ranks, the end
#   tests/gpu_check.sh sanitize          compute-sanitizer's memcheck, racecheck, initcheck and
#                                        synccheck over the tests of kernels; what they find fails it
#   tests/gpu_check.sh benchmark         the GPU rows of tests/benchmarks/README.md, and before them
#                                        200 steps' losses on the King James text against the CPU's
#   tests/gpu_check.sh pack FOLDER       elsewhere, before: what a bare machine lacks, into one folder
#                                        (Debian's packages as files; with `pack FOLDER BUILD` the
#                                        built tests and benchmark of that build folder, and what
#                                        they need to run; and data/kjv.txt, where train.sh made it).
#                                        The build is one file, build.tar.xz, where tar and xz are there
#
# Each command can be called again after whatever ended it and goes on from there; exit code 75 asks
# for that: its time was up before its work was done. 0: all done and well; 1: something failed; 2:
# wrong use, or something needed is missing. What failed is tried again once the rest is done.
# Reports are there at all times, also of a part: COMMAND.txt and COMMAND.jsonl. They name a step
# that was stopped or skipped, and why. Those of `check` are what to send with a report about a card.
#
# From the environment:
#   SLUICE_GPU_REPORT   folder of reports          [$OUT where that is set, else build/gpu-report]
#   SLUICE_GPU_STATE    folder of what is done     [build/gpu-state]
#   SLUICE_GPU_DEPS     a folder that `pack` made  [none: the system has everything]
#   SLUICE_GPU_BUILD    a build that `pack` made (FOLDER/build.tar.xz, FOLDER/build): nothing is built here
#   SLUICE_GPU_PACK_MIB the most that `pack` may make, in MiB [any]
#   SLUICE_GPU_TREE     the folder to build in     [build/cuda]
#   SLUICE_GPU_SECONDS  of one call                [530]
#   SLUICE_GPU_CMAKE    more arguments of the configuration, -DSLUICE_CUDA_ARCHITECTURES=80;90 say
#                       (by itself it builds for the GPU that is there)
#   SLUICE_GPU_ROWS     more arguments of every row of gpu_benchmark, to try the script itself
#   SLUICE_GPU_CURVE    more options of the trainings whose losses are compared, for the same
#   SLUICE_GPU_STEPS    of the losses that `check` compares, for the same [200]
#   SLUICE_GPU_MARGIN   seconds of a call within which no step is begun at its end, and a step has all
#                       of it at its begin, for the same [a twentieth of it]
#
# On the emulated CUDA, which has no speed and no bits of a card, the script itself can be tried:
#   cmake --preset emulated -DSLUICE_BUILD_TESTS=ON && cmake --build build/emulated
#   SLUICE_GPU_TREE=build/emulated tests/gpu_check.sh check
set -euo pipefail
cd "$(dirname "$0")/.."

command=${1:-}
state=${SLUICE_GPU_STATE:-build/gpu-state}
reports=${SLUICE_GPU_REPORT:-${OUT:-build/gpu-report}}
seconds=${SLUICE_GPU_SECONDS:-530}
build=${SLUICE_GPU_TREE:-build/cuda}
# With less left no step is begun, and one that was begun within it had a whole call.
margin=${SLUICE_GPU_MARGIN:-$((seconds / 20 > 0 ? seconds / 20 : 1))}
failed=0
skipped=()

# Debian 12's packages that programs of ours need to run, and more of them to be built, where a
# compiler, CMake, Ninja and the CUDA toolkit are there.
to_run='openmpi-bin openmpi-common libopenmpi3 libhwloc15 libevent-core-2.1-7 libevent-pthreads-2.1-7
  libpmix2 libmunge2 libltdl7 libudev1 zlib1g libdnnl2 ocl-icd-libopencl1
  libboost-program-options1.74.0 libfmt9 libssl3'
to_build='libopenmpi-dev libdnnl-dev libboost1.74-dev libboost-program-options1.74-dev libfmt-dev
  nlohmann-json3-dev libgtest-dev libgmock-dev googletest libssl-dev libxxhash-dev zlib1g-dev'

usage() {
  sed -n '2,/^set /s/^# \{0,1\}//p' "$0" | sed '$d'
}

die() {
  echo "gpu_check: $*" >&2
  exit 2
}

left() {
  echo $((seconds - SECONDS))
}

# --- steps: each is done once for the same inputs ---

# Puts what is known of a step into the command's report. $1: name, $2: result, $3: seconds
write_record() {
  python3 - "$command" "$@" "$state/$command/$1.log" >"$state/$command/$1.json" <<'PYTHON'
import json, sys
command, name, result, seconds, log = sys.argv[1:6]
tail = open(log, encoding="utf-8", errors="replace").read().splitlines()[-40:]
print(json.dumps({"command": command, "step": name, "result": result, "seconds": int(seconds),
                  **({} if result == "passed" else {"log": tail})}))
PYTHON
  write_report
}

# All of the command's steps so far, in the order in which they were first begun.
write_report() {
  local name
  mkdir -p "$reports"
  : >"$reports/$command.txt"
  : >"$reports/$command.jsonl"
  while read -r name; do
    [[ -f $state/$command/$name.json ]] || continue
    {
      printf '== %s\n' "$name"
      if [[ -f $state/$command/$name.log ]]; then tail -n 400 "$state/$command/$name.log"; fi
      printf '\n'
    } >>"$reports/$command.txt"
    cat "$state/$command/$name.json" >>"$reports/$command.jsonl"
    if [[ -f $state/$command/$name.rows ]]; then
      cat "$state/$command/$name.rows" >>"$reports/$command.jsonl"
    fi
  done < <(cat "$state/$command/order" 2>/dev/null || true)
}

# $1: name of the step, $2: seconds that it took
stop_here() {
  write_record "$1" 'stopped: time is up' "$2"
  echo "gpu_check: the time of this call is up at '$1'; call '$0 $command' again to go on" >&2
  exit 75
}

# step NAME INPUTS COMMAND...: runs it, unless it passed before for the same INPUTS (any text), or
# failed since the command began: the later steps have their turn first. A program that ends with 77
# is skipped, one that ends with 75 says that its time is up. One that alone takes longer than a
# call fails. SLUICE_JOB_SECONDS tells the program how long it has.
step() {
  local name=$1 inputs=$2 started=$SECONDS code=0 result=passed
  local base=$state/$command/$name
  shift 2
  mkdir -p "$state/$command"
  grep -qxF "$name" "$state/$command/order" 2>/dev/null || echo "$name" >>"$state/$command/order"
  if [[ -f $base.done && $(<"$base.done") == "$inputs" ]]; then
    echo "-- $name: done before"
    return
  fi
  if [[ -f $base.failed && $(<"$base.failed") == "$inputs" ]]; then
    echo "-- $name: failed before"
    failed=1
    return
  fi
  touch "$base.log"
  if (($(left) < margin)); then stop_here "$name" 0; fi
  echo "-- $name"
  rm -f "$base.rows" "$base.done" "$base.failed"
  SLUICE_JOB_SECONDS=$(($(left) > margin ? $(left) - margin : 1)) \
    timeout --kill-after=10 "$(left)" "$@" >"$base.log" 2>&1 || code=$?
  # timeout ends with 124 or 137; so does a program that the system kills, for want of memory say.
  if ((code == 75)) || { ((code == 124 || code == 137)) && (($(left) <= 0)); }; then
    if ((started > margin)) || [[ $name == build || $name == test ]]; then
      tail -n 30 "$base.log"
      stop_here "$name" "$((SECONDS - started))"
    fi
    result='failed: longer than a whole call'
  elif ((code == 77)); then
    result=skipped
    skipped+=("$name")
  elif ((code != 0)); then
    result="failed: exit code $code"
  fi
  if [[ $result == failed* ]]; then
    failed=1
    tail -n 30 "$base.log"
    printf '%s' "$inputs" >"$base.failed"
  elif [[ $result == passed ]]; then
    printf '%s' "$inputs" >"$base.done"
  fi
  echo "   $result after $((SECONDS - started)) s"
  write_record "$name" "$result" "$((SECONDS - started))"
}

# skip_step NAME REASON...
skip_step() {
  local name=$1
  shift
  # shellcheck disable=SC2016
  step "$name" "" bash -c 'echo "$*"; exit 77' bash "$@"
}

# A name for the contents of files.
contents() {
  sha256sum "$@" | sha256sum | cut -c 1-16
}

# The cards, the driver, and the variables that steps depend on.
conditions() {
  nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null || true
  echo "${CUDA_VISIBLE_DEVICES-all} ${SLUICE_GPU_STEPS:-} ${SLUICE_GPU_ROWS:-} ${SLUICE_GPU_CURVE:-}"
}

# What the steps of a check depend on: programs of the build, the scripts, stored numbers. $@: programs
inputs_of_checks() {
  contents "${@/#/$build/}" "$SLUICE_GOLDEN_TRANSFORMERS" tests/gpus/*.py tests/gpus/*.json tests/faults/harness.py
  conditions
}

finish() {
  rm -f "$state/$command"/*.failed
  write_report
  echo "gpu_check: $command: $1${skipped:+; skipped: ${skipped[*]}};" \
    "report in $reports/$command.txt and $reports/$command.jsonl"
  exit "$failed"
}

# --- the machine, and what was brought along ---

# Packages that `pack` fetched, unpacked once, and found before the system's.
use_packages() {
  local root architecture=x86_64-linux-gnu name package
  [[ -n ${SLUICE_GPU_DEPS:-} ]] || return 0
  compgen -G "$SLUICE_GPU_DEPS/*.deb" >/dev/null || die "no packages in SLUICE_GPU_DEPS=$SLUICE_GPU_DEPS"
  mkdir -p "$state"
  root=$(realpath "$state")/root
  if [[ ! -f $root/done ]]; then
    rm -rf "$root"
    mkdir -p "$root"
    for package in "$SLUICE_GPU_DEPS"/*.deb; do unpack "$package" "$root"; done
    # What Debian's alternatives would make.
    for name in mpirun mpiexec; do ln -sf orterun "$root/usr/bin/$name"; done
    ln -sf opal_wrapper "$root/usr/bin/mpicc"
    ln -sfn ../etc/openmpi "$root/usr/etc" 2>/dev/null || true
    touch "$root/done"
  fi
  export OPAL_PREFIX=$root/usr
  export OPAL_LIBDIR=$root/usr/lib/$architecture/openmpi/lib
  export OPAL_INCLUDEDIR=$root/usr/lib/$architecture/openmpi/include
  export OPAL_PKGLIBDIR=$OPAL_LIBDIR/openmpi3
  export OPAL_DATADIR=$root/usr/share OPAL_PKGDATADIR=$root/usr/share/openmpi
  export OPAL_SYSCONFDIR=$root/etc/openmpi
  export PATH=$root/usr/bin:$PATH
  libraries+=("$root/usr/lib/$architecture" "$root/lib/$architecture" "$OPAL_LIBDIR")
  configuration+=("-DCMAKE_PREFIX_PATH=$root/usr" "-DOPENSSL_ROOT_DIR=$root/usr"
    "-DMPI_C_COMPILER=$root/usr/bin/mpicc" "-DMPIEXEC_EXECUTABLE=$root/usr/bin/mpirun"
    "-DSLUICE_DNNL_INCLUDE=$root/usr/include" "-DSLUICE_DNNL_LIBRARY=$root/usr/lib/$architecture/libdnnl.so"
    "-DCMAKE_CXX_FLAGS=-isystem $root/usr/include -isystem $root/usr/include/$architecture"
    "-DCMAKE_EXE_LINKER_FLAGS=-Wl,-rpath-link,$root/usr/lib/$architecture:$root/lib/$architecture:$OPAL_LIBDIR")
}

unpack() {
  if command -v dpkg-deb >/dev/null; then
    dpkg-deb -x "$1" "$2"
  else # a .deb is an ar archive of tar archives
    ar p "$1" data.tar.xz | tar -xJ -C "$2"
  fi
}

# cuDNN and NCCL of Python's packages, where the toolkit has none: links with the names to build with.
use_python_libraries() {
  local name folder file toolkit
  toolkit=$(dirname "$(dirname "$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)")")
  libraries+=("$toolkit/lib64" "$toolkit/lib") # lib: of a toolkit of Python's packages
  for name in cudnn nccl; do
    if compgen -G "$toolkit/*/$name.h" >/dev/null || [[ -f /usr/include/$name.h ]]; then continue; fi
    folder=$(python3 -c "import nvidia.$name; print(list(nvidia.$name.__path__)[0])" 2>/dev/null || true)
    [[ -n $folder && -f $folder/include/$name.h ]] || continue
    mkdir -p "$state/$name"
    ln -sfn "$folder/include" "$state/$name/include"
    mkdir -p "$state/$name/lib"
    for file in "$folder"/lib/*.so.*; do
      ln -sf "$file" "$state/$name/lib/"
      file=$(basename "$file")
      ln -sf "$file" "$state/$name/lib/${file%%.so.*}.so"
    done
    libraries+=("$(realpath "$state/$name/lib")")
    configuration+=("-DSLUICE_${name^^}_ROOT=$(realpath "$state/$name")")
  done
}

prepare() {
  command -v python3 >/dev/null || die "python3 is missing"
  mkdir -p "$state/$command"
  libraries=()
  configuration=()
  use_packages
  use_python_libraries
  system_libraries=${LD_LIBRARY_PATH:-}
  export LD_LIBRARY_PATH
  LD_LIBRARY_PATH=$(IFS=:; echo "${libraries[*]}")${system_libraries:+:$system_libraries}
  export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
  export OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_MCA_btl=^tcp
  export PMIX_MCA_pcompress_base_silence_warning=1
  # Where it lies here; the tests know where it lay when they were built.
  export SLUICE_GOLDEN_TRANSFORMERS=$PWD/tests/stages/transformer/golden.json
  use_build
  step machine "$(date +%F-%H)" bash -c describe_machine
}

# A build that was brought along names the folders it was made in; here they are others.
use_build() {
  local what from brought=${SLUICE_GPU_BUILD:-} made
  [[ -n $brought ]] || return 0
  if [[ -d $brought ]]; then brought+=/folders; fi
  [[ -f $brought ]] || die "SLUICE_GPU_BUILD=$SLUICE_GPU_BUILD is no build that pack made"
  build=$(realpath "$state")/build
  made=$(contents "$brought")
  if [[ -f $build/made && $(<"$build/made") == "$made" ]]; then return; fi
  rm -rf "$build"
  if [[ -d $SLUICE_GPU_BUILD ]]; then
    cp -r "$SLUICE_GPU_BUILD" "$build"
  else
    mkdir -p "$build"
    tar -xJf "$brought" -C "$build" 2>/dev/null || python3 -m tarfile -e "$brought" "$build" ||
      die "$brought cannot be unpacked"
  fi
  while IFS='=' read -r what from; do
    case $what in
      build) move_names "$from" "$build" ;;
      source) move_names "$from" "$PWD" ;;
      mpiexec) move_names "$from" "$(command -v mpirun || echo mpirun)" ;;
      python) move_names "$from" "$(command -v python3)" ;;
    esac
  done <"$build/folders"
  echo "$made" >"$build/made"
}

move_names() {
  find "$build" -name '*.cmake' -exec sed -i "s#$1\([]/\" ]\)#$2\1#g" {} +
}

describe_machine() {
  uname -srm
  local fields=name,memory.total,driver_version,compute_cap,clocks.sm,clocks.mem,power.limit,temperature.gpu
  # Older drivers know the reasons for low clocks by another name.
  nvidia-smi --query-gpu="$fields,clocks_event_reasons.active" --format=csv 2>/dev/null ||
    nvidia-smi --query-gpu="$fields,clocks_throttle_reasons.active" --format=csv 2>&1 || echo "no nvidia-smi"
  nvcc --version 2>&1 | tail -n 2 || echo "no nvcc"
  c++ --version 2>&1 | head -n 1
  cmake --version 2>&1 | head -n 1
  df -h /dev/shm 2>&1 || true # NCCL takes 31.5 MiB for each communicator over a network
  git log -1 --format='commit %h %s' 2>/dev/null || true
}
export -f describe_machine

# Of the first GPU, as CMake writes it: 90 for 9.0. Nothing where there is none.
compute_capability() {
  nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | sed -n '1s/[^0-9]//gp'
}

gpus() {
  nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true
}

# A test that skips for want of a GPU that is there fails.
require_gpus() {
  local count
  count=$(gpus)
  if ((count > 0)); then export SLUICE_REQUIRE_GPUS=${SLUICE_REQUIRE_GPUS:-$count}; fi
}

is_emulated() {
  grep -q '^SLUICE_CUDA:[A-Z]*=emulated$' "$build/CMakeCache.txt" 2>/dev/null
}

# For commands that run what was built before, on a GPU or on the emulation.
need_card() {
  local file
  for file in "$@"; do
    [[ -x $build/$file ]] || die "no $build/$file: run '$0 build-and-test' first"
  done
  if is_emulated; then
    export SLUICE_EMULATED_DEVICE_MEMORY=${SLUICE_EMULATED_DEVICE_MEMORY:-8589934592}
    return
  fi
  (($(gpus) > 0)) || die "there is no GPU here"
  require_gpus
}

# --- the commands ---

build_and_test() {
  local capability
  prepare
  if [[ -z ${SLUICE_GPU_BUILD:-} ]]; then
    capability=$(compute_capability || true)
    if [[ -n $capability ]]; then configuration+=("-DSLUICE_CUDA_ARCHITECTURES=$capability"); fi
    # shellcheck disable=SC2086
    step configure "$(contents CMakeLists.txt comm/cuda.cmake) ${configuration[*]-} ${SLUICE_GPU_CMAKE:-}" \
      cmake --preset cuda -B "$build" -DSLUICE_BUILD_TESTS=ON "${configuration[@]}" ${SLUICE_GPU_CMAKE:-}
    ((failed == 0)) || finish "cannot be configured"
    rm -f "$state/$command/build.done" # Ninja knows what is done
    step build "" cmake --build "$build" --target gpu_tests
    ((failed == 0)) || finish "does not build"
  fi
  rm -f "$state/$command/test.done"
  require_gpus
  # -F: goes on where a killed run stopped.
  step test "" ctest --test-dir "$build" -L gpu -F --output-on-failure --parallel 8
  grep -E 'tests passed|No tests were found' "$state/$command/test.log" || true
  if grep -q 'No tests were found' "$state/$command/test.log"; then
    failed=1
    finish "there are no tests"
  fi
  ((failed == 0)) || finish "tests failed"
  if ! nvidia-smi -L >/dev/null 2>&1; then finish "no GPU here: every test says that it was skipped"; fi
  if grep -q 'The following tests did not run' "$state/$command/test.log"; then
    sed -n '/The following tests did not run/,/^$/p' "$state/$command/test.log"
  fi
  finish "done"
}

# Runs one shard of a test under one tool; what the tool finds in our kernels fails it. Findings in
# the kernels of NVIDIA's libraries are shown, and memcheck's fail too. Tests that skip for want of a
# GPU, which is what they see where the tool does not support it, fail. Calls that answer with an
# error are no finding: tests make some, such as an allocation while a stream is captured.
sanitize_shard() {
  local tool=$1 program=$2 folder code=0 ours
  folder=$(mktemp -d)
  local options=(--error-exitcode 99 --show-backtrace no --print-limit 50)
  if [[ $tool == memcheck ]]; then options+=(--report-api-errors no); fi
  compute-sanitizer --tool "$tool" "${options[@]}" \
    --log-file "$folder/findings" "$program" >"$folder/output" 2>&1 || code=$?
  touch "$folder/findings"
  cat "$folder/output" "$folder/findings"
  # One finding: from a line that names it to the next empty one; it names the kernel.
  ours=$(sed 's/^========= \{0,1\}//' "$folder/findings" |
    awk -v RS= '/ at |Race reported|access/ && /sluice/' | wc -l)
  if grep -q 'no GPU: ' "$folder/output"; then
    echo "gpu_check: under compute-sanitizer the tests see no GPU"
    code=1
  elif ((code == 99 && ours == 0)) && [[ $tool != memcheck ]]; then
    echo "gpu_check: findings in libraries' kernels alone"
    code=0
  fi
  rm -rf "$folder"
  return "$code"
}
export -f sanitize_shard

sanitize() {
  local tool program shard shards=4 programs name conditions
  prepare
  conditions=$(conditions)
  command -v compute-sanitizer >/dev/null || die "compute-sanitizer is missing (part of the CUDA toolkit)"
  # Every kernel of ours, those of comm/ and cuDNN's attention with them, is launched by a test of
  # this name; the graph test launches none, the one of whole models the same ones again.
  mapfile -t programs < <(find "$build/tests/stages" "$build/tests/comm" -maxdepth 1 -type f -executable \
    -name '*cuda*_test' -not -name '*graph_test' -not -name '*golden_test' 2>/dev/null | sort)
  ((${#programs[@]} > 0)) || die "no operator tests in $build: run '$0 build-and-test' first"
  nvidia-smi -L >/dev/null 2>&1 || die "there is no GPU here, and compute-sanitizer needs one"
  for tool in memcheck racecheck initcheck synccheck; do
    for program in "${programs[@]}"; do
      for ((shard = 0; shard < shards; ++shard)); do
        name=$tool-$(basename "$program")-$((shard + 1))of$shards
        GTEST_TOTAL_SHARDS=$shards GTEST_SHARD_INDEX=$shard step "$name" "$(contents "$program") $conditions" \
          bash -c 'sanitize_shard "$@"' bash "$tool" "$program"
      done
    done
  done
  if ((failed == 0)); then finish "clean"; else finish "not clean"; fi
}

# Whether this build can run NCCL between processes.
nccl_tests=(tests/comm/comm_nccl_mpi_test tests/runtime/runtime_device_mpi_test)
has_nccl() {
  [[ -x $build/${nccl_tests[0]} && -x $build/${nccl_tests[1]} ]]
}

# What a test prints is its log, of which $1 is the file; a case that is skipped fails the step.
whole_test() {
  local log=$1 code=0
  shift
  "$@" || code=$?
  if ((code == 0)) && grep -q 'SKIPPED' "$log"; then
    echo "gpu_check: a case was skipped"
    code=1
  fi
  return "$code"
}
export -f whole_test

# test_step NAME COMMAND...
test_step() {
  local name=$1
  shift
  # shellcheck disable=SC2016
  step "$name" "$inputs" bash -c 'whole_test "$@"' bash "$state/$command/$name.log" "$@"
}

# A card's check that brought a build along without NCCL fails: that build was made for it.
nccl_step() {
  local ranks=$1
  if has_nccl; then
    step "nccl-$ranks" "$inputs" python3 tests/gpus/nccl_processes.py --build "$build" --ranks "$ranks" \
      --report "$state/$command/nccl-$ranks.rows"
  elif [[ -n ${SLUICE_GPU_BUILD:-} ]] && (($(gpus) > 0)); then
    step "nccl-$ranks" "$inputs" bash -c 'echo "the build that was brought along has no NCCL"; exit 1'
  else
    skip_step "nccl-$ranks" "this build has no NCCL"
  fi
}

# Tokens per second of the card against its stored rows; 1.5b where there is time for it.
throughput_steps() {
  local program=$build/tests/benchmarks/gpu_benchmark
  row throughput training --model 124m --rounds 3 --steps 4
  compare_throughput throughput
  if (($(left) < 4 * margin)); then
    skip_step throughput-1.5b "too little of the call is left"
  else
    row throughput-1.5b training --model 1.5b --rounds 3 --steps 2
    compare_throughput throughput-1.5b
  fi
}

# With the card's stored rows. $1: name of the row's step
compare_throughput() {
  local rows=$state/$command/$1.rows
  if [[ -f $rows ]]; then
    step "$1-stored" "$inputs $(contents "$rows")" python3 tests/gpus/check_throughput.py "$rows"
  fi
}

check() {
  local inputs double=tests/stages/stages_cuda_double_test golden=tests/stages/stages_cuda_golden_test real=1
  local needed=("$double" "$golden" sluice sluice-job tests/benchmarks/gpu_benchmark)
  prepare
  need_card "${needed[@]}"
  if is_emulated; then real=; fi # the shapes of a real model would take minutes
  if has_nccl; then needed+=("${nccl_tests[@]}"); fi
  inputs=$(inputs_of_checks "${needed[@]}")
  test_step operators env ${real:+SLUICE_REAL_SHAPES=1} "$build/$double"
  test_step gradients "$build/$golden"
  step training "$inputs" python3 tests/gpus/check_training.py --build "$build" --steps "${SLUICE_GPU_STEPS:-200}" \
    --report "$state/$command/training.rows"
  if is_emulated && [[ -z ${SLUICE_GPU_ROWS:-} ]]; then
    echo "-- throughput: the emulation has none"
  else
    throughput_steps
  fi
  nccl_step 2
  if ((failed == 0)); then finish "all well"; else finish "not well"; fi
}

nccl() {
  local ranks=${1:-2} inputs
  [[ $ranks == 2 || $ranks == 4 ]] || die "nccl $ranks; legal: 2 or 4 processes"
  prepare
  need_card sluice sluice-job
  has_nccl || die "this build has no NCCL"
  inputs=$(inputs_of_checks sluice sluice-job "${nccl_tests[@]}")
  nccl_step "$ranks"
  if ((failed == 0)); then finish "all well"; else finish "not well"; fi
}

# One row of gpu_benchmark; its JSON lines go to the report. $1: name of the step
row() {
  local name=$1
  shift
  # shellcheck disable=SC2086
  step "$name" "$inputs $*" "$program" "$@" ${SLUICE_GPU_ROWS:-} \
    --json "$state/$command/$name.rows"
}

# The micro-batch that a training row chose.
micro_batch_of() {
  python3 -c 'import json, sys
print(json.loads(open(sys.argv[1]).readlines()[-1])["rows"][0]["micro-batch"])' \
    "$state/$command/$1.rows" 2>/dev/null || true
}

# The median of three rounds of a training by PyTorch. $1: name, $2: micro-batch; the rest: arguments
pytorch() {
  local name=pytorch-$1 samples=$2 script=tests/benchmarks/pytorch_gpt2.py
  shift 2
  if [[ -z $samples ]]; then
    skip_step "$name" "no training of ours tells the micro-batch"
    return
  fi
  LD_LIBRARY_PATH=$system_libraries TORCHINDUCTOR_CACHE_DIR=$(realpath "$state")/inductor \
    step "$name" "$inputs $(contents "$script") $samples $*" python3 "$script" \
    "$@" --micro-batch "$samples" --json "$state/$command/$name.rows"
}

# By us and by PyTorch in turns, so that what the machine does meanwhile meets both. Sets `samples`
# to our micro-batch. $1: name, $2: turns; the rest: arguments of both programs
train_in_turns() {
  local name=$1 turns=$2 turn
  shift 2
  samples=
  for ((turn = 1; turn <= turns; ++turn)); do
    row "training-$name-$turn" training "$@"
    samples=${samples:-$(micro_batch_of "training-$name-$turn")}
    pytorch "$name-$turn" "$samples" "$@"
  done
}

# What fills less memory. $1: name; the rest: arguments
train_lean() {
  local name=$1
  shift
  row "training-lean-$name" training "$@" --stream-precision bf16 --moment-precision bf16 --logit-chunks 8
}

# The rows of training a model. $1: model, $2: steps of a round
train_model() {
  local model=$1 samples
  local options=(--model "$model" --rounds 3 --steps "$2")
  train_in_turns "$model" 3 "${options[@]}"
  row "products-$model" products --model "$model" ${samples:+--micro-batch "$samples"}
  row "biases-$model" biases --model "$model" ${samples:+--micro-batch "$samples"}
  row "waiting-$model" waiting --model "$model" ${samples:+--micro-batch "$samples"}
  train_lean "$model" "${options[@]}"
}

# 524,288 tokens a step.
train_large_batch() {
  local samples options=(--model 1.5b --batch 512 --rounds 3 --steps 1)
  train_in_turns 1.5b-512 1 "${options[@]}"
  train_lean 1.5b-512 "${options[@]}"
}

# The same training on the CPU in fp32 and on the GPU in fp32 and bf16.
loss_curve() {
  local text=data/kjv.txt gpu inputs files=() run
  if [[ -s ${SLUICE_GPU_DEPS:-.}/kjv.txt ]]; then text=$SLUICE_GPU_DEPS/kjv.txt; fi
  if [[ ! -s $text ]]; then
    skip_step loss-curve "no $text: ./train.sh makes it, and pack brings it"
    return
  fi
  gpu=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -n 1 || true)
  inputs="$(contents "$build/sluice" "$build/sluice-job" "$text" tests/loss_curve.py) $(conditions)"
  for run in cpu/fp32 cuda:0/fp32 cuda:0/bf16; do
    files+=("$state/$command/loss-${run//[:\/]/-}.metrics")
    # shellcheck disable=SC2086
    step "loss-${run//[:\/]/-}" "$inputs" "$build/sluice" train --data "$text" --steps 200 --seed 1 \
      --validation-samples 1 ${SLUICE_GPU_CURVE:-} --device "${run%/*}" --precision "${run#*/}" \
      --metrics "${files[-1]}"
  done
  step loss-curve "$inputs" python3 tests/loss_curve.py --json "$state/$command/loss-curve.rows" \
    --gpu "${gpu:-Emulated CUDA device}" "${files[@]}"
}

benchmark() {
  local program inputs
  prepare
  program=$build/tests/benchmarks/gpu_benchmark
  [[ -x $program && -x $build/sluice ]] ||
    die "no $program or no $build/sluice: run '$0 build-and-test' first"
  if [[ -z ${SLUICE_GPU_ROWS:-} ]]; then
    nvidia-smi -L >/dev/null 2>&1 || die "there is no GPU here"
  fi
  inputs="$(contents "$program") $(conditions)"
  loss_curve
  row kernels kernels
  row issue issue
  row idle-124m idle --model 124m
  row chunks-124m chunks --model 124m --micro-batch 16
  row graphs-124m graphs --model 124m --micro-batch 4
  row attention attention
  row dropout-124m dropout --model 124m
  row stream-124m stream --model 124m
  row logits-124m logits --model 124m
  train_model 124m 4
  row idle-1.5b idle --model 1.5b --rounds 3
  row moments-1.5b moments --model 1.5b --rounds 3 --steps 1
  train_model 1.5b 2
  train_large_batch
  write_report
  python3 tests/gpu_table.py "$reports/benchmark.jsonl" | tee "$reports/table.md"
  if ((failed == 0)); then finish "done"; else finish "done, and something failed"; fi
}

# Debian's packages as they are: small, and unpacked in seconds. With a build to bring along, those
# alone that it needs to run.
pack() {
  local folder=${1:-} from=${2:-} wanted=$to_run package missing=() packed size
  [[ -n $folder ]] || die "pack needs the folder to fill"
  mkdir -p "$folder"
  folder=$(realpath "$folder")
  command -v apt-get >/dev/null || die "pack takes Debian's packages through apt-get, which is missing here"
  [[ -n $from ]] || wanted+=" $to_build"
  for package in $wanted; do
    compgen -G "$folder/${package}_*.deb" >/dev/null || missing+=("$package")
  done
  if ((${#missing[@]} > 0)); then
    (cd "$folder" && apt-get -qq -o APT::Sandbox::User=root download "${missing[@]}")
  fi
  if [[ -s data/kjv.txt ]]; then
    cp data/kjv.txt "$folder"
  else
    echo "gpu_check: no data/kjv.txt (./train.sh --dry-run makes it): no losses will be compared there" >&2
  fi
  if [[ -n $from ]]; then
    packed=$folder/build
    pack_build "$(realpath "$from")" "$packed"
    if command -v tar >/dev/null && command -v xz >/dev/null; then
      XZ_OPT='-9 -T0' tar -cJf "$packed.tar.xz" -C "$packed" .
      rm -rf "$packed"
      packed+=.tar.xz
    fi
  fi
  size=$(($(du -sb "$folder" | cut -f 1) / 1048576 + 1))
  echo "gpu_check: $folder has $size MiB"
  if [[ -n ${SLUICE_GPU_PACK_MIB:-} ]] && ((size > SLUICE_GPU_PACK_MIB)); then
    echo "gpu_check: that is more than SLUICE_GPU_PACK_MIB=$SLUICE_GPU_PACK_MIB" >&2
    exit 1
  fi
  echo "gpu_check: there: SLUICE_GPU_DEPS=<folder>${from:+ SLUICE_GPU_BUILD=<folder>/$(basename "$packed")} $0 build-and-test"
}

# The programs of the target gpu_tests, stripped, and what ctest knows of them.
pack_build() {
  local from=$1 to=$2 file
  [[ -f $from/CMakeCache.txt ]] || die "$from is no build folder"
  rm -rf "$to" "$to.tar.xz"
  mkdir -p "$to"
  {
    echo "build=$from"
    sed -n 's/^CMAKE_HOME_DIRECTORY:INTERNAL=/source=/p; s/^MPIEXEC_EXECUTABLE:[A-Z]*=/mpiexec=/p;
      s/^_Python3_EXECUTABLE:INTERNAL=/python=/p' "$from/CMakeCache.txt"
    echo "made=$(date +%FT%T)"
  } >"$to/folders"
  while read -r file; do
    mkdir -p "$to/$(dirname "$file")"
    cp "$from/$file" "$to/$file"
  done < <(cd "$from" && find . -name 'CTestTestfile.cmake' -o -name '*_tests.cmake' -o -name '*_include.cmake' -o -name '*_include-*.cmake')
  while read -r file; do
    [[ -x $from/$file ]] || die "$from/$file is not built: build the target gpu_tests first"
    mkdir -p "$to/$(dirname "$file")"
    strip -o "$to/$file" "$from/$file"
  done < <(gpu_programs "$from")
}

gpu_programs() {
  printf '%s\n' tests/benchmarks/gpu_benchmark sluice sluice-job
  ctest --test-dir "$1" -L gpu --show-only=json-v1 | python3 -c 'import json, os, sys
root = sys.argv[1] + "/"
words = {w for t in json.load(sys.stdin)["tests"] for w in t.get("command", [])}
for word in sorted(words):
    if word.startswith(root) and os.path.isfile(word):
        print(word[len(root):])' "$1"
}

case $command in
  build-and-test) build_and_test ;;
  check) check ;;
  nccl) shift && nccl "$@" ;;
  sanitize) sanitize ;;
  benchmark) benchmark ;;
  pack) shift && pack "$@" ;;
  -h | --help) usage ;;
  *)
    usage >&2
    exit 2
    ;;
esac
