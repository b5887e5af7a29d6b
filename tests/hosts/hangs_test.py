#!/usr/bin/env python3
"""A host whose cable is pulled during a training: who is named, how soon, and how the job ends.

    tests/hosts/hangs_test.py [--case NAME] [--build DIR] [--count N]

The link of one of three hosts goes down on the side of the switch, so that the host's card loses its carrier. The
hosts that hear each other have to name it within the time limit and ten seconds. All ranks have to end five seconds
later by themselves, those of the cut host too. mpirun waits for the cut host's daemon and is ended, as `sluice run`
does.
"""

import functools
import re
import subprocess
import time

from cases import metrics_so_far, require, run, wait_for

LIMIT = 3           # seconds, of the watchdog
REPORT_TIME = 10.0  # seconds beyond the limit
GONE_TIME = 5.0     # seconds from the report on
RANKS = 6
SHARED = ("--data", "text.txt", "--layers", "2", "--heads", "2", "--width", "96", "--context", "64", "--micro-batches", "4",
          "--seed", "7")  # for tensor ranks on all hosts: most of a step is in their collectives
SHARED_WAIT = re.compile(r"waits since \S+ s for the \S+ of \d+ bytes of \S+ over the tensor ranks in stage 0, ")
LARGE = ("--data", "text.txt", "--layers", "3", "--heads", "2", "--width", "256", "--context", "256",
         "--micro-batches", "3", "--micro-batch-size", "8", "--seed", "7")  # messages of 2 MiB


class Cut:
    """A training over three hosts, two ranks each, and then a cable that is pulled. `split`: the layout."""

    number = 0

    def __init__(self, setup, model, steps, split=("--pipeline", 3, "--replicas", 2)):
        Cut.number += 1
        self.setup, self.hosts = setup, setup.hosts
        self.directory, self.metrics = setup.folder / f"run-{Cut.number}", setup.folder / f"metrics-{Cut.number}.jsonl"
        self.path = setup.folder / f"output-{Cut.number}"
        words = [*model, *split, "--steps", 1_000_000, "--save", self.directory, "--save-every",
                 5, "--metrics", self.metrics, "--timeout", LIMIT]
        with open(self.path, "wb") as sink:
            self.job = self.hosts.start(1, "mpirun", *self.hosts.slots(RANKS), *setup.train(*words, model=False),
                                        stdout=sink, environment={"SLUICE_SUPERVISED": "1"})
        try:
            wait_for(lambda: len(metrics_so_far(self.metrics)) >= steps, "no training", 60)
        except RuntimeError:
            self.end()
            raise

    @property
    def output(self):
        return self.path.read_text(errors="replace").replace("\r", "")

    def put_back(self, host):
        self.hosts.plug(host)
        other = 2 if host == 1 else 1
        wait_for(lambda: self.hosts.run(other, "ssh", "-o", "ConnectTimeout=1", self.hosts.name(host),
                                        "true").returncode == 0, f"{self.hosts.name(host)} does not come back")

    def reports(self):
        return [path.read_text() for path in sorted(self.directory.glob("hang-*.txt"))]

    def ranks_on(self, host):
        return self.hosts.run(host, "pgrep", "-x", "sluice.*").stdout.split()

    def end(self):
        """Ends mpirun, and what it left on the hosts."""
        for host in self.hosts:
            for name in ("mpirun", "orted", "sluice.*"):
                self.hosts.run(host, "pkill", "-KILL", "-x", name)
        self.job.wait(20)


def cut(setup, host, large=False, shared=False):
    """The report names the host, with its ranks, and says so on the host that starts jobs."""
    model = LARGE if large else SHARED if shared else setup.model
    per_host = RANKS // setup.hosts.count
    if large:
        for each in setup.hosts:
            setup.hosts.limit(each, "100mbit")  # a message takes a sixth of a second
    job = Cut(setup, model, 2 if large else 3 if shared else 20, *([("--tensor", RANKS)] if shared else []))
    try:
        found = [len(job.ranks_on(each)) for each in setup.hosts]
        require(all(count == per_host for count in found), f"ranks on the hosts: {found}")
        since = time.monotonic()
        job.hosts.pull(host)
        wait_for(job.reports, "no report", LIMIT + REPORT_TIME)
        seconds = time.monotonic() - since
        gone = time.monotonic()
        wait_for(lambda: not any(job.ranks_on(each) for each in setup.hosts), "ranks are left", GONE_TIME)
        ended = time.monotonic() - gone
        text, = job.reports()
        first, last = 2 * host - 2, 2 * host - 1
        require(text.startswith(f"sluice: error: ranks {first}, {last} on node{host} are lost: silent for "), text)
        require(len(re.findall(r"^ +\d  node\d  \d", text, re.MULTILINE)) == RANKS, text)
        require(not shared or SHARED_WAIT.search(text), text)
        says = (f"ranks {first}, {last} on node1 are cut off from the other hosts" if host == 1 else
                text.splitlines()[0])
        require(says in job.output, f"mpirun does not show '{says}'\n{job.output}")
        event = re.search(r'^sluice-event ({"event":"hang".*)$', job.output, re.MULTILINE)
        require(event and f'"hosts":["node{host}"]' in event.group(1), f"event: {event}\n{job.output}")
        try:
            code = f"exit {job.job.wait(GONE_TIME)}"
        except subprocess.TimeoutExpired:
            code = "mpirun hangs"
        return f"report after {seconds:.1f} s, ranks gone {ended:.1f} s later, {code}"
    finally:
        job.end()
        job.put_back(host)
        if large:
            for each in setup.hosts:
                setup.hosts.limit(each, "off")


def short_cut(setup):
    """A cable that is put back in time: the training goes on."""
    job = Cut(setup, setup.model, 20)
    try:
        job.hosts.pull(3)
        time.sleep(0.3 * LIMIT)  # the cut is what is tested
        job.put_back(3)
        done = len(metrics_so_far(job.metrics))
        wait_for(lambda: len(metrics_so_far(job.metrics)) > done + 20, "the training does not go on", 60)
        require(not job.reports(), f"a report\n{job.reports()}")
    finally:
        job.end()


def cases(setup):
    return {"cable of node3": functools.partial(cut, setup, 3),
            "cable of node2, large messages": functools.partial(cut, setup, 2, large=True),
            "cable of node2, tensor ranks": functools.partial(cut, setup, 2, shared=True),
            "cable of node1": functools.partial(cut, setup, 1),
            "short cut": functools.partial(short_cut, setup)}


if __name__ == "__main__":
    run("hangs", __doc__, 3, cases)
