#!/usr/bin/env python3
"""Several hosts on one machine: for the tests of this folder, and by hand.

    tests/hosts/hosts.py up N             starts the hosts node1 (10.77.0.1) to nodeN
    tests/hosts/hosts.py on I COMMAND     runs a command on node I
    tests/hosts/hosts.py mpirun N ARGS    mpirun on node1, with N slots spread over the hosts
    tests/hosts/hosts.py limit I RATE     bandwidth of node I in both directions, such as 100mbit; off: no limit
    tests/hosts/hosts.py kill I           node I loses its network, then its power; boot I starts it again
    tests/hosts/hosts.py down             ends the hosts and all that runs on them

A host is a process that holds namespaces of its own: network, mounts, processes, IPC and host name. It has an address
on a bridge, sshd, /tmp, /run, /dev/shm, /etc/hosts and a boot id. All else of the file system is shared by all hosts.
Nothing has a name outside the namespaces, so that runs side by side do not meet. `up` of a second person needs
another name: SLUICE_HOSTS=NAME.

When the process that started the hosts dies in any way, the kernel ends the hosts with it; the next start removes
the files. Hosts by hand last until `down`. There is no delay to set: netem is rare in kernels; see `sluice schedule`.
"""

import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid

ROOT = pathlib.Path(__file__).resolve().parents[2]
RUNS = pathlib.Path("/var/tmp")  # on each host the same; /tmp is not
PREFIX = "sluice-hosts-"
NETWORK = "10.77.0"
PATIENCE = 20.0  # seconds to start or end a host
OWN = ("/tmp", "/run", "/dev/shm")  # folders that each host has for itself
PACKAGES = {"ip": "iproute2", "tc": "iproute2", "sshd": "openssh-server", "ssh": "openssh-client",
            "ssh-keygen": "openssh-client", "nsenter": "util-linux", "unshare": "util-linux", "setpriv": "util-linux",
            "pkill": "procps"}
NAMESPACES = ("--net", "--uts", "--mount", "--ipc", "--pid")

# Root may start ranks. Ranks of one host may outnumber its cores. No time goes into the search for fabrics.
MPI_ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "self,vader,tcp",
    "CUDA_VISIBLE_DEVICES": "",
    "SLUICE_EMULATED_DEVICES": "0",
}

# $1: the host's name, $2: its folder, then folders to keep in sight. The last command waits for orphans too.
INIT = """set -e
hostname "$1"; own=$2; shift 2
mkdir -p "$own/kept"
for kept; do mkdir -p "$own/kept$kept"; mount --rbind "$kept" "$own/kept$kept"; done
for folder in %s; do mount -t tmpfs -o mode=1777 own "$folder"; done
for kept; do mkdir -p "$kept"; mount --move "$own/kept$kept" "$kept"; done
mkdir -p /run/sshd
mount --bind "$own/../hosts" /etc/hosts
mount --bind "$own/../ssh" /etc/ssh
mount --bind "$own/boot_id" /proc/sys/kernel/random/boot_id
echo ready
exec >/dev/null 2>&1 </dev/null
sleep infinity & wait
""" % " ".join(OWN)

SSHD_CONFIG = """SetEnv PATH={bin}:/usr/local/bin:/usr/bin:/bin
HostKey /etc/ssh/host_key
AuthorizedKeysFile /etc/ssh/key.pub
PermitRootLogin yes
StrictModes no
UsePAM no
MaxStartups 100
PidFile /run/sshd.pid
"""
SSH_CONFIG = """IdentityFile /etc/ssh/key
UserKnownHostsFile /dev/null
StrictHostKeyChecking no
LogLevel ERROR
"""


class Unavailable(Exception):
    """This machine cannot have such hosts; the text says why."""


def find(tool):
    return shutil.which(tool, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def available():
    """Raises Unavailable, which says by name what this machine lacks for such hosts."""
    if os.geteuid() != 0:
        raise Unavailable("not root")
    for tool, package in PACKAGES.items():
        if not find(tool):
            raise Unavailable(f"no {tool} (package {package})")
    if not pathlib.Path(f"/proc/self/task/{os.getpid()}/children").exists():
        raise Unavailable("the kernel has no /proc/PID/task/PID/children")
    probe = ("mount -t tmpfs none /run && ip link add br0 type bridge && "
             "ip link add eth0 type veth peer name port0 && "
             "tc qdisc add dev eth0 root tbf rate 1mbit burst 10kb limit 10kb")
    done = subprocess.run([find("unshare"), *NAMESPACES, "--fork", "--mount-proc", "sh", "-c", probe], text=True,
                          capture_output=True, check=False)
    if done.returncode != 0:
        raise Unavailable(f"namespaces, bridges or tbf are not permitted: {done.stderr.strip()}")


def started(pid):
    """When a process started, in the kernel's ticks; 0 for one that is gone."""
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return 0
    return 0 if stat[0] in "ZX" else int(stat[19])


def end_processes(path):
    """Kills the processes that a file of `Hosts.hold` names, and returns them."""
    held = json.loads(path.read_text())
    for pid, start in held:
        if started(pid) == start:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
    return held


def call(*command):
    """Runs a command that must succeed."""
    done = subprocess.run([find(command[0]), *map(str, command[1:])], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, command))}: {(done.stderr or done.stdout).strip()}")


def wait_for(condition, what, seconds=PATIENCE):
    """The condition's value, once it is true."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise RuntimeError(f"{what}, after {seconds:.0f} s")
        time.sleep(0.005)
    return value


class Hosts:
    """Hosts 1 to `count` on a bridge. `name`: hosts by hand, which outlive this process.

    `shared` is a folder that all hosts see under the same path. `bin` is another, which is on their PATH, also on that
    of an ssh without login. `keep` names folders below /tmp, /run or /dev/shm
    that the hosts see too.
    """

    number = 0  # of this process
    keep_files = False  # at the end: then the next start removes them

    def __init__(self, count, name=None, keep=(ROOT,)):
        available()
        remove_leftovers()
        if not 1 <= count <= 200:
            raise ValueError(f"{count} hosts; legal are 1 to 200")
        Hosts.number += 1
        me = f"{os.getpid()}-{started(os.getpid())}-{Hosts.number}"
        self.folder = RUNS / (PREFIX + (name or me))
        self.count, self.by_hand = count, name is not None
        self.keep = [str(path) for path in map(pathlib.Path, keep) if str(path).startswith(OWN)]
        self.processes = {}  # "switch" or a host's number: what holds its namespaces
        self.shared, self.bin = self.folder / "shared", self.folder / "bin"
        try:
            self.folder.mkdir()
        except FileExistsError:
            raise RuntimeError(f"the hosts '{name}' are up; `down` ends them, SLUICE_HOSTS=NAME names others") from None
        try:
            self.write_files()
            self.hold("switch", ["--net"], ["sh", "-c", "echo ready; exec sleep infinity"])
            call("nsenter", *self.net("switch"), "ip", "link", "add", "br0", "type", "bridge", "forward_delay", "0")
            call("nsenter", *self.net("switch"), "ip", "link", "set", "br0", "up")
            for host in self:
                self.boot(host)
        except BaseException:
            self.down()
            raise

    @classmethod
    def by_name(cls, name):
        """The hosts that another process started by hand."""
        self = cls.__new__(cls)
        self.folder = RUNS / (PREFIX + name)
        if not (self.folder / "switch.pid").exists():
            raise RuntimeError("no hosts are up; `up N` starts them")
        self.count = json.loads((self.folder / "count").read_text())
        self.by_hand, self.keep, self.processes = True, [str(ROOT)] if str(ROOT).startswith(OWN) else [], {}
        self.shared, self.bin = self.folder / "shared", self.folder / "bin"
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.down()

    def __iter__(self):
        return iter(range(1, self.count + 1))

    @staticmethod
    def name(host):
        return f"node{host}"

    @staticmethod
    def address(host):
        return f"{NETWORK}.{host}"

    # --- start and end ---

    def write_files(self):
        self.shared.mkdir()
        self.bin.mkdir()
        ssh = self.folder / "ssh"
        ssh.mkdir()
        for key in ("key", "host_key"):
            call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", ssh / key)
        (ssh / "sshd_config").write_text(SSHD_CONFIG.format(bin=self.bin))
        (ssh / "ssh_config").write_text(SSH_CONFIG)
        lines = ["127.0.0.1 localhost", *(f"{self.address(host)} {self.name(host)}" for host in self)]
        (self.folder / "hosts").write_text("\n".join(lines) + "\n")
        (self.folder / "count").write_text(str(self.count))

    def hold(self, what, namespaces, command):
        """Starts a process in new namespaces, and waits until it says that it is ready."""
        end = () if self.by_hand else (find("setpriv"), "--pdeathsig", "KILL")
        with tempfile.TemporaryFile() as errors:
            process = subprocess.Popen([*end, find("unshare"), *namespaces, *command], stdin=subprocess.DEVNULL,
                                       stdout=subprocess.PIPE, stderr=errors, start_new_session=True)
            self.processes[what] = process
            ready = process.stdout.readline()
            process.stdout.close()
            if ready != b"ready\n":
                process.wait()
                errors.seek(0)
                raise RuntimeError(f"{what} does not start: {errors.read().decode(errors='replace').strip()}")
        pid = process.pid
        if "--fork" in namespaces:
            pid = int(pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
        pids = [pid, process.pid]
        (self.folder / f"{what}.pid").write_text(json.dumps([(pid, started(pid)) for pid in pids]))

    def boot(self, host):
        """Starts a host, also one that was killed."""
        own = self.folder / self.name(host)
        own.mkdir(exist_ok=True)
        (own / "boot_id").write_text(f"{uuid.uuid4()}\n")
        self.hold(host, [*NAMESPACES, "--fork", "--kill-child", "--mount-proc", "--propagation", "private"],
                  ["sh", "-c", INIT, "sh", self.name(host), str(own), *self.keep])
        inside = self.net(host)
        # The card's address stays over a start, as that of a real card does: peers remember it.
        call("ip", "link", "add", "eth0", "netns", self.holder(host), "address", f"02:00:0a:4d:00:{host:02x}", "type",
             "veth", "peer", "name", f"port{host}", "netns", self.holder("switch"))
        call("nsenter", *self.net("switch"), "ip", "link", "set", f"port{host}", "master", "br0", "up")
        call("nsenter", *inside, "ip", "address", "add", f"{self.address(host)}/24", "dev", "eth0")
        call("nsenter", *inside, "ip", "link", "set", "eth0", "up")
        call("nsenter", *inside, "ip", "link", "set", "lo", "up")
        self.start_sshd(host)

    def start_sshd(self, host, *options):
        """Starts sshd on a host, in place of the one that runs there."""
        self.stop_sshd(host)
        log = self.folder / self.name(host) / "sshd.log"
        done = self.run(host, find("sshd"), "-E", log, *options)
        if done.returncode != 0:
            raise RuntimeError(f"sshd on {self.name(host)}: {done.stdout}")
        pid = pathlib.Path(f"/proc/{self.holder(host)}/root/run/sshd.pid")  # written once it listens
        wait_for(lambda: pid.exists() and pid.read_text(), f"sshd on {self.name(host)} does not listen")

    def stop_sshd(self, host):
        """Ends sshd and its connections; from then on the host refuses others."""
        self.run(host, "pkill", "-KILL", "-x", "sshd")
        wait_for(lambda: self.run(host, "pgrep", "-x", "sshd").returncode == 1,
                 f"sshd on {self.name(host)} does not end")
        self.run(host, "rm", "-f", "/run/sshd.pid")

    def kill(self, host):
        """Power and network of a host fail: no peer hears a word. All its processes are gone when this returns."""
        call("nsenter", *self.net("switch"), "ip", "link", "delete", f"port{host}")
        self.end(host)

    def end(self, what):
        path = self.folder / f"{what}.pid"
        if not path.exists():
            return
        held = end_processes(path)
        wait_for(lambda: not any(started(pid) == start for pid, start in held), f"{what} does not end")
        if what in self.processes:
            self.processes.pop(what).wait()
        path.unlink()

    def down(self):
        """Ends the hosts and removes their files, the shared folder too, unless `keep_files` is set."""
        for what in (*self, "switch"):
            self.end(what)
        for process in self.processes.values():  # that did not become ready
            process.kill()
            process.wait()
        if not self.keep_files:
            shutil.rmtree(self.folder, ignore_errors=True)

    # --- use ---

    def holder(self, what):
        """The process that is in the namespaces of a host or of the switch."""
        try:
            pid, start = json.loads((self.folder / f"{what}.pid").read_text())[0]
        except FileNotFoundError:
            raise RuntimeError(f"node{what} is not up") from None
        if started(pid) != start:
            raise RuntimeError(f"{what} has ended")
        return pid

    def net(self, what):
        return ["--target", str(self.holder(what)), "--net"]

    def on(self, host, *command, directory=None):
        """The words that run a command on a host, in the shared folder unless said otherwise."""
        return [find("nsenter"), "--target", str(self.holder(host)), *NAMESPACES, "--", "env", "-C",
                str(directory or self.shared), *map(str, command)]

    def start(self, host, *command, environment=None, plain=False, directory=None, **others):
        """A command on a host, as subprocess.Popen; both outputs in one. `plain`: none of MPI_ENVIRONMENT but root."""
        root = {key: value for key, value in MPI_ENVIRONMENT.items() if "ROOT" in key}
        options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, **others}
        return subprocess.Popen(self.on(host, *command, directory=directory),
                                env={**os.environ, "PATH": f"{self.bin}:{os.environ['PATH']}",
                                     **(root if plain else MPI_ENVIRONMENT), **(environment or {})},
                                **options)

    def run(self, host, *command, timeout=60, **others):
        """Runs a command on a host to its end: its exit code and, as text, both outputs. Killed after `timeout`."""
        process = self.start(host, *command, **others)
        try:
            output = process.communicate(timeout=timeout)[0]
        except BaseException:
            process.kill()
            process.wait()
            raise
        output = output.decode(errors="replace") if output is not None else ""
        return subprocess.CompletedProcess(command, process.returncode, output)

    def check(self, host, *command):
        """Runs a command on a host, which must succeed; its output."""
        done = self.run(host, *command)
        if done.returncode != 0:
            words = " ".join(map(str, command))
            raise RuntimeError(f"{self.name(host)}: {words}: exit {done.returncode}: {done.stdout}")
        return done.stdout

    def slots(self, ranks):
        """mpirun's words that spread ranks over the hosts: the first hosts get one more where they do not divide."""
        hosts = min(ranks, self.count)
        counts = [ranks // hosts + (host < ranks % hosts) for host in range(hosts)]
        places = ",".join(f"{self.name(host)}:{count}" for host, count in enumerate(counts, 1))
        return ["--host", places, "-n", str(ranks)]

    def pull(self, host):
        """Pulls the host's cable: its card loses the carrier."""
        call("nsenter", *self.net("switch"), "ip", "link", "set", f"port{host}", "down")

    def plug(self, host):
        call("nsenter", *self.net("switch"), "ip", "link", "set", f"port{host}", "up")

    def limit(self, host, rate):
        """Bandwidth between a host and the bridge, in each direction, such as "100mbit"; "off": no limit."""
        if rate != "off" and not re.fullmatch(r"\d+[kmg]?bit", rate):
            raise ValueError(f"rate '{rate}'; legal are numbers of bits per second such as 100mbit, 1gbit, or off")
        for what, link in ((host, "eth0"), ("switch", f"port{host}")):
            subprocess.run([find("nsenter"), *self.net(what), find("tc"), "qdisc", "delete", "dev", link, "root"],
                           capture_output=True, check=False)  # none is there at first
            if rate != "off":
                # TCP sends blocks of up to 64 KiB, which the bucket must hold.
                call("nsenter", *self.net(what), find("tc"), "qdisc", "add", "dev", link, "root", "tbf", "rate", rate,
                     "burst", "128kb", "latency", "100ms")


def remove_leftovers():
    """Removes what dead runs left. A folder's name has the process that made it; hosts by hand have a switch."""
    for folder in RUNS.glob(PREFIX + "*"):
        match = re.fullmatch(re.escape(PREFIX) + r"(\d+)-(\d+)-\d+", folder.name)
        try:
            if match:
                alive = started(int(match.group(1))) == int(match.group(2))
            else:
                pid, start = json.loads((folder / "switch.pid").read_text())[0]
                alive = started(pid) == start
            if alive:
                continue
            for path in folder.glob("*.pid"):
                end_processes(path)
        except (OSError, ValueError):  # it starts, or another start removes it
            if not match:
                continue
        shutil.rmtree(folder, ignore_errors=True)


def main(words):
    name = os.environ.get("SLUICE_HOSTS", "by-hand")
    if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
        sys.exit(f"hosts.py: SLUICE_HOSTS is '{name}'; legal are a lower-case letter, then letters, digits, '-'")
    command, arguments = (words or ["help"])[0], words[1:]
    if command not in ("up", "on", "mpirun", "limit", "kill", "boot", "down") or (
            command != "down" and not (arguments and arguments[0].isdecimal())) or (
            command == "limit" and len(arguments) != 2):
        print(__doc__)
        return 0 if command in ("help", "--help", "-h") else 2
    number = int(arguments[0]) if arguments else 0
    if command == "up":
        hosts = Hosts(number, name=name)
        print(f"node1 to node{number} are up; they share {hosts.shared}")
        return 0
    if command == "down" and not (RUNS / (PREFIX + name) / "switch.pid").exists():  # nothing, or half a start
        shutil.rmtree(RUNS / (PREFIX + name), ignore_errors=True)
        return 0
    hosts = Hosts.by_name(name)
    if command in ("on", "limit", "kill", "boot") and number not in hosts:
        raise RuntimeError(f"no node{number}; legal are 1 to {hosts.count}")
    if command in ("on", "mpirun"):
        host, run = (number, arguments[1:] or ["bash"]) if command == "on" else (
            1, ["mpirun", *hosts.slots(number), *arguments[1:]])
        return hosts.run(host, *run, directory=pathlib.Path.cwd(), stdin=None, stdout=None, stderr=None,
                         timeout=None).returncode
    {"limit": lambda: hosts.limit(number, arguments[1]), "kill": lambda: hosts.kill(number),
     "boot": lambda: hosts.boot(number), "down": hosts.down}[command]()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (Unavailable, RuntimeError, ValueError) as error:
        sys.exit(f"hosts.py: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
