"""Trainings in turns in one run: what tensor_turns.py and fit_turns.py share."""

import json
import os
import pathlib
import re
import statistics
import subprocess
import sys

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "OMPI_ALLOW_RUN_AS_ROOT": "1",
               "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
ENVIRONMENT.pop("OPENBLAS_CORETYPE", None)


def heads_of(width):
    return max(1, width // 64)


# Runs a command, and says how much memory it had at most, in KiB.
PEAK = "import resource, subprocess, sys; code = subprocess.call(sys.argv[1:]); " \
       "print('peak', resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss); sys.exit(code)"


class Runs:
    """Of `options`: build, layers, context, tokens, micro_batches, rounds, steps."""

    def __init__(self, options, directory, hosts=None):
        self.options, self.directory, self.hosts = options, pathlib.Path(directory), hosts
        self.sluice = str(pathlib.Path(options.build).resolve() / "sluice")
        self.text = self.directory / "text.txt"
        self.text.write_bytes(os.urandom(200000))

    def mpirun(self, ranks, name, *words):
        return self.launched(ranks, name, self.sluice, *words)

    def launched(self, ranks, name, *words):
        """A started job; of several ranks on the two hosts, if there are hosts."""
        log = open(self.directory / f"{name}.log", "w")
        if self.hosts is not None and ranks > 1:
            command = ["mpirun", *self.hosts.slots(ranks), "sh", "-c",
                       'exec taskset -c $OMPI_COMM_WORLD_RANK "$@"', "sh", *words]
            return self.hosts.start(1, *map(str, command), environment={"OMP_NUM_THREADS": "1"}, stdout=log, stderr=log)
        command = ["mpirun", "--oversubscribe", "--bind-to", "none", "-n", ranks, *words]
        return subprocess.Popen(list(map(str, command)), env=ENVIRONMENT, stdout=log, stderr=log)

    def training(self, width, layers=None):
        options = self.options
        return ["train", "--data", self.text, "--layers", layers or options.layers, "--heads", heads_of(width),
                "--width", width, "--context", options.context, "--micro-batch-size", options.tokens // options.context,
                "--micro-batches", options.micro_batches, "--validation-share", 0]

    def start(self, width, ranks, name, *words):
        metrics = self.directory / f"{name}.jsonl"
        metrics.unlink(missing_ok=True)
        command = [*self.training(width), "--steps", self.options.steps + 1, "--metrics", metrics, *words]
        return self.mpirun(ranks, name, *command), metrics, name

    def ended(self, process, name):
        if process.wait() != 0:
            sys.exit(f"{name}: exit {process.returncode}\n{(self.directory / f'{name}.log').read_text()[-2000:]}")

    def memory(self, width, layers, ranks, *words):
        """In MiB: the columns of the plan of the fullest rank, what its host has beside them, the most that a rank used."""
        command = [self.sluice, *self.training(width, layers), "--steps", 2, *words]
        logs = []
        for name, launched in (("plan", [*command, "--dry-run"]), ("peak", [sys.executable, "-c", PEAK, *command])):
            self.ended(self.launched(ranks, name, *launched), name)
            logs.append((self.directory / f"{name}.log").read_text())
        rows = re.findall(r"^ +\d+(?:, tensor \d+)? +\d+ +\S.*\d\.\d *$", logs[0], re.MULTILINE)
        row = max((line.split()[-10:] for line in rows), key=lambda columns: float(columns[8]))
        host = re.search(r"at most ([\d.]+) MiB of host memory", logs[0])
        return ([float(column) for column in row], float(host[1]) if host else 0,
                max(map(int, re.findall(r"peak (\d+)", logs[1]))) / 1024)

    def seconds(self, started):
        """The median of a run's steps, which it waits for."""
        process, metrics, name = started
        self.ended(process, name)
        steps = [json.loads(line) for line in metrics.read_text().splitlines()]
        return statistics.median(step["seconds"] for step in steps[1:] if "seconds" in step)

    def train(self, width, ranks, *words):
        return self.seconds(self.start(width, ranks, "run", *words))

    def in_turns(self, calls):
        """Seconds of each call, by rounds, the order turned round in every other one."""
        rounds = []
        for index in range(self.options.rounds):
            order = list(enumerate(calls))[::-1 if index % 2 else 1]
            rounds.append([seconds for _, seconds in sorted((i, call()) for i, call in order)])
        return rounds


def ratio(rounds, above, below):
    return statistics.median(each[above] / each[below] for each in rounds)
