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
import signal
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/faults"))

from harness import Job, Setup, Violation, require  # noqa: E402

SECONDS = 120  # of one job on a card at most: one that hangs leaves time for the others
EMULATED_SECONDS = 240
SAID = 6000  # characters of a case in the report
EMULATED = "Emulated CUDA device"
TIME_IS_UP = 75  # exit code: call again for the rest
# On the emulation NCCL's ranks are processes, and there is one GPU.
CARD = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0],
        "SLUICE_EMULATED_DEVICES": "1", "SLUICE_EMULATED_DEVICE_MEMORY": str(8 << 30),
        "SLUICE_EMULATED_NCCL": os.environ.get("SLUICE_EMULATED_NCCL", "processes"),
        "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1",
        # Else mpirun binds each of two ranks to one core, for all of its threads and those of NCCL.
        "OMPI_MCA_hwloc_base_binding_policy": "none", "PRTE_MCA_hwloc_default_binding_policy": "none"}
# The layers with embedding and head fill two chunks on each of 4 ranks.
MODEL = ("--layers", "6", "--heads", "2", "--width", "32", "--context", "32", "--micro-batches", "4", "--warmup", "2",
         "--seed", "7", "--validation-samples", "1")


def arguments(description):
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default=str(ROOT / "build/cuda"), help="build folder")
    parser.add_argument("--mpiexec", default="mpirun")
    return parser


class Stopped(Exception):
    """Somebody asks this process to end."""


class Card:
    """The programs of a build, a folder for what they write, and the time that is left for them.

    SLUICE_JOB_SECONDS is the time of all jobs together. At its end a job is stuck, however short it ran.
    """

    def __init__(self, options):
        self.deadline = time.monotonic() + float(os.environ.get("SLUICE_JOB_SECONDS", "inf"))
        self.started = []
        self.starting = self.stopping = False
        self.setup = Setup(options)
        self.build = pathlib.Path(options.build).resolve()
        self.setup.sluice = str(self.build / "sluice")
        require(os.access(self.setup.sluice, os.X_OK), f"no {self.setup.sluice}: build it first")
        self.folder = self.setup.folder
        self.number = 0
        self.seconds = EMULATED_SECONDS if gpu_name(options.build) == EMULATED else SECONDS

    def remove(self):
        self.setup.remove()

    def time_is_up(self):
        return time.monotonic() >= self.deadline

    def within(self, seconds=None):
        """So many seconds, or those of one job; no more than are left."""
        return max(0.0, min(self.seconds if seconds is None else seconds, self.deadline - time.monotonic()))

    def written(self):
        """What the jobs that were started wrote, and what NCCL says of itself in files."""
        parts = [shortened(job.output, job.command) for job in self.started]
        return parts + [shortened(path.read_text(errors="replace"), [path.name]) for path in
                        sorted(self.folder.glob("nccl-*"))]

    def forget(self):
        """Begins a case: of the earlier ones nothing is shown any more."""
        self.started.clear()
        for path in self.folder.glob("nccl-*"):
            path.unlink()

    def end_jobs(self):
        """Kills the jobs that still run; says what they printed last."""
        tails = []
        for job in self.started:
            if job.running() or job.processes():
                job.end()
                tails.append(job.tail())
        return "\n".join(tails)

    def start(self, ranks, *command, apart=False, launcher=(), environment=None):
        """A job. `apart`: each process is on a machine of its own, as NCCL sees it. The processes get `environment`."""
        self.setup.jobs += 1
        words = list(map(str, command))
        if ranks > 1:
            whole = [self.setup.mpiexec, *launcher]
            for rank in range(ranks if apart else 1):
                host = ["-x", f"NCCL_HOSTID=sluice-{rank}"] if apart else []
                whole += [*([":"] if rank else []), "-n", "1" if apart else str(ranks), *host, *words]
            words = whole
        # What NCCL tells of its work goes to files, which are shown where a case fails.
        debug = {"NCCL_DEBUG": os.environ.get("NCCL_DEBUG", "INFO"),
                 "NCCL_DEBUG_SUBSYS": os.environ.get("NCCL_DEBUG_SUBSYS", "INIT,NET,PROXY,BOOTSTRAP"),
                 "NCCL_DEBUG_FILE": str(self.folder / "nccl-%h-%p")} if apart else {}
        self.starting = True  # a signal waits: the job would live on and not be in the report
        try:
            self.started.append(Job(words, {**CARD, **debug, **(environment or {})},
                                    self.folder / f"output-{self.setup.jobs}"))
        finally:
            self.starting = False
        if self.stopping:
            raise Stopped
        return self.started[-1]

    def stop(self, number, _):
        signal.signal(number, signal.SIG_IGN)  # timeout sends it twice
        self.stopping = True
        if not self.starting:
            raise Stopped

    def program(self, ranks, path, *words, environment=None):
        """Runs a test under mpirun, processes apart. A case that is skipped is a violation."""
        none_skips = {"SLUICE_TEST_SKIP_CODE": "77", "SLUICE_REQUIRE_GPUS": str(ranks)}
        job = self.start(ranks, self.build / path, *words, apart=True, environment={**none_skips, **(environment or {})})
        job.expect(0, within=self.within())

    def train(self, ranks, *options, apart=False, digest=True, text=None, model=MODEL):
        """(losses by step, digest of the parameters) of a training on the card."""
        self.number += 1
        name = self.folder / f"training-{self.number}"
        metrics = name.with_suffix(".jsonl")
        words = ["--data", text or self.setup.data, *model, "--metrics", metrics, "--device", "cuda:0", *options]
        if digest:
            words += ["--save", name]
        self.start(ranks, self.setup.sluice, "train", *words, apart=apart).expect(0, within=self.within())
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
    return EMULATED if emulated else "unknown"


def shortened(text, named):
    """The begin and the end of what was written, and of the rest what NCCL warns of."""
    lines = text.splitlines()
    middle = [line for line in lines[20:-60] if "NCCL WARN" in line][:20]
    return "\n".join([f"== {' '.join(map(str, named))}", *lines[:20], *middle, *lines[max(20, len(lines) - 60):]])


def which(program):
    return any(os.access(os.path.join(folder, program), os.X_OK) for folder in os.get_exec_path())


def result_of(card, case):
    """(result, what is said) of one case. "stopped": its time was up, and its jobs are ended."""
    try:
        if card.time_is_up():
            return "stopped", "time is up"
        return "passed", case(card)
    except Violation as violation:
        return ("stopped" if card.time_is_up() else "failed"), str(violation)
    except (subprocess.TimeoutExpired, OSError, ValueError) as error:  # such as metrics that are not there
        return "failed", str(error)
    except Stopped:
        return "stopped", card.end_jobs()
    finally:
        card.end_jobs()


def cut(text):
    """Of a text that is too long for the report, the begin and the end."""
    return text if len(text) <= SAID else f"{text[:SAID // 3]}\n[...]\n{text[-2 * SAID // 3:]}"


def write_report(path, card, rows):
    if path:
        line = {"benchmark": pathlib.Path(sys.argv[0]).stem, "gpu": gpu_name(card.build), "rows": rows}
        pathlib.Path(path).write_text(json.dumps(line) + "\n", encoding="utf-8")


def run(card, cases, report=None):
    """Runs (name, function) after each other. `report`: a file for one JSON line, written after each case.

    1 where a case is violated, TIME_IS_UP where time or SIGTERM stopped one; the later ones are not run then.
    """
    signal.signal(signal.SIGTERM, card.stop)
    rows = []
    for name, case in cases:
        card.forget()
        result, said = result_of(card, case)
        rows.append({"case": name, "result": result, **({"said": cut(said)} if said else {})})
        print(f"{result}: {name}" + (f": {rows[-1]['said']}" if said else ""), flush=True)
        if result != "passed":
            print("\n".join(card.written()), flush=True)
        write_report(report, card, rows)
        if result == "stopped":
            break
    found = {row["result"] for row in rows}
    if found == {"passed"}:
        card.remove()
    else:
        print(f"what the jobs wrote is in {card.folder}")
    return 1 if "failed" in found else TIME_IS_UP if "stopped" in found else 0
