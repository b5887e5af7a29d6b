#!/usr/bin/env python3
"""What `--shard parameters` costs and saves, in turns in one run; medians of the turns' ratios.

    python3 tests/benchmarks/shard_turns.py build/release [--rows memory,step,pytorch] [--width 1024] [--rounds 3]

Each row trains a GPT-2 of `--layers` blocks with `--tokens` tokens a micro-batch, a thread a rank:
  memory   over 4 replicas, for each level: the most that a rank used over what is planned, less those of one block of
           width 64, which leaves libraries out; and, gathered per use, over (4 + 12 / d) x parameters, two units and
           the activations, messages and workspace of the plan
  step     over 2 replicas: `--shard optimizer`, and parameters gathered per step and per use, over no shards
  pytorch  the last two against PyTorch's fully_shard over gloo, with its parameters gathered per step
           (reshard_after_forward off) and per use; skipped without PyTorch
"""

import argparse
import statistics
import sys
import tempfile

import torch_ranks
from turns import Runs, ratio

ROWS = ("memory", "step", "pytorch")
PARSER = argparse.ArgumentParser(description=__doc__.splitlines()[0])
PARSER.add_argument("build")
PARSER.add_argument("--rows", default=",".join(ROWS))
PARSER.add_argument("--width", type=int, default=1024)
PARSER.add_argument("--layers", type=int, default=4)
PARSER.add_argument("--context", type=int, default=64)
PARSER.add_argument("--tokens", type=int, default=512, help="of a micro-batch")
PARSER.add_argument("--micro-batches", type=int, default=4)
PARSER.add_argument("--rounds", type=int, default=3)
PARSER.add_argument("--steps", type=int, default=3, help="of a turn, after one that does not count")
PARSER.add_argument("--torch-rank", type=int, help=argparse.SUPPRESS)
PARSER.add_argument("--torch-gather", default="use", help=argparse.SUPPRESS)
OPTIONS = PARSER.parse_args()
PER_USE, PER_STEP = (["--shard", "parameters", "--shard-gather", when] for when in ("use", "step"))
LEVELS = {"none": [], "optimizer": ["--shard", "optimizer"], "parameters, step": PER_STEP, "parameters, use": PER_USE}


def row_memory(runs):
    replicas, texts = 4, []
    block = 12 * OPTIONS.width ** 2 * 4 / 2 ** 20
    for name, words in LEVELS.items():
        words = ["--replicas", replicas, *words]
        columns, host, most = runs.memory(OPTIONS.width, OPTIONS.layers, replicas, *words)
        small, small_host, small_most = runs.memory(64, 1, replicas, *words)
        used = most - small_most
        text = f"{name} {columns[8] - small[8]:.0f} MiB, used / planned {used / (columns[8] + host - small[8] - small_host):.4f}"
        if name == "none":
            parameters = columns[0] - small[0]
        if name == "parameters, use":
            others = sum(columns[3:7]) - sum(small[3:7])
            bound = (4 + 12 / replicas) / 4 * parameters + 2 * block
            text += f", less activations and the like over (4 + 12 / d) x parameters and two units {(used - others) / bound:.4f}"
        texts.append(text)
    return "; ".join(texts)


def row_step(runs):
    rounds = runs.in_turns([lambda words=words: runs.train(OPTIONS.width, 2, "--replicas", 2, *words)
                            for words in LEVELS.values()])
    return f"none {statistics.median(r[0] for r in rounds):.3f} s" + "".join(
        f", {name} x {ratio(rounds, i, 0):.3f}" for i, name in enumerate(LEVELS) if i > 0)


def row_pytorch(runs):
    texts = []
    for when, words in (("step", PER_STEP), ("use", PER_USE)):
        rounds = runs.in_turns([lambda: torch_ranks.seconds(__file__, "--torch-gather", when),
                                lambda: runs.train(OPTIONS.width, 2, "--replicas", 2, *words)])
        texts.append(f"per {when}: PyTorch {statistics.median(r[0] for r in rounds):.3f} s, Sluice "
                     f"{statistics.median(r[1] for r in rounds):.3f} s, speed / PyTorch's {ratio(rounds, 0, 1):.3f}")
    return "; ".join(texts)


def torch_rank(rank):
    """The same model by fully_shard; prints the median seconds of a step."""
    import torch
    from torch.distributed.fsdp import fully_shard

    mesh = torch_ranks.begin(rank)
    model = torch_ranks.gpt2(OPTIONS, OPTIONS.width)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=OPTIONS.torch_gather == "use")
    torch_ranks.train(OPTIONS, model, torch.optim.AdamW(model.parameters(), lr=1e-5, foreach=True))


def main():
    if OPTIONS.torch_rank is not None:
        return torch_rank(OPTIONS.torch_rank)
    rows = OPTIONS.rows.split(",")
    if "pytorch" in rows:
        try:
            import torch
            print(f"PyTorch {torch.__version__}")
        except ImportError:
            print("pytorch: skipped, no PyTorch")
            rows.remove("pytorch")
    print(f"GPT-2 of {OPTIONS.layers} blocks of width {OPTIONS.width}, context {OPTIONS.context}, {OPTIONS.micro_batches} "
          f"micro-batches of {OPTIONS.tokens} tokens, medians of {OPTIONS.rounds} turns of {OPTIONS.steps} steps")
    with tempfile.TemporaryDirectory() as directory:
        runs = Runs(OPTIONS, directory)
        for name in rows:
            print(f"{name:8} {globals()[f'row_{name}'](runs)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
