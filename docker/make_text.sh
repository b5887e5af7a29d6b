#!/usr/bin/env bash
# The King James Bible as one file of text, without the verse label at the start of each line.
#
#   docker/make_text.sh FILE       needs the packages of `docker/install_dependencies.sh data`
set -euo pipefail

sum=cd45f0c9cedab8e4439bd6486c8952c77cc8b0ecc5d1f6ae3513f2039f47229d
raw=${1%.txt}.raw part=${1%.txt}.part
bible -f gen1:1-rev22:21 </dev/null >"$raw"
if ! echo "$sum  $raw" | sha256sum --check --status; then
  echo "make_text: $raw is not the expected text: its SHA-256 is" \
    "$(sha256sum <"$raw" | cut -d' ' -f1), expected $sum" >&2
  exit 1
fi
LC_ALL=C sed -E 's/^[^:]*:[0-9]+ //' "$raw" >"$part"
mv "$part" "$1"
rm "$raw"
