#!/usr/bin/env python3
"""The hosts of hosts.py: apart from each other and from other runs, and gone afterwards whatever happens.

    tests/hosts/hosts_test.py [--case NAME] [--build DIR]
"""

import functools
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time

import hosts as module
from cases import require, run
from hosts import Hosts, started, wait_for

SCRIPT = str(pathlib.Path(module.__file__).resolve())


def apart(setup):
    """Each host has its own name, address, processes, boot id, /tmp and /dev/shm; they share the rest."""
    hosts = setup.hosts
    for folder in module.OWN:
        hosts.check(1, "touch", f"{folder}/of-node1")
        code = hosts.run(2, "test", "-e", f"{folder}/of-node1").returncode
        require(code == 1 and not pathlib.Path(folder, "of-node1").exists(), f"{folder} is shared")
    for question in ("hostname", "hostname -i", "cat /proc/sys/kernel/random/boot_id", "readlink /proc/self/ns/pid"):
        answers = [hosts.check(host, *question.split()).strip() for host in hosts]
        require(len({*answers}) == hosts.count, f"{question}: {answers}")
    hosts.check(1, "touch", "seen")
    hosts.check(2, "test", "-e", "seen")
    said = hosts.check(1, "ssh", "node2", "hostname; pwd; tty || true").split("\n")
    require(said[0] == "node2", f"ssh node2: {said}")


def orphans(setup):
    """A process whose parent is gone leaves no zombie."""
    hosts = setup.hosts
    hosts.check(1, "sh", "-c", "(setsid sh -c 'exec true' &)")
    wait_for(lambda: "Z" not in hosts.check(1, "ps", "-A", "-o", "state=").split(), "a zombie stays")


def limited(setup):
    """What is sent through a limited link cannot be there sooner, in either direction."""
    hosts, size, rate = setup.hosts, 1_000_000, 8_000_000
    hosts.limit(2, f"{rate}bit")
    for source, target in ((1, 2), (2, 1)):
        begin = time.monotonic()
        sender = f"head -c {size} /dev/zero | ssh -o Compression=no node{target} 'cat >/dev/null'"
        hosts.check(source, "sh", "-c", sender)
        least = (size - 2 * 131072) * 8 / rate  # the buckets are full at first
        took = time.monotonic() - begin
        require(took >= least, f"{size} bytes from node{source} to node{target}: {took:.2f} s, at least {least:.2f} s")
    hosts.limit(2, "off")
    require("tbf" not in hosts.check(2, "tc", "qdisc", "show"), "the limit stays")


def killed_host(setup):
    """A host that lost its power is silent; started again it is the same host with another boot id."""
    hosts = setup.hosts
    boot = hosts.check(2, "cat", "/proc/sys/kernel/random/boot_id")
    hosts.kill(2)
    code = hosts.run(1, "ssh", "-o", "ConnectTimeout=1", "node2", "true").returncode
    require(code == 255, f"ssh to a dead host: exit {code}")
    hosts.boot(2)
    require(hosts.check(1, "ssh", "node2", "hostname").strip() == "node2", "no node2 after the start")
    require(hosts.check(2, "cat", "/proc/sys/kernel/random/boot_id") != boot, "the boot id is the old one")


def killed_run(setup):
    """kill -9 of a run: the kernel ends its hosts and what they run, the next start removes its files."""
    sleep = f"sleep 1{os.getpid()}"
    program = ("import sys, time; sys.path.insert(0, sys.argv[1]); from hosts import Hosts; "
               f"hosts = Hosts(2); hosts.start(2, *'{sleep}'.split()); print(hosts.folder, flush=True); "
               "time.sleep(1000)")
    victim = subprocess.Popen([sys.executable, "-c", program, os.path.dirname(SCRIPT)], text=True,
                              stdout=subprocess.PIPE)
    folder = pathlib.Path(victim.stdout.readline().strip())
    pids = [pid for path in folder.glob("*.pid") for pid, _ in module.json.loads(path.read_text())]
    inside = wait_for(lambda: [pid for pid in map(int, filter(str.isdecimal, os.listdir("/proc")))
                               if command_line(pid) == sleep], "the host runs nothing")
    require(len(pids) == 6 and all(started(pid) for pid in pids), f"holders {pids}")
    victim.send_signal(signal.SIGKILL)
    victim.communicate()
    wait_for(lambda: not any(started(pid) for pid in pids + inside), "the hosts outlive their run")
    require(folder.exists(), "nothing is left to clean")
    module.remove_leftovers()
    require(not folder.exists(), f"{folder} is left")
    require(setup.folder.exists(), "the files of a living run are gone")


def command_line(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
    except OSError:
        return ""


def side_by_side(setup):
    """A second run at the same time has the same names and addresses, and nothing of the first."""
    with Hosts(2) as others:
        others.check(1, "touch", "of-the-second")
        require(not (setup.folder / "of-the-second").exists(), "the shared folders are one")
        boots = [hosts.check(2, "cat", "/proc/sys/kernel/random/boot_id") for hosts in (setup.hosts, others)]
        require(boots[0] != boots[1], "node2 is one host")
        folder = others.folder
    require(not folder.exists(), f"{folder} is left")


def kept(setup):
    """A build below /tmp stays in sight of the hosts, and nothing else there."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, Hosts(1, keep=(folder,)) as hosts:
        pathlib.Path(folder, "seen").touch()
        hosts.check(1, "test", "-e", f"{folder}/seen")
        there = hosts.check(1, "ls", "-A", pathlib.Path(folder).parent).split()
        require(there == [pathlib.Path(folder).name], f"a host's /tmp has {there}")


def by_hand(setup):
    """The commands of the script."""
    name = f"test-{os.getpid()}"

    def script(*words, code=0):
        done = subprocess.run([sys.executable, SCRIPT, *words], env={**os.environ, "SLUICE_HOSTS": name}, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60, check=False)
        require(done.returncode == code, f"hosts.py {' '.join(words)}: exit {done.returncode}\n{done.stdout}")
        return done.stdout

    script("on", "1", "true", code=1)
    try:
        script("up", "3")
        require("are up" in script("up", "2", code=1), "a second `up` does not say why not")
        require(script("on", "3", "hostname").strip() == "node3", "on 3 is not node3")
        script("on", "1", "sh", "-c", "exit 7", code=7)
        require("legal are 1 to 3" in script("on", "4", "true", code=1), "node4")
        said = script("mpirun", "3", "hostname").split()
        require(sorted(said) == ["node1", "node2", "node3"], f"mpirun 3 hostname: {said}")
        script("limit", "2", "100mbit")
        require("rate 100Mbit" in script("on", "2", "tc", "qdisc", "show", "dev", "eth0"), "no limit")
        require("legal are" in script("limit", "2", "fast", code=1), "a bad rate")
        script("kill", "2")
        script("on", "2", "true", code=1)
        script("boot", "2")
        script("on", "1", "ssh", "node2", "true")
        module.end_processes(module.RUNS / (module.PREFIX + name) / "switch.pid")
        script("up", "1")  # what is left of broken hosts gives way
    finally:
        script("down")
    require(not (module.RUNS / (module.PREFIX + name)).exists(), "files are left")
    require("up N" in script("frobnicate", code=2), "no usage")


def unavailable(setup):
    """Without root or without a tool the reason has a name."""
    program = f"import sys; sys.path.insert(0, {os.path.dirname(SCRIPT)!r}); import hosts; {{}}hosts.available()"
    hides = "real = hosts.find; hosts.find = lambda tool: None if tool == 'sshd' else real(tool); "
    for reason, prefix, first in (("not root", ["setpriv", "--reuid", "65534", "--clear-groups"], ""),
                                  (r"no sshd \(package openssh-server\)", [], hides)):
        done = subprocess.run([*prefix, sys.executable, "-c", program.format(first)], capture_output=True, text=True,
                              cwd=setup.folder, check=False)
        require(re.search(rf"Unavailable: {reason}", done.stderr), f"{reason}: {done.stderr}")


def cases(setup):
    return {function.__name__.replace("_", " "): functools.partial(function, setup)
            for function in (apart, orphans, limited, killed_host, killed_run, side_by_side, kept, by_hand,
                             unavailable)}


if __name__ == "__main__":
    run("hosts", __doc__, 3, cases)
