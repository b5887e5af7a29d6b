#!/usr/bin/env python3
"""A long training that saves often: memory, descriptors and files must stay constant.

    tests/faults/steady.py [--steps N] [--ranks N] [--build DIR]

Ranks save every fifth step. What each process holds is read all the while. The largest resident memory, the most
descriptors and the most files of the last third of the steps are compared with those of the thirds before.
"""

import os
import pathlib
import re
import time

from harness import POLL, Setup, Violation, arguments, main, metrics_so_far, require

# What may be more by chance: allocators settle late, and a look may fall into a save, which has files and
# descriptors for moments. What each save left would add up to more: a third of 300 steps has 20 saves.
SLACK = {"memory": 1024 * 1024, "descriptors": 6, "files": 10, "folders": 2}


def held_by(pid):
    """(resident bytes, open descriptors) of a process, or None where it is gone."""
    try:
        status = pathlib.Path(f"/proc/{pid}/status").read_text()
        descriptors = len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return None
    match = re.search(r"^VmRSS:\s+(\d+) kB", status, re.MULTILINE)
    return (int(match.group(1)) * 1024, descriptors) if match else None


def last_step(metrics):
    """The step of a metrics file's last whole line; reads its end alone."""
    try:
        with open(metrics, "rb") as file:
            file.seek(max(os.path.getsize(metrics) - 4096, 0))
            found = re.findall(rb'"step":\s*(\d+),\s*"loss"', file.read())
    except FileNotFoundError:
        return 0
    return int(found[-1]) if found else 0


class Thirds:
    """The largest value in each third of the run, by name."""

    def __init__(self, steps):
        self.steps, self.largest = steps, [{}, {}, {}]

    def add(self, step, name, value):
        if step >= self.steps:
            return  # the validation and the end take memory of their own
        third = self.largest[min(step * 3 // self.steps, 2)]
        third[name] = max(third.get(name, 0), value)


def watch(job, directory, metrics, thirds):
    ranks = {}
    while job.running():
        step = last_step(metrics)
        if step and len(ranks) < job.ranks:
            ranks = {pid: rank for pid, rank in job.processes().items() if rank is not None} or {job.process.pid: 0}
        for pid, rank in ranks.items():
            if held := held_by(pid):
                thirds.add(step, f"memory of rank {rank}", held[0])
                thirds.add(step, f"descriptors of rank {rank}", held[1])
        thirds.add(step, "files", sum(len(files) for _, _, files in os.walk(directory)))
        thirds.add(step, "folders", sum(len(folders) for _, folders, _ in os.walk(directory)))
        time.sleep(10 * POLL)


def check(thirds):
    first, second, last = thirds.largest
    require(len(last) >= 4 and set(last) == set(second), f"too few looks: {thirds.largest}")
    for name, value in sorted(last.items()):
        before = max(first.get(name, 0), second[name])
        require(value <= before + SLACK[name.split()[0]], f"{name} rises from {before} to {value}")


def campaign():
    parser = arguments(__doc__.splitlines()[0], steps=300, ranks=2)
    options = parser.parse_args()
    setup, start = Setup(options), time.monotonic()
    directory, metrics = setup.folder / "run", setup.folder / "metrics.jsonl"
    thirds = Thirds(options.steps)
    job = setup.train(options.ranks, "--pipeline", options.ranks, "--steps", options.steps, "--save", directory,
                      "--save-every", 5, "--metrics", metrics)
    job.ranks = options.ranks
    violations = 0
    try:
        watch(job, directory, metrics, thirds)
        job.expect(0)
        require(len(metrics_so_far(metrics)) == options.steps, "the metrics lack steps")
        check(thirds)
    except Violation as error:
        violations = 1
        print(f"FAILED {error}")
    finally:
        job.end()
    values = "; ".join(f"{name} " + " ".join(str(third.get(name)) for third in thirds.largest)
                       for name in sorted(thirds.largest[2]))
    print(f"steady: {options.steps} steps, {violations} violations, {time.monotonic() - start:.0f} s; "
          f"largest of each third: {values}")
    setup.remove()
    return violations


if __name__ == "__main__":
    main(campaign)
