"""What the tests of this folder share: hosts with a program, data and a folder, and the trainings on them."""

import argparse
import os
import pathlib
import re
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "faults"))
from harness import (Violation, made_up_text, metrics_so_far, require, resumed_step,  # noqa: E402,F401
                     run_cases)
from hosts import ROOT, Hosts, Unavailable, wait_for  # noqa: E402,F401

SKIPPED = 77
PATIENCE = 60  # seconds after which a job counts as stuck
TRAINED = re.compile(r"^Done: \d+ steps$", re.MULTILINE)


class Setup:
    """The hosts, and what each training takes. `folder` is on all hosts."""

    def __init__(self, options, hosts):
        self.hosts, self.folder = hosts, hosts.shared
        self.sluice = str(pathlib.Path(options.build).resolve() / "sluice")
        (self.folder / "text.txt").write_text(made_up_text(20000))
        self.model = ["--data", "text.txt", "--layers", "6", "--heads", "2", "--width", "16", "--context", "16",
                      "--micro-batches", "6", "--seed", "7"]
        self.digests = {}
        (hosts.bin / "sluice").symlink_to(self.sluice)

    def remove(self):
        """The hosts remove the folder, unless a case failed."""

    def train(self, *options, model=True):
        """The words of a training, without a launcher."""
        return [self.sluice, "train", *(self.model if model else ()), *map(str, options)]

    def mpirun(self, ranks, *options, places=None, **others):
        """Trains over the hosts, or as `places` (words of mpirun) says: exit code and output."""
        done = self.hosts.run(1, "timeout", PATIENCE, "mpirun", *(places or self.hosts.slots(ranks)),
                              *self.train(*options), timeout=2 * PATIENCE, **others)
        return done.returncode, done.stdout

    def trains(self, ranks, *options, **others):
        """Such a training, which must end well; its output."""
        code, output = self.mpirun(ranks, *options, **others)
        require(code == 0 and TRAINED.search(output),
                f"{ranks} ranks {' '.join(map(str, options))}: exit {code}\n{output}")
        return output

    def sluice_says(self, *words):
        """A command of sluice on node1: exit code and output."""
        done = self.hosts.run(1, self.sluice, *words)
        return done.returncode, done.stdout

    def digest(self, directory):
        code, output = self.sluice_says("digest", directory)
        match = re.search(r"^([0-9a-f]{64})\s+total$", output, re.MULTILINE)
        require(code == 0 and match, f"sluice digest {directory}: exit {code}\n{output}")
        return match.group(1)

    def one_host(self, steps, replicas=1):
        """The digest of an undisturbed training on one host, with a rank for each replica."""
        key = (steps, replicas)
        if key not in self.digests:
            directory = f"one-host-{steps}-{replicas}"
            self.trains(replicas, "--pipeline", 1, "--replicas", replicas, "--steps", steps, "--save", directory,
                        places=["--host", f"localhost:{replicas}", "-n", str(replicas)])
            self.digests[key] = self.digest(directory)
        return self.digests[key]

    def same_bits(self, directory, steps, replicas=1):
        found, wanted = self.digest(directory), self.one_host(steps, replicas)
        require(found == wanted, f"{directory}: digest {found}, on one host {wanted}")


def of_hosts(case):
    """What a host refuses to do fails the case alone."""
    def guarded():
        try:
            return case()
        except RuntimeError as error:
            raise Violation(str(error)) from error
    return guarded


def run(title, description, count, cases_of, missing=lambda: None):
    """A test's main: starts the hosts, runs the cases that `cases_of`, given the setup, returns by name. `missing`
    says what else this machine lacks; then the test is skipped."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--build", default=str(ROOT / "build/release"), help="build folder")
    parser.add_argument("--case", help="the only case to run")
    parser.add_argument("--count", type=int, default=1, help="times that each case runs")
    options = parser.parse_args()
    sys.stdout.reconfigure(line_buffering=True)
    os.environ.pop("OPENBLAS_CORETYPE", None)
    if reason := missing():
        print(f"skipped: {reason}")
        sys.exit(SKIPPED)
    try:
        hosts = Hosts(count, keep=(ROOT, pathlib.Path(options.build).resolve()))
    except Unavailable as reason:
        print(f"skipped: several hosts on one machine: {reason}")
        sys.exit(SKIPPED)
    with hosts:
        setup = Setup(options, hosts)
        cases = cases_of(setup)
        if options.case and options.case not in cases:
            sys.exit(f"no case '{options.case}'; legal are {', '.join(cases)}")
        code = run_cases(setup, title, options.count * [(name, of_hosts(case)) for name, case in cases.items()
                                                        if options.case in (None, name)])
        hosts.keep_files = code == 1
        sys.exit(code)
