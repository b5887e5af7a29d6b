#!/usr/bin/env python3
"""Ranks that fail within a collective: who is named, in which collective, how soon, and how the job ends.

    tests/faults/collectives.py [--full] [--case NAME] [--timeout S] [--seed N] [--build DIR]

Four ranks: 2 replicas of 2 stages, 4 replicas of one stage, or 2 tensor ranks for each of 2 stages. The seed draws the
layout, the rank, the step, the action, which of its collectives, and the moment: before the rank comes to it, once it waits
in it for the others, or while data moves. Sums of gradients are under way, with some of them here and others not. The rank
says on standard error where it is. The bounds are those of hangs.py.
Without --full each case runs once, with it 20 times.
"""

import os
import re
import signal
import time

from hangs import CULPRIT, PEER, REPORT_TIME, SPARED, SPARES, ends, report_of
from harness import Job, Setup, arguments, main, require, run_cases

RANKS = 4
USAGE, FOREIGN = 2, 13
LAYOUTS = (("replica", 2), ("replica", 1), ("tensor", 2))  # axis, ranks of a pipeline
MOMENTS = ("before", "waits", "amid")
IN_SUMS = r"^fault: rank (\d) in sums of gradients of step (\d+): (\d+ of \d+ parts)"
SAID = r"^fault: rank (\d) in (\d)([FB])(\d) of step (\d+): the (.*) \(its collective (\d)\)\r?$"


def program(setup, words, launcher=()):
    setup.jobs += 1
    path = os.path.join(os.path.dirname(setup.sluice), "tests/faults/collective_program")
    return Job([setup.mpiexec, *launcher, "-n", str(RANKS), path, *map(str, words)], {},
               setup.folder / f"output-{setup.jobs}")


def fault_of(job, pattern):
    """What the rank that fails says, and when."""
    said = job.wait_for(lambda: re.search(pattern, job.output, re.MULTILINE), "no fault")
    return said, time.monotonic()


def line_of(job, rank):
    """What the report says of a rank: its stages and its state."""
    found = re.search(rf"^ +{rank}  \S+ +(\d) +(.*?)\r?$", job.output, re.MULTILINE)
    require(found, f"no line of rank {rank}\n{job.tail()}")
    return found.group(1), found.group(2)


def lost(how):
    return r"its process has ended; last seen in" if how == "kill" else r"silent for \S+ s; last seen in"


def named(job, limit, how, rank, place, since):
    """The first line names this rank, with its place where that was heard."""
    first, seconds = report_of(job, limit, since)
    ends(job, SPARED if how == "kill" else (PEER,))
    require(re.match(rf"rank {rank} on \S+ \(stage \d(; tensor rank \d)?\) is lost: {lost(how)} {place}", first),
            f"the first line does not name rank {rank} in {place}: {first}\n{job.tail()}")
    return first, seconds


def within_action(setup, limit, how, case):
    """Each rank that shares the stage waits for that collective or for a later one, and then says who did not come."""
    axis, pipeline = LAYOUTS[case % len(LAYOUTS)]
    moment = MOMENTS[case // len(LAYOUTS) % len(MOMENTS)]
    job = program(setup, [how, axis, moment, pipeline, setup.seed + case, limit], SPARES if how == "kill" else ())
    said, since = fault_of(job, SAID)
    rank, stage, action, micro_batch, step, what, index = said.groups()
    op = f"{stage}{action}{micro_batch}"
    heard = moment != "amid"
    first, seconds = named(job, limit, how, rank, f"{op} of step {step}" if heard else r"", since)
    words = {"F": "forward", "B": "backward"}[action]
    place = f"{what} in stage {stage}, {words} of micro-batch {micro_batch} (its collective {index})"
    if moment == "waits":
        require(f"last seen in waiting for the {place}" in line_of(job, rank)[1], f"rank {rank} is not in it\n{job.tail()}")
    there = 0
    for other in range(RANKS):
        shares, state = line_of(job, other)
        if shares != stage or other == int(rank):
            continue
        same = f"for the {place}" in state
        there += same
        absent = f"; rank {rank} did not come" in state
        unknown = f"; rank {rank} may not have come" in state
        # Once the rank has sent its part, others may go on, to what needs it next.
        later = moment != "before" and (absent or unknown or re.search(r" for \dRECV_[FB]\d ", state))
        require(same or later, f"rank {other} does not wait for the {place}: {state}\n{job.tail()}")
        right = absent if moment == "before" else not same or not (absent or (heard and unknown))
        require(right, f"rank {other} says of rank {rank}: {state}\n{job.tail()}")
    return f"{seconds:.1f} s, {axis} {pipeline} {moment}, {there} still in it: {first}"


def other_collective(setup, limit, case):
    """It is refused before any message, and the job ends on all ranks."""
    axis, pipeline = LAYOUTS[case % len(LAYOUTS)]
    job = program(setup, ["other", axis, "before", pipeline, setup.seed + case, limit])
    said, since = fault_of(job, SAID)
    rank, stage, action, micro_batch, _, what, index = said.groups()
    words = {"F": "forward", "B": "backward"}[action]
    job.expect(USAGE)
    seconds = time.monotonic() - since
    first = re.search(CULPRIT, job.output, re.MULTILINE)
    require(first and re.match(rf"stage {stage}, {words} of micro-batch {micro_batch}: the stage makes an? .* where its "
                               rf"description has an? {what} \(collective {index} of \d\), on rank {rank}\r?$", first.group(1)),
            f"the first line does not name rank {rank}: {first and first.group(1)}\n{job.tail()}")
    require(seconds < limit + REPORT_TIME, f"the end took {seconds:.1f} s\n{job.tail()}")
    return f"{seconds:.1f} s: {first.group(1)}"


def within_sums(setup, limit, how, case):
    """Some buckets are summed, others are not. The other replicas wait for the rest."""
    pipeline = (2, 1)[case % 2]
    job = program(setup, [how, "sums", "amid", pipeline, setup.seed + case, limit], SPARES if how == "kill" else ())
    said, since = fault_of(job, IN_SUMS)
    rank, step, parts = said.groups()
    first, seconds = named(job, limit, how, rank, "", since)
    stage = line_of(job, rank)[0]
    others = [state for shares, state in map(lambda each: line_of(job, each), set(range(RANKS)) - {int(rank)}) if shares == stage]
    require(all(re.match(rf"step {step}: waits since \S+ s for a message (from|to) rank \d \(tag \d+, \d+ bytes\) among the "
                         r"replicas, in \dREDUCE_GRAD", state) for state in others), f"{others}\n{job.tail()}")
    return f"{seconds:.1f} s, {pipeline} stages, {parts}: {first}"


def exception(setup, limit, case):
    """It comes to all ranks, also to those in the collective."""
    axis, pipeline = LAYOUTS[case % len(LAYOUTS)]
    job = program(setup, ["throw", axis, "before", pipeline, setup.seed + case, limit])
    said, since = fault_of(job, SAID)
    rank, stage, action, micro_batch = said.groups()[:4]
    words = {"F": "forward", "B": "backward"}[action]
    job.expect(FOREIGN, rf"(?m)^sluice: error: stage {stage}, {words} of micro-batch {micro_batch}: not today, .* \[rank {rank}\]")
    seconds = time.monotonic() - since
    require(seconds < limit + REPORT_TIME, f"the end took {seconds:.1f} s\n{job.tail()}")
    return f"{seconds:.1f} s"


def embedded(setup, limit, case):
    """The others catch the loss and destroy their pipelines. Then the rank goes on: what it sends meets memory that they have
    cancelled, and no longer use."""
    axis, pipeline = (("sums", 1), ("replica", 1), ("sums", 2), ("tensor", 2))[case % 4]
    job = program(setup, ["embedded", axis, "amid", pipeline, setup.seed + case, limit], ("-x", "MALLOC_PERTURB_=165"))
    said, _ = fault_of(job, IN_SUMS if axis == "sums" else SAID)
    rank = int(said.group(1))
    others = set(range(RANKS)) - {rank}
    job.wait_for(lambda: all(f"rank {other} has destroyed" in job.output for other in others), "no end of the pipelines")
    job.signal(job.rank(rank), signal.SIGCONT)
    output = job.expect(PEER)
    for other in others:
        require(f"rank {other} caught {PEER} of rank {rank}" in output, f"rank {other} caught something else\n{job.tail()}")


def cases_of(setup, options):
    count = 20 if options.full else 1
    cases = {
        "kill -9 within a collective": lambda case: within_action(setup, options.timeout, "kill", case),
        "SIGSTOP within a collective": lambda case: within_action(setup, options.timeout, "stop", case),
        "another collective": lambda case: other_collective(setup, options.timeout, case),
        "kill -9 within sums of gradients": lambda case: within_sums(setup, options.timeout, "kill", case),
        "SIGSTOP within sums of gradients": lambda case: within_sums(setup, options.timeout, "stop", case),
        "an exception": lambda case: exception(setup, options.timeout, case),
        "embedded": lambda case: embedded(setup, options.timeout, case),
    }
    return [(name, lambda run=run, case=case: run(case)) for i, (name, run) in enumerate(cases.items())
            if (options.case or "") in name for case in range(5 * i, 5 * i + count)]


def campaign():
    parser = arguments(__doc__.splitlines()[0], seed=1)
    parser.add_argument("--full", action="store_true", help="20 times each case")
    parser.add_argument("--case", help="cases whose name has this in it")
    parser.add_argument("--timeout", type=int, default=3, help="the time limit of the watchdog")
    options = parser.parse_args()
    setup = Setup(options)
    setup.seed = options.seed
    return run_cases(setup, "faults within collectives", cases_of(setup, options))


if __name__ == "__main__":
    main(campaign)
