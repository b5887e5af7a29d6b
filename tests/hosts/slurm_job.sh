#!/usr/bin/env bash
# Trains over several nodes under Slurm, and goes on by itself after its time limit and after a node that died.
# Copy it, change the lines below, and submit it from a folder that all nodes see:
#
#   sbatch slurm_job.sh [options of `sluice train`]     they win over those below
#
#   scancel --batch --signal=USR1 JOB    saves after the step; the job goes on later, as before the time limit
#   touch run/stop                       saves after the step; the job ends
#   scancel JOB                          ends the job at once; the last complete save stays
#
#SBATCH --job-name=sluice
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --time=24:00:00
#SBATCH --output=sluice-%j.log --open-mode=append
# Seconds before the time limit: longer than a step and a save.
#SBATCH --signal=B:USR1@300
# A node that dies: Slurm starts the job again on others.
#SBATCH --requeue
# With GPUs, one for each rank:
##SBATCH --gpus-per-task=1

# --pipeline x --replicas is nodes x tasks per node.
save=run
train=(sluice train --pipeline 2 --data text.txt --save "$save" --save-minutes 10 --resume auto "$@")
# SLUICE_LAUNCH=mpirun where Slurm has no pmix (srun --mpi=list shows it). When a rank ends, srun gives the others a
# minute. Without --wait a dead rank leaves them waiting; killed at once, ranks that are done with a save lose their 12.
read -ra launch <<<"${SLUICE_LAUNCH:-srun --mpi=pmix --kill-on-bad-exit=0 --wait=60}"
# The job gives up after so many failures without a save between them. Slurm takes minutes to notice a dead node.
attempts=5

newest() { cat "$save/latest" 2>/dev/null; }

count=sluice-$SLURM_JOB_ID.failures
asked=0 saved=$(newest)
date "+== %F %T: ${launch[0]} on $SLURM_JOB_NODELIST, restart ${SLURM_RESTART_COUNT:-0}"
"${launch[@]}" "${train[@]}" </dev/null &
trap 'asked=1; kill -USR1 $!' USR1
# A signal ends `wait` early; the launcher's own code comes from a `wait` without one.
while true; do
  before=$asked
  wait $!
  code=$?
  if ((asked == before)); then break; fi
done

again() {
  echo "== ended with $code after $SECONDS s: $1"
  scontrol requeue "$SLURM_JOB_ID"
  exit "$code"
}

case $code in
  0) rm -f "$count" ;;
  12) # Stopped as asked, and saved.
    rm -f "$count"
    if ((asked)); then again "goes on in the next allocation"; fi
    ;;
  2 | 3 | 4 | 5 | 6 | 7 | 8 | 70) ;; # Another attempt ends in the same way.
  *)
    failures=1
    if [[ $(newest) == "$saved" ]]; then failures=$(($(cat "$count" 2>/dev/null) + 1)); fi
    echo "$failures" >"$count"
    if ((failures < attempts)); then again "failure $failures of $attempts, trying again"; fi
    ;;
esac
echo "== ended with $code"
exit "$code"
