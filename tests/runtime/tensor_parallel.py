"""Ranks that share a model's stages, by the program: `sluice train --tensor T --tensor-shards 4`.

usage: tensor_parallel.py --build BUILD --mpiexec MPIEXEC [--only TEXT]

A training goes on from saves under other layouts and shards and has the digest, the losses, the gradient norms and the
validation loss of one on one rank; `evaluate` and `generate` say the same on any layout. gradients/every_option_test.cpp has
layouts under all other options. --only: checks whose name has TEXT. Ends with 1 where one fails, and with 0 else.
"""

import argparse
import itertools
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import time

SHARDS = 4
BASE = {"tensor": 1, "pipeline": 1, "replicas": 1}
ENVIRONMENT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
               "OMPI_MCA_rmaps_base_oversubscribe": "1", "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
               "OMPI_MCA_mpi_yield_when_idle": "1", "OMPI_MCA_btl": "^tcp"}


class Failed(Exception):
    pass


def require(holds, text):
    if not holds:
        raise Failed(text)


def ranks_of(case):
    return case["tensor"] * case["pipeline"] * case["replicas"]


def text():
    words = "the ranks of a stage share its layers and add what their shards make in one tree".split()
    chooser = random.Random(1)
    return " ".join(chooser.choice(words) for _ in range(3000))


class Runs:
    def __init__(self, build, mpiexec, folder):
        self.program, self.mpiexec, self.folder = pathlib.Path(build).resolve() / "sluice", mpiexec, folder
        (folder / "text").write_text(text())

    def run(self, *arguments, ranks=1):
        """Standard output and standard error of the program, which must end well."""
        launcher = [] if ranks == 1 else [self.mpiexec, "--timeout", "120", "-n", str(ranks)]
        words = [*launcher, str(self.program), *map(str, arguments)]
        run = subprocess.run(words, cwd=self.folder, env={**os.environ, **ENVIRONMENT}, text=True, errors="replace",
                             capture_output=True, stdin=subprocess.DEVNULL, check=False)
        require(run.returncode == 0, f"{' '.join(words)}\nended with {run.returncode}:\n{run.stdout}{run.stderr}")
        return run.stdout, run.stderr

    def train(self, case, *more, save="run", steps=3, shards=("--tensor-shards", SHARDS)):
        """What the training says, after one into the directory `save`."""
        layout = itertools.chain.from_iterable((f"--{key}", value) for key, value in case.items())
        return self.run(
            "train", "--data", "text", "--device", "cpu", "--layers", 4, "--heads", 4, "--width", 64, "--context", 32,
            "--steps", steps, "--warmup", 0, "--learning-rate-decay", "constant", "--micro-batches", 2,
            "--micro-batch-size", 2, "--virtual-replicas", 2, "--validation-samples", 5, "--save", save, "--metrics",
            f"{save}.metrics", *shards, *layout, *more, ranks=ranks_of(case))[0]

    def digest(self, save):
        """By parameter, and of all as "total"; what the command says of the ranks that saved."""
        out, said = self.run("digest", save)
        return {name: sha for sha, name in (line.split("  ", 1) for line in out.splitlines())}, said

    def numbers(self, save):
        """By step and name: losses, gradient norms and validation losses."""
        lines = map(json.loads, (self.folder / f"{save}.metrics").read_text().splitlines())
        return {(line["step"], key): line[key] for line in lines for key in ("loss", "grad_norm", "val_loss")
                if key in line}

    def results(self, save):
        return self.digest(save)[0], self.numbers(save)

    def compare(self, found, expected):
        digests, numbers = found
        others = sorted(name for name in expected[0] if digests.get(name) != expected[0][name])
        require(not others, f"other parameters: {', '.join(others)}")
        require(digests == expected[0], f"parameters {sorted(digests)}, expected {sorted(expected[0])}")
        different = [(key, numbers.get(key), value) for key, value in expected[1].items() if numbers.get(key) != value]
        require(not different, f"other numbers (step, name, this one's, expected): {different[:3]}")

    def resumes(self):
        """One training over layouts and shards, each of which goes on from the save of the one before."""
        self.train(BASE, save="whole", steps=12)
        expected = self.results("whole")
        self.train(BASE, save="chain", steps=2)
        layouts = ({"tensor": 4}, {"replicas": 2, "shard": "parameters"}, {"tensor": 2, "pipeline": 2, "shard": "none"},
                   {"replicas": 2, "tensor": 2, "shard": "gradients"}, {"replicas": 2, "shard": "optimizer"})
        for steps, layout in zip(range(4, 14, 2), layouts):
            # Without --tensor-shards: those of the save stay.
            said = self.train({**BASE, **layout}, "--resume", "auto", save="chain", steps=steps, shards=())
            require("going on after step" in said and "other bits" not in said, said)
        self.compare(self.results("chain"), expected)
        said = self.digest("chain")[1]
        require(f"computed with {SHARDS} tensor shards" in said, said)
        others = self.train({**BASE, "shard": "none"}, "--resume", "chain", save="others", steps=13, shards=("--tensor-shards", 2))
        require(f"other bits from step 13 on: 2 tensor shards, the save has {SHARDS}" in others, others)

    def reads_saves(self):
        """What computes with a save has the shards of it, on any ranks that share its stages."""
        self.train(BASE, "--context", 70, save="saved")
        read = ("--weights", "saved", "--device", "cpu")
        # Of 64 positions, then of 70, which the shards do not divide.
        for command, layouts in ((("evaluate", *read), ((1, 1), (2, 2))),
                                 (("generate", *read, "--tokens", 70), ((1, 1), (1, 2), (2, 1), (2, 2), (4, 1)))):
            outputs = [self.run(*command, "--tensor-shards", SHARDS)[0]]
            for tensor, pipeline in layouts:
                layout = ("--tensor", tensor, "--pipeline", pipeline)
                outputs.append(self.run(*command, *layout, ranks=tensor * pipeline)[0])
            require(len(set(outputs)) == 1, f"{command} says on other ranks: {outputs}")
        self.run("generate", *read, "--tokens", 4, "--tensor", 3, ranks=3)  # which do not divide those shards

    def one_shard(self):
        """One shard is what there is without the option."""
        self.train(BASE, save="default", shards=())
        self.train(BASE, save="run", shards=("--tensor-shards", 1))
        self.compare(self.results("run"), self.results("default"))
        state = json.loads(next((self.folder / "default").glob("step-*/state.json")).read_text())
        require(not [key for key in state["layout"] if key.startswith("tensor")], state["layout"])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", required=True)
    parser.add_argument("--mpiexec", default="mpirun")
    parser.add_argument("--only", default="", help="checks whose name has this text")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(options.build, options.mpiexec, pathlib.Path(folder))
        checks = [("one shard", runs.one_shard), ("resumes", runs.resumes), ("reads saves", runs.reads_saves)]
        failed = 0
        chosen = [check for check in checks if options.only in check[0]]
        for name, check in chosen:
            start = time.monotonic()
            try:
                check()
                print(f"held    {time.monotonic() - start:5.1f} s  {name}", flush=True)
            except Failed as failure:
                failed += 1
                print(f"FAILED  {time.monotonic() - start:5.1f} s  {name}\n{failure}", flush=True)
    print(f"{len(chosen) - failed} of {len(chosen)} held")
    return 1 if failed or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
