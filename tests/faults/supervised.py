#!/usr/bin/env python3
"""Trainings under `sluice run`: killed again and again, or failing each time.

    tests/faults/supervised.py [--count KILLS] [--halves RUNS] [--seed S] [--case NAME] [--build DIR]

"kills" is one training of four ranks. A random rank, the launcher or all ranks are killed --count times, each time at a
random moment after the start has added a save. In the end the weights have the digest, and every step the loss, of a
training without kills, and nothing is left of it.

"halves" are --halves trainings of four virtual replicas and four shards. Each loses half of its ranks twice, at random moments after a
save: a host of two ranks, then one of one. It goes on with the layouts that are left, and ends with the digest and the
losses of a training of four ranks that lost none. The hosts are names alone, whose loss the job itself reports.
"""

import functools
import random
import re
import signal
import time

from harness import (Job, Setup, arguments, losses_in, main, metrics_so_far, require, run_cases,
                     steps_in)

SPLIT = ("--pipeline", "2", "--replicas", "2")
SHARED = ("--pipeline", "2", "--tensor", "2")
RANKS = 4
EVERY = 4        # steps between saves
STEPS_A_KILL = 30  # a start adds fewer before it is killed
LAUNCHER, ALL = -1, -2  # victims besides a rank
# Pipeline x replicas x tensor.
HALVES = ("1x4,1x2,1x1", "2x2,1x1x2,1x1", "2x1x2,1x2,1x1", "4x1,1x1x2,1x1", "1x2x2,2x1,1x1", "1x1x4,1x1x2,1x1")
HALVES_STEPS = 100
# A host that is down is not reached; a start that fails has lost the host that went down last.
ON_HOSTS = r"""
hosts=$1; shift
if grep -q -f $DOWN $hosts; then exit 205; fi
"$@"; code=$?
if [ $code -ne 0 ]; then
  printf '\nsluice-event {"event":"hang","kind":"lost","hosts":["%s"]}\n' "$(tail -n 1 $DOWN)" >&2
fi
exit $code
"""


class Supervised:
    def __init__(self, setup, name, steps, *options, training=(), split=SPLIT, ranks=str(RANKS), before=(), model=None):
        """`before`: words before those of the launcher."""
        self.folder = setup.folder / name
        self.folder.mkdir()
        self.directory, self.metrics = self.folder / "run", self.folder / "metrics.jsonl"
        self.down = self.folder / "down"  # a line for each host that is
        self.down.touch()
        train = [setup.sluice, "train", *(model or setup.model), *split, "--steps", str(steps), "--save", str(self.directory),
                 "--save-every", str(EVERY), "--resume", "auto", "--metrics", str(self.metrics), *training]
        self.job = Job([setup.sluice, "run", "--pause", "0", *options, "--", *before, setup.mpiexec, "-n", ranks, *train],
                       {"DOWN": str(self.down)}, self.folder / "output")

    def ranks(self):
        return {pid: rank for pid, rank in self.job.processes().items() if rank is not None}

    def launcher(self):
        """The process of mpirun, which is the parent of the ranks."""
        for pid in self.ranks():
            with open(f"/proc/{pid}/stat", encoding="utf-8") as stat:
                return int(stat.read().rsplit(")", 1)[1].split()[1])
        return None

    def kill(self, victim):
        ranks = self.ranks()
        victims = [pid for pid, rank in ranks.items() if victim in (rank, ALL)]
        if victim == LAUNCHER:
            victims = [self.launcher()]
        for pid in filter(None, victims):
            self.job.signal(pid, signal.SIGKILL)


def reference(setup, name, steps, *words, model=True):
    directory, metrics = setup.folder / f"{name}-reference", setup.folder / f"{name}-reference.jsonl"
    setup.train(RANKS, *words, "--steps", steps, "--save", directory, "--metrics", metrics, model=model).expect(0)
    return setup.digest(directory), losses_in(metrics)


def require_same(setup, run, digest, losses):
    require(setup.digest(run.directory) == digest, f"digest {setup.digest(run.directory)} instead of {digest}")
    found = losses_in(run.metrics)
    different = [step for step in losses if found.get(step) != losses[step]]
    require(not different, f"losses of steps {different} differ")


def kills(setup, count, seed, split=SPLIT):
    draw, name = random.Random(seed), "kills" + split[2]
    steps = STEPS_A_KILL * (count + 1)
    digest, losses = reference(setup, name, steps, *split)
    run = Supervised(setup, name, steps, "--restarts", "unlimited", split=split)
    done = 0
    while done < count:
        newest = (steps_in(run.directory) or [0])[-1]
        restarts = run.job.output.count("; restart ")
        # A save that is new since this start, and ranks of this start.
        run.job.wait_for(lambda: (steps_in(run.directory) or [0])[-1] > newest and len(run.ranks()) == RANKS,  # noqa: B023
                         f"no save after kill {done}")
        at = (metrics_so_far(run.metrics) or [0])[-1] + draw.randrange(EVERY + 2)
        run.job.wait_for(lambda: (metrics_so_far(run.metrics) or [0])[-1] >= min(at, steps - 1), "no step")  # noqa: B023
        run.kill(draw.choice([*range(RANKS), LAUNCHER, ALL]))
        run.job.wait_for(lambda: run.job.output.count("; restart ") > restarts, f"no restart after kill {done}")  # noqa: B023
        done += 1
    output = run.job.expect(0, rf"sluice run: {count} restarts? in \d+ s; [\d.]+ % of the time in steps that count")
    require_same(setup, run, digest, losses)
    require("sluice-event" not in output, output)
    return re.findall(r"^sluice run: (\d+ restarts?.*)", output, re.MULTILINE)[0]


def halves(setup, count, seed):
    model = ["--virtual-replicas", "4", "--tensor-shards", "4", *setup.model]
    model[model.index("--layers") + 1] = "4"  # as many as a layout has ranks
    digest, losses = reference(setup, "halves", HALVES_STEPS, "--pipeline", "1", "--replicas", "4", *model, model=False)
    hosts = setup.folder / "hosts"
    hosts.write_text("node1 slots=1\nnode2 slots=1\nnode3 slots=2\n")
    draw = random.Random(seed)
    for number in range(count):
        layouts = draw.choice(HALVES)
        run = Supervised(setup, f"halves-{number}", HALVES_STEPS, "--hosts", str(hosts), "--layouts", layouts, ranks="{ranks}",
                         split=("--pipeline", "{pipeline}", "--replicas", "{replicas}", "--tensor", "{tensor}"), model=model,
                         before=("sh", "-c", ON_HOSTS, "job", "{hostfile}"))
        for ranks, host, most in ((4, "node3", 40), (2, "node2", 80)):
            lose_half(run, draw, ranks, host, most)
        output = run.job.expect(0, r"sluice run: 4 restarts in \d+ s")
        require_same(setup, run, digest, losses)
        first, second, third = layouts.split(",")
        for part in (f"layout {second} instead of {first}: ", f"layout {third} instead of {second}: "):
            require(part in output, f"the output lacks '{part}'\n{output}")
        print(f"  {layouts}: {', '.join(re.findall('from step [0-9]+', output))}", flush=True)
    return f"{count} trainings"


def lose_half(run, draw, ranks, host, most):
    """Kills half of these ranks after a save of this start, and soon after a step before `most`."""
    newest = (steps_in(run.directory) or [0])[-1]
    run.job.wait_for(lambda: (steps_in(run.directory) or [0])[-1] > newest and len(run.ranks()) == ranks, "no save")
    at = draw.randrange(most)
    run.job.wait_for(lambda: (metrics_so_far(run.metrics) or [0])[-1] >= at, f"step {at} is not reached")
    time.sleep(draw.random() * 0.02)  # anywhere within a step
    half = draw.choice((range(ranks // 2), range(ranks // 2, ranks)))
    with open(run.down, "a", encoding="utf-8") as down:
        down.write(f"{host}\n")
    for pid in [pid for pid, rank in run.ranks().items() if rank in half]:
        run.job.signal(pid, signal.SIGKILL)
    run.job.wait_for(lambda: f"leaving out {host} from now on" in run.job.output, f"{host} is not left out")


def always_fails(setup):
    """A rank is killed before each save: two restarts, then the reason."""
    run = Supervised(setup, "fails", 100000, training=("--save-every", "100000"))
    for start in range(3):
        # The watchdog is up once a step is done.
        run.job.wait_for(lambda: run.job.output.count("step 1/100000 ") > start, f"no step of start {start}")  # noqa: B023
        run.kill(1)
        said = "giving up" if start == 2 else f"; restart {start + 1} "
        run.job.wait_for(lambda: said in run.job.output, f"'{said}' is not said")  # noqa: B023
    run.job.expect(137, r"giving up: rank 1 on \S+ was killed by SIGKILL; two restarts in a row added no save")


def refused(setup):
    """An error that a restart does not mend: one start, and Sluice's own line."""
    run = Supervised(setup, "refused", 5, training=("--weights", "/no/such/file"))
    run.job.expect(5, "^sluice: error: .*'/no/such/file'", "giving up: exit code 5: saved weights")


def stops(setup):
    """Asked to stop, the training saves; the same command goes on and is done."""
    run = Supervised(setup, "stops", 1000000)
    run.job.wait_for(lambda: len(metrics_so_far(run.metrics)) > 5, "no step")
    run.job.signal(run.job.process.pid, signal.SIGTERM)
    output = run.job.expect(12, r"stopped as asked after step \d+")
    require("giving up" not in output, output)
    step = int(re.search(r"stopped as asked after step (\d+)", output).group(1))
    require(steps_in(run.directory)[-1] == step, f"saved {steps_in(run.directory)}, stopped after {step}")


def killed_supervisor(setup):
    """kill -9 of `sluice run`: mpirun ends its ranks, nothing is left, and the newest save verifies."""
    run = Supervised(setup, "killed", 1000000)
    run.job.wait_for(lambda: steps_in(run.directory), "no save")
    run.job.signal(run.job.process.pid, signal.SIGKILL)
    run.job.expect(-signal.SIGKILL)  # and nothing is left
    require(setup.verifies(run.directory), "no save that verifies")


def second_stop(setup):
    """A rank is stopped, so that no step ends: the second request ends the job."""
    run = Supervised(setup, "twice", 1000000, training=("--timeout", "1000"))
    run.job.wait_for(lambda: len(metrics_so_far(run.metrics)) > 5 and len(run.ranks()) == RANKS, "no step")
    stopped = next(pid for pid, rank in run.ranks().items() if rank == 1)
    run.job.signal(stopped, signal.SIGSTOP)
    def asked_again():
        run.job.signal(run.job.process.pid, signal.SIGTERM)
        return "ending the job" in run.job.output

    run.job.wait_for(asked_again, "the second request did nothing")
    output = run.job.output
    run.job.finish()
    require("stopping after this step" in output, output)


def campaign():
    parser = arguments(__doc__.splitlines()[0], count=3, halves=1, seed=1)
    cases = {"kills": lambda s: kills(s, options.count, options.seed),
             "kills of ranks that share stages": lambda s: kills(s, (options.count + 2) // 3, options.seed, SHARED),
             "halves": lambda s: halves(s, options.halves, options.seed), "always fails": always_fails, "refused": refused,
             "stops": stops, "kill -9 of the supervisor": killed_supervisor, "a second stop": second_stop}
    parser.add_argument("--case", choices=cases)
    options = parser.parse_args()
    setup = Setup(options)
    return run_cases(setup, "supervised trainings", [(name, functools.partial(case, setup)) for name, case in cases.items()
                                                     if options.case in (None, name)])


if __name__ == "__main__":
    main(campaign)
