#!/usr/bin/env python3
"""`sluice run` over hosts that fail: it leaves them out, and the training ends with the bits of an undisturbed one.

    tests/hosts/supervised_test.py [--case NAME] [--build DIR]

The watchdog reports a dead host, here after three seconds. Virtual replicas stay, so the bits do too.
"""

import functools
import re
import shlex
import subprocess

from cases import PATIENCE, metrics_so_far, require, run, wait_for

STEPS = 60
REPLICAS = 2
CONNECT = ("--mca", "plm_rsh_args", "-o ConnectTimeout=2")


class Supervised:
    """A supervised training over three hosts of two slots, saved every other step."""

    def __init__(self, setup, name, options=("--timeout", 3), mpi=()):
        self.setup, self.directory, self.metrics = setup, setup.folder / name, setup.folder / f"{name}.jsonl"
        self.log = setup.folder / f"{name}.log"
        (setup.folder / f"{name}.hosts").write_text("".join(f"{setup.hosts.name(host)} slots=2\n" for host in (1, 2, 3)))
        training = setup.train("--pipeline", "{pipeline}", "--replicas", "{replicas}", "--steps", STEPS, "--save",
                               self.directory, "--save-every", 2, "--resume", "auto", "--metrics", self.metrics, *options)
        with open(self.log, "wb") as sink:
            self.process = setup.hosts.start(
                1, setup.sluice, "run", "--hosts", setup.folder / f"{name}.hosts", "--layouts", "3x2,2x2,2x1", "--pause",
                0, "--", "mpirun", *CONNECT, *mpi, "-n", "{ranks}", "--hostfile", "{hostfile}", *training, stdout=sink)

    def output(self):
        return self.log.read_text(errors="replace")

    def trains_to(self, step):
        wait_for(lambda: (metrics_so_far(self.metrics) or [0])[-1] >= step or self.process.poll() is not None,
                 f"step {step} is not reached\n{self.output()}", PATIENCE)
        require(self.process.poll() is None, f"ended early\n{self.output()}")

    def says(self, text):
        wait_for(lambda: text in self.output() or self.process.poll() is not None,
                 f"'{text}' is not said\n{self.output()}", PATIENCE)
        require(text in self.output(), f"'{text}' is not said\n{self.output()}")

    def ends_with_the_bits(self):
        try:
            code = self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            code = None
        require(code == 0, f"exit {code}\n{self.output()}")
        self.setup.same_bits(self.directory, STEPS, replicas=REPLICAS)
        left = [host for host in (1, 2, 3) if host in self.setup.hosts.processes and
                self.setup.hosts.run(host, "pgrep", "-f", self.setup.sluice).returncode == 0]
        require(not left, f"processes are left on {left}\n{self.output()}")
        return self.output()


def one_by_one(setup):
    """Three hosts, then two, then one. Each is tried a second time before it is left out."""
    job = Supervised(setup, "one-by-one")
    job.trains_to(10)
    setup.hosts.kill(3)
    job.says("leaving out node3 from now on")
    job.trains_to(24)
    setup.hosts.kill(2)
    job.says("leaving out node2 from now on")
    output = job.ends_with_the_bits()
    for host in (2, 3):
        setup.hosts.boot(host)
    for part in ("layout 2x2 instead of 3x2: the same bits", "layout 2x1 instead of 2x2: other replicas", "4 restarts in"):
        require(part in output, f"the output lacks '{part}'\n{output}")
    return re.findall(r"sluice run: (4 restarts.*)", output)[0]


def failing_host(setup):
    """The ranks of one host are killed again and again: it is left out after the third time in a row."""
    job = Supervised(setup, "failing-host", options=())
    for kill in range(1, 4):
        job.trains_to(8 * kill)
        setup.hosts.run(2, "pkill", "-KILL", "-f", f"^{setup.sluice} train")
        job.says(f"on node2 was killed by SIGKILL; restart {kill} " if kill < 3 else "leaving out node2 from now on")
    output = job.ends_with_the_bits()
    require("layout 2x2 instead of 3x2: the same bits" in output and "3 restarts in" in output, output)


def cut_cable(setup):
    """The watchdog's report ends the job, and the second start finds no way to the host."""
    job = Supervised(setup, "cut-cable")
    job.trains_to(10)
    setup.hosts.pull(3)
    try:
        job.says("ranks 4, 5 on node3 are lost: silent for")
        job.says("leaving out node3 from now on")
        output = job.ends_with_the_bits()
    finally:
        setup.hosts.plug(3)
    require("layout 2x2 instead of 3x2: the same bits" in output and len(list(job.directory.glob("hang-*.txt"))) == 1, output)
    return re.findall(r"sluice run: (\d+ restarts.*)", output)[0]


def events_from_another_host(setup):
    """Rank 0 runs on node3: its events reach the supervisor on node1. The first of two trainings counts as failed."""
    (setup.folder / "far.hosts").write_text("node3 slots=2\n")
    words = ["mpirun", "-x", "FOO=1", "-n", 2, "--hostfile", "{hostfile}", *setup.train("--pipeline", 2, "--steps", 4)]
    job = f"{shlex.join(map(str, words))}; test -e far.again || {{ touch far.again; exit 1; }}"
    done = setup.hosts.run(1, setup.sluice, "run", "--pause", 0, "--hosts", "far.hosts", "--", "sh", "-c", job,
                           timeout=PATIENCE)
    require(done.returncode == 0 and re.search(r"1 restart in \d+ s; [\d.]+ % of the time in steps", done.stdout) and
            "sluice-event" not in done.stdout, f"exit {done.returncode}\n{done.stdout}")


def cases(setup):
    return {"hosts taken away one by one": functools.partial(one_by_one, setup),
            "a failing host": functools.partial(failing_host, setup),
            "a cable that is pulled": functools.partial(cut_cable, setup),
            "events from another host": functools.partial(events_from_another_host, setup)}


if __name__ == "__main__":
    run("supervised training over hosts", __doc__, 3, cases)
