#!/usr/bin/env bash
# Runs a command in a bare Debian, such as a user's new machine: debootstrap's minbase, which has nothing of
# this machine but its devices, its network and the settings of its package clients. Processes and files
# there end with the command.
#
#   tests/bare_root.sh [--suite bookworm|trixie] [--bind FOLDER:/THERE]... COMMAND...
#   tests/bare_root.sh [--suite bookworm|trixie]     prints the folder of that Debian, which is only to be read
#
#   --suite   this machine's by default
#   --bind    FOLDER of this machine is /THERE too
#
# Needs root that may mount; installs debootstrap. That Debian is made once, in /var/cache/sluice-bare-SUITE. Exit code:
# COMMAND's; 2: wrong use, or this machine cannot.
set -euo pipefail

refuse() {
  echo "bare_root.sh: $*" >&2
  exit 2
}

own=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
suite=$own
binds=()
while [[ ${1-} == --* ]]; do
  (($# > 1)) || refuse "$1 needs a value"
  case $1 in
    --suite) suite=$2 ;;
    --bind)
      [[ $2 == *?:/?* && -d ${2%%:*} ]] || refuse "--bind '$2'; legal: FOLDER:/THERE with a FOLDER that exists"
      binds+=("$(realpath "${2%%:*}")" "${2#*:}")
      ;;
    *) refuse "unknown option '$1'; legal are --suite and --bind" ;;
  esac
  shift 2
done
[[ $suite == bookworm || $suite == trixie ]] || refuse "unknown suite '$suite'; legal are bookworm and trixie"
[[ $(id -u) == 0 ]] && unshare --mount --pid --fork true 2>/dev/null ||
  refuse "a bare Debian needs root that may make mounts and namespaces"
"$(dirname "$0")/../docker/install_dependencies.sh" bare >&2

base=/var/cache/sluice-bare-$suite
work=$(mktemp -d /var/tmp/sluice-bare-XXXXXX)
# Where this script is ended, the command is ended first, and what copies files ends by itself.
finish() {
  if [[ -f $work/pid ]]; then kill -KILL "$(<"$work/pid")" 2>/dev/null || true; fi
  until rm -rf --one-file-system "$work" 2>/dev/null; do sleep 1; done
}
trap finish EXIT

# Where this machine gets Debian's packages; empty: where debootstrap does by itself.
mirror() {
  apt-get indextargets --format '$(SITE)' 'Created-By: Packages' 2>/dev/null | grep -m 1 '/debian/*$' || true
}

make_base() {
  local root=$work/base
  # shellcheck disable=SC2046
  debootstrap --variant=minbase "$suite" "$root" $(mirror) >"$work/log" || {
    tail -n 20 "$work/log" >&2
    exit 1
  }
  apt-config dump | grep '^Acquire::' >"$root/etc/apt/apt.conf.d/99machine" || true
  if [[ $suite == "$own" && -f /etc/apt/sources.list.d/debian.sources ]]; then
    cp /etc/apt/sources.list.d/debian.sources "$root/etc/apt/sources.list.d/"
    : >"$root/etc/apt/sources.list"
  fi
  if [[ -f /etc/pip.conf ]]; then cp /etc/pip.conf "$root/etc/"; fi
  if [[ -d /usr/local/share/ca-certificates ]]; then # which the package ca-certificates installs there
    cp -r /usr/local/share/ca-certificates "$root/usr/local/share/"
  fi
  rm -rf "$root"/var/cache/apt/* "$root"/var/lib/apt/lists/* "$root"/var/log/* "$root"/dev/*
  mv -T "$root" "$base"
}

exec 9>"$base.lock"
flock 9
[[ -d $base ]] || make_base
exec 9>&-
if (($# == 0)); then
  echo "$base"
  exit
fi

cp -a "$base" "$work/root"
cp /etc/resolv.conf "$work/root/etc/"
printf '127.0.0.1 localhost\n127.0.1.1 %s\n' "$(uname -n)" >"$work/root/etc/hosts"
settings=(HOME=/root PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin)
while read -r name; do settings+=("$name=${!name}"); done < <(compgen -e | grep -E '^PIP_|_proxy$' || true)

# Not chroot, within which the kernel refuses some namespaces. Bash stays as the first process, to reap orphans.
sh -c 'echo $$ >"$0" && exec setpriv --pdeathsig KILL unshare --mount --propagation private --pid --fork --kill-child "$@"' \
  "$work/pid" bash -euo pipefail -c '
    cd "$1"
    mount --bind . .
    cd "$1"
    mount -t proc proc proc
    mount --rbind /sys sys
    mount --rbind /dev dev
    mount -t tmpfs tmpfs dev/shm
    mkdir before
    pivot_root . before
    cd /
    for ((i = $2; i > 0; --i)); do # here, where a link of this Debian leads to a place in it
      mkdir -p "$4"
      mount --bind "/before$3" "$4"
      set -- "$1" "$2" "${@:5}"
    done
    shift 2
    umount -l /before
    rmdir /before
    code=0
    env -i "$@" || code=$?
    exit "$code"
' bash "$work/root" "$((${#binds[@]} / 2))" "${binds[@]}" "${settings[@]}" "$@"
