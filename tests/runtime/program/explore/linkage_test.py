#!/usr/bin/env python3
"""What `sluice schedule` loads: neither MPI nor a library of CUDA. That `sluice-job` loads large ones of CUDA
only where it uses a GPU. And that the rest of `sluice` is found.

    tests/runtime/program/explore/linkage_test.py SLUICE SLUICE_JOB

SLUICE has to draw a schedule with no such library among those that it loads, directly or through others.
SLUICE_JOB, which it becomes for other commands, loads MPI's: that shows that the search can find one. A copy
of SLUICE finds SLUICE_JOB beside it or in ../libexec/sluice, also through a link to the copy, and says where
it looked if neither is there. Exits 1 where any of this is not so.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

LARGE = re.compile(r"libcublas|libnccl|libcudart")
UNWANTED = re.compile(r"libmpi|libopen-|libcuda|libcudart|libcublas|libcudnn|libnccl")


def loaded(program):
    text = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
    return re.findall(r"^\s*(\S+)", text, re.MULTILINE)


def run(*command):
    return subprocess.run(command, capture_output=True, text=True)


def check_copies(sluice, job):
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        for name in ("bin", "libexec/sluice", "links"):
            (root / name).mkdir(parents=True)
        copy = root / "bin" / "sluice"
        shutil.copy(sluice, copy)
        (root / "links" / "sluice").symlink_to(copy)
        alone = run(copy, "--version")
        if alone.returncode != 70 or str(root / "libexec/sluice/sluice-job") not in alone.stderr:
            sys.exit(f"a copy without sluice-job: {alone}")
        if "rank 1" not in run(copy, "schedule", "--ranks", "2").stdout:
            sys.exit("a copy without sluice-job has no 'schedule'")
        for place in ("libexec/sluice/sluice-job", "bin/sluice-job"):
            os.link(job, root / place) if same_device(job, root) else shutil.copy(job, root / place)
            for program in (copy, root / "links" / "sluice"):
                if not run(program, "--version").stdout.startswith("sluice "):
                    sys.exit(f"{program} does not find {place}")
            (root / place).unlink()


def same_device(one, two):
    return os.stat(one).st_dev == os.stat(two).st_dev


def main():
    sluice, job = sys.argv[1:]
    found = [name for name in loaded(sluice) if UNWANTED.match(name)]
    if found or not loaded(sluice):
        sys.exit(f"{sluice} loads {found}")
    if not any(UNWANTED.match(name) for name in loaded(job)):
        sys.exit(f"{job} loads no MPI: the search for it finds nothing")
    found = [name for name in loaded(job) if LARGE.match(name)]
    if found:
        sys.exit(f"{job} loads {found} before it knows whether there is a GPU")
    drawn = run(sluice, "schedule", "--schedule", "gpipe", "--ranks", "2", "--micro-batches", "2")
    if "rank 1" not in drawn.stdout:
        sys.exit(f"{sluice} draws no schedule: {drawn}")
    check_copies(sluice, job)


if __name__ == "__main__":
    main()
