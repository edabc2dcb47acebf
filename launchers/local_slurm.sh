#!/usr/bin/env bash
# A SLURM cluster of two nodes on this machine, for trials and tests. Needs root and packages of Debian or Ubuntu.
#
#   launchers/local_slurm.sh install              install the packages by apt, if they are missing
#   launchers/local_slurm.sh run <command> ...    start the cluster, run the command, stop the cluster
#
# The cluster writes only to a temporary folder, listens only on the loopback interface and stops with the command.
# Both nodes are this machine. Their names, 127.0.0.1 and 127.0.0.2, are addresses that resolve without a name server.
# A job in the partition `urgent` preempts jobs in `debug`, which are requeued.
set -euo pipefail

PACKAGES=(slurmctld slurmd slurm-client munge)

fail() {
  echo "error: $*" >&2
  exit 2
}

installed() {
  local name
  for name in slurmctld slurmd sbatch munged; do
    command -v "$name" >/dev/null || return 1
  done
}

install_packages() {
  if installed; then return; fi
  [ "$(id -u)" -eq 0 ] || fail "SLURM must be installed by root, got user $(id -un); run it as root"
  command -v apt-get >/dev/null || fail "SLURM must be installed by hand without apt-get (slurmctld, slurmd, munge)"
  "$(dirname "$0")/apt_install.sh" "${PACKAGES[@]}"
}

free_ports() {
  python3 - "$1" <<'PY'
import socket, sys
taken = [socket.create_server(("127.0.0.1", 0)) for _ in range(int(sys.argv[1]))]
print(*(each.getsockname()[1] for each in taken))
PY
}

configure() {
  local host ctld first second
  host=$(uname -n) host=${host%%.*}
  read -r ctld first second <<<"$(free_ports 3)"
  cat >"$FOLDER/slurm.conf" <<CONF
ClusterName=local
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$ctld
# bind only to the addresses in this file, not to all addresses of the machine
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# a requeued job starts only after its old credential has expired; the default is two minutes
AuthInfo=socket=$FOLDER/munge.socket,cred_expire=5
# scontrol shows finished jobs for a day; the default is five minutes
MinJobAge=86400
StateSaveLocation=$FOLDER/state
SlurmdSpoolDir=$FOLDER/spool-%n
SlurmctldPidFile=$FOLDER/slurmctld.pid
SlurmdPidFile=$FOLDER/slurmd-%n.pid
SlurmctldLogFile=$FOLDER/slurmctld.log
SlurmdLogFile=$FOLDER/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,sched_min_interval=0,batch_sched_delay=0,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=20
SlurmdParameters=config_overrides
ReturnToService=2
NodeName=127.0.0.1 NodeHostname=$host NodeAddr=127.0.0.1 Port=$first CPUs=2 RealMemory=4000
NodeName=127.0.0.2 NodeHostname=$host NodeAddr=127.0.0.1 Port=$second CPUs=2 RealMemory=4000
PartitionName=debug Nodes=ALL Default=YES PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL PriorityTier=2 PreemptMode=OFF
CONF
}

start() {
  (umask 077 && head -c 1024 /dev/urandom >"$FOLDER/munge.key")
  mkdir -p "$FOLDER/state" "$FOLDER/spool-127.0.0.1" "$FOLDER/spool-127.0.0.2"
  # --force: munged accepts a temporary folder
  munged --force --socket="$FOLDER/munge.socket" --key-file="$FOLDER/munge.key" --seed-file="$FOLDER/munge.seed" \
    --pid-file="$FOLDER/munged.pid" --log-file="$FOLDER/munged.log" 2>"$FOLDER/munged.err"
  slurmctld
  slurmd -N 127.0.0.1
  slurmd -N 127.0.0.2
  local try
  for try in $(seq 200); do
    [ "$(sinfo --noheader --Node --partition=debug --states=idle --format=%N 2>/dev/null | wc -l)" -eq 2 ] && return
    sleep 0.1
  done
  tail -n 20 "$FOLDER"/*.log >&2
  fail "SLURM did not start; its logs are above"
}

stop() {
  local pid try
  timeout 10 scancel --full --user="$(id -u)" 2>/dev/null || true
  for try in $(seq 50); do
    [ -z "$(timeout 10 squeue --noheader 2>/dev/null)" ] && break
    sleep 0.1
  done
  for pid in "$FOLDER"/slurmd-*.pid "$FOLDER"/slurmctld.pid "$FOLDER"/munged.pid; do
    if [ -s "$pid" ]; then end "$(cat "$pid")"; fi
  done
  # Processes that jobs have left running: SLURM_CONF in their environment names this cluster.
  for pid in $(grep -lzs "^SLURM_CONF=$FOLDER/" /proc/[0-9]*/environ | cut -d/ -f3); do
    kill -9 "$pid" 2>/dev/null || true
  done
  rm -rf "$FOLDER"
}

end() {
  local try
  kill "$1" 2>/dev/null || return 0
  for try in $(seq 50); do
    case "$(ps -o stat= -p "$1")" in "" | Z*) return 0 ;; esac
    sleep 0.1
  done
  kill -9 "$1" 2>/dev/null || true
}

run() {
  [ "$(id -u)" -eq 0 ] || fail "a SLURM on this machine must be started by root, got user $(id -un); run it as root"
  installed || fail "SLURM must be installed; run $0 install"
  FOLDER=$(mktemp -d "${TMPDIR:-/tmp}/slurm.XXXXXX")
  chmod 755 "$FOLDER"
  trap stop EXIT
  configure
  export SLURM_CONF="$FOLDER/slurm.conf"
  start
  "$@"
}

case "${1:-}" in
  install) install_packages ;;
  run) shift; run "$@" ;;
  *) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0"; exit 2 ;;
esac
