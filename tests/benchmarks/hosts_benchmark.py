#!/usr/bin/env python3
"""Steps over two hosts with slow links, next to the simulation in which messages overlap with compute.

    tests/benchmarks/hosts_benchmark.py [--build build/release] [--steps 12] [--shares 0.5,1,2]
    tests/benchmarks/hosts_benchmark.py --sums 1,2 [--against build/other]

Two hosts as network namespaces (tests/hosts), a core each, one rank each. `tc tbf` limits the link so that a message
takes a share of a forward action. A run without a limit shows what a step takes besides its actions (optimizer, norm).
The prediction is that rest and the simulation with the link's bandwidth and the times of the actions in the run itself.
Each row runs with messages that advance between operators and, for comparison, between actions alone, in turns; it
shows medians over the steps of `--rounds` rounds. Needs root and two idle cores.

`--sums`: two replicas, one per host, of pipelines of so many ranks, which share a core. The link is limited so that the
sums of gradients take `--sum-share` of what a rank computes: of a step without limit by the ranks of a core. Shown is how
much of their time operators hide: what the limit does not add to the time in which ranks compute nothing, for the builds in
turns.
"""

import argparse
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "hosts"))
sys.path.insert(0, str(HERE.parent / "faults"))
from harness import made_up_text  # noqa: E402
from hosts import ROOT, Hosts, Unavailable  # noqa: E402

SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb-h1": 1, "zb-v": 2}  # chunks per rank
LAYERS, WIDTH, CONTEXT, MICRO_BATCHES = 8, 256, 256, 8
MESSAGE_BYTES = 4 * WIDTH * CONTEXT  # of one sample
WARMUP = 3  # steps that do not count


class Benchmark:
    def __init__(self, options, hosts):
        self.options, self.hosts = options, hosts
        self.sluice = str(pathlib.Path(options.build).resolve() / "sluice")
        (hosts.shared / "text.txt").write_text(made_up_text(200000))

    def train(self, sluice, ranks, words):
        """Lines of metrics of the steps of a run, and what it prints."""
        metrics = self.hosts.shared / "metrics.jsonl"
        metrics.unlink(missing_ok=True)
        words = [sluice, "train", "--data", "text.txt", "--layers", LAYERS, "--width", WIDTH, "--heads", 4,
                 "--context", CONTEXT, "--steps", WARMUP + self.options.steps, "--validation-share", 0, "--metrics",
                 metrics, *words]
        # The ranks of the first host on core 0, those of the second on core 1.
        done = self.hosts.run(1, "mpirun", *self.hosts.slots(ranks), "sh", "-c",
                              f'exec taskset -c $((2 * OMPI_COMM_WORLD_RANK / {ranks})) "$@"', "sh", *map(str, words),
                              timeout=600)
        if done.returncode != 0:
            sys.exit(f"{' '.join(map(str, words))}: exit {done.returncode}\n{done.stdout}")
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
        return lines[WARMUP:], done.stdout

    def steps(self, schedule, progress):
        """Seconds of the steps of a run, which leaves a trace."""
        lines, _ = self.train(self.sluice, 2, [
            "--micro-batches", MICRO_BATCHES, "--micro-batch-size", self.options.samples, "--pipeline", 2, "--schedule",
            schedule, "--chunks", SCHEDULES[schedule], "--trace", "trace.json", "--progress", progress])
        return [line["seconds"] for line in lines]

    def sums_row(self, depth):
        builds = [self.options.build, *filter(None, [self.options.against])]
        words = ["--pipeline", depth, "--replicas", 2, "--rank-order", "pipeline-first", "--micro-batches", depth,
                 "--micro-batch-size", self.options.samples]

        def turns():
            """[build] the medians of seconds and of idle seconds of the steps of its runs, and what the last prints."""
            steps = {build: [] for build in builds}
            for _ in range(self.options.rounds):
                for build in builds:
                    lines, said = self.train(str(pathlib.Path(build).resolve() / "sluice"), 2 * depth, words)
                    steps[build] += lines
            return {build: (statistics.median(line["seconds"] for line in lines),
                            statistics.median(line["seconds"] * line["bubble_measured"] for line in lines))
                    for build, lines in steps.items()}, said

        self.limit("off")
        free, said = turns()
        # Each of two replicas sends a half of its gradients, and then a half of the sum.
        column = re.findall(r"^ +\d+ .*? \d+\.\d +(\d+\.\d) ", said, re.MULTILINE)
        gradients = sum(float(mebibytes) for mebibytes in column) * 2**20
        sums = self.options.sum_share * min(seconds for seconds, _ in free.values()) / depth
        self.limit(f"{int(8 * gradients / sums)}bit")
        limited, _ = turns()
        for build in builds:
            (before, idle_before), (after, idle_after) = free[build], limited[build]
            print(f"{depth:>2} {8 * gradients / sums / 1e6:8.0f} {1e3 * sums:7.0f} {1e3 * before:9.0f} "
                  f"{1e3 * idle_before:6.0f} {1e3 * after:10.0f} {1e3 * idle_after:6.0f} "
                  f"{1 - (idle_after - idle_before) / sums:7.2f}  {build}")

    def simulated(self, schedule, bandwidth):
        """Seconds of a step with the times of the last run; bandwidth in bytes per second, 0: without limit."""
        words = [self.sluice, "schedule", "--schedule", schedule, "--ranks", 2, "--chunks", SCHEDULES[schedule],
                 "--micro-batches", MICRO_BATCHES, "--profile", self.hosts.shared / "trace.json", "--format", "json",
                 "--message-bytes", MESSAGE_BYTES * self.options.samples, "--bandwidth", bandwidth / 1e3]
        done = subprocess.run(list(map(str, words)), capture_output=True, text=True, check=False)
        if done.returncode != 0:
            sys.exit(f"{schedule}: {done.stderr}")
        return json.loads(done.stdout)["makespan"] / 1e3

    def forward_seconds(self, schedule):
        """The mean forward action of the last run."""
        events = json.loads((self.hosts.shared / "trace.json").read_text())["traceEvents"]
        return statistics.mean(event["dur"] for event in events if event.get("cat") == "compute"
                               and re.fullmatch(r"\d+F\d+", event["name"])) / 1e6

    def limit(self, rate):
        for host in self.hosts:
            self.hosts.limit(host, rate)

    def row(self, schedule):
        self.limit("off")
        free = statistics.median(self.steps(schedule, "operators"))
        rest = free - self.simulated(schedule, 0)
        forward = self.forward_seconds(schedule)
        for share in self.options.shares:
            rate = int(8 * MESSAGE_BYTES * self.options.samples / (share * forward))
            self.limit(f"{rate}bit")
            measured = {"operators": [], "actions": []}
            ratios = {"operators": [], "actions": []}
            for _ in range(self.options.rounds):
                for progress in measured:
                    seconds = statistics.median(self.steps(schedule, progress))
                    measured[progress].append(seconds)
                    ratios[progress].append(seconds / (self.simulated(schedule, rate / 8) + rest))
            inside, between = (1e3 * statistics.median(times) for times in measured.values())
            x_inside, x_between = (statistics.median(each) for each in ratios.values())
            print(f"{schedule:<12} {1e3 * forward:6.1f} {rate / 1e6:9.0f} {share:6.2g} {1e3 * free:8.0f} "
                  f"{inside / x_inside:10.0f} {inside:10.0f} {x_inside:6.2f} {between:9.0f} {x_between:6.2f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", default=str(ROOT / "build/release"), help="build folder")
    parser.add_argument("--steps", type=int, default=12, help="that count, per run")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--samples", type=int, default=2, help="per micro-batch")
    parser.add_argument("--shares", default="0.5,1,2", help="time of a message by that of a forward action",
                        type=lambda text: [float(share) for share in text.split(",")])
    parser.add_argument("--sums", default=[], help="depths of pipelines, such as 1,2",
                        type=lambda text: [int(depth) for depth in text.split(",")])
    parser.add_argument("--sum-share", type=float, default=0.5, help="time of the sums by what a rank computes")
    parser.add_argument("--against", help="build folder of another version, for --sums")
    parser.add_argument("--schedules", default=",".join(SCHEDULES), type=lambda text: text.split(","))
    options = parser.parse_args()
    sys.stdout.reconfigure(line_buffering=True)
    os.environ.pop("OPENBLAS_CORETYPE", None)
    folders = [pathlib.Path(folder).resolve() for folder in (options.build, options.against) if folder]
    try:
        hosts = Hosts(2, keep=(ROOT, *folders))
    except Unavailable as reason:
        print(f"skipped: several hosts on one machine: {reason}")
        return 77
    if options.sums:
        print("milliseconds; hidden: share of the sums' time\n"
              f"{'p':>2} {'Mbit/s':>8} {'sums':>7} {'no limit':>9} {'idle':>6} {'limited':>10} {'idle':>6} "
              f"{'hidden':>7}  build")
        with hosts:
            benchmark = Benchmark(options, hosts)
            for depth in options.sums:
                benchmark.sums_row(depth)
        return 0
    print("milliseconds; share: a message's time by a forward action's; x: measured by predicted\n"
          f"{'schedule':<12} {'F':>6} {'Mbit/s':>9} {'share':>6} {'no limit':>8} {'predicted':>10} {'operators':>10} "
          f"{'x':>6} {'actions':>9} {'x':>6}")
    with hosts:
        benchmark = Benchmark(options, hosts)
        for schedule in options.schedules:
            benchmark.row(schedule)
    return 0


if __name__ == "__main__":
    sys.exit(main())
