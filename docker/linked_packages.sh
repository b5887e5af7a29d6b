#!/usr/bin/env bash
# The packages of the shared libraries that a program is linked with, one a line, sorted: what the
# runtime image installs. Libraries that belong to no package, such as a toolkit's, are left out.
#
#   docker/linked_packages.sh PROGRAM
set -euo pipefail

libraries=$(ldd "$1" | awk '$3 ~ /^\// { print $3; sub("^/usr", "", $3); print "/usr" $3; print $3 }')
# Each name with and without /usr: dpkg knows one of them.
# shellcheck disable=SC2046
dpkg-query -S $(sort -u <<<"$libraries") 2>/dev/null | cut -d: -f1 | sort -u || true
