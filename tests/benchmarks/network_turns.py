"""Training steps of networks of layers against PyTorch's on a CPU, one thread each, in turns in one run. Prints
the median seconds of a step of both, and the median of the turns' ratios; 77 without PyTorch.

    python3 tests/benchmarks/network_turns.py build/release [--rounds 15] [--steps 5]
"""

import argparse
import os
import statistics
import subprocess
import sys
import time

PARSER = argparse.ArgumentParser(description=__doc__.splitlines()[0])
PARSER.add_argument("build")
PARSER.add_argument("--rounds", type=int, default=15)
PARSER.add_argument("--steps", type=int, default=5, help="of a turn")
OPTIONS = PARSER.parse_args()
os.environ["OMP_NUM_THREADS"] = "1"
try:
    import torch
    from torch import nn
except ImportError:
    print("no PyTorch")
    sys.exit(77)


class Residual(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        return x + self.layers(x)


def convolution(channels, out):
    return nn.Conv2d(channels, out, 3, padding=1)


# As network_benchmark.cpp has them: shape of a sample, samples of a step, layers.
NETWORKS = {
    "clothes": ((1, 28, 28), 32, lambda: [
        convolution(1, 16), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), convolution(16, 32), nn.BatchNorm2d(32),
        nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(1568, 128), nn.ReLU(), nn.Linear(128, 10)]),
    "wide": ((3, 32, 32), 16, lambda: [
        convolution(3, 64), nn.BatchNorm2d(64), nn.ReLU(),
        Residual(convolution(64, 64), nn.BatchNorm2d(64), nn.ReLU(), convolution(64, 64), nn.BatchNorm2d(64)),
        nn.ReLU(), nn.MaxPool2d(2), convolution(64, 128), nn.BatchNorm2d(128), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(128, 10)]),
    "rows": ((512,), 64, lambda: [
        nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)]),
}


def compare(name):
    shape, samples, layers = NETWORKS[name]
    model = nn.Sequential(*layers())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    x, y = torch.rand(samples, *shape), torch.arange(samples) % 10
    program = subprocess.Popen([f"{OPTIONS.build}/tests/benchmarks/network_benchmark", name, str(samples),
                                str(OPTIONS.steps)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def theirs():
        begin = time.perf_counter()
        for _ in range(OPTIONS.steps):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        return (time.perf_counter() - begin) / OPTIONS.steps

    def ours():
        print("turn", file=program.stdin, flush=True)
        return float(program.stdout.readline())

    turns = [(ours(), theirs()) for _ in range(OPTIONS.rounds + 2)][2:]
    program.stdin.close()
    program.wait()
    mine, torchs = (1000 * statistics.median(side) for side in zip(*turns))
    ratio = statistics.median(b / a for a, b in turns)
    print(f"{name:8} batch {samples:3}  Sluice {mine:7.2f} ms  PyTorch {torchs:7.2f} ms  speed / PyTorch's {ratio:.2f}",
          flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(f"PyTorch {torch.__version__}, one thread, {OPTIONS.rounds} turns of {OPTIONS.steps} steps")
    for each in NETWORKS:
        compare(each)
