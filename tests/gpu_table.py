"""The GPU rows of tests/benchmarks/README.md from the report of `tests/gpu_check.sh benchmark`.

What is missing in the report, or comes from the tests' emulation of CUDA, is "not run".

usage: gpu_table.py benchmark.jsonl
"""

import json
import os
import statistics
import sys

BARE, COPY, IDLE = 0.97, 0.85, 0.03  # aims: matmuls, memory-bound kernels, idle share


def lines_of(path):
    if not os.path.exists(path):
        return []
    with open(path, encoding="utf-8") as text:
        lines = [json.loads(line) for line in text if line.strip()]
    return [line for line in lines if "Emulated" not in line.get("gpu", "")]  # no speeds at all


def rows_of(lines, benchmark):
    return [row for line in lines if line.get("benchmark") == benchmark for row in line["rows"]]


BATCH = {"124m": 64, "1.5b": 16}  # samples of 1024 tokens
BATCH_OF_HALF_A_MILLION = 512
DEFAULT, LEAN = "as by default", "stream and moments in bf16, logits in chunks"


def way_of(row):
    changes = [row.get("stream", "fp32") != "fp32", row.get("moments", "fp32") != "fp32",
               row.get("logit chunks", 1) != 1]
    return LEAN if all(changes) else None if any(changes) else DEFAULT


def training_rows(lines, model, batch=None, way=DEFAULT, benchmark="GPU: training"):
    return [row for row in rows_of(lines, benchmark)
            if row["model"] == model and row["samples"] == (batch or BATCH[model]) and way_of(row) == way]


def training(*arguments, **names):
    """Medians over the turns, as training_rows(); None where it was not run."""
    rows = training_rows(*arguments, **names)
    if not rows:
        return None
    return {key: statistics.median(row[key] for row in rows)
            for key in ("tokens/s", "share of 989 TFLOP/s", "ms per step")}


def measured_training(*arguments):
    run = training(*arguments)
    return run and f"{run['tokens/s']:,.0f} tokens/s, {run['share of 989 TFLOP/s']:.1%}"


def measured_memory(lines, model):
    rows = [row for row in training_rows(lines, model) if "used / planned" in row]
    return rows and f"{rows[-1]['used / planned'] - 1:+.1%} ({rows[-1]['used GiB']:.1f} GiB)"


def measured_power(lines, model):
    """Of the turns of training that the driver was asked in."""
    found = [line for line in lines if line.get("samples of the driver") and training_rows([line], model)]
    if not found:
        return None
    watts, mhz = (statistics.mean(line[key] for line in found) for key in ("watts", "SM MHz"))
    reasons = sorted({line["clocks held back by"] for line in found})
    return f"{watts:.0f} W of {found[0]['limit watts']:.0f}, {mhz:.0f} MHz, held back by {'; '.join(reasons)}"


def measured_pytorch(lines, model, batch=None, way=DEFAULT):
    ours = training(lines, model, batch, way)
    theirs = training(lines, model, batch, benchmark="PyTorch: training")
    if not ours or not theirs:
        return None
    ratio = ours["tokens/s"] / theirs["tokens/s"]
    return f"{ratio:.3f} x ({theirs['tokens/s']:,.0f} tokens/s)"


def measured_idle(lines, model, benchmark):
    rows = [r for r in rows_of(lines, benchmark) if r["model"] == model]
    if not rows:
        return None
    share = rows[-1]["idle share"]  # or why there is none
    return share if isinstance(share, str) else f"{share:.1%}"


def matmuls(lines, model):
    """(line, its rows without the sum, the sum) of the model, or None."""
    name = "GPU: matmuls against cuBLASLt called bare"
    width = {"124m": "768", "1.5b": "1600"}[model]
    for line in lines:
        if line.get("benchmark") != name:
            continue
        *rows, total = line["rows"]
        output = next(row for row in rows if row["matmul"] == "output forward")
        if output["m x n x k"].endswith(f"x {width} x {width}"):
            return rows, total
    return None


def measured_matmuls(lines, model):
    found = matmuls(lines, model)
    if not found:
        return None
    rows, total = found
    lowest = min(rows, key=lambda row: row["ratio"])
    text = f"all together {total['ratio']:.3f}; lowest {lowest['ratio']:.3f} ({lowest['matmul']})"
    run = training_rows(lines, model)
    if run:
        micro_batches = run[0]["samples"] / run[0]["micro-batch"]
        share = total["ms per micro-batch"] * micro_batches / training(lines, model)["ms per step"]
        text += f"; {share:.0%} of the step"
    return text


def measured_biases(lines, model):
    rows = [r for r in rows_of(lines, "GPU: gradients of biases in epilogues of matmuls") if r["model"] == model]
    if not rows:
        return None
    *each, total = rows
    text = ", ".join(f"{r['matmul']} {r['ratio']:.2f}" if r["ratio"] != "" else f"{r['matmul']} not supported"
                     for r in each)
    text += f"; weight gradients together {total['gain ms per micro-batch']:.2f} ms a micro-batch"
    run = training_rows(lines, model)
    if run:
        gain = total["gain ms per micro-batch"] * run[0]["samples"] / run[0]["micro-batch"]
        text += f", {gain / training(lines, model)['ms per step']:.1%} of the step"
    return text


def measured_waiting(lines, model):
    rows = [r for r in rows_of(lines, "GPU: matmuls beside kernels that wait") if r["model"] == model]
    return ", ".join(f"{r['ratio']:.3f} beside {r['blocks that wait']} blocks" for r in rows[1:]) or None


def measured_kernels(lines):
    rows = rows_of(lines, "GPU: memory-bound kernels against a device copy")
    if not rows:
        return None
    lowest = min(rows, key=lambda row: row["ratio"])
    slow = [row["kernel"] for row in rows if row["ratio"] < COPY]
    return (f"lowest {lowest['ratio']:.2f} ({lowest['kernel']}); copy {rows[0]['copy GB/s']:,.0f} GB/s"
            + (f"; below the aim: {'; '.join(slow)}" if slow else ""))


def measured_issue(lines):
    rows = [r for r in rows_of(lines, "GPU: host time per compute action, stages that do nothing")
            if r["device"] != "cpu"]
    return rows and ", ".join(f"{r['schedule']} {r['host ns per action'] / 1e3:.2f} us" for r in rows)


def measured_ratio(lines, title, same_loss=True):
    rows = rows_of(lines, title)
    other = same_loss and rows and not rows[-1]["same loss"]
    return rows and f"{rows[-1]['ratio']:.3f}" + (", other loss" if other else "")


def measured_attention(lines):
    rows = rows_of(lines, "GPU: attention alone")
    return rows and ", ".join(f"{row['pass']} {row['over bf16 as a model runs it']:.2f}" for row in rows
                              if row["attention"] == "bf16, own, dropout 0.1")


def measured_losses(lines, precision):
    rows = [row for row in rows_of(lines, "GPU: losses against the CPU's in fp32")
            if row["precision"] == precision and row["steps"] == 200]
    if not rows:
        return None
    return f"{rows[-1]['largest deviation']:.2%} at step {rows[-1]['at step']}"


def table(lines):
    for model, batch, aim in (("124m", 64, "600,000 tokens/s; beyond 620,000"), ("1.5b", 16, "53,000; beyond 54,400"),
                              ("1.5b", BATCH_OF_HALF_A_MILLION, "56,000; beyond 58,000")):
        for way in (DEFAULT, LEAN):
            yield f"GPT-2 {model.upper()}, bf16, sequence 1024, batch {batch}, one rank, {way}", aim, \
                measured_training(lines, model, batch, way)
    for model, batch, aim in (("124m", 64, "1.2 x; beyond 1.25"), ("1.5b", 16, "1.15 x; beyond 1.2"),
                              ("1.5b", BATCH_OF_HALF_A_MILLION, "1.15 x; beyond 1.2")):
        for way in (DEFAULT, LEAN):
            yield f"against PyTorch 2, torch.compile, flash attention, {model.upper()}, batch {batch}, {way}", aim, \
                measured_pytorch(lines, model, batch, way)
    for model in ("124m", "1.5b"):
        yield f"power and clock of training, {model.upper()}", "", measured_power(lines, model)
    for model in ("124m", "1.5b"):
        yield f"memory that training takes against the plan, {model.upper()}", "within 2 %", \
            measured_memory(lines, model)
    for name, model in (("a bf16 stream against fp32", "124m"), ("logits in 8 chunks against whole", "124m"),
                        ("bf16 moments against fp32", "1.5b")):
        yield f"training with {name}, {model.upper()}", "", \
            measured_ratio(lines, f"GPU: training with {name}", same_loss=False)
    for model in ("124m", "1.5b"):
        yield f"GPU idle between kernels within a step, {model.upper()}", f"{IDLE:.0%}", \
            measured_idle(lines, model, "GPU: idle between kernels within a step")
    for model in ("124m", "1.5b"):
        yield f"of that, waiting for the host, {model.upper()}", "", \
            measured_idle(lines, model, "GPU: waiting for the host within a step")
    for model in ("124m", "1.5b"):
        yield f"matmuls against cuBLASLt called bare, {model.upper()}", f"{BARE}", \
            measured_matmuls(lines, model)
    for model in ("124m", "1.5b"):
        yield f"gradients of biases in epilogues of matmuls against apart, {model.upper()}", "", \
            measured_biases(lines, model)
    for model in ("124m", "1.5b"):
        yield f"time of matmuls beside kernels that wait over that alone, {model.upper()}", "", \
            measured_waiting(lines, model)
    yield "memory-bound kernels against a device copy", f"{COPY}", measured_kernels(lines)
    yield "host time to issue one action", "5 us", measured_issue(lines)
    yield "four chunks on one rank against the model unsplit, 124M", "0.97", \
        measured_ratio(lines, "GPU: four chunks on one rank against the model unsplit")
    yield "`--cuda-graphs` against calls, micro-batches of 4, 124M", "at least 1", \
        measured_ratio(lines, "GPU: CUDA graphs against calls")
    yield "dropout 0.1 against none, 124M", "0.9; beyond 0.95", \
        measured_ratio(lines, "GPU: training with dropout 0.1 against without", same_loss=False)
    yield "attention with dropout 0.1 by own kernels against that without as a model runs it, bf16", "", \
        measured_attention(lines)
    for precision in ("fp32", "bf16"):
        yield f"200 losses on the King James text in {precision} against the CPU's in fp32, largest " \
            "deviation", "1 %", measured_losses(lines, precision)


def main(path):
    lines = lines_of(path)
    gpus = sorted({line["gpu"] for line in lines if "gpu" in line})
    print(f"GPU: {', '.join(gpus) or 'none'}\n")
    print("| measure | aim | measured |\n|---|---|---|")
    for measure, aim, measured in table(lines):
        print(f"| {measure} | {aim} | {measured or 'not run: no GPU'} |")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
