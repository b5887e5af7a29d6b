#!/usr/bin/env python3
"""Jobs that hang, or look as if they did: who is named, how soon, and how they end.

    tests/faults/hangs.py [--full] [--case NAME] [--timeout S] [--seed N] [--build DIR]

The report has to come within the time limit and ten seconds, all processes have to be gone five seconds later, and
mpirun has to give 11. Without --full each case runs once, with a limit of three seconds, and ranks 0 and 2 are
stopped; with it, the counts of the table in README.md.
"""

import json
import math
import os
import pathlib
import random
import re
import signal
import tempfile
import time

from harness import (PATIENCE, PEER, Job, Setup, Violation, arguments, main, metrics_so_far, require, run_cases,
                     step_directory, steps_in)

RANKS = 4
SPLIT = ("--pipeline", "2", "--replicas", "2")
SHARDED = (*SPLIT, "--shard", "parameters")
SHARING = (("--pipeline", "2", "--tensor", "2"), ("--tensor", "2"))  # ranks share stages
REPORT_TIME = 10.0  # seconds beyond the limit
GONE_TIME = 5.0     # seconds from the report on
SPARES = ("--enable-recovery",)  # the launcher lets survivors live
SPARED = (PEER, 0)  # Open MPI 4.1 gives 0 then, whatever its ranks do ("mpirun ... sh -c 'exit 11'" too)
CULPRIT = r"^sluice: error: (.*)$"
SHARED_WAIT = (r"waits since \S+ s for the (?:sum|reduce-scatter|all-gather) of \d+ bytes of \S+ over the tensor ranks in "
               r"stage (\d), (?:forward|backward) of micro-batch \d \(its collective \d+\)")


def ranks_of(split):
    return math.prod(int(word) for word in split if word.isdigit())


class Case:
    """A training that is watched, with saves."""

    def __init__(self, setup, name, limit, supervised=False, split=SPLIT):
        self.setup, self.limit, self.split = setup, limit, split
        self.ranks = ranks_of(split)
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix=f"{name}-", dir=setup.folder))
        self.directory, self.metrics = self.folder / "run", self.folder / "metrics.jsonl"
        self.supervised = supervised

    def start(self, *options, launcher=(), steps=1_000_000, every=20, fault=None):
        fault = fault or {}
        words = ["--steps", steps, "--save", self.directory, "--save-every", every, "--metrics", self.metrics,
                 "--timeout", self.limit, "--keep", "2", *options]
        environment = {"SLUICE_SUPERVISED": "1"} if self.supervised else {}
        os.environ.update(environment)
        try:
            return self.setup.train(self.ranks, *self.split, *words, fault=fault, launcher=launcher)
        finally:
            for name in environment:
                del os.environ[name]

    def trains(self, job, steps=25):
        job.wait_for(lambda: len(metrics_so_far(self.metrics)) >= steps and steps_in(self.directory),
                     f"step {steps} is not reached")


def report_of(job, limit, since):
    """The first line of the report, and the seconds until it came."""
    deadline = since + limit + REPORT_TIME
    while not (found := re.search(CULPRIT, job.output, re.MULTILINE)):
        require(time.monotonic() < deadline, f"no report within {limit + REPORT_TIME:.0f} s\n{job.tail()}")
        require(job.running(), f"ended without a report: {job.process.returncode}\n{job.tail()}")
        time.sleep(0.02)
    return found.group(1), time.monotonic() - since


def ends(job, codes=(PEER,)):
    """All processes are gone soon, and the launcher gives one of these codes."""
    deadline = time.monotonic() + GONE_TIME
    while left := {pid: rank for pid, rank in job.processes().items() if rank is not None}:
        if time.monotonic() > deadline:
            job.end()
            require(False, f"processes {left} are there {GONE_TIME:.0f} s after the report\n{job.tail()}")
        time.sleep(0.02)
    require(job.wait(GONE_TIME), f"the launcher does not end\n{job.tail()}")
    require(job.process.returncode in codes, f"exit {job.process.returncode} instead of {codes}\n{job.tail()}")


def reports_in(directory):
    return sorted(pathlib.Path(directory).glob("hang-*.txt"))


def check_report(case, job, first, ranks, saved):
    """The report is complete: a file with the same text, a line for each rank, and the newest save. `saved`: when the
    rank was hit; the disk may still have finished a later save's rename, or has not answered the report in time."""
    require(re.match(rf"ranks? {', '.join(map(str, ranks))} on ", first), f"the culprit is not {ranks}: {first}")
    files = reports_in(case.directory)
    require(len(files) == 1, f"reports: {files}")
    text = files[0].read_text()
    require(first in text and text.strip() in job.output, f"the file differs from the output\n{text}\n{job.tail()}")
    for rank in range(case.ranks):
        require(re.search(rf"^ +{rank}  \S+ +\d+ +(step \d+: |silent for |its process has ended)", text, re.MULTILINE),
                f"no line of rank {rank}\n{text}")
    newest = re.search(r"newest complete save: (\S+)( \(the disk does not answer\))?$", text,
                       re.MULTILINE)
    later = [step_directory(case.directory, step) for step in steps_in(case.directory) if step >= saved]
    require(newest and (newest.group(2) or pathlib.Path(newest.group(1)) in later),
            f"another save than {steps_in(case.directory)}, {saved} or later\n{text}")


def stopped(setup, limit, rank, split=SPLIT):
    """SIGSTOP of one rank; the supervisor's event names it as well."""
    case = Case(setup, f"stop_{rank}", limit, supervised=True, split=split)
    job = case.start()
    case.trains(job)
    pid = job.rank(rank)
    since = time.monotonic()
    os.kill(pid, signal.SIGSTOP)
    saved = steps_in(case.directory)[-1]
    first, seconds = report_of(job, limit, since)
    ends(job)
    check_report(case, job, first, [rank], saved)
    event = re.search(r'^sluice-event ({"event":"hang".*)$', job.output, re.MULTILINE)
    require(event, f"no event\n{job.tail()}")
    event = json.loads(event.group(1))
    require(event["event"] == "hang" and event["kind"] == "lost" and event["ranks"] == [rank] and event["step"] > 0,
            f"event {event}")
    return f"{seconds:.1f} s: {first}", job.output


def killed(setup, limit, rank, split=SPLIT):
    """kill -9, and a launcher that spares the survivors: they say at once who is gone, and end the job."""
    case = Case(setup, f"kill_{rank}", limit, split=split)
    job = case.start(launcher=SPARES)
    case.trains(job)
    pid = job.rank(rank)
    since = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    saved = steps_in(case.directory)[-1]
    first, seconds = report_of(job, limit, since)
    ends(job, SPARED)
    check_report(case, job, first, [rank], saved)
    require(re.search(rf"^sluice: watchdog: rank {rank} on \S+ \(stage \d(; tensor rank \d)?\) is gone: its process ended; "
                      r"last seen in .*; (newest complete save: |no complete save in \S+ is known)", job.output, re.MULTILINE), f"nobody said it at once\n{job.tail()}")
    return f"{seconds:.1f} s: {first}", job.output


def shared(setup, limit, hit, rank, split):
    """A rank is hit while ranks that share its stage compute a step. The other one waits for it in a collective of the
    model, but for the moments between two steps: then the next try is another."""
    for _ in range(6):
        said, output = hit(setup, limit, rank, split)
        if found := re.search(rf"^ +{rank ^ 1}  \S+ +(\d) +step \d+: {SHARED_WAIT}; rank {rank} (?:did not come|may not have "
                              r"come), it (?:is|was heard) in ", output, re.MULTILINE):
            require(found.group(1) == found.group(2), found.group())
            return said
    raise Violation(f"rank {rank ^ 1} does not wait in a collective of the model\n{output}")


def killed_all(setup, limit, rank):
    """kill -9, and a launcher that kills the survivors: one of them speaks before that."""
    case = Case(setup, f"kill_all_{rank}", limit)
    job = case.start()
    case.trains(job)
    os.kill(job.rank(rank), signal.SIGKILL)
    job.expect(128 + signal.SIGKILL, rf"(?m)^sluice: watchdog: rank {rank} on \S+ \(stage \d\) is gone: ")


# --- programs of one's own ---

def program(setup, how, limit, *number, ranks=2, launcher=(), directory=None):
    setup.jobs += 1
    words = [os.path.join(os.path.dirname(setup.sluice), "tests/faults/watched_program"), how, str(limit), *number]
    environment = {"WATCHED_DIRECTORY": str(directory)} if directory else {}
    return Job([setup.mpiexec, *launcher, "-n", str(ranks), *map(str, words)], environment,
               setup.folder / f"output-{setup.jobs}")


def deadlock(setup, limit):
    job = program(setup, "deadlock", limit)
    first, _ = report_of(job, limit, time.monotonic())
    ends(job)
    require(re.match(r"deadlock: rank 0 on \S+ \(stage 0\) waits for 0RECV_B0 from rank 1 \(tag 0, 4 bytes\): never sent; "
                     r"rank 1 on \S+ \(stage 1\) waits for 1RECV_F0 from rank 0 \(tag 0, 4 bytes\): never sent; all "
                     r"ranks wait", first), first)
    return first


def leaves(setup, limit, ranks):
    """A rank that goes its own way: the others wait for good, those of a tree for each other."""
    job = program(setup, "leave", limit, ranks=ranks)
    first, _ = report_of(job, limit, time.monotonic())
    ends(job)
    require(f"rank {ranks - 2} has destroyed its pipeline" in first, first)
    return first


def embedded(setup, limit):
    """The program catches the loss of a rank on every rank that is left, and its pipeline ends quickly."""
    job = program(setup, "embedded", limit, ranks=3, launcher=SPARES)
    job.wait_for(lambda: "step 5\n" in job.output.replace("\r", ""), "no training")
    os.kill(job.rank(1), signal.SIGSTOP)
    left = (0, 2)
    job.wait_for(lambda: all(f"rank {rank} destroyed its" in job.output for rank in left), "no end of the pipelines")
    for rank in left:
        require(re.search(rf"^rank {rank} caught 11 of rank 1: rank 1 on \S+ \(stage 1\) is lost", job.output, re.MULTILINE),
                f"rank {rank} caught something else\n{job.tail()}")
    seconds = [float(text) for text in re.findall(r"destroyed its pipeline in ([\d.]+) s", job.output)]
    require(max(seconds) < 5, f"the ends took {seconds} s")
    job.end()
    return f"destroyed in {max(seconds):.1f} s"


def no_ports(setup, limit):
    """Closed ports, here a single one for all ranks: a warning, and the training goes on."""
    case = Case(setup, "ports", limit)
    output = case.start("--watchdog-ports", 46299, steps=100).expect(0, "Done: 100 steps")
    # On a slow machine rank 0 may give up before the others have said why.
    require(len(re.findall(r"^sluice: watchdog: .*(cannot listen on 127.0.0.1 at port \d+: .*|has not called); "
                           r"no rank watches another: .*--watchdog-ports FIRST-LAST", output, re.MULTILINE)) == 1,
            f"no warning, or several\n{output}")


def many(setup, count):
    """Pipelines that are made and destroyed leave no thread and no descriptor behind."""
    job = program(setup, "many", 3, count, ranks=2)
    output = job.expect(0)
    for rank in range(2):
        found = re.findall(rf"^rank {rank} (?:before|after): (\d+) threads, (\d+) descriptors", output, re.MULTILINE)
        require(len(found) == 2 and found[0] == found[1], f"rank {rank}: {found}")
    return f"{count} pipelines: {found[0][0]} threads, {found[0][1]} descriptors"


def crashes(setup):
    """A rank that dies by a fault says where."""
    for how, name, code in (("segv", "SIGSEGV", 139), ("bus", "SIGBUS", 135), ("fpe", "SIGFPE", 136),
                            ("abort", "SIGABRT", 134), ("terminate", "SIGABRT", 134)):
        program(setup, how, 3).expect(code, rf"(?m)^sluice: error: {name} on rank 1 on \S+ \(stages 1\), step 3: in 1F1\r?$",
                                      r"(?m)^sluice: watchdog: rank 1 on \S+ \(stage 1\) is gone")
    program(setup, "bad_alloc", 3).expect(10, r"stage 1, forward of micro-batch 1 of step 3 on \S+: out of host memory "
                                              r"\[rank 1\]")


# --- what is no hang ---

def quiet(output):
    require(not re.search(CULPRIT, output, re.MULTILINE), f"a false alarm\n{output}")


def slow_stage(setup, limit, seconds):
    """A stage that takes longer than the limit: a notice that names it."""
    output = program(setup, "slow", limit, seconds).expect(0, "step 6", within=PATIENCE + seconds)
    quiet(output)
    require(re.search(r"^sluice: watchdog: rank 1 on \S+ \(stage 1\) is in 1F1 of step 3 since \d+ s, and is heard; this "
                      r"rank waits: 0", output, re.MULTILINE), f"no notice\n{output}")


def slow_loading(setup, limit, seconds):
    output = program(setup, "loading", limit, seconds).expect(0, "step 6", within=PATIENCE + seconds)
    quiet(output)
    require("in the loading of a batch" in output, f"no notice\n{output}")


def action_timeout(setup, limit):
    """With a limit for actions, a rank that stays in one ends the job: here in a save."""
    case = Case(setup, "action", limit)
    job = case.start("--action-timeout", limit, every=10, steps=1000,
                     fault={"directory": case.directory, "rank": 0, "call": "mkdir", "nth": 3, "action": "sleep:60"})
    job.wait_for(lambda: len(metrics_so_far(case.metrics)) >= 10, "no training")
    first, _ = report_of(job, limit, time.monotonic())
    ends(job)
    require(re.match(r"rank 0 on \S+ \(stage \d\) is in a save", first), first)
    return first


def slow_disk(setup, limit, seconds):
    """A save that takes longer than the limit."""
    case = Case(setup, "disk", limit)
    job = case.start(steps=40, every=20, fault={"directory": case.directory, "rank": 0, "call": "mkdir", "nth": 3,
                                                "action": f"sleep:{seconds}"})
    output = job.expect(0, "Done: 40 steps", within=PATIENCE + seconds)
    quiet(output)
    require(re.search(r"^sluice: watchdog: rank 0 on .* is in a save.* since", output, re.MULTILINE),
            f"no notice\n{output}")


def deaf_disk(setup, limit, seconds):
    """A rank is stopped, and the disk of the others does not answer when they look for the newest save: the report
    comes all the same, with the one they know of."""
    case = Case(setup, "deaf", limit)
    gate = case.folder / "gate"
    job = case.start(fault={"directory": case.directory, "call": "list", "times": 0, "gate": gate,
                            "action": f"sleep:{seconds}"})
    case.trains(job, steps=45)  # the save of step 20 is published before that of step 40 begins
    gate.touch()
    since = time.monotonic()
    os.kill(job.rank(0), signal.SIGSTOP)
    first, seconds = report_of(job, limit, since)
    ends(job)
    require(re.search(r"^  newest complete save: \S+/step-000\d{5} \(the disk does not answer\)$", job.output,
                      re.MULTILINE), f"not said\n{job.tail()}")
    return f"{seconds:.1f} s: {first}"


def validation(setup, limit):
    case = Case(setup, "validation", limit)
    quiet(case.start("--validate-every", 5, "--validation-samples", "all", steps=20).expect(0, "Done: 20 steps"))


def paused(setup, limit, share):
    """SIGSTOP for a share of the limit: nothing, or a notice that it is silent and one that it is heard again."""
    case = Case(setup, "pause", limit)
    job = case.start()
    case.trains(job)
    for rank in (0, 2):
        pid = job.rank(rank)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(share * limit)  # the pause is what is tested
        os.kill(pid, signal.SIGCONT)
    (case.directory / "stop").touch()
    quiet(job.expect(12))


def slow_job(setup, limit, seconds):
    """All ranks run at a tenth of their speed."""
    case = Case(setup, "tenth", limit)
    job = case.start()
    case.trains(job, steps=5)
    ranks = [job.rank(rank) for rank in range(RANKS)]
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for number, span in ((signal.SIGSTOP, 0.27), (signal.SIGCONT, 0.03)):
            for pid in ranks:
                os.kill(pid, number)
            time.sleep(span)
    done = len(metrics_so_far(case.metrics))
    (case.directory / "stop").touch()
    quiet(job.expect(12))
    return f"{done} steps"


def table(setup, limit):
    """SIGUSR2 to the launcher prints one table; status.json follows the job, `sluice doctor --live` reads it."""
    case = Case(setup, "table", limit)
    job = case.start()
    case.trains(job)
    os.kill(job.process.pid, signal.SIGUSR2)
    job.wait_for(lambda: "sluice: watchdog: step " in job.output, "no table")
    job.wait_for((case.directory / "status.json").exists, "no status.json")
    code, text = setup.run("doctor", "--live", case.directory)
    require(code == 0 and re.search(r"^state +as of \d+ s ago$", text, re.MULTILINE) and
            len(re.findall(r"^ +\d  \S+ +\d  \d +step \d+: ", text, re.MULTILINE)) == RANKS, f"exit {code}\n{text}")
    (case.directory / "stop").touch()
    output = job.expect(12)
    require(len(re.findall("^sluice: watchdog: step ", output, re.MULTILINE)) == 1, f"more than one table\n{output}")
    code, text = setup.run("doctor", "--live", case.directory)
    require(code == 0 and "the job has ended in order" in text, f"exit {code}\n{text}")


def off(setup):
    """Without a watchdog there is none."""
    case = Case(setup, "off", 3)
    case.start("--watchdog", "off", steps=200).expect(0, "Done: 200 steps")
    require(not (case.directory / "status.json").exists(), "a status.json")


def cases_of(setup, options):
    limit, full = options.timeout, options.full
    stops = [rank for _ in range(5) for rank in range(RANKS)] if full else [0, 2, 3]
    pick = random.Random(options.seed)
    kills = [pick.randrange(RANKS) for _ in range(20)] if full else [0, 3]
    shares = [(name, hit, pick.randrange(ranks_of(split)), split) for turn in range(10 if full else 1)
              for name, hit, split in (("SIGSTOP", stopped, SHARING[turn % 2]), ("kill -9", killed, SHARING[1 - turn % 2]))]
    long = 60 if full else 2 * limit + 1
    return [
        *((f"SIGSTOP of rank {rank}", lambda rank=rank: stopped(setup, limit, rank)[0]) for rank in stops),
        *((f"kill -9 of rank {rank}, spared", lambda rank=rank: killed(setup, limit, rank)[0]) for rank in kills),
        *((f"SIGSTOP of rank {rank}, sharded parameters", lambda rank=rank: stopped(setup, limit, rank, SHARDED)[0])
          for rank in stops[-1:]),
        *((f"{name} of rank {rank} of {ranks_of(split)}, shared",
           lambda hit=hit, rank=rank, split=split: shared(setup, limit, hit, rank, split))
          for name, hit, rank, split in shares),
        *((f"kill -9 of rank {rank}", lambda rank=rank: killed_all(setup, limit, rank)) for rank in kills[:5]),
        *(("deadlock", lambda: deadlock(setup, limit)) for _ in range(5 if full else 1)),
        *((f"one of {ranks} ranks leaves", lambda ranks=ranks: leaves(setup, limit, ranks)) for ranks in (3, 8)),
        ("embedded", lambda: embedded(setup, limit)),
        ("closed ports", lambda: no_ports(setup, limit)),
        ("many pipelines", lambda: many(setup, 1000 if full else 50)),
        ("faults", lambda: crashes(setup)),
        ("slow stage", lambda: slow_stage(setup, limit, long)),
        ("slow data", lambda: slow_loading(setup, limit, long)),
        ("action timeout", lambda: action_timeout(setup, limit)),
        ("slow disk", lambda: slow_disk(setup, limit, long)),
        ("deaf disk", lambda: deaf_disk(setup, limit, 5 * long)),
        ("validation", lambda: validation(setup, limit)),
        ("short pauses", lambda: paused(setup, limit, 0.75)),
        ("a tenth of the speed", lambda: slow_job(setup, limit, 60 if full else 8)),
        ("table and status", lambda: table(setup, limit)),
        ("off", lambda: off(setup)),
    ]


def campaign():
    parser = arguments(__doc__.splitlines()[0], seed=1)
    parser.add_argument("--full", action="store_true", help="the counts of the table in README.md")
    parser.add_argument("--case", help="cases whose name has this in it")
    parser.add_argument("--timeout", type=int, default=3, help="the time limit of the watchdog")
    options = parser.parse_args()
    setup = Setup(options)
    cases = [(name, case) for name, case in cases_of(setup, options) if (options.case or "") in name]
    return run_cases(setup, "hangs", cases)


if __name__ == "__main__":
    main(campaign)
