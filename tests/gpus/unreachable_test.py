#!/usr/bin/env python3
"""Ranks whose NCCL never connects end at the time limit, and say what they wait for. For the emulation.

usage: unreachable_test.py [--build DIR]
"""

import os
import sys

os.environ["SLUICE_EMULATED_NCCL"] = "unreachable"

from jobs import MODEL, Card, arguments, require, run  # noqa: E402

LIMIT = 3  # seconds of --timeout


def connecting(card):
    job = card.start(2, card.setup.sluice, "train", "--data", card.setup.data, *MODEL, "--device", "cuda:0", "--pipeline",
                     "2", "--transport", "nccl", "--steps", "5", "--timeout", LIMIT, apart=True)
    code = job.finish(within=60)
    require(code == 11, f"exit {code} instead of 11\n{job.tail()}")
    require("sluice: error: " in job.output and "NCCL" in job.output, f"no report\n{job.tail()}")
    return next(line for line in job.output.splitlines() if line.startswith("sluice: error: "))


if __name__ == "__main__":
    sys.exit(run(Card(arguments(__doc__).parse_args()), [("NCCL that never connects", connecting)]))
