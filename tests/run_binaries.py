#!/usr/bin/env python3
"""The tests of one label, for so long: what sanitizers make too slow to run whole.

    tests/run_binaries.py BUILD LABEL [SECONDS]

Runs them as ctest does, one per core at a time, first what a machine without a GPU runs nowhere else, last the runs of the
GPU's benchmark. Prints the output of what failed; the exit code is 1 then. No test is started after SECONDS; which were
not is said.
"""

import concurrent.futures
import json
import os
import re
import signal
import subprocess
import sys
import time


def tests_of(build, label):
    """(name, command, environment, folder, seconds), in ctest's order."""
    shown = subprocess.run(["ctest", "--test-dir", build, "-L", f"^{label}$", "--show-only=json-v1"], check=True,
                           capture_output=True, text=True).stdout
    for test in json.loads(shown)["tests"]:
        properties = {each["name"]: each["value"] for each in test["properties"]}
        if "command" not in test:
            sys.exit(f"run_binaries.py: {test['name']} was not built")
        environment = dict(pair.split("=", 1) for pair in properties.get("ENVIRONMENT", []) if pair)
        yield test["name"], test["command"], environment, properties["WORKING_DIRECTORY"], properties["TIMEOUT"]


def run(command, environment, folder, seconds):
    """(exit code, output); 77 is a skip."""
    with subprocess.Popen(command, env={**os.environ, **environment}, cwd=folder, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, start_new_session=True) as process:
        try:
            output, code = process.communicate(timeout=seconds)[0], process.returncode
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # what it started, too
            output, code = process.communicate()[0] + f"\nnot done after {seconds} s".encode(), 1
    return (0 if code == 77 else code), output.decode(errors="replace")


def main(build, label, most_seconds=float("inf")):
    end = time.monotonic() + most_seconds
    tests = sorted(tests_of(build, label), key=lambda test: (
        test[0].startswith("gpu_benchmark"), not re.search("cuda|device|gpu|nccl|replica_sums", test[0])))
    late, failed = [], 0

    def one(name, *test):
        return run(*test) if time.monotonic() <= end else late.append(name)

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        runs = {pool.submit(one, *test): test[0] for test in tests}
        for future in concurrent.futures.as_completed(runs):
            if future.result() and future.result()[0] != 0:
                failed += 1
                code, output = future.result()
                print(f"FAILED with {code}: {runs[future]}\n{output}", flush=True)
    if late:
        print(f"stopped after {most_seconds:g} s: not reached: {' '.join(late)}")
    print(f"{len(tests)} tests, {failed} failed")
    return failed > 0


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:3], *map(float, sys.argv[3:])))
