#!/usr/bin/env python3
"""Tokens per second of this card against those that are stored for it: not more than 3 % less.

    tests/gpus/check_throughput.py ROWS.jsonl...    # of gpu_benchmark training --json

throughput.json has one row for each card and model that were measured, with the precisions and logits that a model has
by default; rows of others do not count. A card without a row passes, and the row to store is printed.
"""

import json
import pathlib
import statistics
import sys

STORED = pathlib.Path(__file__).with_name("throughput.json")
LEAST = 0.97
DEFAULTS = {"stream": "fp32", "moments": "fp32", "logit chunks": 1}


def check(lines, stored):
    """(texts to print, whether all is well) for the lines of gpu_benchmark."""
    texts, well, found = [], True, {}
    for line in lines:
        for row in line.get("rows", []) if line.get("benchmark") == "GPU: training" else []:
            if all(row.get(column, value) == value for column, value in DEFAULTS.items()):
                found.setdefault((line["gpu"], row["model"]), []).append(row["tokens/s"])
    if not found:
        return ["no rows of training by default"], False
    for (gpu, model), rates in found.items():
        rate = statistics.median(rates)
        row = next((r for r in stored if r["gpu"] == gpu and r["model"] == model), None)
        if row is None:
            texts.append(f"{gpu}, {model}: {rate:,.0f} tokens/s; no row is stored for this card. To store:")
            texts.append(json.dumps({"gpu": gpu, "model": model, "tokens/s": round(rate), "date": "", "command": ""}))
            continue
        share = rate / row["tokens/s"]
        passed = share >= LEAST
        well = well and passed
        texts.append(f"{gpu}, {model}: {rate:,.0f} tokens/s, {share:.3f} of the stored {row['tokens/s']:,.0f} "
                     f"({row['date']}): {'well' if passed else f'less than {LEAST}'}")
    return texts, well


def main(*paths):
    texts = [pathlib.Path(path).read_text(encoding="utf-8") for path in paths]
    lines = [json.loads(line) for text in texts for line in text.splitlines() if line.strip()]
    texts, well = check(lines, json.loads(STORED.read_text(encoding="utf-8")))
    print("\n".join(texts))
    return 0 if well else 1


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
