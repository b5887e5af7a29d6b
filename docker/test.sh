#!/usr/bin/env bash
# Builds the CPU images without a container engine, and tests them: their files, their default
# command, bad input, and a training over three hosts whose files are the image's.
#
#   docker/test.sh [--suite bookworm|trixie] [--keep] [--cold] [--cuda]
#
# Needs root and the package sources of this machine, and installs what is missing: buildah,
# debootstrap, and what tests/hosts needs. Stands on the Debian of tests/bare_root.sh. --keep leaves the
# images; otherwise only that base stays, for the next run. --cold uses nothing that stayed, and compiles
# everything for each of the two builds that are compared. --cuda builds the image for GPUs instead, on a
# base that has this machine's toolkit, and starts it: it says that there is no GPU.
set -euo pipefail
cd "$(dirname "$0")/.."

suite=bookworm keep=false cold=false cuda=false
while (($# > 0)); do
  case $1 in
    --keep) keep=true ;;
    --cold) cold=true ;;
    --cuda) cuda=true ;;
    --suite)
      suite=${2-}
      [[ $suite == bookworm || $suite == trixie ]] || {
        echo "test.sh: unknown suite '$suite'; legal are bookworm and trixie" >&2
        exit 2
      }
      shift
      ;;
    *)
      echo "test.sh: unknown option '$1'; legal are --suite, --keep, --cold and --cuda" >&2
      exit 2
      ;;
  esac
  shift
done
if [[ $(id -u) != 0 ]]; then
  echo "test.sh: images without an engine need root: chroot, mounts and namespaces" >&2
  exit 2
fi
export BUILDAH_ISOLATION=chroot
unset OPENBLAS_CORETYPE
base=localhost/sluice-base:$suite
work=$(mktemp -d /var/tmp/sluice-images-XXXXXX)
containers=()

finish() {
  local container
  for container in "${containers[@]}"; do buildah rm "$container" >/dev/null || true; done
  if ! $keep; then
    buildah rmi localhost/sluice-test:{runtime,again,devel,example,no-apt,cuda,cuda-base,cuda-runtime-base} >/dev/null 2>&1 || true
    buildah rmi --prune >/dev/null 2>&1 || true
  fi
  rm -rf --one-file-system "$work"
}
trap finish EXIT

step() {
  printf '\n== %s (%d s)\n' "$1" "$SECONDS"
}

# The system alone, with the package sources of this machine.
make_base() {
  local container root
  if buildah inspect --type image "$base" >/dev/null 2>&1; then return; fi
  root=$(tests/bare_root.sh --suite "$suite")
  container=$(buildah from scratch)
  buildah add -q "$container" "$root" / >/dev/null
  buildah commit -q --rm --format docker --timestamp 0 "$container" "$base" >/dev/null
}

# mounted NAME: the path of an image's files, in `root`.
root=
mounted() {
  local container
  container=$(buildah from --pull-never "$1")
  containers+=("$container")
  root=$(buildah mount "$container")
}

megabytes() {
  du -sm --apparent-size "$1" | cut -f1
}

# The image for GPUs, on bases with this machine's toolkit, cuDNN and NCCL.
test_cuda() {
  local toolkit container library
  if ! toolkit=$(readlink -f /usr/local/cuda) || ! [[ -x $toolkit/bin/nvcc ]]; then
    echo "skipped: no CUDA toolkit in /usr/local/cuda"
    return
  fi
  step "Bases with the toolkit"
  container=$(buildah from --pull-never "$base")
  buildah add -q "$container" "$toolkit" /usr/local/cuda >/dev/null
  buildah run "$container" -- sh -c 'echo /usr/local/cuda/lib64 >/etc/ld.so.conf.d/cuda.conf && ldconfig'
  buildah commit -q --rm --format docker "$container" localhost/sluice-test:cuda-base >/dev/null
  mkdir -p "$work/cuda"
  for library in cudart cublas cublasLt cudnn nccl nvrtc nvJitLink; do
    cp -a "$toolkit/lib64/"lib$library*.so* "$work/cuda/"
  done
  container=$(buildah from --pull-never "$base")
  buildah add -q "$container" "$work/cuda" /usr/local/cuda/lib64 >/dev/null
  buildah run "$container" -- sh -c 'echo /usr/local/cuda/lib64 >/etc/ld.so.conf.d/cuda.conf && ldconfig'
  buildah commit -q --rm --format docker "$container" localhost/sluice-test:cuda-runtime-base >/dev/null

  step "Image"
  build cuda --base localhost/sluice-test:cuda-base --runtime-base localhost/sluice-test:cuda-runtime-base \
    --architectures 90 --tag localhost/sluice-test:cuda
  mounted localhost/sluice-test:cuda-runtime-base
  library=$(megabytes "$root")
  mounted localhost/sluice-test:cuda
  printf 'base %d MB, runtime %d MB more\n' "$library" $(($(megabytes "$root") - library))

  step "Without a GPU"
  container=$(buildah from --pull-never localhost/sluice-test:cuda)
  containers+=("$container")
  buildah run "$container" -- sluice-entrypoint sluice doctor --probe-seconds 0 | tee "$work/doctor" | grep 'GPUs '
  grep -q 'this build is for GPUs, but none can be used' "$work/doctor"
  buildah run "$container" -- sluice-entrypoint sluice doctor --self-test
  if buildah run "$container" -- sluice-entrypoint sluice train --device cuda --dry-run 2>"$work/refused"; then exit 1; fi
  grep "^sluice: error: .*no NVIDIA driver" "$work/refused"
  printf '\ndocker/test.sh --cuda passed at commit %s, %d s\n' "$(git rev-parse --short HEAD)" "$SECONDS"
}

step "Dependencies"
docker/install_dependencies.sh images hosts data build
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check spdx-tools

# What buildah keeps for `RUN --mount=type=cache`: compiled sources.
forget() {
  if $cold; then rm -rf --one-file-system /var/tmp/buildah-cache*; fi
}

step "Base"
if $cold; then
  buildah rmi --force "$base" >/dev/null 2>&1 || true
  rm -rf --one-file-system "/var/cache/sluice-bare-$suite"
fi
forget
make_base

# build WORDS...: docker/build.sh, of whose output only the last line is shown.
build() {
  docker/build.sh "$@" --engine buildah >"$work/build.log" 2>&1 || {
    tail -n 40 "$work/build.log" >&2
    exit 1
  }
  tail -n 1 "$work/build.log"
}
if $cuda; then
  test_cuda
  exit
fi

# A base that cannot be one: one line of ours says why.
step "A base without apt"
mkdir "$work/empty"
printf 'FROM %s\nRUN rm /usr/bin/apt-get\n' "$base" >"$work/empty/Dockerfile"
buildah build --quiet --tag localhost/sluice-test:no-apt "$work/empty" >/dev/null
if docker/build.sh cpu --engine buildah --base localhost/sluice-test:no-apt >"$work/no-apt.log" 2>&1; then
  echo "test.sh: a base without apt was accepted" >&2
  exit 1
fi
grep -x 'sluice image: the base has no apt and bash; legal are.*' "$work/no-apt.log"

step "Images"
build cpu --base "$base" --tag localhost/sluice-test:runtime
printf 'done at %d s\n' "$SECONDS"
build cpu --base "$base" --target devel --tag localhost/sluice-test:devel
printf 'done at %d s\n' "$SECONDS"
forget
mounted localhost/sluice-test:runtime
build cpu --base "$base" --tag localhost/sluice-test:again --no-cache \
  --packages "$root/usr/local/share/sluice/packages.txt"
if docker/build.sh cpu --engine buildah --base "$base" --packages <(echo libc6=1) >"$work/pinned.log" 2>&1; then
  echo "test.sh: a version that does not exist was accepted" >&2
  exit 1
fi
grep -o 'sluice image: libc6=1 cannot be installed: .*' "$work/pinned.log" | head -n 1
printf 'done at %d s\n' "$SECONDS"

step "A program of one's own, on sluice:devel"
buildah build --quiet --format docker --tag localhost/sluice-test:example --file docker/example.Dockerfile \
  --build-arg DEVEL=localhost/sluice-test:devel --build-arg RUNTIME=localhost/sluice-test:runtime examples
program=$(buildah from --pull-never localhost/sluice-test:example)
containers+=("$program")
buildah run "$program" -- sluice-entrypoint mpirun --oversubscribe -n 2 program

step "The same sources, built outside"
if ! [[ -f build/release/build.ninja ]]; then cmake --preset release -DSLUICE_BUILD_TESTS=OFF -DSLUICE_CUDA=off; fi
cmake --build --preset release --target sluice | tail -n 1

step "Sizes"
mounted "$base" && base_root=$root
mounted localhost/sluice-test:devel && devel_root=$root
mounted localhost/sluice-test:again && again_root=$root
mounted localhost/sluice-test:runtime
printf 'base %d MB, runtime %d MB more, devel %d MB more\n' "$(megabytes "$base_root")" \
  $(($(megabytes "$root") - $(megabytes "$base_root"))) \
  $(($(megabytes "$devel_root") - $(megabytes "$base_root")))

step "Tests"
buildah inspect --type image localhost/sluice-test:runtime >"$work/config.json"
outside=()
if [[ $suite == "$(. /etc/os-release && echo "$VERSION_CODENAME")" ]]; then outside=(--outside build/release/sluice); fi
python3 tests/docker/image_test.py --root "$root" --again "$again_root" --devel "$devel_root" \
  --config "$work/config.json" --python "$work/venv/bin/python" "${outside[@]}"
printf '\ndocker/test.sh passed at commit %s, %d s\n' "$(git rev-parse --short HEAD)" "$SECONDS"
