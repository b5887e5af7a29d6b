#!/usr/bin/env python3
"""What a disk does to saves: full, gone, read-only, slow; and two jobs on one directory.

    tests/faults/disk_faults.py [--full] [--case NAME] [--build DIR]

After each fault the saves that were complete before it verify, and the same command goes on from them to the digest
of an undisturbed run. Cases that mount run in a mount namespace of their own, as root or by a user
namespace, and are skipped where the system allows neither. Those of --full take longer or need more.
"""

import errno
import functools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys

from harness import (OUTPUT, PEER, STOPPED, Setup, Skip, arguments, losses_in, main, metrics_so_far,
                     partial_directory, require, resumed_step, run_cases, step_directory, steps_in)

STEPS = 24
EVERY = 4
INSIDE = "SLUICE_FAULTS_NAMESPACE"
SPLIT = ("--pipeline", "2", "--replicas", "2")
SHARED = ("--pipeline", "2", "--tensor", "2")
DEEP = ("--pipeline", "4", "--partition", "1,1,0,0")
SHARDS = (*SPLIT, "--schedule", "gpipe", "--recompute", "block", "--shard", "parameters")
RANKS = 4


class Case:
    """One directory, and the jobs on it."""

    def __init__(self, setup, name, split=SPLIT):
        self.setup, self.split = setup, split
        self.folder = setup.folder / name
        self.folder.mkdir()
        self.directory = self.folder / "run"
        self.metrics = self.folder / "metrics.jsonl"
        self.log = self.folder / "fault"

    def options(self, steps=STEPS, every=EVERY):
        return [*self.split, "--steps", steps, "--save", self.directory, "--save-every", every, "--resume", "auto",
                "--metrics", self.metrics]

    def start(self, fault=None, **counts):
        if fault:
            fault = {"directory": self.directory, "log": self.log, **fault}
        return self.setup.train(RANKS, *self.options(**counts), fault=fault)

    def complete(self):
        """Steps of the saves, which all verify."""
        steps = steps_in(self.directory)
        for step in steps:
            code, output = self.setup.run("verify", step_directory(self.directory, step))
            require(code == 0, f"the save of step {step} does not verify\n{output}")
        return steps

    def goes_on(self, from_step, *more):
        """The same command, with more options, ends with the digest of an undisturbed run."""
        job = self.setup.train(RANKS, *self.options(), *more)
        output = job.expect(0)
        require(resumed_step(output) == from_step,
                f"went on from step {resumed_step(output)}, not {from_step}\n{output}")
        digest, wanted = self.setup.digest(self.directory), undisturbed(self.setup, self.split)
        require(digest == wanted, f"digest {digest} instead of {wanted}")
        left = [name for name in os.listdir(self.directory) if name.startswith(".") or name == "lock"]
        require(not left, f"left in the directory: {left}")


@functools.lru_cache
def undisturbed(setup, split=SPLIT):
    directory = setup.folder / "undisturbed"
    setup.train(RANKS, *split, "--steps", STEPS, "--save", directory).expect(0)
    return setup.digest(directory)


def enters_namespace(setup, function):
    """Runs a case in a mount namespace: this script once more, inside."""
    if os.environ.get(INSIDE):
        return function(setup)
    enter = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--mount"]
    try:
        subprocess.run([*enter, "sh", "-c", "mount -t tmpfs none /mnt"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise Skip("cannot mount here: needs root or user namespaces") from error
    done = subprocess.run([*enter, sys.executable, *sys.argv, "--case", function.__name__], stdout=subprocess.PIPE,
                          env={**os.environ, INSIDE: "1"}, text=True, check=False)
    require(done.returncode == 0, done.stdout)
    return None


def mount(*words):
    subprocess.run(["mount", *map(str, words)], check=True)


# --- full ---

def full_tmpfs(setup):
    """A file system that takes two saves, but not the third next to them."""
    case = Case(setup, "full_tmpfs")
    case.directory.mkdir()
    probe = Case(setup, "probe")
    probe.start(steps=EVERY).expect(0)
    size = sum(path.stat().st_size for path in probe.directory.rglob("*") if path.is_file())
    room = size * 5 // 2 + (1 << 20)  # Sluice leaves 1 MiB free
    mount("-t", "tmpfs", "-o", f"size={room}", "none", case.directory)
    output = case.start().expect(OUTPUT, re.escape(str(case.directory)), r"free|space")
    require(case.complete() == [EVERY, 2 * EVERY], f"saves {case.complete()} are left\n{output}")
    case.goes_on(2 * EVERY, "--keep", 1)
    require(case.complete() == [STEPS], f"saves {case.complete()} are left")


def too_small(setup):
    """A file system without room for a save ends the job before its first step, and a dry run."""
    case = Case(setup, "too_small")
    case.directory.mkdir()
    mount("-t", "tmpfs", "-o", f"size={1 << 20}", "none", case.directory)
    for more in (["--dry-run"], []):
        setup.train(RANKS, *case.options(), *more).expect(OUTPUT, re.escape(str(case.directory)), "takes .* free")
    require(not case.metrics.exists() or not losses_in(case.metrics), "it did steps")


def full_while_writing(setup, rank, split=SPLIT):
    """A rank's write of the third save fails as on a full disk."""
    case = Case(setup, f"full_{rank}", split)
    job = case.start(fault={"directory": partial_directory(case.directory, 3 * EVERY), "call": "write", "rank": rank,
                            "nth": 2, "times": 0, "action": "ENOSPC"})
    output = job.expect(OUTPUT, re.escape(str(case.directory)), "No space left on device")
    require(case.log.exists(), f"rank {rank} wrote nothing\n{output}")
    require(case.complete() == [EVERY, 2 * EVERY], f"saves {case.complete()} are left\n{output}")
    case.goes_on(2 * EVERY)


# --- gone ---

def deleted(setup):
    """The directory is deleted after its first save."""
    case = Case(setup, "deleted")
    job = case.start(steps=4000, every=50)
    job.wait_for(lambda: steps_in(case.directory), "no save")
    shutil.rmtree(case.directory, ignore_errors=True)
    shutil.rmtree(case.directory, ignore_errors=True)  # a save may have added files
    job.expect(OUTPUT, re.escape(str(case.directory)))
    require(not steps_in(case.directory), f"saves came back: {steps_in(case.directory)}")


# --- read-only ---

def read_only_errno(setup):
    """After the first save every change fails as on a read-only file system."""
    case = Case(setup, "read_only")
    gate = case.folder / "gate"
    job = case.start(fault={"gate": gate, "times": 0, "action": "EROFS"}, steps=4000)
    job.wait_for(lambda: steps_in(case.directory), "no save")
    gate.touch()
    job.expect(OUTPUT, re.escape(str(case.directory)), "Read-only file system")
    newest = case.complete()[-1]
    output = case.start(steps=newest + 2).expect(0)
    require(resumed_step(output) == newest, f"went on from step {resumed_step(output)}, not {newest}\n{output}")


def read_only_mount(setup):
    """The directory's mount becomes read-only after its first save."""
    case = Case(setup, "read_only_mount")
    case.directory.mkdir()
    mount("-t", "tmpfs", "none", case.directory)
    job = case.start(steps=STEPS * 100, every=EVERY)
    job.wait_for(lambda: steps_in(case.directory), "no save")
    # Busy while a file is open for writing.
    job.wait_for(lambda: subprocess.run(["mount", "-o", "remount,ro", case.directory], capture_output=True,
                                        check=False).returncode == 0, "cannot be remounted")
    job.expect(OUTPUT, re.escape(str(case.directory)), "Read-only file system")
    mount("-o", "remount,rw", case.directory)
    require(case.complete(), "no save is left")


def unwritable_from_the_start(setup):
    """Refused before anything is trained."""
    case = Case(setup, "unwritable")
    case.start(fault={"times": 0, "action": "EROFS"}).expect(OUTPUT, re.escape(str(case.directory)),
                                                             "Read-only file system")
    require(not metrics_so_far(case.metrics), "it trained")


# --- slow ---

def slow_writer(setup):
    """A sync of the first save takes 3 s: training goes on until the next save, which waits and says so once."""
    case = Case(setup, "slow")
    job = case.start(fault={"directory": partial_directory(case.directory, EVERY), "rank": 0, "call": "sync",
                            "action": "sleep:3"})
    job.wait_for(case.log.exists, "no sync")
    job.wait_for(lambda: metrics_so_far(case.metrics)[-1:] == [2 * EVERY] or steps_in(case.directory), "no training")
    require(not steps_in(case.directory), "training waited for the first save's writer")
    output = job.expect(0)
    waits = re.findall(rf"the save of step {2 * EVERY} waits for that of step {EVERY}\b.*", output)
    require(len(waits) == 1, f"{len(waits)} lines say that the second save waits\n{output}")
    require(case.setup.digest(case.directory) == undisturbed(setup), "the digest differs")
    return waits[0]


# --- what is offloaded ---

def offloaded(setup, call, action, what="activations", nth=60, split=DEEP):
    """A disk that fails in the middle of a step: named on all ranks, and resumed from the last save."""
    case = Case(setup, f"offloaded_{what}_{call}_{len(split)}", split)
    scratch = case.folder / "scratch"
    options = ["--micro-batches", 6, "--offload", f"{what}:disk={scratch}"]
    job = setup.train(RANKS, *case.options(), *options,
                      fault={"directory": scratch, "log": case.log, "call": call, "rank": 0, "nth": nth, "times": 0,
                             "action": action})
    output = job.expect(OUTPUT, re.escape(str(scratch)), f"cannot {call} ", os.strerror(getattr(errno, action)),
                        *([r"go on from the save of step \d+"] if (what, call) == ("optimizer", "write") else []))
    require(case.log.exists(), f"rank 0 did not {call}\n{output}")
    saves = case.complete()
    require(saves and saves[-1] < STEPS, f"saves {saves} are left\n{output}")
    require(not os.listdir(scratch), f"left: {os.listdir(scratch)}")
    setup.train(RANKS, *case.options(), *options).expect(0)
    whole = case.folder / "whole"
    setup.train(RANKS, *split, "--micro-batches", 6, "--steps", STEPS, "--save", whole).expect(0)
    require(setup.digest(case.directory) == setup.digest(whole), "the digest differs from that of a run that keeps all")


def offloaded_gone(setup):
    """A directory that is removed after the first save: the files in it have no name and stay."""
    case = Case(setup, "offloaded_gone", SHARDS)
    scratch = case.folder / "scratch"
    options = ["--micro-batches", 6, "--offload", f"activations:disk={scratch}"]
    job = setup.train(RANKS, *case.options(), *options)
    job.wait_for(lambda: steps_in(case.directory), "no save")
    scratch.rmdir()
    job.expect(0)
    whole = case.folder / "whole"
    setup.train(RANKS, *SPLIT, "--micro-batches", 6, "--steps", STEPS, "--save", whole).expect(0)
    require(setup.digest(case.directory) == setup.digest(whole), "the digest differs from that of a plain run")


def offloaded_read_only(setup):
    """Refused before the first step: a disk that takes no file."""
    case = Case(setup, "offloaded_read_only", SHARDS)
    scratch = case.folder / "scratch"
    scratch.mkdir()
    setup.train(RANKS, *case.options(), "--micro-batches", 6, "--offload", f"activations:disk={scratch}",
                fault={"directory": scratch, "log": case.log, "times": 0, "action": "EROFS"}).expect(
                    OUTPUT, re.escape(str(scratch)), "Read-only file system")
    require(not metrics_so_far(case.metrics), "it trained")


def offloaded_that_hangs(setup, what="activations", within="0"):
    """A disk that stands still ends the job with the rank that waits for it."""
    case = Case(setup, f"offloaded_{what}_that_hang", DEEP)
    scratch = case.folder / "scratch"
    job = setup.train(RANKS, *case.options(), "--micro-batches", 6, "--timeout", 4, "--offload",
                      f"{what}:disk={scratch}",
                      fault={"directory": scratch, "log": case.log, "call": "write", "rank": 0, "nth": 9,
                             "action": "sleep:60"})
    job.expect(PEER, f"rank 0 .* waits for what it offloads or fetches, in {within}")


def without_room(setup, what):
    """Refused before the first step: a disk that is full."""
    case = Case(setup, f"{what}_without_room", DEEP)
    scratch = case.folder / "scratch"
    scratch.mkdir()
    mount("-t", "tmpfs", "-o", "size=16k", "none", scratch)
    setup.train(RANKS, *case.options(), "--micro-batches", 6, "--offload", f"{what}:disk-cached={scratch}").expect(
        OUTPUT, re.escape(str(scratch)), "cannot take .* MiB", "No space left on device")
    require(not metrics_so_far(case.metrics), "it trained")


def offloaded_without_room(setup):
    without_room(setup, "activations")


def optimizer_without_room(setup):
    without_room(setup, "optimizer")


# --- two jobs ---

def two_jobs(setup):
    """The second job is refused, names the first, and the first does not notice."""
    case = Case(setup, "two_jobs")
    first = case.start(steps=100000, every=20)
    first.wait_for(lambda: steps_in(case.directory), "no save")
    holder = first.rank(0)
    try:
        case.start(steps=100000, every=50).expect(OUTPUT, re.escape(socket.gethostname()), rf"\b{holder}\b",
                                                  re.escape(str(case.directory)))
        require(first.running(), f"the first job ended\n{first.tail()}")
        steps = len(metrics_so_far(case.metrics))
        first.wait_for(lambda: len(metrics_so_far(case.metrics)) > steps, "the first job stands still")
        (case.directory / "stop").touch()
        first.expect(STOPPED)
        losses_in(case.metrics)
    finally:
        first.end()
    require(case.complete(), "no save is left")


def stale_lock(setup):
    """A killed job leaves its lock; the next one takes it over at once."""
    case = Case(setup, "stale")
    job = case.start(steps=100000, every=50)
    job.wait_for(lambda: steps_in(case.directory), "no save")
    for pid in job.processes():
        job.signal(pid, signal.SIGKILL)
    job.finish()
    require((case.directory / "lock").exists(), "a killed job left no lock")
    newest = case.complete()[-1]
    again = case.start(steps=newest + 2)
    output = again.expect(0)
    require(resumed_step(output) == newest, f"went on from step {resumed_step(output)}, not {newest}\n{output}")
    require(not (case.directory / "lock").exists(), "the lock is left")


def foreign_lock(setup):
    """A lock of another host that nobody renews is watched, said so, and taken over."""
    case = Case(setup, "foreign")
    job = case.start()
    job.expect(0)
    job = case.start(steps=100000, every=50)
    lock = case.directory / "lock"
    job.wait_for(lambda: lock.exists() and steps_in(case.directory), "no lock")
    for pid in job.processes():
        job.signal(pid, signal.SIGKILL)
    job.finish()
    newest = case.complete()[-1]
    holder = json.loads(lock.read_text())
    require(holder["host"] == socket.gethostname(), f"the lock lacks this host's name: {holder}")
    lock.write_text(json.dumps({**holder, "host": "elsewhere", "place": "elsewhere"}))
    again = case.start(steps=newest + 2)
    output = again.expect(0, "elsewhere")
    require(resumed_step(output) == newest, f"went on from step {resumed_step(output)}, not {newest}\n{output}")


# --- several hosts ---

def two_hosts(case):
    """A wrapper by which rank 1 runs on another host: its own name, and its own file system as the directory."""
    other, script = case.folder / "other", case.folder / "wrap.sh"
    case.directory.mkdir()
    other.mkdir()
    script.write_text(f'''#!/bin/sh
if [ "$OMPI_COMM_WORLD_RANK" = 1 ]; then
  exec unshare --mount --uts sh -c 'hostname node2; mount --bind "{other}" "{case.directory}" && exec "$@"' sh "$@"
fi
exec "$@"
''')
    script.chmod(0o755)
    return [script]


def unshared(setup):
    """Two hosts that see different directories: refused, with the way out."""
    case = Case(setup, "unshared")
    job = setup.train(2, "--pipeline", 2, "--steps", 4, "--save", case.directory, wrap=two_hosts(case))
    job.expect(OUTPUT, re.escape(str(case.directory)), "node2", "--save-local")


def local(setup):
    """A directory on each of two hosts: killed and resumed, every step has the loss of an undisturbed run."""
    case = Case(setup, "local")
    whole = case.folder / "whole.jsonl"
    setup.train(2, "--pipeline", 2, "--steps", 10 * STEPS, "--metrics", whole).expect(0)
    options = ["--pipeline", 2, "--steps", 10 * STEPS, "--save", case.directory, "--save-local", "--save-every",
               EVERY, "--resume", "auto", "--metrics", case.metrics]
    wrap = two_hosts(case)
    job = setup.train(2, *options, wrap=wrap)
    job.wait_for(lambda: len(metrics_so_far(case.metrics)) > STEPS, "no training")
    job.signal(job.rank(1), signal.SIGKILL)
    require(job.finish() != 0, "it was not killed")
    output = setup.train(2, *options, wrap=wrap).expect(0)
    require(resumed_step(output) > 0, f"it did not resume\n{output}")
    require(losses_in(case.metrics) == losses_in(whole), "the losses differ from those of an undisturbed run")
    require(steps_in(case.directory) == steps_in(case.folder / "other"), "the hosts' saves differ")


CASES = {
    "full_tmpfs": lambda s: enters_namespace(s, full_tmpfs),
    "too_small": lambda s: enters_namespace(s, too_small),
    "full_while_rank_0_writes": lambda s: full_while_writing(s, 0),
    "full_while_rank_1_writes": lambda s: full_while_writing(s, 1),
    "full_while_a_tensor_rank_writes": lambda s: full_while_writing(s, 3, SHARED),
    "deleted": deleted,
    "read_only_errno": read_only_errno,
    "read_only_mount": lambda s: enters_namespace(s, read_only_mount),
    "unwritable_from_the_start": unwritable_from_the_start,
    "slow_writer": slow_writer,
    "offloaded_write": lambda s: offloaded(s, "write", "ENOSPC"),
    "offloaded_read": lambda s: offloaded(s, "read", "EIO"),
    "offloaded_write_of_shards": lambda s: offloaded(s, "write", "ENOSPC", split=SHARDS),
    "offloaded_read_of_shards": lambda s: offloaded(s, "read", "EIO", split=SHARDS),
    "offloaded_gone": offloaded_gone,
    "offloaded_read_only": offloaded_read_only,
    "offloaded_that_hangs": offloaded_that_hangs,
    "offloaded_without_room": lambda s: enters_namespace(s, offloaded_without_room),
    "optimizer_write": lambda s: offloaded(s, "write", "EIO", "optimizer", 21),
    "optimizer_read_by_a_save": lambda s: offloaded(s, "read", "EIO", "optimizer", 5),
    "optimizer_that_hangs": lambda s: offloaded_that_hangs(s, "optimizer", "the update of parameters"),
    "optimizer_without_room": lambda s: enters_namespace(s, optimizer_without_room),
    "two_jobs": two_jobs,
    "stale_lock": stale_lock,
    "unshared": lambda s: enters_namespace(s, unshared),
    "local": lambda s: enters_namespace(s, local),
}
FULL = {"foreign_lock": foreign_lock}


def campaign():
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--case", choices=[*CASES, *FULL])
    options = parser.parse_args()
    cases = {**CASES, **FULL} if options.full or options.case else CASES
    setup = Setup(options)
    return run_cases(setup, "disk faults", [(name, functools.partial(case, setup)) for name, case in cases.items()
                                            if options.case in (None, name)])


if __name__ == "__main__":
    main(campaign)
