#!/usr/bin/env python3
"""Kills trainings that save every other step, and resumes them by the same command until they are done.

    tests/faults/kill_campaign.py [--count KILLS] [--seed S] [--story K] [--build DIR]

A story is one training: its ranks, and kills of a random rank, the launcher, or all at once. Half of the kills come
at a random moment, half in a random file operation of a save. Seed and story decide all of it, but the machine
decides what a moment meets. A story holds if

  * the weights have the digest, and every step the loss, of a run without kills;
  * each resume goes on from the newest save that was complete on disk, and no complete save is ever lost;
  * the metrics hold every step once, each line is JSON;
  * in the end the directory holds the files of a run without kills, and no others;
  * no process outlives its job by long, and no resume fails.

`--story K` repeats one story. Prints one line for each story and a sum; exits 1 after a violation.
"""

import collections
import random
import signal
import tempfile
import time

from harness import (Setup, Violation, arguments, losses_in, main, metrics_so_far, names_below, require,
                     resumed_step, step_directory, steps_in)

STEPS = 40
# ranks, and what splits them: 4 ranks are 2 replicas of 2 stages.
LAYOUTS = ((4, ("--pipeline", "2", "--replicas", "2")), (2, ("--pipeline", "2")), (2, ("--replicas", "2")),
           (1, ()), (3, ("--save-precision", "bf16")), (4, ("--pipeline", "2", "--replicas", "2", "--schedule", "gpipe")),
           (4, ("--pipeline", "2", "--replicas", "2", "--shard", "optimizer")),
           (3, ("--replicas", "3", "--shard", "optimizer")), (2, ("--tensor", "2")),
           (3, ("--replicas", "3", "--shard", "parameters")),
           (4, ("--pipeline", "2", "--replicas", "2", "--shard", "parameters", "--shard-gather", "step")),
           (4, ("--pipeline", "2", "--replicas", "2", "--shard", "parameters", "--shard-gather", "use", "--schedule", "dualpipe-v")),
           (4, ("--pipeline", "2", "--replicas", "2", "--shard", "gradients", "--schedule", "looped-bfs")),
           (2, ("--replicas", "2", "--shard", "parameters", "--gradient-order", "micro-batch")),
           (4, ("--pipeline", "2", "--replicas", "2", "--schedule", "gpipe", "--shard", "parameters", "--recompute", "block",
                "--offload", f"activations:disk-cached={tempfile.gettempdir()}")),
           (4, ("--pipeline", "2", "--tensor", "2", "--tensor-shards", "4")),
           (4, ("--replicas", "2", "--tensor", "2", "--shard", "optimizer")),
           (4, ("--pipeline", "4", "--partition", "1,1,0,0", "--micro-batches", "6", "--recompute", "attention",
                "--offload", f"activations,optimizer:disk={tempfile.gettempdir()}")))
CALLS = ("open", "write", "sync", "rename", "remove", "mkdir")
LAUNCHER, HOST = -1, -2  # victims besides a rank; with the host all processes go at once


class Reference:
    """A run without kills: digest, losses, files, seconds, and how often each rank makes each call."""

    def __init__(self, setup, layout):
        ranks, split = layout
        folder = setup.folder / "reference"
        folder.mkdir()
        log = folder / "calls"
        start = time.monotonic()
        job = setup.train(ranks, *split, *story_options(folder),
                          fault={"directory": folder / "run", "times": 0, "log": log})
        job.expect(0)
        self.seconds = time.monotonic() - start
        self.digest = setup.digest(folder / "run")
        self.losses = losses_in(folder / "metrics.jsonl")
        require(len(self.losses) == STEPS, f"the reference has {len(self.losses)} steps")
        self.files = names_below(folder / "run")
        self.calls = collections.Counter(tuple(line.split()[:2]) for line in log.read_text().splitlines())
        folder.rename(setup.folder / f"reference-{time.monotonic_ns()}")


def story_options(folder):
    return ["--steps", str(STEPS), "--save", folder / "run", "--save-every", "2", "--resume", "auto",
            "--metrics", folder / "metrics.jsonl"]


class Kill:
    """Where or when one kill comes."""

    def __init__(self, draw, layout, reference):
        ranks = layout[0]
        self.victim = draw.randrange(HOST if ranks > 1 else 0, ranks)
        self.fault = None
        self.moment = draw.random() * reference.seconds
        if draw.random() < 0.5:
            made = sorted(key for key, count in reference.calls.items() if key[1] in CALLS)
            made += [key for key in made if key[0] == "0"] * 2  # rank 0 publishes
            rank, call = draw.choice(made)
            # The first eighth of the run's calls: a resumed run makes fewer.
            nth = draw.randint(1, max(reference.calls[rank, call] // 8, 1))
            self.fault = {"rank": rank, "call": call, "nth": nth,
                          "action": "launcher" if self.victim == LAUNCHER else "kill"}

    def __str__(self):
        if self.fault:
            what = "launcher" if self.fault["action"] == "launcher" else f"rank {self.fault['rank']}"
            return f"{what} in rank {self.fault['rank']}'s {self.fault['call']} {self.fault['nth']}"
        what = {LAUNCHER: "launcher", HOST: "host"}.get(self.victim, f"rank {self.victim}")
        return f"{what} after {self.moment:.3f} s"


class Story:
    def __init__(self, setup, seed, number):
        self.setup = setup
        self.draw = random.Random(f"{seed} {number}")
        self.layout = self.draw.choice(LAYOUTS)
        self.folder = setup.folder / f"story-{number}"
        self.folder.mkdir()
        self.directory = self.folder / "run"
        self.kills = []
        self.complete = False  # the last start found nothing left to do
        self.launcher_hangs = 0

    def play(self, reference, kills_left):
        """Number of kills until the training is done."""
        while True:
            kill = Kill(self.draw, self.layout, reference) if len(self.kills) < kills_left else None
            if not self.launch(kill):
                break
        self.check_end(reference)
        return len(self.kills)

    def launch(self, kill):
        """One start of the command; whether it was killed."""
        expected = self.newest()
        log = self.folder / f"fault-{len(self.kills)}"
        fault = {**kill.fault, "directory": self.directory, "log": log} if kill and kill.fault else None
        job = self.setup.train(self.layout[0], *self.layout[1], *story_options(self.folder), fault=fault)
        seen = expected
        if kill and not kill.fault:
            seen = self.wait_and_kill(job, kill, seen)
        code = job.finish()
        self.launcher_hangs += job.launcher_hung
        # A rank kills its launcher in the middle of a save: with luck the job is done all the same.
        killed = log.exists() if fault else kill is not None and code != 0
        if killed:
            self.kills.append(str(kill))
        require(code == 0 or killed, f"exit {code} without a kill\n{job.tail()}")
        resumed = resumed_step(job.output)
        self.complete = "already complete" in job.output
        if metrics_so_far(self.folder / "metrics.jsonl") and "step" in job.output:
            # A save that was complete but for its name counts as well.
            named = f"is complete: it is '{step_directory('', resumed or 0).name}' now" in job.output
            right = resumed == expected or named and resumed > expected
            require(right or self.complete or not resumed and killed,
                    f"went on from step {resumed}, though step {expected} was complete\n{job.tail()}")
        newest = self.newest()
        require(newest >= seen, f"step {seen} was complete before the kill, now the newest is {newest}")
        return killed and not (code == 0 and newest == STEPS)

    def wait_and_kill(self, job, kill, seen):
        """Lets the moment come, and kills; returns the newest save that was complete before."""
        if not job.wait(kill.moment):
            processes = job.processes()
            victims = [pid for pid, rank in processes.items() if kill.victim in (rank, HOST)]
            seen = max([seen, *steps_in(self.directory)])
            for pid in victims if victims and self.layout[0] > 1 else [job.process.pid]:
                job.signal(pid, signal.SIGKILL)
        return seen

    def newest(self):
        """Newest step that is complete on disk: it has its name, so it must verify."""
        steps = steps_in(self.directory)
        for step in steps:
            code, output = self.setup.run("verify", step_directory(self.directory, step))
            require(code == 0, f"step {step} has its name but does not verify: exit {code}\n{output}")
        return steps[-1] if steps else 0

    def check_end(self, reference):
        digest = self.setup.digest(self.directory)
        require(digest == reference.digest, f"digest {digest} instead of {reference.digest}")
        losses = losses_in(self.folder / "metrics.jsonl")
        different = [step for step in reference.losses if losses.get(step) != reference.losses[step]]
        require(not different, f"losses of steps {different} differ from those of a run without kills")
        files, wanted = names_below(self.directory), reference.files
        if self.complete:
            # Killed after its last save: nothing removes older saves, the lock and a status.json that is not yet
            # named so. A job of less than a second has no status.json.
            left = ("lock", "status.json.partial", *(f"step-{step:08d}" for step in range(STEPS - 2)))
            files = [name for name in files if name in wanted or not name.startswith(left)]
            wanted = [name for name in wanted if name in files or name != "status.json"]
        require(files == wanted, f"files {files} instead of {wanted}")


def campaign():
    parser = arguments(__doc__.splitlines()[0], count=20, seed=1)
    parser.add_argument("--story", type=int, help="repeats this story of the seed alone")
    options = parser.parse_args()
    setup, references = Setup(options), {}
    kills, story, violations, start = 0, options.story or 0, 0, time.monotonic()
    aimed = hangs = 0
    while kills < options.count:
        tale = Story(setup, options.seed, story)
        try:
            if tale.layout not in references:
                references[tale.layout] = Reference(setup, tale.layout)
            # At most eight a story, so that several layouts get their turn.
            tale.play(references[tale.layout], min(8, options.count - kills))
            print(f"story {story}: ranks {tale.layout[0]} {' '.join(tale.layout[1])}: {len(tale.kills)} kills")
        except Violation as error:
            violations += 1
            print(f"story {story} FAILED after {len(tale.kills)} kills ({'; '.join(tale.kills)})\n{error}\n"
                  f"kept in {tale.folder}; repeat by --seed {options.seed} --story {story} --build {options.build}")
        kills += max(len(tale.kills), 1)
        hangs += tale.launcher_hangs
        aimed += sum("'s " in text for text in tale.kills)
        story += 1
        if options.story is not None:
            break
    digests = collections.defaultdict(set)  # by number of replicas, where that decides them
    for layout, reference in references.items():
        if "--replicas" in layout[1] and not {"--tensor", "--gradient-order"} & {*layout[1]}:
            digests[layout[1][layout[1].index("--replicas") + 1]].add(reference.digest)
    for replicas, seen in digests.items():
        if len(seen) > 1:
            violations += 1
            print(f"the references of {replicas} replicas differ: {sorted(seen)}")
    print(f"kill campaign: {kills} kills ({aimed} of them in a file operation) in {story} stories, "
          f"seed {options.seed}, {violations} violations, mpirun itself hung {hangs} times, "
          f"{time.monotonic() - start:.0f} s")
    if not violations:
        setup.remove()
    return 1 if violations else 0


if __name__ == "__main__":
    main(campaign)
