#!/usr/bin/env bash
# Start of a container: sets what MPI and SSH need there, then becomes COMMAND.
#
#   sluice-entrypoint COMMAND...       such as `sluice train ...`
#   sluice-entrypoint mpirun ...       the same, where SIGTERM and Ctrl-C stop a training after its step
#   sluice-entrypoint sshd             a node of a job: sshd on port 2222 as this user; SIGTERM stops the
#                                      training that has ranks here, as above, before the node ends
#   sluice-entrypoint health           0 where sshd answers, or where none was started and sluice starts
#
# Everything also works without it, on one host and under srun. It writes below /tmp alone.
#
#   SLUICE_SSH_PORT   of sshd (2222); the client's is in /etc/ssh/ssh_config.d/sluice.conf
#   SLUICE_SSH_KEYS   folder with authorized_keys and a private key (/etc/sluice/ssh), from a secret
set -euo pipefail

port=${SLUICE_SSH_PORT:-2222} keys=${SLUICE_SSH_KEYS:-/etc/sluice/ssh}
# Its own for each user, also where /tmp is the host's.
state=${TMPDIR:-/tmp}/sluice-$(id -u)

refuse() {
  echo "sluice-entrypoint: $*" >&2
  exit 2
}

make_state() {
  mkdir -m 700 "$state" 2>/dev/null || true
  if ! [[ -d $state && ! -L $state && -O $state && -w $state ]]; then
    refuse "$state cannot be written to by user $(id -u): mount a writable /tmp, such as --tmpfs /tmp"
  fi
}

# SSH wants a name for every user; a container may run as a number that has none.
name_user() {
  local wrapper
  if getent passwd "$(id -u)" >/dev/null; then return; fi
  wrapper=$(find /usr/lib /usr/lib64 -name libnss_wrapper.so -print -quit 2>/dev/null || true)
  if [[ -z $wrapper ]]; then
    echo "sluice-entrypoint: user $(id -u) has no entry in /etc/passwd and the image lacks" \
      "libnss-wrapper: one host works, SSH to others does not" >&2
    return
  fi
  make_state
  # Renamed when complete: another command of this user may start at this moment.
  {
    cat /etc/passwd
    echo "sluice-user:x:$(id -u):$(id -g):Sluice:$state:/bin/bash"
  } >"$state/passwd.$$"
  mv "$state/passwd.$$" "$state/passwd"
  cp /etc/group "$state/group.$$"
  mv "$state/group.$$" "$state/group"
  export LD_PRELOAD="$wrapper${LD_PRELOAD:+:$LD_PRELOAD}"
  export NSS_WRAPPER_PASSWD=$state/passwd NSS_WRAPPER_GROUP=$state/group
}

# bridge OLD NEW [VALUE]: Open MPI 4 reads OLD, 5 reads NEW; where one is set, so is the other.
bridge() {
  if [[ -n ${!1-} && -z ${!2-} ]]; then export "$2=${!1}"; fi
  if [[ -n ${!2-} && -z ${!1-} ]]; then export "$1=${!2}"; fi
}

bridge_mpi() {
  bridge OMPI_MCA_orte_default_hostfile PRTE_MCA_prte_default_hostfile
  bridge OMPI_MCA_orte_set_default_slots PRTE_MCA_prte_set_default_slots
  bridge OMPI_MCA_orte_keep_fqdn_hostnames PRTE_MCA_prte_keep_fqdn_hostnames
  bridge OMPI_MCA_plm_rsh_agent PRTE_MCA_plm_ssh_agent
  bridge OMPI_MCA_plm_rsh_args PRTE_MCA_plm_ssh_args
  if [[ ${OMPI_MCA_rmaps_base_oversubscribe-} == [1tTyY]* ]]; then
    export PRTE_MCA_rmaps_default_mapping_policy=${PRTE_MCA_rmaps_default_mapping_policy:-:oversubscribe}
  fi
}

# Whether a process may copy from another one's memory: not under a seccomp filter, which containers
# usually have, nor where the kernel's Yama allows it to ancestors alone.
may_copy() {
  local seccomp capabilities scope=0
  seccomp=$(awk '$1 == "Seccomp:" { print $2 }' /proc/self/status)
  capabilities=$(awk '$1 == "CapEff:" { print $2 }' /proc/self/status)
  if ((16#$capabilities >> 19 & 1)); then return 0; fi # CAP_SYS_PTRACE
  if [[ -r /proc/sys/kernel/yama/ptrace_scope ]]; then scope=$(</proc/sys/kernel/yama/ptrace_scope); fi
  [[ ${seccomp:-0} == 0 && $scope == 0 ]]
}

# Without it Open MPI complains of every message within the host.
copy_twice() {
  if may_copy; then return; fi
  export OMPI_MCA_btl_vader_single_copy_mechanism=${OMPI_MCA_btl_vader_single_copy_mechanism:-none}
  export OMPI_MCA_smsc=${OMPI_MCA_smsc:-^cma,xpmem}
}

check_keys() {
  local file mode
  if ! [[ -e $keys/authorized_keys ]]; then
    refuse "$keys/authorized_keys is missing: mount a secret there, with authorized_keys and id_ed25519"
  fi
  for file in "$keys"/authorized_keys "$keys"/id_*; do
    if [[ $file == *.pub || ! -e $file ]]; then continue; fi
    if ! [[ -r $file ]]; then
      refuse "$file cannot be read by user $(id -u): give it to this user, or to a group of his"
    fi
    # SSH refuses a key of the user's own that others may read; Kubernetes' are root's.
    mode=$(stat -L -c %a "$file")
    if [[ $file == */id_* && -O $file ]] && ((8#$mode & 8#077)); then
      refuse "$file has mode $mode, so SSH would not use it: chmod 600"
    fi
  done
}

start_sshd() {
  local name
  if ! [[ $port =~ ^[0-9]{1,5}$ ]] || ((10#$port < 1 || 10#$port > 65535)); then
    refuse "SLUICE_SSH_PORT is '$port'; legal are 1 to 65535, without rights from 1024 on"
  fi
  [[ -x /usr/sbin/sshd ]] || refuse "/usr/sbin/sshd is missing from this image"
  check_keys
  make_state
  if (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then
    refuse "port $port is taken: end what listens there, or set SLUICE_SSH_PORT, also for the client"
  fi
  rm -f "$state/host_key" "$state/host_key.pub"
  ssh-keygen -q -t ed25519 -N '' -C '' -f "$state/host_key"
  {
    printf 'Port %s\nHostKey %s\nPidFile %s\n' "$port" "$state/host_key" "$state/sshd.pid"
    printf 'AuthorizedKeysFile %s\n' "$keys/authorized_keys"
    printf 'PasswordAuthentication no\nKbdInteractiveAuthentication no\nUsePAM no\n'
    # A secret is a link into a folder of root's, which the group may read.
    printf 'StrictModes no\nX11Forwarding no\nPermitUserRC no\nMaxStartups 1000\n'
    printf 'SetEnv PATH=%s' "$PATH"
    for name in LD_PRELOAD LD_LIBRARY_PATH NSS_WRAPPER_PASSWD NSS_WRAPPER_GROUP TMPDIR \
      OMPI_ALLOW_RUN_AS_ROOT OMPI_ALLOW_RUN_AS_ROOT_CONFIRM; do
      if [[ -n ${!name-} ]]; then printf ' %s=%s' "$name" "${!name}"; fi
    done
    printf '\n'
  } >"$state/sshd_config"
  echo "sluice-entrypoint: sshd listens on port $port"
  trap 'leave' TERM INT
  /usr/sbin/sshd -D -e -f "$state/sshd_config" &
  wait $! || refuse "sshd ended; its last line says why"
}

# A node that is asked to end: its ranks ask the whole job to stop after this step, and it stays until
# the connections of the job are closed.
leave() {
  trap '' TERM INT
  kill $! || true
  pkill -USR1 -u "$(id -u)" -x sluice-job || true # what the program's training is called
  # A connection is served by `sshd`, from OpenSSH 10 on by `sshd-session`.
  while pgrep -u "$(id -u)" -x 'sshd(-session)?' >/dev/null; do sleep 0.2; done
  exit 0
}

health() {
  if [[ -e $state/sshd.pid ]]; then
    (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null
  else
    sluice --version >/dev/null
  fi
}

# mpirun as a child: SIGTERM, by which engines and clusters end a container, and Ctrl-C let the step end
# and save it (exit code 12); a second one ends the job.
run_mpirun() {
  local stops=0 before now code=127
  stop() {
    stops=$((stops + 1))
    if ((stops == 1)); then
      echo "sluice-entrypoint: stopping after this step" >&2 || true
      kill -USR1 $! || true
    else
      kill -TERM $! || true
    fi
  }
  setsid setpriv --pdeathsig USR1 "$@" </dev/null &
  trap stop TERM INT
  # A signal ends `wait` early. The job's own code comes from a `wait` during which there was none.
  while true; do
    before=$stops now=0
    wait $! || now=$?
    if ((now == 127)); then break; fi
    code=$now
    if ((stops == before)); then break; fi
  done
  exit "$code"
}

if (($# == 0)); then refuse "no command; such as 'sluice doctor --self-test', 'mpirun ...' or 'sshd'"; fi
if [[ $1 == health ]]; then
  health
  exit
fi
name_user
bridge_mpi
copy_twice
if ! [[ -w ${HOME:-/} ]]; then
  make_state
  export HOME=$state
fi
if [[ $1 == sshd ]]; then start_sshd; fi
command -v "$1" >/dev/null || refuse "there is no program '$1' in this image; sluice train, mpirun and sshd are"
if [[ ${1##*/} == mpirun ]]; then run_mpirun "$@"; fi
exec "$@"
