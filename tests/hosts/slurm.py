"""A real Slurm over the hosts of hosts.py: munged and slurmd on every host, slurmctld on node1. No systemd."""

import os

from hosts import Unavailable, find, wait_for

PACKAGES = {"slurmctld": "slurm-wlm", "slurmd": "slurm-wlm", "sbatch": "slurm-wlm", "munged": "munge"}

# The times are short, so that tests are. A node that is silent for SlurmdTimeout seconds is down (default 300). A
# requeued job starts after cred_expire seconds (120, at least 5). A killed job has KillWait seconds from SIGTERM to
# SIGKILL (30).
CONFIGURATION = """ClusterName=sluice
SlurmctldHost=node1({address})
AuthType=auth/munge
AuthInfo=socket=/run/munge.socket,cred_expire=5
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation=/run/slurmctld
SlurmdSpoolDir=/run/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile={logs}/slurmctld.log
SlurmdLogFile={logs}/slurmd-%n.log
SlurmdTimeout=4
SlurmctldTimeout=5
MessageTimeout=4
TCPTimeout=1
KillWait=1
InactiveLimit=0
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=pmix
ReturnToService=2
SchedulerParameters=sched_interval=1,bf_interval=1
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def available():
    """Raises Unavailable, which says by name what this machine lacks for Slurm."""
    for tool, package in PACKAGES.items():
        if not find(tool):
            raise Unavailable(f"no {tool} (package {package})")


class Slurm:
    """Slurm on `hosts`, each with `cpus` processors. It ends with the hosts."""

    def __init__(self, hosts, cpus=2):
        available()
        self.hosts = hosts
        folder = hosts.folder / "slurm"
        folder.mkdir()
        nodes = [f"NodeName={hosts.name(host)} NodeAddr={hosts.address(host)} CPUs={cpus} State=UNKNOWN"
                 for host in hosts]
        self.configuration = folder / "slurm.conf"
        self.configuration.write_text(CONFIGURATION.format(address=hosts.address(1), logs=folder,
                                                           nodes="\n".join(nodes)))
        self.key = folder / "munge.key"
        self.key.write_bytes(os.urandom(1024))
        self.key.chmod(0o600)
        self.environment = {"SLURM_CONF": str(self.configuration)}
        hosts.check(1, "mkdir", "/run/slurmctld")
        self.munge(1)
        self.check(find("slurmctld"), "-c")
        for host in hosts:
            self.start(host)
        wait_for(lambda: self.states() == ["idle"] * hosts.count, f"nodes {self.states()}")

    def munge(self, host):
        self.check(find("munged"), "--force", f"--key-file={self.key}", "--socket=/run/munge.socket",
                   "--pid-file=/run/munged.pid", "--log-file=/run/munged.log", "--seed-file=/run/munge.seed", host=host)

    def start(self, host):
        """Starts slurmd on a host, also after the host was started again."""
        if host != 1:
            self.munge(host)
        self.hosts.check(host, "mkdir", "-p", "/run/slurmd")
        self.check(find("slurmd"), "-N", self.hosts.name(host), host=host)

    def check(self, *command, host=1):
        """Runs a command, which must succeed, with this Slurm; its output."""
        done = self.run(*command, host=host)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(map(str, command))}: exit {done.returncode}: {done.stdout}")
        return done.stdout

    def run(self, *command, host=1, **others):
        return self.hosts.run(host, *command, environment=self.environment, plain=True, **others)

    def states(self):
        """The state of each node, such as idle or down*."""
        return self.check("sinfo", "--noheader", "--Node", "--format=%t").split()
