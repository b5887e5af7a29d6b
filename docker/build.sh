#!/usr/bin/env bash
# Builds an image of Sluice.
#
#   docker/build.sh cpu|cuda [--target runtime|devel] [--base IMAGE] [--runtime-base IMAGE]
#                            [--tag NAME] [--engine docker|podman|buildah] [--packages FILE]
#                            [--architectures LIST] [--no-cache]
#
#   --base          what it is built on; --runtime-base: what the runtime image stands on (default: --base
#                   where that is given, else the published image of that kind)
#   --tag           sluice:runtime (also sluice alone), sluice:devel; for GPUs sluice:cuda-runtime and
#                   sluice:cuda-devel
#   --engine        the first of docker, podman and buildah that works
#   --packages      versions to install, a file like /usr/local/share/sluice/packages.txt of an image; beside
#                   it may be that image's build_packages.txt, of the toolchain
#   --architectures GPUs to compile for, such as 90 or "80;90"; all that the toolkit has
#
# Prints the image's name and size. Exit code 2: wrong use.
set -euo pipefail
caller=$PWD
cd "$(dirname "$0")/.."

refuse() {
  echo "build.sh: $*" >&2
  exit 2
}

# An engine that answers.
works() {
  command -v "$1" >/dev/null && "$1" version >/dev/null 2>&1
}

kind=${1-}
case $kind in
  cpu)
    base=docker.io/library/debian:bookworm-slim
    runtime_base=$base prefix='' cuda=off
    ;;
  cuda)
    base=docker.io/nvidia/cuda:13.0.2-cudnn-devel-ubuntu24.04
    runtime_base=docker.io/nvidia/cuda:13.0.2-cudnn-runtime-ubuntu24.04 prefix=cuda- cuda=on
    ;;
  -h | --help)
    sed -n '2,20s/^# \{0,1\}//p' "$0"
    exit
    ;;
  *) refuse "unknown kind '$kind'; legal are cpu and cuda" ;;
esac
shift
target=runtime tag='' engine='' packages='' build_packages='' architectures='' own_base='' own_runtime_base='' more=()
while (($# > 0)); do
  case $1 in
    --no-cache)
      more+=(--no-cache)
      shift
      continue
      ;;
    --target | --base | --runtime-base | --tag | --engine | --packages | --architectures)
      [[ -n ${2-} ]] || refuse "$1 needs a value"
      ;;
    *) refuse "unknown option '$1'; 'docker/build.sh --help' lists them" ;;
  esac
  case $1 in
    --target) target=$2 ;;
    --base) own_base=$2 ;;
    --runtime-base) own_runtime_base=$2 ;;
    --tag) tag=$2 ;;
    --engine) engine=$2 ;;
    --architectures) architectures=$2 ;;
    --packages)
      list=$2
      if [[ $list != /* ]]; then list=$caller/$list; fi
      [[ -r $list ]] || refuse "cannot read the list of packages '$2'"
      packages=$(tr '\n' ' ' <"$list")
      list=${list%/*}/build_packages.txt # of the toolchain
      if [[ -r $list ]]; then build_packages=$(tr '\n' ' ' <"$list"); fi
      ;;
  esac
  shift 2
done
[[ $target == runtime || $target == devel ]] || refuse "unknown target '$target'; legal are runtime and devel"
base=${own_base:-$base}
runtime_base=${own_runtime_base:-${own_base:-$runtime_base}}
if [[ -z $tag && $kind$target == cpuruntime ]]; then more+=(--tag sluice); fi
tag=${tag:-sluice:$prefix$target}

case $engine in
  '')
    for engine in docker podman buildah none; do
      if works $engine; then break; fi
    done
    [[ $engine != none ]] ||
      refuse "none of docker, podman and buildah works here; 'apt-get install buildah' is the smallest"
    ;;
  docker | podman | buildah)
    works "$engine" || refuse "'$engine' is not installed or does not answer ('$engine version' fails)"
    ;;
  *) refuse "unknown engine '$engine'; legal are docker, podman and buildah" ;;
esac

build=("$engine" build)
if [[ $engine != docker ]]; then build+=(--format docker --timestamp 0); fi # OCI's has no HEALTHCHECK
if [[ $engine == buildah ]]; then
  # chroot needs no runtime, no network of its own, and works in most containers.
  export BUILDAH_ISOLATION=${BUILDAH_ISOLATION:-chroot}
  build+=(--layers)
fi
if [[ $engine == docker ]]; then export DOCKER_BUILDKIT=1; fi

# A base that is not there or that has no apt: said before an hour of work, in one line.
case $base$runtime_base in *[[:space:]]*) refuse "a base is '$base', '$runtime_base'; legal are names of images" ;; esac
for image in "$base" "$runtime_base"; do
  "$engine" inspect --type image "$image" >/dev/null 2>&1 || "$engine" pull -q "$image" >/dev/null 2>&1 ||
    refuse "there is no base '$image' here, and it cannot be pulled"
done

version=$(sed -n 's/^project(sluice VERSION \([0-9.]*\).*/\1/p' CMakeLists.txt)
revision=$(git rev-parse HEAD 2>/dev/null || echo unknown)
if [[ -n $(git status --porcelain 2>/dev/null) ]]; then revision+=-changed; fi

"${build[@]}" --file docker/Dockerfile --target "$target" --tag "$tag" "${more[@]}" \
  --build-arg "BUILD_BASE=$base" --build-arg "RUNTIME_BASE=$runtime_base" --build-arg "CUDA=$cuda" \
  --build-arg "CUDA_ARCHITECTURES=$architectures" --build-arg "PACKAGES=$packages" \
  --build-arg "BUILD_PACKAGES=$build_packages" \
  --build-arg "VERSION=$version" --build-arg "REVISION=$revision" .

if [[ $engine == buildah ]]; then
  size=$(buildah images --format '{{.Size}}' "$tag" | head -n 1)
else
  size=$("$engine" images --format '{{.Size}}' "$tag" | head -n 1)
fi
echo "$tag: $size, of which the base is part"
