#!/usr/bin/env bash
# What `docker run --rm sluice` does: trains about a minute on the King James Bible over two
# ranks, then prints some text of the model. OPTIONS go to `sluice train`.
#
#   docker/demo.sh [OPTIONS]
set -euo pipefail

run=$PWD/demo
if ! [[ -w $PWD ]]; then
  run=$(mktemp -d)
  echo "sluice: $PWD cannot be written to; the run is in $run and ends with this container"
fi
# All ranks are in this container.
export OMPI_MCA_btl=${OMPI_MCA_btl:-^tcp} OMPI_MCA_rmaps_base_oversubscribe=1 \
  PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe
# In the background: bash as the first process of a container has Ctrl-C and SIGTERM only while it waits.
trap 'kill $! || true; exit 143' TERM INT
mpirun -n 2 sluice train --pipeline 2 --data /usr/local/share/sluice/kjv.txt --steps 600 \
  --width 128 --heads 4 --context 128 --batch-size 8 --micro-batches 4 --learning-rate 3e-3 --beta2 0.99 \
  --save "$run" --overwrite "$@" </dev/null &
wait $!
echo
echo "A sample at temperature 0.7:"
sluice generate --weights "$run" --prompt "And the LORD said" --tokens 120 --temperature 0.7 --seed 1
