#!/usr/bin/env python3
"""The tests of one label by whole programs: what GoogleTest's tests need when each start is slow, as with sanitizers.

    tests/run_binaries.py BUILD LABEL [SECONDS]

ctest starts a program once for every test. This starts it once for every shard of its tests, one program per core at a
time, with the environment that ctest gives it. Tests that are no GoogleTest run as ctest runs them. Prints the output of
what failed; the exit code is 1 then. No program is started after SECONDS; how many were not is said.
"""

import concurrent.futures
import json
import os
import re
import signal
import subprocess
import sys
import time

SHARDS = 4
SECONDS = 600  # of a shard


def tests_of(build, label):
    """(command, environment as a sorted tuple) -> names, in ctest's order."""
    shown = subprocess.run(["ctest", "--test-dir", build, "-L", label, "--show-only=json-v1"], check=True,
                           capture_output=True, text=True).stdout
    programs = {}
    for test in json.loads(shown)["tests"]:
        properties = {each["name"]: each["value"] for each in test["properties"]}
        command = test.get("command")
        if command is None:
            sys.exit(f"run_binaries.py: {test['name']} was not built")
        whole = any(word.startswith("--gtest_filter=") for word in command)
        words = tuple(word for word in command if not word.startswith("--gtest_"))
        key = (words, tuple(sorted(properties.get("ENVIRONMENT", []))), properties["WORKING_DIRECTORY"], whole)
        programs.setdefault(key, []).append(test["name"])
    return programs


def run(command, environment, folder, shard, seconds=SECONDS):
    """(exit code, output); a test that skips by 77 is no failure."""
    variables = dict(pair.split("=", 1) for pair in environment)
    if shard is not None:
        variables |= {"GTEST_TOTAL_SHARDS": str(SHARDS), "GTEST_SHARD_INDEX": str(shard), "GTEST_BRIEF": "1"}
    with subprocess.Popen(command, env={**os.environ, **variables}, cwd=folder, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, start_new_session=True) as process:
        try:
            output, code = process.communicate(timeout=seconds)[0], process.returncode
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # what it started, too
            output, code = process.communicate()[0] + f"\nnot done after {seconds} s".encode(), 1
    return (0 if code == 77 and shard is None else code), output.decode(errors="replace")


def main(build, label, most_seconds=float("inf")):
    end = time.monotonic() + most_seconds
    programs = tests_of(build, label)
    failed = 0
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        runs = {}
        # First what a machine without a GPU runs nowhere else.
        order = sorted(programs.items(), key=lambda each: not re.search("cuda|device|gpu|nccl|replica_sums", each[0][0][0]))
        for (command, environment, folder, whole), names in order:
            for shard in range(min(SHARDS, len(names))) if whole else [None]:
                runs[pool.submit(run, command, environment, folder, shard)] = (command, shard)
        for future in concurrent.futures.as_completed(runs):
            if future.cancelled():
                continue
            code, output = future.result()
            if time.monotonic() > end:
                for other in runs:
                    other.cancel()
            command, shard = runs[future]
            if code == 0:
                continue
            failed += 1
            part = "" if shard is None else f" (GTEST_TOTAL_SHARDS={SHARDS} GTEST_SHARD_INDEX={shard})"
            print(f"FAILED with {code}: {' '.join(command)}{part}\n{output}", flush=True)
        late = sum(future.cancelled() for future in runs)
    if late:
        print(f"stopped after {most_seconds:g} s: {late} of {len(runs)} runs were not reached")
    print(f"{sum(map(len, programs.values()))} tests in {len(runs)} runs of {len(programs)} programs, {failed} runs failed")
    return failed > 0


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:3], *map(float, sys.argv[3:])))
