#!/usr/bin/env bash
# Runs every benchmark and prints its tables; OUT gets one line of JSON for each table.
#   tests/benchmarks/run.sh [BUILD=build/release] [OUT=benchmarks.jsonl]
set -euo pipefail
cd "$(dirname "$0")/../.."
programs=${1:-build/release}/tests/benchmarks
out=${2:-benchmarks.jsonl}
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export OMPI_MCA_rmaps_base_oversubscribe=1 PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe

title() { printf '\n== %s\n' "$*"; }
run() {
  title "$*"
  "$@" --json "$out"
}

: >"$out"
run "$programs/engine_benchmark"
run mpirun -n 2 "$programs/engine_benchmark"
run mpirun -n 4 "$programs/engine_benchmark"
for ranks in 2 4 8; do run mpirun -n "$ranks" "$programs/pipeline_benchmark"; done
for ranks in 4 8; do
  run mpirun -n "$ranks" "$programs/pipeline_benchmark" --stages family --steps 5
done
saves=$(mktemp -d)
run mpirun -n 2 "$programs/save_benchmark" --directory "$saves"
rm -r "$saves"
for ranks in 2 4; do run mpirun -n "$ranks" "$programs/shard_benchmark"; done
run mpirun -n 2 "$programs/transport_benchmark"
for ranks in 2 4; do run mpirun -n "$ranks" "$programs/collective_benchmark"; done
run "$programs/operator_benchmark"
run "$programs/block_shards_benchmark"
run "$programs/step_benchmark"
run "$programs/planning_benchmark"
for ranks in 4 8; do run mpirun -n "$ranks" "$programs/waiting_benchmark"; done
