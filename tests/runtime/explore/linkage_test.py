#!/usr/bin/env python3
"""What `sluice schedule` needs when it is linked alone: neither MPI nor a library of CUDA.

    tests/runtime/explore/linkage_test.py SCHEDULE_ONLY SLUICE

SCHEDULE_ONLY has to draw a schedule without naming such a library among those it needs. SLUICE, the whole
program, names MPI's: that shows that the search can find one. Exits 1 where either is not so.
"""

import re
import subprocess
import sys

UNWANTED = re.compile(r"libmpi|libopen-|libcuda|libcudart|libcublas|libcudnn|libnccl")


def needed(program):
    text = subprocess.run(["readelf", "-d", program], capture_output=True, text=True, check=True).stdout
    return re.findall(r"\(NEEDED\).*\[(.*)\]", text)


def main():
    schedule_only, sluice = sys.argv[1:]
    found = [name for name in needed(schedule_only) if UNWANTED.match(name)]
    if found or not needed(schedule_only):
        sys.exit(f"{schedule_only} needs {found}")
    if not any(UNWANTED.match(name) for name in needed(sluice)):
        sys.exit(f"{sluice} needs no MPI: the search for it finds nothing")
    drawn = subprocess.run([schedule_only, "--schedule", "gpipe", "--ranks", "2", "--micro-batches", "2"],
                           capture_output=True, text=True, check=True).stdout
    if "rank 1" not in drawn:
        sys.exit(f"{schedule_only} draws no schedule: {drawn}")


if __name__ == "__main__":
    main()
