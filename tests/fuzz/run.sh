#!/usr/bin/env bash
# Runs the built fuzzers one after the other: tests/fuzz/run.sh RUNS SECONDS [READER...]
# Each stops after RUNS inputs (-1: no limit) or SECONDS (0: no limit), whichever comes first. Without
# READER all run. The kept corpus comes first, then what the fuzzer makes of it. What it found before
# is in build/fuzz/found. An input that fails stays in build/fuzz and ends the script.
set -euo pipefail
cd "$(dirname "$0")/../.."
(($# >= 2)) || { sed -n '2,5s/^# //p' tests/fuzz/run.sh >&2; exit 2; }
runs=$1 seconds=$2
shift 2
(($#)) || set -- array_file cluster_file option_file save_state schedule_file token_file tokenizer_file weights
# Most inputs end in an exception, which the check for use after return makes several times slower.
export ASAN_OPTIONS=${ASAN_OPTIONS:-detect_stack_use_after_return=0:malloc_context_size=2}
for reader in "$@"; do
  echo "$reader"
  corpora=("build/fuzz/found/$reader" "tests/fuzz/corpus/$reader")
  if [[ $reader == schedule_file ]]; then corpora+=(tests/schedules/data); fi
  mkdir -p "${corpora[0]}"
  "build/fuzz/tests/fuzz/${reader}_fuzz" -runs="$runs" -max_total_time="$seconds" -timeout=10 \
    -rss_limit_mb=2048 -verbosity=0 -print_final_stats=1 \
    -artifact_prefix="build/fuzz/$reader-" "${corpora[@]}"
done
