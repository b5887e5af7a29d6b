#!/usr/bin/env bash
# Makes apt install these versions and no others: while an image is built.
#
#   docker/pin_packages.sh "NAME=VERSION NAME=VERSION ..."     empty: any version
set -euo pipefail

for package in $1; do
  printf 'Package: %s\nPin: version %s\nPin-Priority: 1001\n\n' "${package%%=*}" "${package#*=}"
done >/etc/apt/preferences.d/sluice
