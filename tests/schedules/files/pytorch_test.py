#!/usr/bin/env python3
"""Schedule files to PyTorch and back: ours into its loader, and its own into `sluice schedule --file`.

    tests/schedules/files/pytorch_test.py PROGRAM [WORD...]          # in CI: a reader as strict as PyTorch's
    tests/schedules/files/pytorch_test.py --live PROGRAM [WORD...]   # with PyTorch itself, of this Python
    tests/schedules/files/pytorch_test.py --install DIR PROGRAM [WORD...]   # installs it into a new DIR first

PROGRAM and its WORDs begin a command of `sluice schedule`, such as `build/release/sluice schedule`. With
--live, _load_csv and _dump_csv of torch.distributed.pipelining are called, the reader below has to agree with them on
damaged files, and what was dumped has to be the sample that lies in tests/schedules/data. --write replaces
the samples. --install takes about 4 GB: PyPI has no wheels without CUDA. Prints what was checked; exits 1 at the
first thing that is wrong.
"""

import argparse
import csv
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

VERSION = "2.15.0"  # what --install takes, and what the samples were made by
SAMPLES = pathlib.Path(__file__).resolve().parent.parent / "data" / "pytorch_2_15"
COMPUTE = ("F", "I", "W", "B")
CELL = re.compile(r"(\d+)(WAIT_REDUCE_GRAD|WAIT_SEND_F|WAIT_SEND_B|REDUCE_GRAD|UNSHARD|RESHARD|SEND_F|RECV_F|SEND_B|"
                  r"RECV_B|F|I|B|W)(\d*)")
SHAPES = ((2, 4), (3, 7), (4, 8), (4, 12))
FORMATS = ("compute_only", "compute_comms")
# Schedules of PyTorch with two stages per rank, whether these lie in a V, and the names of their samples.
THEIRS = {"ScheduleLoopedBFS": (False, "looped_bfs"), "ScheduleInterleaved1F1B": (False, "interleaved"),
          "ScheduleInterleavedZeroBubble": (False, "interleaved_zero_bubble"),
          "ScheduleZBVZeroBubble": (True, "zbv"), "ScheduleDualPipeV": (True, "dualpipev")}


def refuse(why):
    raise ValueError(why)


def parse(text):
    """A cell as a list of (stage, kind, micro-batch or None); a pair has two."""
    pair = re.fullmatch(r"\(([^;()]+);([^;()]+)\)OVERLAP_F_B", text)
    parts = []
    for part in pair.groups() if pair else (text,):
        found = CELL.fullmatch(part) or refuse(f"no action: {part!r}")
        stage, kind, micro_batch = found.groups()
        sharding = kind in ("UNSHARD", "RESHARD", "REDUCE_GRAD", "WAIT_REDUCE_GRAD")
        if sharding == bool(micro_batch):
            refuse(f"{part}: micro-batch")
        parts.append((int(stage), kind, int(micro_batch) if micro_batch else None))
    if pair and any(kind not in COMPUTE for _, kind, _ in parts):
        refuse(f"{text}: a pair of what does not compute")
    return parts


def check_waits(row):
    sends, registered, reduction = set(), set(), None
    for stage, kind, micro_batch in (part for cell in row for part in cell):
        if kind in ("SEND_F", "SEND_B"):
            if (kind, stage, micro_batch) in registered:
                refuse(f"duplicate {stage}{kind}{micro_batch}")
            registered.add((kind, stage, micro_batch))
            sends.add((kind, stage, micro_batch))
        elif kind.startswith("WAIT_SEND"):
            if (kind[5:], stage, micro_batch) not in sends:
                refuse(f"{stage}{kind}{micro_batch} has no pending send")
            sends.remove((kind[5:], stage, micro_batch))
        elif kind == "REDUCE_GRAD":
            if reduction is not None:
                refuse(f"{stage}{kind} while stage {reduction} has a pending reduction")
            reduction = stage
        elif kind == "WAIT_REDUCE_GRAD":
            if reduction != stage:
                refuse(f"{stage}{kind} without its reduction")
            reduction = None
    if sends:
        refuse(f"sends have no matching wait: {sorted(sends)}")
    if reduction is not None:
        refuse(f"stage {reduction} has REDUCE_GRAD without WAIT_REDUCE_GRAD")


def check_complete(rows, stages, micro_batches):
    """F, and B or I and W, of each stage and micro-batch, each after what it needs on its own rank."""
    done = {}
    rank_of = {}
    for rank, row in enumerate(rows):
        for stage, kind, micro_batch in (part for cell in row for part in cell):
            if rank_of.setdefault(stage, rank) != rank:
                refuse(f"stage {stage} on two ranks")
            if kind not in COMPUTE:
                continue
            seen = done.setdefault((stage, micro_batch), "")
            if kind in seen or {"F": "", "B": "F", "I": "F", "W": "I"}[kind] not in seen:
                refuse(f"{stage}{kind}{micro_batch} after {seen!r}")
            done[stage, micro_batch] = seen + kind
    for stage in range(stages):
        for micro_batch in range(micro_batches):
            seen = "".join(sorted(done.pop((stage, micro_batch), "")))
            if seen not in ("BF", "FIW"):
                refuse(f"stage {stage}, micro-batch {micro_batch} has {seen!r}")
    if done:
        refuse(f"more than {stages} stages with {micro_batches} micro-batches: {sorted(done)[0]}")
    return rank_of


def check_messages(rows, stages, rank_of):
    """Plays the rows. A receive waits for its send, a wait for the peer's receive."""
    done, at = set(), [0] * len(rows)

    def arrived(stage, kind, micro_batch):
        if kind == "F":
            return stage == 0 or (stage - 1, "F", micro_batch) in done if local(stage, -1) else \
                (stage, "RECV_F", micro_batch) in done
        if kind in ("B", "I"):
            if stage == stages - 1:
                return True
            if local(stage, 1):
                return any((stage + 1, each, micro_batch) in done for each in ("B", "I"))
            return (stage, "RECV_B", micro_batch) in done
        if kind == "SEND_F":
            return (stage, "F", micro_batch) in done
        if kind == "SEND_B":
            return any((stage, each, micro_batch) in done for each in ("B", "I"))
        way = 1 if kind.endswith("_F") else -1
        if kind.startswith("RECV"):
            return (stage - way, "SEND" + kind[4:], micro_batch) in done
        if kind.startswith("WAIT_SEND"):
            return (stage + way, "RECV" + kind[9:], micro_batch) in done
        return True

    def local(stage, way):
        other = stage + way
        return other not in range(stages) or rank_of[other] == rank_of[stage]

    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while at[rank] < len(row) and all(arrived(*part) for part in row[at[rank]]):
                done.update(row[at[rank]])
                at[rank] += 1
                moved = True
    for rank, row in enumerate(rows):
        if at[rank] < len(row):
            refuse(f"rank {rank} never gets past {row[at[rank]]}")


def strict_load(path, form, ranks, stages, micro_batches):
    with open(path, newline="") as file:
        text = [row for row in csv.reader(file)]
    if len(text) != ranks:
        refuse(f"{len(text)} rows for {ranks} ranks")
    if form == "compute_comms" and any(cell == "" for row in text for cell in row):
        refuse("an empty cell")
    rows = [[parse(cell) for cell in row if cell] for row in text]
    rank_of = check_complete(rows, stages, micro_batches)
    if form == "compute_only":
        for row in rows:
            for stage, kind, _ in (part for cell in row for part in cell):
                if kind not in COMPUTE:
                    refuse(f"{stage}{kind} in a file of compute alone")
        return
    for row in rows:
        check_waits(row)
    check_messages(rows, stages, rank_of)


class PyTorch:
    def __init__(self):
        import torch
        from torch.distributed.pipelining import schedules
        from torch.distributed.pipelining.stage import _PipelineStageBase

        class Stage(_PipelineStageBase):
            """A stage of a pipeline that is only planned."""

            def __init__(self, index, stages, ranks):
                self.stage_index, self.num_stages = index, stages
                self.group_size, self.group_rank, self.group = ranks, 0, None
                self.has_backward = True
                self.__dict__["submod"] = torch.nn.Identity()

            def _create_grad_recv_info(self, *_):
                return None

            def _prepare_forward_infra(self, *_):
                return None

            def _prepare_backward_infra(self, *_):
                return None

        self.version = torch.__version__
        self.schedules, self.stage = schedules, Stage

    def runtime(self, ranks, stages, micro_batches, kind="_PipelineScheduleRuntime", v_shape=False):
        own = [0] if stages == ranks else [0, stages - 1 if v_shape else ranks]
        return getattr(self.schedules, kind)([self.stage(each, stages, ranks) for each in own], micro_batches)

    def load(self, path, form, ranks, stages, micro_batches):
        runtime = self.runtime(ranks, stages, micro_batches)
        runtime._load_csv(str(path), form)
        if "OVERLAP" not in path.read_text():  # _simulate() does not know it
            if "REDUCE_GRAD" not in str(runtime.pipeline_order_with_comms) and form == "compute_comms":
                runtime._simulate()

    def dump(self, kind, ranks, micro_batches, folder):
        v_shape, _ = THEIRS[kind]
        order = self.runtime(ranks, 2 * ranks, micro_batches, kind, v_shape).pipeline_order
        runtime = self.runtime(ranks, 2 * ranks, micro_batches)
        runtime._prepare_schedule_with_comms(order)
        runtime.pipeline_order = order
        paths = []
        for form in FORMATS:
            paths.append(folder / f"{kind}_{ranks}_{micro_batches}_{form}.csv")
            runtime._dump_csv(str(paths[-1]), form)
        return paths


class Check:
    def __init__(self, command, folder, pytorch):
        self.command, self.folder, self.pytorch = command, folder, pytorch
        self.load = pytorch.load if pytorch else strict_load
        self.count = dict.fromkeys(("ours", "theirs", "damaged"), 0)

    def sluice(self, *words):
        run = subprocess.run([*self.command, *map(str, words)], capture_output=True, text=True)
        if run.returncode != 0:
            sys.exit(f"{' '.join(map(str, words))}: exit code {run.returncode}: {run.stderr}")
        return run.stdout

    def names(self):
        rows = json.loads(self.sluice("compare", "--ranks", 2, "--micro-batches", 4, "--format", "json"))["rows"]
        return [(row["schedule"], row["chunks"]) for row in rows]

    def ours(self):
        for name, chunks in self.names():
            for ranks, micro_batches in SHAPES:
                for form in FORMATS:
                    path = self.folder / f"ours_{name}_{ranks}_{micro_batches}_{form}.csv"
                    words = ["--schedule", name, "--ranks", ranks, "--micro-batches", micro_batches]
                    words += ["--chunks", chunks, "--format", "csv", "--output", path]
                    self.sluice(*words, *(["--messages"] if form == "compute_comms" else []))
                    self.load(path, form, ranks, chunks * ranks, micro_batches)
                    self.count["ours"] += 1

    def figures(self, path):
        report = json.loads(self.sluice("--file", path, "--format", "json"))
        return {key: report[key] for key in ("makespan", "peak_in_flight", "ranks", "stages", "micro_batches")}

    def one_of_theirs(self, compute, comms):
        """Both files of a schedule mean the same, and what we write of the second one is loaded."""
        figures = self.figures(comms)
        if compute and self.figures(compute) != figures:
            sys.exit(f"{compute} and {comms} differ")
        back = self.folder / f"back_{comms.name}"
        self.sluice("--file", comms, "--format", "csv", "--messages", "--output", back)
        for path in (comms, back):
            self.load(path, "compute_comms", figures["ranks"], figures["stages"], figures["micro_batches"])
        self.count["theirs"] += 1

    def samples(self):
        for _, name in THEIRS.values():
            self.one_of_theirs(None, SAMPLES / f"{name}.csv")

    def dumps(self, write):
        for kind, (_, name) in THEIRS.items():
            for micro_batches in (8, 12):
                compute, comms = self.pytorch.dump(kind, 4, micro_batches, self.folder)
                self.one_of_theirs(compute, comms)
                sample = SAMPLES / f"{name}.csv"
                if micro_batches == 8 and write:
                    sample.write_bytes(comms.read_bytes())
                elif micro_batches == 8 and sample.read_bytes() != comms.read_bytes():
                    sys.exit(f"{sample} is not what PyTorch {self.pytorch.version} dumps")

    def damaged(self):
        """Files that lost or repeat a cell: our reader refuses what PyTorch refuses."""
        path = self.folder / "damaged.csv"
        text = (SAMPLES / "zbv.csv").read_text().replace("\r", "")
        rows = [row.split(",") for row in text.splitlines()]
        for index in range(0, len(rows[0]), 3):
            cells = rows[0][index]
            for damage in (rows[0][:index] + rows[0][index + 1:], rows[0][:index + 1] + [cells] + rows[0][index + 1:]):
                path.write_text("\n".join(",".join(row) for row in [damage, *rows[1:]]) + "\n")
                shape = (path, "compute_comms", len(rows), 2 * len(rows), 8)
                if accepts(self.load, shape) or not accepts(strict_load, shape):
                    self.count["damaged"] += 1
                    continue
                sys.exit(f"PyTorch refuses {path.read_text()}, the strict reader does not")


def accepts(load, arguments):
    try:
        load(*arguments)
    except Exception:  # of PyTorch: ValueError, AssertionError, RuntimeError and others
        return False
    return True


def install(folder):
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = pathlib.Path(folder) / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--no-cache-dir", f"torch=={VERSION}", "numpy"], check=True)
    words = sys.argv[1:]
    at = words.index("--install")
    os.execv(python, [str(python), __file__, "--live", *words[:at], *words[at + 2:]])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--live", action="store_true")
    parser.add_argument("--install", metavar="DIR")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    if options.install:
        install(options.install)
    pytorch = PyTorch() if options.live else None
    with tempfile.TemporaryDirectory() as folder:
        check = Check(options.command, pathlib.Path(folder), pytorch)
        check.ours()
        if pytorch:
            check.dumps(options.write)
            check.damaged()
        check.samples()
    by = f"PyTorch {pytorch.version}" if pytorch else f"a reader as strict as PyTorch {VERSION}"
    alike = f", {check.count['damaged']} damaged files judged alike" if pytorch else ""
    print(f"{by}: {check.count['ours']} of our files loaded, {check.count['theirs']} of its schedules read and "
          f"written back{alike}")


if __name__ == "__main__":
    main()
