"""Trainings on one card, for the checks of this folder: one process, several, or several that NCCL joins.

NCCL refuses two ranks on one GPU, unless it takes them to be on two machines: then each process has an NCCL_HOSTID of
its own, and they meet over sockets of the loopback interface. NVIDIA does not support that. It shows that Sluice drives
NCCL rightly between processes; it shows nothing of NVLink, of InfiniBand, of several cards, or of speed.
"""

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/faults"))

from harness import Job, Setup, Violation, require  # noqa: E402

SECONDS = 240  # of one job at most
# On the emulation NCCL's ranks are processes, and there is one GPU.
CARD = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0],
        "SLUICE_EMULATED_DEVICES": "1", "SLUICE_EMULATED_DEVICE_MEMORY": str(8 << 30),
        "SLUICE_EMULATED_NCCL": os.environ.get("SLUICE_EMULATED_NCCL", "processes"),
        "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
MODEL = ("--layers", "4", "--heads", "2", "--width", "32", "--context", "32", "--micro-batches", "4", "--warmup", "2",
         "--seed", "7", "--validation-samples", "1")


def arguments(description):
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default=str(ROOT / "build/cuda"), help="build folder")
    parser.add_argument("--mpiexec", default="mpirun")
    return parser


class Card:
    """The programs of a build, and a folder for what they write."""

    def __init__(self, options):
        self.setup = Setup(options)
        self.build = pathlib.Path(options.build).resolve()
        self.setup.sluice = str(self.build / "sluice")
        require(os.access(self.setup.sluice, os.X_OK), f"no {self.setup.sluice}: build it first")
        self.folder = self.setup.folder
        self.number = 0

    def remove(self):
        self.setup.remove()

    def start(self, ranks, *command, apart=False, launcher=()):
        """A job. `apart`: each process is on a machine of its own, as NCCL sees it."""
        self.setup.jobs += 1
        words = list(map(str, command))
        if ranks > 1:
            whole = [self.setup.mpiexec, *launcher]
            for rank in range(ranks if apart else 1):
                host = ["-x", f"NCCL_HOSTID=sluice-{rank}"] if apart else []
                whole += [*([":"] if rank else []), "-n", "1" if apart else str(ranks), *host, *words]
            words = whole
        return Job(words, CARD, self.folder / f"output-{self.setup.jobs}")

    def program(self, ranks, path, *words, environment=None):
        """Runs a test under mpirun, processes apart."""
        before = dict(os.environ)
        os.environ.update(environment or {})
        try:
            self.start(ranks, self.build / path, *words, apart=True).expect(0, within=SECONDS)
        finally:
            os.environ.clear()
            os.environ.update(before)

    def train(self, ranks, *options, apart=False, digest=True, text=None, model=MODEL):
        """(losses by step, digest of the parameters) of a training on the card."""
        self.number += 1
        name = self.folder / f"training-{self.number}"
        metrics = name.with_suffix(".jsonl")
        words = ["--data", text or self.setup.data, *model, "--metrics", metrics, "--device", "cuda:0", *options]
        if digest:
            words += ["--save", name]
        self.start(ranks, self.setup.sluice, "train", *words, apart=apart).expect(0, within=SECONDS)
        return losses_of(metrics), self.setup.digest(name) if digest else None


def losses_of(metrics):
    lines = [json.loads(line) for line in pathlib.Path(metrics).read_text(encoding="utf-8").splitlines()]
    return [float(line["loss"]) for line in lines if "loss" in line]


def gpu_name(build):
    """As Sluice and nvidia-smi name the first card; the emulation's says so."""
    shown = subprocess.run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], stdout=subprocess.PIPE,
                           stderr=subprocess.DEVNULL, text=True, check=False) if which("nvidia-smi") else None
    if shown and shown.returncode == 0 and shown.stdout.strip():
        return shown.stdout.splitlines()[0].strip()
    cache = pathlib.Path(build) / "CMakeCache.txt"
    emulated = cache.exists() and re.search(r"^SLUICE_CUDA:\w+=emulated$", cache.read_text(), re.MULTILINE)
    return "Emulated CUDA device" if emulated else "unknown"


def which(program):
    return any(os.access(os.path.join(folder, program), os.X_OK) for folder in os.get_exec_path())


def run(card, cases, report=None):
    """Runs (name, function) after each other; 1 where one is violated. `report`: a file for one JSON line."""
    rows, failed = [], 0
    for name, case in cases:
        try:
            said = case(card)
            rows.append({"case": name, "result": "passed", **({"said": said} if said else {})})
        except Violation as violation:
            failed = 1
            rows.append({"case": name, "result": "failed", "said": str(violation)[-2000:]})
        print(f"{rows[-1]['result']}: {name}" + (f": {rows[-1]['said']}" if "said" in rows[-1] else ""), flush=True)
    if report:
        with open(report, "w", encoding="utf-8") as out:
            out.write(json.dumps({"benchmark": pathlib.Path(sys.argv[0]).stem, "gpu": gpu_name(card.build),
                                  "rows": rows}) + "\n")
    if not failed:
        card.remove()
    else:
        print(f"what the jobs wrote is in {card.folder}")
    return failed
