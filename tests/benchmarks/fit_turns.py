#!/usr/bin/env python3
"""What makes a model fit costs and saves, in turns in one run; medians of the turns' ratios.

    python3 tests/benchmarks/fit_turns.py build/release [--rows offload,memory,recompute,both,state] [--width 512] [--rounds 3]

Each row trains a GPT-2 of `--layers` blocks over `--ranks` ranks of `1f1b` with `--tokens` tokens a micro-batch:
  offload    activations that leave to a file in `--directory` (or through the page cache, `--cached`) against a run that
             keeps all: activations of rank 0 by the plan, and seconds of a step
  memory     the most that a rank used over what is planned of the fullest rank, less those of a model of one block a
             rank and width 64, which leaves libraries out
  recompute  `--recompute auto` where rank 0 has 60 % of its activations, and every setting of all blocks and of the
             first ones that fits as well: seconds of a step over the least of all
  both       the same where activations may also leave, with each setting, to a file
  state      the optimizer's state in a file against a run that has it in memory, with as many micro-batches as make that
             one's step `--times` as long as the disk takes to read and write all of it once (dd)
"""

import argparse
import re
import statistics
import subprocess
import sys
import tempfile
import time

from turns import Runs, ratio

ROWS = ("offload", "memory", "recompute", "both", "state")
PARSER = argparse.ArgumentParser(description=__doc__.splitlines()[0])
PARSER.add_argument("build")
PARSER.add_argument("--rows", default=",".join(ROWS))
PARSER.add_argument("--width", type=int, default=512)
PARSER.add_argument("--layers", type=int, default=8)
PARSER.add_argument("--ranks", type=int, default=4)
PARSER.add_argument("--context", type=int, default=256)
PARSER.add_argument("--tokens", type=int, default=1024, help="of a micro-batch")
PARSER.add_argument("--micro-batches", type=int, default=8)
PARSER.add_argument("--rounds", type=int, default=5)
PARSER.add_argument("--steps", type=int, default=4, help="of a turn, after one that does not count")
PARSER.add_argument("--times", default="10,5", help="lengths of a step of the row state")
PARSER.add_argument("--directory", help="of what is offloaded; by default a temporary one")
PARSER.add_argument("--cached", action="store_true", help="offload through the page cache")
OPTIONS = PARSER.parse_args()
OPTIMIZER, ACTIVATIONS, TOTAL = 2, 3, 8  # columns of the plan


def offload(runs, what="activations"):
    directory = OPTIONS.directory or runs.directory / "offloaded"
    return ["--offload", f"{what}:disk{'-cached' if OPTIONS.cached else ''}={directory}"]


def plan(runs, *words):
    """The planned columns of each rank, in MiB."""
    command = [*runs.training(OPTIONS.width), "--dry-run", *words]
    runs.ended(runs.mpirun(OPTIONS.ranks, "plan", *command), "plan")
    text = (runs.directory / "plan.log").read_text()
    rows = re.findall(r"^ +\d+ +\d+ +\S.*\d\.\d *$", text, re.MULTILINE)
    return [[float(column) for column in row.split()[-10:]] for row in rows]


def row_offload(runs):
    kept, left = plan(runs)[0], plan(runs, *offload(runs))[0]
    rounds = runs.in_turns([lambda words=words: runs.train(OPTIONS.width, OPTIONS.ranks, *words)
                            for words in ([], offload(runs))])
    return f"activations of rank 0 {kept[ACTIVATIONS]:.0f} MiB, with a file {left[ACTIVATIONS]:.0f} MiB; step " \
           f"{statistics.median(r[0] for r in rounds):.3f} s, with a file x {ratio(rounds, 1, 0):.3f}"


def row_memory(runs):
    texts = []
    for name, words in (("plain", []), ("offload", offload(runs)), ("recompute attention", ["--recompute", "attention"]),
                        ("recompute block", ["--recompute", "block"]),
                        ("offload, recompute block", [*offload(runs), "--recompute", "block"])):
        planned, used = (of - of_small for of, of_small in zip(*(
            (columns[TOTAL] + host, most) for columns, host, most in (
                runs.memory(OPTIONS.width, OPTIONS.layers, OPTIONS.ranks, *words),
                runs.memory(64, OPTIONS.ranks, OPTIONS.ranks, *words)))))
        texts.append(f"{name} {planned:.0f} MiB, used / planned {used / planned:.4f}")
    return "; ".join(texts)


def row_recompute(runs, *leaves):
    columns = plan(runs)[0]
    limit = columns[TOTAL] - 0.4 * columns[ACTIVATIONS]
    kinds = [f"{kind}*{blocks},none" for kind in ("attention", "block") for blocks in range(1, OPTIONS.layers)]
    settings = [["--recompute", each, *more] for each in (*kinds, "attention", "block") for more in dict.fromkeys(((), leaves))]
    if leaves:
        settings.append([*leaves])
    settings = [each for each in settings if max(row[TOTAL] for row in plan(runs, *each)) <= limit]
    automatic = ["--recompute", "auto", "--memory", f"{int(limit * 1024)}K", *leaves]
    rounds = runs.in_turns([lambda words=words: runs.train(OPTIONS.width, OPTIONS.ranks, *words)
                            for words in (automatic, *settings, [])])
    ratios = [ratio(rounds, i + 1, 0) for i in range(len(settings))]
    best = min(range(len(settings)), key=ratios.__getitem__)
    plan(runs, *automatic)
    chosen = re.search(r"recompute auto: (.*)", (runs.directory / "plan.log").read_text())[1]
    return f"{limit:.0f} MiB a rank; auto takes {chosen}: {statistics.median(r[0] for r in rounds):.3f} s a step, over the " \
           f"best of {len(settings)} that fit ({' '.join(settings[best])}) x {1 / ratios[best]:.3f}, over one that keeps all x " \
           f"{ratio(rounds, 0, len(settings) + 1):.3f}"


def row_both(runs):
    return row_recompute(runs, *offload(runs))


def disk_seconds(runs, mebibytes):
    """Of writing so much past the page cache, and of reading it."""
    file, seconds = runs.directory / "disk", []
    for words in ((f"of={file}", "if=/dev/zero", "oflag=direct"), (f"if={file}", "of=/dev/null", "iflag=direct")):
        start = time.monotonic()
        subprocess.run(["dd", "bs=4M", f"count={max(1, round(mebibytes / 4))}", *words], check=True, capture_output=True)
        seconds.append(time.monotonic() - start)
    file.unlink()
    return seconds


def row_state(runs):
    state = plan(runs, *offload(runs, "optimizer"))
    text = (runs.directory / "plan.log").read_text()
    size = OPTIONS.ranks * float(re.search(r"optimizer's state, at most ([\d.]+) MiB", text)[1])
    one, two = (runs.train(OPTIONS.width, OPTIONS.ranks, "--micro-batches", count) for count in (1, 2))
    texts = []
    for times in map(float, OPTIONS.times.split(",")):
        disk = [disk_seconds(runs, size)]
        count = max(1, round((times * sum(disk[0]) - one) / (two - one)) + 1)
        rounds = runs.in_turns([lambda words=words: runs.train(OPTIONS.width, OPTIONS.ranks, "--micro-batches", count, *words)
                                for words in ([], offload(runs, "optimizer"))])
        disk.append(disk_seconds(runs, size))
        written, read = (statistics.mean(each) for each in zip(*disk))
        step = statistics.median(each[0] for each in rounds)
        texts.append(f"{count} micro-batches, step {step:.3f} s, {step / (written + read):.1f} times one read and write of the "
                     f"state ({read:.2f} and {written:.2f} s); with a file x {ratio(rounds, 1, 0):.3f}")
    return f"{size:.0f} MiB of state through {state[0][OPTIMIZER]:.0f} MiB a rank; " + "; ".join(texts)


def main():
    print(f"GPT-2 of {OPTIONS.layers} blocks of width {OPTIONS.width}, {OPTIONS.ranks} ranks of 1f1b, context "
          f"{OPTIONS.context}, {OPTIONS.micro_batches} micro-batches of {OPTIONS.tokens} tokens, medians of "
          f"{OPTIONS.rounds} turns of {OPTIONS.steps} steps")
    with tempfile.TemporaryDirectory(dir=OPTIONS.directory) as directory:
        runs = Runs(OPTIONS, directory)
        for name in OPTIONS.rows.split(","):
            print(f"{name:9} {globals()[f'row_{name}'](runs)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
