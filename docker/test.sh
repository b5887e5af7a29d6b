#!/usr/bin/env bash
# Builds the CPU images without a container engine, and tests them: their files, their default
# command, bad input, and a training over three hosts whose files are the image's.
#
#   docker/test.sh [--suite bookworm|trixie] [--keep] [--cold]
#
# Needs root and the package sources of this machine, and installs what is missing: buildah,
# debootstrap, and what tests/hosts needs. Stands on a base made by debootstrap. --keep leaves the
# images; otherwise only that base stays, for the next run. --cold uses nothing that stayed, and compiles
# everything for each of the two builds that are compared.
set -euo pipefail
cd "$(dirname "$0")/.."

suite=bookworm keep=false cold=false
while (($# > 0)); do
  case $1 in
    --keep) keep=true ;;
    --cold) cold=true ;;
    --suite)
      suite=${2-}
      [[ $suite == bookworm || $suite == trixie ]] || {
        echo "test.sh: unknown suite '$suite'; legal are bookworm and trixie" >&2
        exit 2
      }
      shift
      ;;
    *)
      echo "test.sh: unknown option '$1'; legal are --suite, --keep and --cold" >&2
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
    buildah rmi localhost/sluice-test:{runtime,again,devel,example} >/dev/null 2>&1 || true
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
  local container root=$work/base
  if buildah inspect --type image "$base" >/dev/null 2>&1; then return; fi
  apt-get update -qq
  # shellcheck disable=SC2046
  debootstrap --variant=minbase "$suite" "$root" $(mirror) >"$work/debootstrap.log"
  apt-config dump | grep '^Acquire::' >"$root/etc/apt/apt.conf.d/99machine" || true
  if [[ $suite == "$(. /etc/os-release && echo "$VERSION_CODENAME")" && -f /etc/apt/sources.list.d/debian.sources ]]; then
    cp /etc/apt/sources.list.d/debian.sources "$root/etc/apt/sources.list.d/"
    : >"$root/etc/apt/sources.list"
  fi
  rm -rf "$root"/var/cache/apt/* "$root"/var/lib/apt/lists/* "$root"/var/log/* "$root"/dev/*
  container=$(buildah from scratch)
  buildah add -q "$container" "$root" / >/dev/null
  buildah commit -q --rm --format docker --timestamp 0 "$container" "$base" >/dev/null
  rm -rf --one-file-system "$root"
}

# Where this machine gets Debian's packages; empty: where debootstrap does by itself.
mirror() {
  apt-get indextargets --format '$(SITE)' 'Created-By: Packages' 2>/dev/null | grep -m 1 '/debian/*$' || true
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

step "Dependencies"
docker/install_dependencies.sh images hosts data build
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check spdx-tools

# What buildah keeps for `RUN --mount=type=cache`: compiled sources.
forget() {
  if $cold; then rm -rf --one-file-system /var/tmp/buildah-cache*; fi
}

step "Base"
if $cold; then buildah rmi --force "$base" >/dev/null 2>&1 || true; fi
forget
make_base

step "Images"
build() {
  docker/build.sh cpu --engine buildah --base "$base" "$@" >"$work/build.log" 2>&1 || {
    tail -n 40 "$work/build.log" >&2
    exit 1
  }
  tail -n 1 "$work/build.log"
}
build --tag localhost/sluice-test:runtime
printf 'done at %d s\n' "$SECONDS"
build --target devel --tag localhost/sluice-test:devel
printf 'done at %d s\n' "$SECONDS"
forget
build --tag localhost/sluice-test:again --no-cache
printf 'done at %d s\n' "$SECONDS"

step "A program of one's own, on sluice:devel"
buildah build --quiet --format docker --tag localhost/sluice-test:example --file docker/example.Dockerfile \
  --build-arg DEVEL=localhost/sluice-test:devel --build-arg RUNTIME=localhost/sluice-test:runtime examples
program=$(buildah from --pull-never localhost/sluice-test:example)
containers+=("$program")
buildah run "$program" -- sluice-entrypoint mpirun --oversubscribe -n 2 program

step "The same sources, built outside"
if ! [[ -f build/release/build.ninja ]]; then cmake --preset release -DSLUICE_BUILD_TESTS=OFF; fi
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
python3 tests/docker/image_test.py --root "$root" --again "$again_root" --devel "$devel_root" --config "$work/config.json" \
  --build build/release --python "$work/venv/bin/python"
printf '\ndocker/test.sh passed at commit %s, %d s\n' "$(git rev-parse --short HEAD)" "$SECONDS"
