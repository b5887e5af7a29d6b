#!/usr/bin/env python3
"""A profiler that listens hears every action of a step by its name, and no range stays open.

    profiler_ranges_test.py SLUICE FAKE_PROFILER
"""

import collections
import os
import pathlib
import subprocess
import sys
import tempfile

STEPS, MICRO_BATCHES = 2, 4

sluice, profiler = sys.argv[1:]
with tempfile.TemporaryDirectory() as place:
    (pathlib.Path(place) / "text.txt").write_text("in the beginning " * 200)
    ranges = pathlib.Path(place) / "ranges"
    subprocess.run([sluice, "train", "--data", "text.txt", "--layers", "1", "--width", "8", "--heads", "1", "--context", "8",
                    "--batch-size", "8", "--micro-batch-size", "2", "--steps", str(STEPS), "--validate-every", "0",
                    "--device", "cpu"], cwd=place, check=True, stdout=subprocess.DEVNULL,
                   env={**os.environ, "NVTX_INJECTION64_PATH": profiler, "SLUICE_TEST_RANGES": str(ranges)})
    heard = ranges.read_text().splitlines()
counts = collections.Counter(heard)
for name in [f"0{kind}{i}" for kind in "FB" for i in range(MICRO_BATCHES)]:
    if counts[name] < STEPS:
        sys.exit(f"range {name} was heard {counts[name]} times in {STEPS} steps; there were {dict(counts)}")
if counts["end"] * 2 != len(heard):
    sys.exit(f"{len(heard) - counts['end']} ranges were opened, {counts['end']} were closed")
print(f"{counts['end']} ranges of {len(counts) - 1} names")
