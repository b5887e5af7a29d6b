"""Ranks that share a model's stages have the bits of one rank: `sluice train --tensor T --tensor-shards 4`.

usage: tensor_parallel.py --build BUILD --mpiexec MPIEXEC [--all] [--only TEXT]

Trains small models by mpirun. Each training has the digest, the losses, the gradient norms and the validation loss of
the training of the same model on one rank. Without --all the trainings are few: each pair of values of two factors
below is in one of them. With it they are the whole product of all but those in OPTIONS. --only: those whose name has TEXT. Ends with 1 where one
differs, and with 0 else.
"""

import argparse
import itertools
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile
import time

SHARDS = 4
FACTORS = {
    "tensor": (1, 2, 4),
    "pipeline": (1, 2),
    "replicas": (1, 2),
    "schedule": ("1f1b", "zb-h1", "interleaved"),
    "model": ("gpt2", "llama", "qwen3"),
    "precision": ("fp32", "bf16"),
    "head": ("tied", "untied"),
    "positions": ("dealt", "whole"),
    "keeps": ("all", "inputs"),
    "state": ("whole", "divided"),
}
OPTIONS = {  # of values that change no bit
    ("positions", "whole"): ["--no-sequence-parallel"],
    ("keeps", "inputs"): ["--recompute", "block"],
    ("state", "divided"): ["--shard", "optimizer"],
}
FUNCTION = ("model", "precision", "head")  # what the bits depend on
BASE = {key: values[0] for key, values in FACTORS.items()}
MODELS = {
    "gpt2": [],
    "llama": ["--model", "llama", "--kv-heads", "2"],
    "qwen3": ["--model", "llama", "--kv-heads", "2", "--qk-norm", "--head-dim", "32"],
}
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


def name_of(case):
    return " ".join(f"{key} {value}" for key, value in case.items())


def product():
    return [dict(zip(FACTORS, values)) for values in itertools.product(*FACTORS.values())]


def covering():
    """Few cases with all pairs of values of two factors, of few ranks where there is a choice."""
    def pairs_of(case):
        return set(itertools.combinations(case.items(), 2))

    cases, chosen = product(), []
    missing = set().union(*map(pairs_of, cases))
    while missing:
        best = max(cases, key=lambda case: (len(pairs_of(case) & missing), -ranks_of(case)))
        chosen.append(best)
        missing -= pairs_of(best)
    return chosen


def text():
    words = "the ranks of a stage share its layers and add what their shards make in one tree".split()
    chooser = random.Random(1)
    return " ".join(chooser.choice(words) for _ in range(3000))


class Runs:
    def __init__(self, build, mpiexec, folder):
        self.program, self.mpiexec, self.folder = pathlib.Path(build).resolve() / "sluice", mpiexec, folder
        (folder / "text").write_text(text())
        self.expected = {}  # by the values of FUNCTION

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
        layout = itertools.chain.from_iterable((f"--{key}", case[key]) for key in ("tensor", "pipeline", "replicas"))
        return self.run(
            "train", "--data", "text", "--device", "cpu", "--layers", 4, "--heads", 4, "--width", 64, "--context", 32,
            "--steps", steps, "--warmup", 0, "--learning-rate-decay", "constant", "--micro-batches", 2,
            "--micro-batch-size", 2, "--virtual-replicas", 2, "--validation-samples", 5, "--save", save, "--metrics",
            f"{save}.metrics", *shards, *layout, "--schedule", case["schedule"],
            *(["--chunks", 2] if case["schedule"] == "interleaved" else []),
            *MODELS[case["model"]], "--precision", case["precision"], *(["--untie"] if case["head"] == "untied" else []),
            *itertools.chain.from_iterable(OPTIONS.get(item, []) for item in case.items()), *more,
            ranks=ranks_of(case))[0]

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

    def remove(self, save):
        shutil.rmtree(self.folder / save, ignore_errors=True)
        (self.folder / f"{save}.metrics").unlink(missing_ok=True)

    def compare(self, found, expected):
        digests, numbers = found
        others = sorted(name for name in expected[0] if digests.get(name) != expected[0][name])
        require(not others, f"other parameters: {', '.join(others)}")
        require(digests == expected[0], f"parameters {sorted(digests)}, expected {sorted(expected[0])}")
        different = [(key, numbers.get(key), value) for key, value in expected[1].items() if numbers.get(key) != value]
        require(not different, f"other numbers (step, name, this one's, expected): {different[:3]}")

    def on_one_rank(self, case):
        """The results of the case's function on one rank."""
        key = tuple(case[name] for name in FUNCTION)
        if key not in self.expected:
            self.train({**BASE, **{name: case[name] for name in FUNCTION}}, save="one")
            self.expected[key] = self.results("one")
            self.remove("one")
        return self.expected[key]

    def layout(self, case):
        expected = self.on_one_rank(case)
        said = self.train(case)
        ranks = f" x {case['tensor']} tensor rank"
        require(ranks in said, f"the layout does not have '{ranks}':\n{said}")
        self.compare(self.results("run"), expected)
        self.remove("run")

    def resumes(self, case):
        """One training over four layouts, each of which goes on from the save of the one before."""
        one = {**case, "tensor": 1, "pipeline": 1, "replicas": 1}
        self.train(one, save="whole", steps=8)
        expected = self.results("whole")
        self.train(one, save="chain", steps=2)
        for steps, layout in ((4, {"tensor": 4}), (6, {"tensor": 2, "pipeline": 2}), (8, {"replicas": 2})):
            # Without --tensor-shards: those of the save stay.
            said = self.train({**one, **layout}, "--resume", "auto", save="chain", steps=steps, shards=())
            require("going on after step" in said and "other bits" not in said, said)
        self.compare(self.results("chain"), expected)
        said = self.digest("chain")[1]
        require(f"computed with {SHARDS} tensor shards" in said, said)
        others = self.train(one, "--resume", "chain", save="others", steps=9, shards=("--tensor-shards", 2))
        require(f"other bits from step 9 on: 2 tensor shards, the save has {SHARDS}" in others, others)

    def reads_saves(self, case):
        """What computes with a save has the shards of it, on any ranks that share its stages."""
        self.train(case, "--context", 70, save="saved")
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

    def one_shard(self, case):
        """One shard is what there is without the option."""
        self.train(case, save="default", shards=())
        self.train(case, save="run", shards=("--tensor-shards", 1))
        self.compare(self.results("run"), self.results("default"))
        state = json.loads(next((self.folder / "default").glob("step-*/state.json")).read_text())
        require(not [key for key in state["layout"] if key.startswith("tensor")], state["layout"])
        self.remove("run")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", required=True)
    parser.add_argument("--mpiexec", default="mpirun")
    parser.add_argument("--all", action="store_true", help="all layouts of all models")
    parser.add_argument("--only", default="", help="trainings whose name has this text")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(options.build, options.mpiexec, pathlib.Path(folder))
        checks = [("one shard, " + name_of(BASE), lambda: runs.one_shard(BASE)),
                  ("resumes, " + name_of(BASE), lambda: runs.resumes(BASE)),
                  ("reads saves, " + name_of(BASE), lambda: runs.reads_saves(BASE))]
        some = {factor for factor, _ in OPTIONS}
        whole = [case for case in product() if all(case[factor] == BASE[factor] for factor in some)]
        for case in whole if options.all else covering():
            checks.append((name_of(case), lambda case=case: runs.layout(case)))
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
