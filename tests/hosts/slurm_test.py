#!/usr/bin/env python3
"""A real Slurm: trainings by mpirun and by srun, time limits, and nodes that die.

    tests/hosts/slurm_test.py [--case NAME] [--build DIR]

Every job is the script that users copy, slurm_job.sh. However it is interrupted, it ends with the bits of a training
on one host.
"""

import functools
import pathlib
import re
import shutil

import slurm
from cases import metrics_so_far, require, resumed_step, run
from hosts import Unavailable, wait_for

STEPS = 400
SHORT = 4
STOPPED = 12  # exit code: stopped as asked
SRUN = "srun --mpi=pmix --kill-on-bad-exit=0 --wait=3"  # the script waits longer for the other ranks
SCRIPTS_OWN = ""
MPIRUN = "mpirun"
SLOW = "1mbit"  # a step takes a tenth of a second, so that what happens to the job happens amid steps
# One in 90 starts of an MPI program that does nothing but start crashed, by srun with Debian 12's Open MPI 4.1.4 and
# PMIx 4.2.2. The script tries again.
CRASHED = 139
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


class Job:
    """A submitted job in a folder of its own."""

    def __init__(self, setup, name, launch, *options, steps=STEPS, sbatch=()):
        self.setup, self.cluster, self.directory, self.steps = setup, setup.cluster, setup.folder / name, steps
        self.directory.mkdir()
        (self.directory / "text.txt").symlink_to(setup.folder / "text.txt")
        self.cluster.environment["SLUICE_LAUNCH"] = launch
        said = self.cluster.check("sbatch", "--chdir", self.directory, *sbatch, setup.folder / "slurm_job.sh",
                                  *setup.model, "--steps", steps, "--metrics", "metrics.jsonl", *options)
        self.number = re.search(r"Submitted batch job (\d+)", said).group(1)

    def has(self, field):
        """A field of what Slurm knows of the job."""
        return re.search(rf"\b{field}=(\S+)", self.cluster.check("scontrol", "show", "job", self.number)).group(1)

    def restarts(self):
        return int(self.has("Restarts")) - self.log().count(f"== ended with {CRASHED} ")

    def log(self):
        return "\n".join(path.read_text(errors="replace") for path in self.directory.glob("*.log"))

    def trains(self, more=10):
        """Waits for that many more steps; the last step."""
        metrics = self.directory / "metrics.jsonl"
        last = (metrics_so_far(metrics) or [0])[-1]
        self.wait(lambda: len(metrics_so_far(metrics)) >= last + more, f"no {more} steps after step {last}")
        return metrics_so_far(metrics)[-1]

    def wait(self, condition, what):
        """A job that ends first fails."""
        def ready():
            done = condition()
            require(done or self.has("JobState") not in ENDED, f"{what}: the job has ended\n{self.log()}")
            return done
        try:
            wait_for(ready, what, seconds=60)
        except RuntimeError as error:
            raise RuntimeError(f"{error}\n{self.log()}") from error

    def ends(self, state="COMPLETED", code="0:0", restarts=None):
        """Waits for the end; the log. Restarts after a crash of MPI are not counted."""
        wait_for(lambda: self.has("JobState") in ENDED, f"job {self.number} does not end\n{self.log()}", seconds=60)
        found = (self.has("JobState"), self.has("ExitCode"))
        require(found == (state, code), f"the job ended with {found}\n{self.log()}")
        require(restarts in (None, self.restarts()), f"{self.restarts()} restarts\n{self.log()}")
        return self.log()

    def same_bits(self, replicas=1):
        self.setup.same_bits(self.directory / "run", self.steps, replicas)


def launched(setup, name, launch):
    """The script to its end, with two ranks on each node."""
    job = Job(setup, name, launch, "--pipeline", 2, "--replicas", 2, steps=SHORT, sbatch=["--ntasks-per-node=2"])
    job.ends(restarts=0)
    job.same_bits(replicas=2)


def srun_alone(setup):
    """srun without a script."""
    for _ in range(3):
        done = setup.cluster.run("timeout", 60, "srun", "--mpi=pmix", "-N", 2, "-n", 4, *setup.train(
            "--pipeline", 2, "--replicas", 2, "--steps", SHORT, "--save", "srun-alone", "--resume", "auto"), timeout=90)
        if done.returncode != CRASHED:
            break
    require(done.returncode == 0, f"exit {done.returncode}\n{done.stdout}")
    setup.same_bits("srun-alone", SHORT, replicas=2)


def goes_on(setup, job, asked=None):
    """A job that ended early is queued again, by itself, and goes on from its last save to the same bits."""
    job.wait(lambda: job.restarts() >= 1, "it is not queued again")
    setup.hosts.limit(2, "off")
    log = job.ends(restarts=1)
    if asked:
        stopped = [int(step) for step in re.findall(r"stopped as asked after step (\d+)", log)]
        require(len(stopped) == 1 and stopped[0] >= asked, f"asked in step {asked}, stopped after {stopped}\n{log}")
        require(resumed_step(log) == stopped[0], f"went on from step {resumed_step(log)}, not {stopped[0]}\n{log}")
        require("ended with 12 " in log, f"the exit code is lost\n{log}")
    require(resumed_step(log) > 0, f"it began anew\n{log}")
    job.same_bits()


def time_limit(setup):
    """Slurm itself sends the signal: the limit is set to less than --signal leaves."""
    setup.hosts.limit(2, SLOW)
    job = Job(setup, "time-limit", SRUN)
    asked = job.trains()
    setup.cluster.check("scontrol", "update", f"JobId={job.number}", "TimeLimit=5")  # minutes; the signal: 300 s
    job.wait(lambda: "stopped as asked" in job.log(), "no signal comes")
    setup.cluster.check("scontrol", "update", f"JobId={job.number}", "TimeLimit=60")
    goes_on(setup, job, asked)


def asked_to_stop(setup):
    """The same by hand, with mpirun."""
    setup.hosts.limit(2, SLOW)
    job = Job(setup, "asked", MPIRUN, steps=STEPS // 2)
    asked = job.trains()
    setup.cluster.check("scancel", "--batch", "--signal=USR1", job.number)
    goes_on(setup, job, asked)


def stays_stopped(setup):
    """The file `stop` ends the job for good, and so do scancel and an option that is wrong."""
    setup.hosts.limit(2, SLOW)
    job = Job(setup, "stop-file", SRUN)
    job.trains()
    (job.directory / "run" / "stop").touch()
    job.ends("FAILED", f"{STOPPED}:0", restarts=0)
    job = Job(setup, "cancelled", SRUN)
    job.trains()
    setup.cluster.check("scancel", job.number)
    wait_for(lambda: not setup.cluster.check("squeue", "--noheader"), f"the job is still there\n{job.log()}")
    job.ends("CANCELLED", job.has("ExitCode"), restarts=0)
    setup.hosts.limit(2, "off")
    Job(setup, "wrong-option", SRUN, "--heads", 3).ends("FAILED", "2:0", restarts=0)


def dead_node(setup, name, launch, die):
    """A node dies amid steps. The job goes on with the third node, from a save, and nobody does anything."""
    setup.hosts.limit(2, SLOW)
    job = Job(setup, name, launch, "--save-every", 5, steps=STEPS // 8)
    job.trains()
    require(job.has("NodeList") == "node[1-2]", f"the job is on {job.has('NodeList')}")
    die()
    job.wait(lambda: job.restarts() >= 1, "it is not queued again")
    log = job.ends()
    require(job.has("NodeList") == "node[1,3]", f"the job ended on {job.has('NodeList')}\n{log}")
    require(resumed_step(log) >= 5, f"it began anew\n{log}")
    job.same_bits()
    restarts = job.has("Restarts")
    if not (setup.hosts.folder / "2.pid").exists():
        setup.hosts.boot(2)
    setup.cluster.start(2)
    wait_for(lambda: setup.cluster.states() == ["idle"] * 3, "the node does not return")
    return f"from step {resumed_step(log)}, {restarts} restarts"


def dead_rank(setup):
    """A rank dies while its node stays. The script tries again."""
    setup.hosts.limit(2, SLOW)
    job = Job(setup, "dead-rank", SRUN, "--save-every", 5, steps=STEPS // 8)
    job.trains()
    setup.hosts.check(2, "pkill", "-KILL", "sluice")
    goes_on(setup, job)


def loses_power(setup):
    setup.hosts.kill(2)


def loses_processes(setup):
    """Slurm's daemon and all it started; what the kernel does for them still reaches the peers."""
    setup.hosts.check(2, "pkill", "-KILL", "slurm|sluice|orted")


def cases(setup):
    shutil.copy(pathlib.Path(__file__).with_name("slurm_job.sh"), setup.folder)
    setup.cluster = slurm.Slurm(setup.hosts)
    return {
        "mpirun in the allocation": lambda: launched(setup, "by-mpirun", MPIRUN),
        "srun --mpi=pmix in the allocation": lambda: launched(setup, "by-srun", SCRIPTS_OWN),
        "srun --mpi=pmix -N 2 -n 4": functools.partial(srun_alone, setup),
        "asked to stop": functools.partial(asked_to_stop, setup),
        # Slurm looks at time limits every 30 seconds: this case waits least when those before took 25.
        "the time limit comes": functools.partial(time_limit, setup),
        "stopped for good": functools.partial(stays_stopped, setup),
        "a rank dies, srun": functools.partial(dead_rank, setup),
        "a node loses power, srun": lambda: dead_node(setup, "power-srun", SRUN, lambda: loses_power(setup)),
        "a node loses its processes, mpirun": lambda: dead_node(setup, "processes-mpirun", MPIRUN,
                                                                lambda: loses_processes(setup)),
    }


def missing():
    try:
        slurm.available()
    except Unavailable as reason:
        return f"Slurm: {reason}"
    return None


if __name__ == "__main__":
    run("slurm", __doc__, 3, cases, missing)
