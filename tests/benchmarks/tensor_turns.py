#!/usr/bin/env python3
"""Tensor parallelism over two ranks of a thread each, in turns in one run; medians of the turns' ratios.

    python3 tests/benchmarks/tensor_turns.py build/release [--widths 512,1024,2048] [--rounds 5] [--steps 4]

Each row trains a GPT-2 of `--layers` blocks with `--tokens` tokens a micro-batch:
  shards   one rank, with 4 and with 8 shards, against one shard: what shards cost
  busy     2 ranks that share the model (`--tensor 2`) against two processes of one rank each that train the same model
           with two shards at the same time: tokens a second over the sum of both, which is what two busy cores can do
  depth    `--tensor 2` against `--pipeline 2`, and what `sluice schedule` says of both: with what `sluice doctor` measures
           of the links, and the times of one rank, of which two run at the same time. With `--link RATE` also on
           two hosts with a link of that rate between them (tests/hosts; needs root)
  memory   1, 2 and 4 ranks of a model of 4 shards: parameters, gradients and optimizer state of a rank over those of one
           rank, and the most that a rank used over what is planned; both less those of one block of width 64,
           which leaves libraries out
  pytorch  `--tensor 2` against PyTorch's parallelize_module over gloo on two processes of a thread each; skipped
           without PyTorch
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

import torch_ranks
from turns import Runs, heads_of, ratio

ROWS = ("shards", "busy", "depth", "memory", "pytorch")
PARSER = argparse.ArgumentParser(description=__doc__.splitlines()[0])
PARSER.add_argument("build")
PARSER.add_argument("--rows", default=",".join(ROWS))
PARSER.add_argument("--widths", default="512,1024,2048")
PARSER.add_argument("--layers", type=int, default=2)
PARSER.add_argument("--context", type=int, default=256)
PARSER.add_argument("--tokens", type=int, default=512, help="of a micro-batch")
PARSER.add_argument("--micro-batches", type=int, default=4)
PARSER.add_argument("--rounds", type=int, default=5)
PARSER.add_argument("--steps", type=int, default=4, help="of a turn, after one that does not count")
PARSER.add_argument("--link", help="of two hosts in the row depth, as tc says it: 1gbit")
PARSER.add_argument("--torch-rank", type=int, help=argparse.SUPPRESS)
OPTIONS = PARSER.parse_args()


def row_shards(runs, width):
    rounds = runs.in_turns([lambda v=v: runs.train(width, 1, "--tensor-shards", v) for v in (1, 4, 8)])
    return f"1 shard {statistics.median(r[0] for r in rounds):.3f} s, 4 shards x {ratio(rounds, 1, 0):.3f}, " \
           f"8 shards x {ratio(rounds, 2, 0):.3f}"


def row_busy(runs, width):
    def alone():
        both = [runs.start(width, 1, f"alone{i}", "--tensor-shards", 2) for i in (0, 1)]
        return 1 / sum(1 / runs.seconds(each) for each in both)

    rounds = runs.in_turns([alone, lambda: runs.train(width, 2, "--tensor", 2)])
    return f"--tensor 2: {statistics.median(r[1] for r in rounds):.3f} s, tokens a second / those of two apart " \
           f"{ratio(rounds, 0, 1):.3f}"


def row_memory(runs, width):
    def numbers(width, layers, ranks):
        """In MiB, of rank 0: what the plan divides, all that it has, and the most that a rank used."""
        plan, host, used = runs.memory(width, layers, ranks, "--tensor", ranks, "--tensor-shards", 4)
        return sum(plan[:3]), plan[8] + host, used

    texts, whole = [], None
    for ranks in (1, 2, 4):
        divided, planned, used = (of - of_small for of, of_small in
                                  zip(numbers(width, OPTIONS.layers, ranks), numbers(64, 1, ranks)))
        whole = whole or divided
        texts.append(f"{ranks} of 4 shards: {planned:.0f} MiB, used / planned {used / planned:.4f}, "
                     f"state of one rank x {divided / whole:.4f}")
    return "; ".join(texts)


class Simulation:
    """What `sluice schedule` says of steps of two ranks."""

    def __init__(self, runs, width):
        self.runs, self.width, self.collectives = runs, width, []

    def schedule(self, *words):
        done = subprocess.run(list(map(str, [self.runs.sluice, "schedule", "--micro-batches", OPTIONS.micro_batches,
                                             "--format", "json", *words])), capture_output=True, text=True, check=False)
        if done.returncode != 0:
            sys.exit(done.stderr)
        return json.loads(done.stdout)

    def profile(self, shards):
        """The trace of one rank while another one computes the same, and what a step takes besides its actions."""
        traces = [self.runs.directory / f"profile{i}.json" for i in (0, 1)]
        both = [self.runs.start(self.width, 1, f"profile{i}", "--tensor-shards", shards, "--trace", traces[i])
                for i in (0, 1)]
        seconds = [self.runs.seconds(each) for each in both][0]
        alone = self.schedule("--ranks", 1, "--profile", traces[0])
        return traces[0], max(0, 1e3 * seconds - alone["makespan"])

    def seconds(self, kind):
        """Of a step with `--pipeline 2` or `--tensor 2`, of which self.collectives are a part."""
        trace, rest = self.profile(2 if kind == "tensor" else 1)
        links = self.runs.directory / f"links-{kind}.json"
        self.runs.ended(self.runs.mpirun(2, "doctor", "doctor", f"--{kind}", 2, "--output", links), "doctor")
        # Each rank has half of the parameters, on which the rest depends.
        report = self.schedule("--profile", trace, "--cluster", links, "--message-bytes", 4 * OPTIONS.tokens * self.width,
                               "--reduce-time", rest / 2)
        if kind == "tensor":
            self.collectives.append(report["tensor"]["time"] / 1e3)
        return report["makespan"] / 1e3


def row_depth(runs, width):
    kinds = ("pipeline", "tensor")
    simulation = Simulation(runs, width)
    rounds = runs.in_turns([lambda kind=kind: runs.train(width, 2, f"--{kind}", 2) for kind in kinds]
                      + [lambda kind=kind: simulation.seconds(kind) for kind in kinds])
    texts = [f"--{kind} 2: {statistics.median(r[i] for r in rounds):.3f} s, simulated "
             f"{statistics.median(r[i + 2] for r in rounds):.3f} s ({ratio(rounds, i + 2, i) - 1:+.1%})"
             for i, kind in enumerate(kinds)]
    return f"{'; '.join(texts)}, collectives {statistics.median(simulation.collectives):.3f} s of it; " \
           f"speed / the pipeline's {ratio(rounds, 0, 1):.3f}"


def row_depth_over_link(runs, width):
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "hosts"))
    from hosts import Hosts
    with Hosts(2, keep=(pathlib.Path(__file__).resolve().parents[2], pathlib.Path(OPTIONS.build).resolve())) as hosts:
        for host in hosts:
            hosts.limit(host, OPTIONS.link)
        return f"link of {OPTIONS.link}: {row_depth(Runs(OPTIONS, hosts.shared, hosts), width)}"


def row_pytorch(runs, width):
    rounds = runs.in_turns([lambda: torch_ranks.seconds(__file__, "--widths", str(width)),
                            lambda: runs.train(width, 2, "--tensor", 2)])
    return f"PyTorch {statistics.median(r[0] for r in rounds):.3f} s, --tensor 2: " \
           f"{statistics.median(r[1] for r in rounds):.3f} s, speed / PyTorch's {ratio(rounds, 0, 1):.3f}"


def torch_rank(rank, width):
    """The same model by parallelize_module; prints the median seconds of a step."""
    import torch
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = torch_ranks.begin(rank)
    model = torch_ranks.gpt2(OPTIONS, width, heads_of(width) // 2)
    for block in model.blocks:
        plan = {name: ColwiseParallel() for name in ("q", "k", "v", "up")}
        plan.update({name: RowwiseParallel() for name in ("output", "down")})
        parallelize_module(block, mesh, plan)
    shared = [each for each in model.parameters() if isinstance(each, DTensor)]
    whole = [each for each in model.parameters() if not isinstance(each, DTensor)]
    torch_ranks.train(OPTIONS, model, torch.optim.AdamW([{"params": shared}, {"params": whole}], lr=1e-5, foreach=True))


def main():
    widths = [int(width) for width in OPTIONS.widths.split(",")]
    if OPTIONS.torch_rank is not None:
        return torch_rank(OPTIONS.torch_rank, widths[-1])
    rows = {name: globals()[f"row_{name}"] for name in OPTIONS.rows.split(",")}
    if OPTIONS.link and "depth" in rows:
        rows["depth, link"] = row_depth_over_link
    if "pytorch" in rows:
        try:
            import torch
            print(f"PyTorch {torch.__version__}")
        except ImportError:
            print("pytorch: skipped, no PyTorch")
            del rows["pytorch"]
    print(f"GPT-2 of {OPTIONS.layers} blocks, context {OPTIONS.context}, {OPTIONS.micro_batches} micro-batches of "
          f"{OPTIONS.tokens} tokens, medians of {OPTIONS.rounds} turns of {OPTIONS.steps} steps")
    with tempfile.TemporaryDirectory() as directory:
        runs = Runs(OPTIONS, directory)
        for width in widths:
            for name, row in rows.items():
                print(f"width {width:5}  {name:11} {row(runs, width)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
