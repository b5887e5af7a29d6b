"""gpu_table.py: medians of turns, ratios, and nothing from an emulation."""

import contextlib
import io
import json
import pathlib
import sys
import tempfile
import unittest

sys.dont_write_bytecode = True  # nothing of ours into the sources' folder
import gpu_table

ALL = len(list(gpu_table.table([])))  # measures


def training(speed, benchmark="GPU: training", gpu="NVIDIA H200"):
    return {"benchmark": benchmark, "gpu": gpu,
            "rows": [{"model": "124m", "samples": 64, "micro-batch": 32, "tokens/s": speed,
                      "share of 989 TFLOP/s": speed / 1e6, "ms per step": 100.0}]}


def matmuls(gpu="NVIDIA H200"):
    def row(name, ratio, milliseconds):
        return {"matmul": name, "m x n x k": "32768 x 768 x 768", "ratio": ratio,
                "ms per micro-batch": milliseconds}
    return {"benchmark": "GPU: matmuls against cuBLASLt called bare", "gpu": gpu,
            "rows": [row("output forward", 0.98, 10), row("up forward", 0.99, 20),
                     row("all of a micro-batch", 0.985, 30)]}


def table_of(lines):
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "report.jsonl")
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            gpu_table.main(str(path))
    return output.getvalue()


class GpuTable(unittest.TestCase):
    def test_takes_the_median_of_the_turns_and_their_ratio(self):
        lines = [training(speed) for speed in (500000, 700000, 600000)]
        lines += [training(speed, "PyTorch: training") for speed in (400000, 500000, 300000)]
        text = table_of([{"command": "benchmark", "step": "machine"}, *lines])
        self.assertIn("| 600,000 tokens/s, 60.0% |", text)
        self.assertIn("| 1.500 x (400,000 tokens/s) |", text)

    def test_tells_batches_and_precisions_apart(self):
        def row(speed, samples=16, **ways):
            return {"benchmark": "GPU: training", "gpu": "NVIDIA H200",
                    "rows": [{"model": "1.5b", "samples": samples, "tokens/s": speed, "share of 989 TFLOP/s": 0.5,
                              "ms per step": 1.0, "used GiB": 50.0, "used / planned": 1.012, **ways}]}
        lean = {"stream": "bf16", "moments": "bf16", "logit chunks": 8}
        theirs = {**row(40000, 512), "benchmark": "PyTorch: training"}
        text = table_of([row(50000), row(51000, **lean), row(56000, 512), row(58000, 512, **lean), theirs,
                         row(1, stream="bf16")])
        for line in ("batch 16, one rank, as by default | 53,000; beyond 54,400 | 50,000 tokens/s",
                     "batch 16, one rank, stream and moments in bf16, logits in chunks | 53,000; beyond 54,400 | 51,000",
                     "batch 512, one rank, as by default | 56,000; beyond 58,000 | 56,000",
                     "1.5B, batch 512, stream and moments in bf16, logits in chunks | 1.15 x; beyond 1.2 | 1.450 x",
                     "against the plan, 1.5B | within 2 % | +1.2% (50.0 GiB) |"):
            self.assertIn(line, text)

    def test_gives_power_and_clock_under_load(self):
        line = {**training(600000), "samples of the driver": 9, "watts": 690, "limit watts": 700, "SM MHz": 1550,
                "clocks held back by": "power limit"}
        idle = {**training(600000), "samples of the driver": 0}
        self.assertIn("of training, 124M |  | 690 W of 700, 1550 MHz, held back by power limit |", table_of([line, idle]))

    def test_gives_what_a_setting_brings(self):
        text = table_of([{"benchmark": "GPU: training with a bf16 stream against fp32", "gpu": "NVIDIA H200",
                          "rows": [{"ratio": 1.0312, "same loss": False}]}])
        self.assertIn("| training with a bf16 stream against fp32, 124M |  | 1.031 |", text)

    def test_gives_the_lowest_matmul_and_their_share_of_the_step(self):
        text = table_of([training(600000), matmuls()])
        self.assertIn("all together 0.985; lowest 0.980 (output forward); 60% of the step", text)

    def test_gives_the_idle_share_or_why_there_is_none(self):
        def idle(model, share):
            return {"benchmark": "GPU: idle between kernels within a step", "gpu": "NVIDIA H200",
                    "rows": [{"model": model, "idle share": share}]}
        text = table_of([idle("124m", 0.0214), idle("1.5b", "not measured: no CUPTI")])
        self.assertIn("| GPU idle between kernels within a step, 124M | 3% | 2.1% |", text)
        self.assertIn("within a step, 1.5B | 3% | not measured: no CUPTI |", text)

    def test_gives_the_lowest_kernel_and_those_below_the_aim(self):
        def kernels(*ratios):
            rows = [{"kernel": f"kernel {i}", "copy GB/s": 4000, "ratio": ratio}
                    for i, ratio in enumerate(ratios)]
            return {"benchmark": "GPU: memory-bound kernels against a device copy",
                    "gpu": "NVIDIA H200", "rows": rows}
        self.assertIn("| 0.85 | lowest 0.85 (kernel 1); copy 4,000 GB/s |",
                      table_of([kernels(0.9, 0.85)]))
        self.assertIn("lowest 0.50 (kernel 1); copy 4,000 GB/s; below the aim: kernel 1; kernel 2 |",
                      table_of([kernels(0.9, 0.5, 0.84)]))

    def test_gives_the_largest_deviation_of_whole_loss_curves(self):
        def losses(steps):
            rows = [{"precision": precision, "steps": steps, "largest deviation": largest,
                     "at step": 7} for precision, largest in (("fp32", 0.00014), ("bf16", 0.0042))]
            return {"benchmark": "GPU: losses against the CPU's in fp32", "gpu": "NVIDIA H200",
                    "rows": rows}
        text = table_of([losses(200)])
        self.assertIn("in fp32 against the CPU's in fp32, largest deviation | 1 % | 0.01% at step 7 |",
                      text)
        self.assertIn("in bf16 against the CPU's in fp32, largest deviation | 1 % | 0.42% at step 7 |",
                      text)
        self.assertEqual(table_of([losses(20)]).count("| not run: no GPU |"), ALL)

    def test_gives_what_dropout_costs(self):
        rows = [{"attention": attention, "pass": way, "over bf16 as a model runs it": ratio}
                for attention, way, ratio in (("bf16, own", "forward", 0.9), ("bf16, own, dropout 0.1", "forward", 0.62),
                                              ("bf16, own, dropout 0.1", "backward", 0.555))]
        text = table_of([{"benchmark": "GPU: attention alone", "gpu": "NVIDIA H200", "rows": rows},
                         {"benchmark": "GPU: training with dropout 0.1 against without", "gpu": "NVIDIA H200",
                          "rows": [{"ratio": 0.912, "same loss": False}]}])
        self.assertIn("| dropout 0.1 against none, 124M | 0.9; beyond 0.95 | 0.912 |", text)
        self.assertIn("| forward 0.62, backward 0.56 |", text)

    def test_gives_what_epilogues_gain(self):
        rows = [{"model": "124m", "matmul": "qkv weight gradient", "ratio": 1.051, "gain ms per micro-batch": 0.4},
                {"model": "124m", "matmul": "up weight gradient", "ratio": "", "gain ms per micro-batch": ""},
                {"model": "124m", "matmul": "all weight gradients", "ratio": "", "gain ms per micro-batch": 0.4}]
        biases = {"benchmark": "GPU: gradients of biases in epilogues of matmuls", "gpu": "NVIDIA H200", "rows": rows}
        text = "| qkv weight gradient 1.05, up weight gradient not supported; weight gradients together 0.40 ms a micro-batch"
        self.assertIn(text + " |", table_of([biases]))
        steps = {"benchmark": "GPU: training", "gpu": "NVIDIA H200",
                 "rows": [{"model": "124m", "samples": 64, "micro-batch": 16, "ms per step": 80, "tokens/s": 600000,
                           "share of 989 TFLOP/s": 0.5}]}
        self.assertIn(text + ", 2.0% of the step |", table_of([biases, steps]))

    def test_says_not_run_of_what_is_missing_or_emulated(self):
        emulated = "Emulated CUDA device"
        for lines in ([], [training(600000, gpu=emulated), matmuls(gpu=emulated)]):
            text = table_of(lines)
            self.assertIn("GPU: none", text)
            self.assertEqual(text.count("| not run: no GPU |"), ALL)


if __name__ == "__main__":
    unittest.main()
