#!/usr/bin/env python3
"""Trainings on one card against stored losses, and against each other to the bit.

    tests/gpus/check_training.py [--build DIR] [--steps N] [--report FILE]
    tests/gpus/check_training.py --make [--build DIR]

loss_curves.json has the losses of 200 steps on a CPU in fp32, with and without dropout; --make writes it. On a card
fp32, dropout, recomputation and CUDA graphs stay within 0.01 % of them, bf16 within 0.5 %, with dropout and with a bf16
residual stream too (on a CPU: within 0.07 %). TF32, which has eight times the precision of bf16, and moments in bf16
stay within 0.1 % (moments on a CPU: 0.010 to 0.022 % with six seeds; whether they are rounded at random is a matter of
the operators' tests, as rounding to nearest shows in no loss here). Graphs, in fp32 and in bf16, and recomputation have
the bits of calls on that card, and so have four ranks that share it; tensor ranks have those of one rank with their
shards. Logits in two chunks stay within 0.01 % of logits at once on that card, over 10 steps, and graphs have their
bits. --steps compares the first N steps.
"""

import json
import math
import pathlib
import sys

from jobs import Card, Violation, arguments, require, run

STORED = pathlib.Path(__file__).with_name("loss_curves.json")
STEPS, WARMUP = 200, 20
MODEL = ("--layers", "2", "--heads", "2", "--width", "64", "--context", "64", "--micro-batches", "2", "--warmup", str(WARMUP),
         "--learning-rate", "0.0005", "--learning-rate-decay", "constant", "--seed", "3", "--validation-samples", "1")
STREAM = ("--precision", "bf16", "--stream-precision", "bf16")
CURVES = {"fp32": (), "dropout": ("--dropout", "0.1")}
# name: (options, stored curve, largest relative deviation)
RUNS = {"fp32": ((), "fp32", 1e-4), "dropout": (("--dropout", "0.1"), "dropout", 1e-4),
        "recompute": (("--recompute", "block"), "fp32", 1e-4), "graphs": (("--cuda-graphs",), "fp32", 1e-4),
        "bf16": (("--precision", "bf16"), "fp32", 5e-3),
        "bf16 with dropout": (("--precision", "bf16", "--dropout", "0.1"), "dropout", 5e-3),
        "bf16 stream": (STREAM, "fp32", 5e-3), "tf32": (("--precision", "tf32"), "fp32", 1e-3),
        "bf16 moments": (("--moment-precision", "bf16"), "fp32", 1e-3),
        "bf16 graphs": (("--precision", "bf16", "--cuda-graphs"), "fp32", 5e-3),
        "bf16 stream graphs": ((*STREAM, "--cuda-graphs"), "fp32", 5e-3)}
SAME_BITS = {"recompute": "fp32", "graphs": "fp32", "bf16 graphs": "bf16", "bf16 stream graphs": "bf16 stream"}
# 9 samples of 64 rows in a micro-batch; a chunk has at least 512 rows, so the second has 64.
LARGE = ("--layers", "1", "--heads", "1", "--width", "16", "--context", "64", "--micro-batches", "2", "--batch-size", "18",
         "--warmup", "2", "--learning-rate", "0.002", "--learning-rate-decay", "constant", "--seed", "3",
         "--validation-samples", "1", "--steps", "10")
CHUNKS = ("--logit-chunks", "2")


def deviation(expected, found):
    """(largest relative deviation, its step from 1); infinite for what is no number."""
    each = [abs(f - e) / abs(e) if math.isfinite(f) else math.inf for e, f in zip(expected, found)]
    return max((value, step) for step, value in enumerate(each, 1))


def curve_cases(steps, stored):
    found = {}

    def case_of(name):
        options, curve, most = RUNS[name]

        def case(card):
            losses, _ = card.train(1, "--steps", steps, *options, model=MODEL, digest=False)
            found[name] = losses
            expected = stored["curves"][curve][:steps]
            require(len(losses) == len(expected), f"{len(losses)} losses instead of {len(expected)}")
            largest, step = deviation(expected, losses)
            require(largest <= most, f"{largest:.2g} from the stored curve '{curve}' at step {step}, {most:g} is allowed")
            same = SAME_BITS.get(name)
            if same in found:
                require(losses == found[same], f"other losses than '{same}' has on this card")
            return f"largest deviation {largest:.2g} at step {step}"
        return case

    return [(f"losses of {name}", case_of(name)) for name in RUNS]


def chunks(card):
    def losses(*options):
        return card.train(1, *options, model=LARGE, digest=False)[0]

    whole, parts = losses(), losses(*CHUNKS)
    require(len(whole) == len(parts) == 10, f"{len(whole)} and {len(parts)} losses instead of 10")
    largest, step = deviation(whole, parts)
    require(largest <= 1e-4, f"{largest:.2g} from the losses of logits at once at step {step}, 0.0001 is allowed")
    require(losses(*CHUNKS, "--cuda-graphs") == parts, "other losses with graphs than with calls")
    return f"largest deviation {largest:.2g} at step {step}"


def bits(card):
    expected = card.train(1, "--steps", "5")
    for ranks, options in ((4, ("--schedule", "1f1b")), (4, ("--schedule", "zb-h1")),
                           (2, ("--schedule", "zb-v", "--chunks", "2")), (2, ("--cuda-graphs",))):
        found = card.train(ranks, "--steps", "5", "--pipeline", ranks, "--transport", "mpi", *options)
        require(found == expected, f"{found} on {ranks} ranks with {' '.join(options)}, {expected} on one")
    found = card.train(1, "--steps", "5", "--cuda-graphs")
    require(found == expected, f"{found} with graphs, {expected} without")
    expected = card.train(1, "--steps", "5", *STREAM)
    found = card.train(4, "--steps", "5", "--pipeline", 4, "--transport", "mpi", "--schedule", "zb-h1", *STREAM)
    require(found == expected, f"{found} on 4 ranks with a bf16 stream, {expected} on one")


def shards(card):
    for more in ((), ("--precision", "bf16", "--dropout", "0.1")):
        options = ("--steps", "5", "--tensor-shards", "2", *more)
        expected = card.train(1, *options)
        for ranks, layout in ((1, ("--cuda-graphs",)), (2, ("--tensor", "2")), (2, ("--tensor", "2", "--no-sequence-parallel")),
                              (4, ("--tensor", "2", "--pipeline", "2", "--schedule", "zb-h1"))):
            found = card.train(ranks, *options, *layout, *(("--transport", "mpi") if ranks > 1 else ()))
            require(found == expected, f"{found} on {ranks} ranks with {' '.join(layout)}, {expected} on one")


def make(card):
    curves = {}
    for name, options in CURVES.items():
        curves[name], _ = card.train(1, "--steps", STEPS, *options, "--device", "cpu", model=MODEL, digest=False)
    stored = {"made by": "tests/gpus/check_training.py --make, on a CPU in fp32", "model": list(MODEL), "curves": curves}
    text = json.dumps(stored, indent=1)
    STORED.write_text(text + "\n", encoding="utf-8")


def main():
    parser = arguments(__doc__)
    parser.add_argument("--make", action="store_true")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--report", help="a file for one JSON line")
    options = parser.parse_args()
    if not WARMUP <= options.steps <= STEPS:
        parser.error(f"--steps {options.steps}; legal: {WARMUP} to {STEPS}")
    try:
        card = Card(options)
    except Violation as violation:
        parser.error(str(violation))
    if options.make:
        make(card)
        card.remove()
        return 0
    stored = json.loads(STORED.read_text(encoding="utf-8"))
    if stored["model"] != list(MODEL):
        parser.error(f"{STORED.name} is of another model: make it again")
    cases = [*curve_cases(options.steps, stored), ("losses of logits in chunks", chunks),
             ("bits of 1 rank, 4 ranks, graphs", bits), ("bits of tensor ranks", shards)]
    return run(card, cases, options.report)


if __name__ == "__main__":
    sys.exit(main())
