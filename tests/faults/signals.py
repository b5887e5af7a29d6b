#!/usr/bin/env python3
"""How a training ends by signals and by the file `stop`, and that it goes on to the bits of an undisturbed run.

    tests/faults/signals.py [--full] [--case NAME] [--build DIR]

Asked to stop, a job saves at the end of the step, says so and exits with 12. A job whose processes are killed
begins no save; what was saved before stays. After each case the same command resumes and reaches the digest of
an undisturbed run.
"""

import functools
import os
import pathlib
import re
import signal
import tempfile

from harness import (STOPPED, Setup, arguments, main, metrics_so_far, names_below, partial_directory, require,
                     resumed_step, run_cases, step_directory, steps_in)

STEPS = 200
EVERY = 10
SPLIT = ("--pipeline", "2", "--replicas", "2")
RANKS = 4
LAUNCHER = "launcher"


class Case:
    def __init__(self, setup, name, every=EVERY, mca=(), pace=0.02):
        self.setup, self.every, self.mca, self.pace = setup, every, mca, pace
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix=f"{name}-", dir=setup.folder))
        self.directory = self.folder / "run"
        self.metrics = self.folder / "metrics.jsonl"

    def start(self, fault=None):
        """Each line of the metrics takes `pace` seconds, so that a signal meets it; unless there is another fault."""
        every = ("--save-every", self.every) if self.every else ()
        fault = fault or {"directory": self.metrics, "call": "write", "times": 0, "action": f"sleep:{self.pace}"}
        os.environ.update(self.mca)
        try:
            return self.setup.train(RANKS, *SPLIT, "--steps", STEPS, "--save", self.directory, *every, "--resume",
                                    "auto", "--metrics", self.metrics, fault=fault)
        finally:
            for name in self.mca:
                del os.environ[name]

    def trains(self, job, steps=25):
        """Waits for the step, and for a save where there are any; returns the last step and the newest save."""
        job.wait_for(lambda: len(metrics_so_far(self.metrics)) >= steps and
                     (not self.every or steps_in(self.directory)), f"step {steps} is not reached")
        return len(metrics_so_far(self.metrics)), (steps_in(self.directory) or [0])[-1]

    def saved(self):
        """The newest save; all verify."""
        steps = steps_in(self.directory)
        for step in steps:
            code, output = self.setup.run("verify", step_directory(self.directory, step))
            require(code == 0, f"the save of step {step} does not verify\n{output}")
        return steps[-1] if steps else 0

    def goes_on(self, step):
        output = self.start(fault={"directory": self.folder / "none"}).expect(0)
        require(resumed_step(output) == step, f"went on from step {resumed_step(output)}, not {step}\n{output}")
        digest, wanted = self.setup.digest(self.directory), undisturbed(self.setup)
        require(digest == wanted, f"digest {digest} instead of {wanted}")


@functools.lru_cache
def undisturbed(setup):
    directory = setup.folder / "undisturbed"
    setup.train(RANKS, *SPLIT, "--steps", STEPS, "--save", directory).expect(0)
    return setup.digest(directory)


def send(job, target, number):
    job.signal(job.process.pid if target == LAUNCHER else job.rank(target), number)


def stops(setup, name, target, number):
    """Saved at the end of the step, exit code 12 and a line."""
    case = Case(setup, name, every=0)
    job = case.start()
    asked, _ = case.trains(job)
    send(job, target, number)
    check_stopped(case, job, asked)


def stops_early(setup, target, number):
    """Asked before there is a pipeline: rank 0 is stuck in its first write. The job stops after its first step."""
    case = Case(setup, f"early_{number}", every=0)
    log = case.folder / "fault"
    job = case.start(fault={"directory": case.directory, "rank": 0, "action": "sleep:2", "log": log})
    job.wait_for(log.exists, "no write")
    job.wait_for(lambda: all(job.catches(job.rank(rank), number) for rank in range(RANKS)), "no handler")
    send(job, target, number)
    check_stopped(case, job, 1)


def stop_file(setup):
    case = Case(setup, "stop_file", every=0)
    job = case.start()
    asked, _ = case.trains(job)
    (case.directory / "stop").touch()
    check_stopped(case, job, asked)
    require(not (case.directory / "stop").exists(), "the request is left")


def check_stopped(case, job, asked):
    output = job.expect(STOPPED)
    lines = re.findall(r"stopped as asked after step (\d+); resume with --resume .*", output)
    require(len(lines) == 1, f"{len(lines)} lines say that it stopped\n{job.tail()}")
    step = int(lines[0])
    require(asked <= step < STEPS, f"stopped after step {step}, asked in step {asked}")
    require(case.saved() == step, f"stopped after step {step}, saved step {case.saved()}")
    require(metrics_so_far(case.metrics)[-1] == step, f"the metrics end with another step than {step}")
    case.goes_on(step)


def launcher_ends(setup, name, number):
    """mpirun gives its ranks a second, perhaps too little for a save: what was saved before is intact."""
    case = Case(setup, name)
    job = case.start()
    _, newest = case.trains(job)
    send(job, LAUNCHER, number)
    require(job.finish() != 0, f"exit 0\n{job.tail()}")
    saved = case.saved()
    require(saved >= newest, f"step {newest} was saved before the signal, now the newest is {saved}")
    case.goes_on(saved)
    return f"newest before {newest}, after {saved}"


def launcher_ends_slowly(setup, number, seconds):
    """mpirun lets so much time pass before SIGTERM, and once more before SIGKILL: the ranks save."""
    case = Case(setup, f"slowly_{number}_{seconds}", every=0, pace=seconds / 100,
                mca={f"{prefix}_MCA_odls_base_sigkill_timeout": str(seconds) for prefix in ("OMPI", "PRTE")})
    job = case.start()
    asked, _ = case.trains(job)
    send(job, LAUNCHER, number)
    job.finish()
    saved = case.saved()
    require(asked <= saved < STEPS, f"saved step {saved}, asked in step {asked}\n{job.tail()}")
    case.goes_on(saved)


def rank_killed(setup, every):
    """The others get SIGTERM from mpirun, but their peer is gone: no save begins."""
    case = Case(setup, f"rank_killed_{every}", every=every)
    job = case.start()
    _, newest = case.trains(job)
    send(job, 1, signal.SIGKILL)
    require(job.finish() != 0, f"exit 0\n{job.tail()}")
    saved = case.saved()
    if not every:
        begun = [name for name in names_below(case.directory) if "step-" in name]
        require(not begun, f"a save was begun: {begun}")
    require(saved >= newest, f"step {newest} was saved before, now the newest is {saved}")
    case.goes_on(saved)


def second_signal(setup, target, number):
    """The first request is in its save, whose sync takes a minute; the second ends the job at once."""
    case = Case(setup, f"second_{number}")
    log = case.folder / "fault"
    job = case.start(fault={"directory": partial_directory(case.directory, 3 * EVERY), "rank": target, "call": "sync",
                            "action": "sleep:50", "log": log})
    job.wait_for(log.exists, "no sync")
    newest = steps_in(case.directory)[-1]
    send(job, target, number)
    job.wait_for(lambda: job.handled(job.rank(target), number), "the signal stays pending")
    send(job, target, number)
    require(job.wait(20), f"still there after 20 s\n{job.tail()}")
    require(job.finish() not in (0, STOPPED), f"exit {job.process.returncode}\n{job.tail()}")
    require(case.saved() >= newest, f"step {newest} was saved before, now the newest is {case.saved()}")
    case.goes_on(case.saved())


CASES = {
    "SIGUSR1 to mpirun": lambda s: stops(s, "usr1_launcher", LAUNCHER, signal.SIGUSR1),
    "SIGUSR1 to one rank": lambda s: stops(s, "usr1_rank", 2, signal.SIGUSR1),
    "SIGTERM to one rank": lambda s: stops(s, "term_rank", 3, signal.SIGTERM),
    "SIGINT to one rank": lambda s: stops(s, "int_rank", 1, signal.SIGINT),
    "SIGUSR1 to mpirun, early": lambda s: stops_early(s, LAUNCHER, signal.SIGUSR1),
    "SIGTERM to one rank, early": lambda s: stops_early(s, 1, signal.SIGTERM),
    "file stop": stop_file,
    "SIGTERM to mpirun": lambda s: launcher_ends(s, "term_launcher", signal.SIGTERM),
    "SIGINT to mpirun": lambda s: launcher_ends(s, "int_launcher", signal.SIGINT),
    "SIGTERM to mpirun, then 3 s": lambda s: launcher_ends_slowly(s, signal.SIGTERM, 3),
    "SIGINT to mpirun, then 3 s": lambda s: launcher_ends_slowly(s, signal.SIGINT, 3),
    "kill -9 of a rank": lambda s: rank_killed(s, EVERY),
    "kill -9 of a rank, no saves": lambda s: rank_killed(s, 0),
    "second SIGTERM to a rank": lambda s: second_signal(s, 0, signal.SIGTERM),
    "second SIGINT to a rank": lambda s: second_signal(s, 0, signal.SIGINT),
}
FULL = {
    "SIGTERM to mpirun, then 20 s": lambda s: launcher_ends_slowly(s, signal.SIGTERM, 20),
    "SIGINT to mpirun, then 20 s": lambda s: launcher_ends_slowly(s, signal.SIGINT, 20),
}


def campaign():
    parser = arguments(__doc__.splitlines()[0], count=1)
    parser.add_argument("--full", action="store_true", help="cases that take most of a minute, too")
    parser.add_argument("--case", choices=[*CASES, *FULL])
    options = parser.parse_args()
    cases = {**CASES, **FULL} if options.full or options.case else CASES
    setup = Setup(options)
    return run_cases(setup, "signals", options.count *
                     [(name, functools.partial(case, setup)) for name, case in cases.items()
                      if options.case in (None, name)])


if __name__ == "__main__":
    main(campaign)
