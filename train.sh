#!/usr/bin/env bash
# Trains a byte-level GPT on the King James Bible over four MPI ranks, then prints some of its text.
#
#   ./train.sh [options passed on to `sluice train`]
#
# Installs what is missing, builds a release build, makes data/kjv.txt. The defaults below give way
# to options of the same name, on the command line or in a --config FILE; the number of ranks is
# pipeline x replicas. A second run installs and builds nothing.
#
# A run that crashes is started again from its newest save by `sluice run`. Started again by you, it
# goes on as well, with the options of that run; --overwrite starts anew. Ctrl-C ends the run after
# its step, with a save and exit code 12; a second one ends it at once.
set -euo pipefail
cd "$(dirname "$0")"

# Open MPI 4.1 and 5: run as root (in a container), and more ranks than cores.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export OMPI_MCA_rmaps_base_oversubscribe=1
export PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe
# All ranks are on this machine: shared memory is enough, and Open MPI 5 complains of every network
# interface that TCP could not use.
export OMPI_MCA_btl=${OMPI_MCA_btl:-^tcp}

options=("$@")
sluice=build/release/sluice

# given NAME: whether the user gave --NAME; leaves its value (the last one) in `value`.
value=
given() {
  local i found=1
  for ((i = 0; i < ${#options[@]}; i++)); do
    case ${options[i]} in
      "--$1") value=${options[i + 1]-} found=0 ;;
      "--$1="*) value=${options[i]#*=} found=0 ;;
    esac
  done
  return $found
}

# in_file NAME FILE: the same for a file of options.
in_file() {
  local found
  if ! [[ -r $2 ]]; then return 1; fi
  found=$(sed -n -E "s/^[[:space:]]*$1[[:space:]]*=[[:space:]]*([^#]*[^#[:space:]]).*/\1/p" "$2" |
    tail -n 1)
  [[ -n $found ]] && value=$found
}

# The same, where the user's configuration file counts too.
configured() {
  if given "$1"; then return 0; fi
  if ! given config; then return 1; fi
  in_file "$1" "$value"
}

# The same, where the options of the run to go on from count too.
saved=
known() {
  configured "$1" || in_file "$1" "$saved"
}

# default NAME VALUE: passes --NAME VALUE on unless it is known; `value` is what holds.
defaults=()
default() {
  if known "$1"; then return; fi
  defaults+=("--$1" "$2")
  value=$2
}

build() {
  docker/install_dependencies.sh build
  if ! [[ -f build/release/build.ninja ]]; then
    cmake --preset release -DSLUICE_BUILD_TESTS=OFF
  fi
  # What is built already is no news.
  cmake --build --preset release --target sluice | sed -u '/Re-checking globbed\|no work to do/d'
}

make_text() {
  if [[ -s data/kjv.txt ]]; then return; fi
  docker/install_dependencies.sh data
  mkdir -p data
  docker/make_text.sh data/kjv.txt
}

build
if given help || [[ " ${options[*]-} " == *" -h "* ]]; then exec "$sluice" train --help; fi

# Where the run goes on from, and so its options: --resume DIR, else --save DIR where it has saves.
# Restarts are for a command that goes on from the newest save of the run itself.
restarts=(--restarts 0)
if configured resume && [[ $value != auto ]]; then
  save=${value%/}
  if [[ $save != */step-* ]]; then restarts=(); fi
  save=${save%/step-*}
  saved=$save/options.conf
  if configured save; then save=$value restarts=(--restarts 0); fi
else
  default save runs/kjv && save=$value
  if [[ -n $save ]] && ! given overwrite && ! configured overwrite; then
    default resume auto
    restarts=()
    if [[ -f $save/state.json ]] || compgen -G "$save/step-*" >/dev/null; then
      saved=$save/options.conf
    fi
  fi
fi
default data data/kjv.txt
if [[ $value == data/kjv.txt ]]; then make_text; fi
default pipeline 2 && pipeline=$value
default replicas 2 && replicas=$value
default schedule 1f1b
default steps 1600
default learning-rate 1e-3
default beta2 0.999 # steps of 1024 tokens are small and noisy
if ! configured save-every; then default save-minutes 1; fi
default trace "${save:-runs/kjv}/trace.json"
default metrics "${save:-runs/kjv}/metrics.jsonl"

if ! [[ $pipeline =~ ^[1-9][0-9]{0,3}$ && $replicas =~ ^[1-9][0-9]{0,3}$ ]]; then
  # Not a number of ranks: the program names the option and what is legal.
  exec "$sluice" train "${defaults[@]}" "${options[@]}"
fi
ranks=$((pipeline * replicas))
mkdir -p "${save:-runs/kjv}"

# mpirun binds one or two ranks to one core each, which would leave further threads no core.
binding=()
if known threads && [[ $value != 1 ]]; then binding=(--bind-to none); fi

# The supervisor has a session of its own, which Ctrl-C does not reach: it gets SIGUSR1, which stops
# the job after its step, then SIGTERM, which ends it. Where this script is killed, it gets SIGUSR1
# as well.
stops=0
stop() {
  stops=$((stops + 1))
  if ((stops == 1)); then kill -USR1 $! || true; else kill -TERM $! || true; fi
}
setsid setpriv --pdeathsig USR1 "$sluice" run "${restarts[@]}" -- mpirun -n "$ranks" \
  "${binding[@]}" "$sluice" train "${defaults[@]}" "${options[@]}" </dev/null &
trap stop INT TERM
# A terminal that closes may send SIGHUP twice: from the kernel and from the user's shell.
trap 'if ((stops == 0)); then stop; fi' HUP
# A signal ends `wait` early. The job's own code comes from a `wait` during which there was none.
code=127
while true; do
  before=$stops now=0
  wait $! || now=$?
  if ((now == 127)); then break; fi
  code=$now
  if ((stops == before)); then break; fi
done
trap - INT TERM HUP
if ((code == 12)); then
  echo "train.sh: the same command goes on with this run" >&2
fi
if ((code != 0)); then exit "$code"; fi

dry=false
if given dry-run; then dry=true; elif configured dry-run; then dry=$value; fi
if [[ $dry != true && -n $save ]]; then
  echo
  echo "A sample at temperature 0.7:"
  "$sluice" generate --weights "$save" --prompt "And the LORD said" --tokens 120 \
    --temperature 0.7 --seed 1
fi
