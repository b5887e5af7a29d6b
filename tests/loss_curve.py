"""Losses of a training on a GPU against those of the same training on the CPU in fp32.

Reads the files of `sluice train --metrics`, step by step, and prints the largest relative deviation
of each curve. Ends with 1 where one is above a hundredth, or where what is compared are not the
losses of as many steps of the same training: only device and precision may differ.

usage: loss_curve.py [--json FILE --gpu NAME] CPU.jsonl GPU.jsonl...
"""

import argparse
import json
import math
import sys

MOST = 0.01
FREE = {"device", "precision", "metrics"}  # options in which the runs may differ


class Refusal(Exception):
    """What makes two files incomparable."""


def curve_of(path):
    """(options, losses by step) of a metrics file."""
    try:
        with open(path, encoding="utf-8") as text:
            lines = [json.loads(line) for line in text if line.strip()]
    except (OSError, ValueError) as error:
        raise Refusal(f"{path}: {error}") from error
    steps = [line for line in lines if "loss" in line]
    if not steps or "run" not in steps[0]:
        raise Refusal(f"{path}: no losses of a run")
    return steps[0]["run"]["options"], [float(line["loss"]) for line in steps]


def refuse_others(path, reference, options):
    if reference["device"] != "cpu" or reference["precision"] != "fp32":
        raise Refusal("the first file is not of a run on the CPU in fp32")
    if not options["device"].startswith("cuda"):
        raise Refusal(f"{path}: --device {options['device']}, not cuda")
    for name in sorted((reference.keys() | options.keys()) - FREE):
        if reference.get(name) != options.get(name):
            raise Refusal(f"{path}: --{name} {options.get(name)}, on the CPU {reference.get(name)}")


def deviation(expected, actual):
    """(largest |actual - expected| / |expected|, its step from 1); infinite for what is no number."""
    each = [abs(a - e) / abs(e) for e, a in zip(expected, actual)]
    each = [math.inf if math.isnan(value) else value for value in each]
    largest = max(each)
    return largest, each.index(largest) + 1


def compare(reference_path, paths):
    """One row per file of `paths`."""
    reference, expected = curve_of(reference_path)
    rows = []
    for path in paths:
        options, actual = curve_of(path)
        refuse_others(path, reference, options)
        if len(actual) != int(options["steps"]) or len(actual) != len(expected):
            raise Refusal(f"{path}: {len(actual)} steps, {len(expected)} on the CPU, "
                          f"of {options['steps']}")
        largest, step = deviation(expected, actual)
        rows.append({"precision": options["precision"], "steps": len(actual),
                     "largest deviation": largest, "at step": step,
                     "last loss": actual[-1], "last loss on the CPU": expected[-1]})
    return rows


def main(arguments):
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--json")
    parser.add_argument("--gpu", default="")
    parser.add_argument("cpu")
    parser.add_argument("gpus", nargs="+")
    given = parser.parse_args(arguments)
    try:
        rows = compare(given.cpu, given.gpus)
    except Refusal as refusal:
        print(f"loss_curve: {refusal}")
        return 1
    for row in rows:
        print(f"{row['precision']}: largest deviation {row['largest deviation']:.3g} at step "
              f"{row['at step']} of {row['steps']}; last loss {row['last loss']:.5f}, on the CPU "
              f"in fp32 {row['last loss on the CPU']:.5f}")
    if given.json:
        line = {"benchmark": "GPU: losses against the CPU's in fp32", "gpu": given.gpu, "rows": rows}
        with open(given.json, "a", encoding="utf-8") as out:
            out.write(json.dumps(line) + "\n")
    far = [row["precision"] for row in rows if not row["largest deviation"] <= MOST]
    if far:
        print(f"loss_curve: further off than {MOST:.0%}: {', '.join(far)}")
    return 1 if far else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
