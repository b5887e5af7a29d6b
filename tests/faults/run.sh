#!/usr/bin/env bash
# Runs every campaign and prints a table of what held.
#   tests/faults/run.sh [--full] [BUILD=build/release]
# Without --full the counts are those of ctest (-L faults). With it: 1000 kills, 20 of each signal, 10000
# cases of damage, 5000 steps, 50 kills of a supervised training and 20 that lose half their ranks twice, 20 stopped and 20
# killed ranks, 20 of each fault within a collective. SLUICE_FAULTS_SEED names the seed (1); SLUICE_FAULTS_KILLS and
# SLUICE_FAULTS_DAMAGE replace counts.
set -euo pipefail
cd "$(dirname "$0")/../.."

kills=20 damage=300 steps=300 signals=1 supervised=3 halves=1 full=()
if [[ ${1:-} == --full ]]; then
  shift
  kills=1000 damage=10000 steps=5000 signals=20 supervised=50 halves=20 full=(--full)
fi
build=$(realpath "${1:-build/release}")
seed=${SLUICE_FAULTS_SEED:-1}
logs=$(mktemp -d)
rows=() failed=0

campaign() {
  local name=$1 code=0 verdict=holds start=$SECONDS
  shift
  printf '\n== %s: %s\n' "$name" "$*"
  python3 "tests/faults/$@" --build "$build" 2>&1 | tee "$logs/$name" || code=$?
  if ((code == 77)); then
    verdict=skipped
  elif ((code != 0)); then
    verdict=FAILED failed=1
  fi
  rows+=("$(printf '%-11s %-8s %5d s  %s' "$name" "$verdict" $((SECONDS - start)) "$(tail -n 1 "$logs/$name")")")
}

campaign disk disk_faults.py "${full[@]}"
campaign signals signals.py --count "$signals" "${full[@]}"
campaign jobs supervised_jobs.py
campaign restarts supervised.py --count "$supervised" --halves "$halves" --seed "$seed"
campaign steady steady.py --steps "$steps"
campaign kill kill_campaign.py --count "${SLUICE_FAULTS_KILLS:-$kills}" --seed "$seed"
campaign hangs hangs.py --seed "$seed" "${full[@]}"
campaign collectives collectives.py --seed "$seed" "${full[@]}"
campaign damage damage_campaign.py --count "${SLUICE_FAULTS_DAMAGE:-$damage}" --seed "$seed"

printf '\n'
printf '%s\n' "${rows[@]}"
rm -r "$logs"
exit "$failed"
