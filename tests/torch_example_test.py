"""examples/torch_stage.cpp as a user runs it: it learns, and three ranks give the bits of one.

usage: torch_example_test.py MPIEXEC TORCH_STAGE
"""

import subprocess
import sys

MPIEXEC, TORCH_STAGE = sys.argv[1:3]


def main():
    alone, three = (
        subprocess.run([MPIEXEC, "--timeout", "25", "-n", ranks, TORCH_STAGE], check=True, text=True,
                       stdout=subprocess.PIPE).stdout for ranks in ("1", "3"))
    losses = [float(line.split()[-1]) for line in alone.splitlines()]
    print(alone)
    if len(losses) != 5 or not losses[-1] < losses[0] / 2:
        sys.exit("the loss does not fall to half")
    if alone != three:
        sys.exit(f"three ranks give other bits:\n{three}")


if __name__ == "__main__":
    main()
