"""The examples with LibTorch as a user runs them: they learn, and several ranks give the bits of one.

usage: torch_example_test.py MPIEXEC TORCH_STAGE TORCH_RESNET
"""

import subprocess
import sys

MPIEXEC, TORCH_STAGE, TORCH_RESNET = sys.argv[1:4]


def check(program, ranks, count):
    alone, several = (
        subprocess.run([MPIEXEC, "--timeout", "50", "-n", str(n), program], check=True, text=True,
                       stdout=subprocess.PIPE).stdout for n in (1, ranks))
    losses = [float(line.split()[-1]) for line in alone.splitlines()]
    print(alone)
    if len(losses) != count or not losses[-1] < losses[0] / 2:
        sys.exit(f"{program}: the loss does not fall to half")
    if alone != several:
        sys.exit(f"{program}: {ranks} ranks give other bits:\n{several}")


if __name__ == "__main__":
    check(TORCH_STAGE, 3, 5)
    check(TORCH_RESNET, 2, 3)
