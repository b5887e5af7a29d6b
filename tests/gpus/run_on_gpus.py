#!/usr/bin/env python3
"""Runs a program that needs GPUs and is no GoogleTest, for ctest.

usage: run_on_gpus.py NEEDED LACK COMMAND...

Where its output has the regular expression LACK, the program found too few GPUs. Then the exit code is 77
(skipped), or 1 where SLUICE_REQUIRE_GPUS says that NEEDED are there. Else it is the program's.
"""

import os
import re
import subprocess
import sys


def main(needed, lack, *command):
    text = os.environ.get("SLUICE_REQUIRE_GPUS", "")
    if text and not (text.isdigit() and int(text) > 0):
        sys.exit(f"SLUICE_REQUIRE_GPUS='{text}'; legal: the number of GPUs that a job has, 1 or more")
    run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    sys.stdout.write(run.stdout)
    if not re.search(lack, run.stdout):
        return run.returncode
    if int(text or 0) < int(needed):
        return 77
    print(f"too few GPUs, but SLUICE_REQUIRE_GPUS is {text}")
    return 1


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
