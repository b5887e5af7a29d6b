"""What the campaigns of this folder share: jobs of `sluice train` with a fault in them, and what must hold after.

A job runs in a session of its own. Its processes are known by a mark in their environment, so that only they
are looked at and killed.
"""

import argparse
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid

ROOT = pathlib.Path(__file__).resolve().parents[2]
POLL = 0.003       # seconds between two looks at a file or a process
PATIENCE = 60.0    # seconds after which a job counts as stuck
STOPPED = 12       # exit code: stopped as asked
OUTPUT = 4         # exit code: an output that cannot be written
PEER = 11          # exit code: a rank died or stopped answering
WEIGHTS = 5        # exit code: damaged weights

MPI_ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMPI_MCA_btl": "^tcp,ofi",  # looking for fabrics takes ofi a second a start
    "CUDA_VISIBLE_DEVICES": "",
    "SLUICE_EMULATED_DEVICES": "0",
}


class Violation(Exception):
    """What must hold does not."""


class Skip(Exception):
    """This machine lacks what the case needs."""


def require(condition, text):
    if not condition:
        raise Violation(text)


def arguments(description, **counts):
    """The options that all campaigns have, and --count and --seed with these defaults."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--build", default=str(ROOT / "build/release"), help="build folder")
    parser.add_argument("--mpiexec", default="mpirun")
    for name, value in counts.items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    return parser


class Setup:
    """The programs, a folder that is removed at the end unless something failed, and the data."""

    def __init__(self, options):
        self.sluice = os.path.join(options.build, "sluice")
        self.fault_io = os.path.join(options.build, "tests/faults/libfault_io.so")
        self.mpiexec = options.mpiexec
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="sluice_faults_"))
        self.jobs = 0
        self.data = self.folder / "text.txt"
        self.data.write_text(made_up_text(20000))
        self.model = ["--data", str(self.data), "--layers", "2", "--heads", "2", "--width", "32",
                      "--context", "32", "--micro-batches", "4", "--warmup", "2", "--seed", "7"]

    def remove(self):
        shutil.rmtree(self.folder, ignore_errors=True)

    def run(self, *command):
        """A command of sluice without MPI: (exit code, both outputs)."""
        done = subprocess.run([self.sluice, *map(str, command)], stdout=subprocess.PIPE, timeout=PATIENCE,
                              stderr=subprocess.STDOUT, env={**os.environ, **MPI_ENVIRONMENT}, check=False)
        return done.returncode, done.stdout.decode(errors="replace")

    def digest(self, path):
        code, output = self.run("digest", path)
        match = re.search(r"^([0-9a-f]{64})\s+total$", output, re.MULTILINE)
        require(code == 0 and match, f"sluice digest {path}: exit {code}\n{output}")
        return match.group(1)

    def verifies(self, path):
        return self.run("verify", path)[0] == 0

    def train(self, ranks, *options, fault=None, model=True, wrap=(), launcher=()):
        """Starts `sluice train`. `fault`: settings of fault_io without their common prefix; `launcher`: words for
        mpirun."""
        environment = {f"SLUICE_FAULT_{key.upper()}": str(value) for key, value in (fault or {}).items()}
        if fault:
            environment["LD_PRELOAD"] = self.fault_io
        command = [self.sluice, "train", *(self.model if model else ()), *map(str, options)]
        if ranks > 1:
            # Only the ranks get the fault, not the launcher.
            export = [word for key, value in environment.items() for word in ("-x", f"{key}={value}")]
            command = [self.mpiexec, *launcher, "-n", str(ranks), *export, *map(str, wrap), *command]
            environment = {}
        else:
            command = [*map(str, wrap), *command]
        self.jobs += 1
        return Job(command, environment, self.folder / f"output-{self.jobs}")


class Job:
    """A started job; `output` is both its outputs."""

    def __init__(self, command, environment, output):
        self.command = command
        self.mark = f"SLUICE_FAULT_JOB={uuid.uuid4().hex}"
        name, value = self.mark.split("=")
        self.path = output
        self.launcher_hung = False
        with open(output, "wb") as sink:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True,
                env={**os.environ, **MPI_ENVIRONMENT, **environment, name: value})

    @property
    def output(self):
        return self.path.read_text(errors="replace")

    def running(self):
        return self.process.poll() is None

    def processes(self):
        """{pid: rank} of the job's living processes; the rank is None for a launcher and its helpers."""
        found = {}
        for entry in os.listdir("/proc"):
            if not entry.isdigit():
                continue
            try:
                environment = pathlib.Path("/proc", entry, "environ").read_bytes().split(b"\0")
                state = pathlib.Path("/proc", entry, "stat").read_text().rsplit(")", 1)[1].split()[0]
            except OSError:
                continue
            if self.mark.encode() in environment and state != "Z":
                ranks = [word for word in environment if word.startswith(b"OMPI_COMM_WORLD_RANK=")]
                found[int(entry)] = int(ranks[0].split(b"=")[1]) if ranks else None
        return found

    def rank(self, rank):
        """The process of a rank, once it is there; of a job without launcher the process itself."""
        if os.path.basename(self.command[0]) == "sluice":
            return self.process.pid
        return self.wait_for(lambda: next((p for p, r in self.processes().items() if r == rank), None),
                             f"no process of rank {rank}")

    def wait_for(self, look, otherwise):
        """What `look` gives once it is true. The job may end meanwhile: it is looked at once more."""
        deadline = time.monotonic() + PATIENCE
        while True:
            running = self.running()
            if found := look():
                return found
            if not running or time.monotonic() > deadline:
                self.end()
                raise Violation(f"{otherwise}; {'ended' if not running else 'stuck'}\n{self.tail()}")
            time.sleep(POLL)

    def wait(self, seconds=None):
        """Whether the job ended within so many seconds."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def handled(self, pid, number):
        """Whether a signal is not pending any more."""
        try:
            status = pathlib.Path(f"/proc/{pid}/status").read_text()
        except OSError:
            return True
        pending = re.findall(r"^(?:SigPnd|ShdPnd):\s+([0-9a-f]+)", status, re.MULTILINE)
        return not any(int(mask, 16) >> (number - 1) & 1 for mask in pending)

    def catches(self, pid, number):
        """Whether the process has a handler for a signal."""
        try:
            status = pathlib.Path(f"/proc/{pid}/status").read_text()
        except OSError:
            return False
        caught = re.search(r"^SigCgt:\s+([0-9a-f]+)", status, re.MULTILINE)
        return int(caught.group(1), 16) >> (number - 1) & 1 == 1

    def signal(self, pid, number):
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass

    def end(self):
        """Kills what is left of the job."""
        for pid in self.processes():
            self.signal(pid, signal.SIGKILL)
        self.process.wait()

    def finish(self, within=PATIENCE):
        """Exit code, once every process is gone; a job that is stuck is killed and a violation.

        Not so where only the launcher is left and says that it ended the job: Open MPI 4.1 hangs if a rank is killed
        while it connects to it ("PMIX ERROR: UNREACHABLE"), or now and then after an MPI_Abort, and so does the daemon
        that a rank without a launcher starts for itself. It is killed, and `launcher_hung` is set; of an abort the code
        is the rank's. So it is where the launcher crashes at its own end, after an abort, in PMIx_server_finalize().
        """
        ended = self.wait(within)
        codes = re.findall(r"MPI_ABORT was invoked[^\n]*\n *with errorcode (\d+)", self.output)
        if "run" in self.command:  # 'sluice run' has no rank either, and no hang of its own is excused
            codes = []
        if not ended:
            left = self.processes()
            self.launcher_hung = set(left.values()) == {None} and bool(codes or "exited on signal" in self.output)
            self.end()
            if self.launcher_hung:
                return int(codes[-1]) if codes else self.process.returncode
            raise Violation(f"stuck for {within:.0f} s, processes {left}\n{self.tail()}")
        deadline = time.monotonic() + PATIENCE
        while left := self.processes():
            if time.monotonic() > deadline:
                self.launcher_hung = set(left.values()) == {None} and "PMIX ERROR: UNREACHABLE" in self.output
                self.end()
                if self.launcher_hung:
                    return self.process.returncode
                raise Violation(f"processes {left} outlive their launcher\n{self.tail()}")
            time.sleep(POLL)
        crashed = self.process.returncode == -signal.SIGSEGV and "PMIx_server_finalize" in self.output
        return int(codes[-1]) if crashed and codes else self.process.returncode

    def expect(self, code, *parts, within=PATIENCE):
        """Finishes; the exit code must be this, and each part (a regular expression) in the output."""
        found = self.finish(within)
        require(found == code, f"exit {found} instead of {code}\n{self.tail()}")
        for part in parts:
            require(re.search(part, self.output), f"the output lacks '{part}'\n{self.tail()}")
        return self.output

    def tail(self):
        return f"$ {' '.join(self.command)}\n" + "\n".join(self.output.splitlines()[-40:])


def made_up_text(size):
    """The same text each time; words follow each other by a linear congruence."""
    words = "in the beginning was a word and it saw that light is good so they went over water by night".split()
    state, text = 1, []
    while size > 0:
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        text.append(words[(state >> 33) % len(words)])
        size -= len(text[-1]) + 1
    return " ".join(text)


def steps_in(directory):
    """Steps of the complete saves, ascending."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    return sorted(int(name[5:]) for name in names if re.fullmatch(r"step-\d{8,}", name))


def partial_directory(directory, step):
    """Where a save is written."""
    return pathlib.Path(directory) / f".step-{step:08d}.partial"


def step_directory(directory, step):
    return pathlib.Path(directory) / f"step-{step:08d}"


def names_below(directory):
    return sorted(str(path.relative_to(directory)) for path in pathlib.Path(directory).rglob("*"))


def metrics_so_far(path):
    """Steps in a metrics file, also while it is written."""
    try:
        text = pathlib.Path(path).read_text()
    except FileNotFoundError:
        return []
    return [int(step) for step in re.findall(r'^\{"step":\s*(\d+),\s*"loss"', text, re.MULTILINE)]


def losses_in(path):
    """Loss by step of a finished run's metrics. Each line must be JSON, and each step come once, in order."""
    losses = {}
    for number, line in enumerate(pathlib.Path(path).read_text().splitlines(), 1):
        try:
            record = json.loads(line)
        except ValueError as error:
            raise Violation(f"{path}, line {number} is no JSON ({error}): {line[:200]}") from error
        if "loss" in record:
            step = record["step"]
            require(step == len(losses) + 1, f"{path}, line {number}: step {step} after {len(losses)}")
            losses[step] = record["loss"]
    return losses


def resumed_step(output):
    """The step that a job went on from; 0 where it started anew."""
    match = re.search(r"^going on after step (\d+) of ", output, re.MULTILINE)
    return int(match.group(1)) if match else 0


def run_cases(setup, title, cases):
    """Runs each (name, function); prints a line for each and a sum; returns the exit code."""
    failed, skipped = [], []
    for name, case in cases:
        start = time.monotonic()
        try:
            detail = case() or ""
            verdict = "ok"
        except Skip as reason:
            verdict, detail = "skipped", str(reason)
            skipped.append(name)
        except (Violation, subprocess.TimeoutExpired) as error:
            verdict, detail = "FAILED", str(error)
            failed.append(name)
        print(f"{verdict:<8}{name:<34}{time.monotonic() - start:6.1f} s  {detail}", flush=True)
    print(f"{title}: {len(cases) - len(failed) - len(skipped)} of {len(cases)} hold, {len(skipped)} skipped"
          + (f"; kept in {setup.folder}" if failed else ""), flush=True)
    if not failed:
        setup.remove()
    return 1 if failed else 77 if len(skipped) == len(cases) else 0


def main(campaign):
    sys.stdout.reconfigure(line_buffering=True)
    sys.exit(campaign())
