#!/usr/bin/env python3
"""NCCL between processes on one card: setting up, messages, sums, order, bits, dying and stopped ranks, the end.

    tests/gpus/nccl_processes.py [--build DIR] [--ranks N] [--report FILE]

Every process has an NCCL_HOSTID of its own, and NCCL goes over sockets of the loopback interface. It shows nothing of
NVLink, of InfiniBand, of several cards or of speed. Two processes take turns on the card; more may be slow.
"""

import os
import re
import signal
import sys
import time

from jobs import MODEL, Card, Violation, arguments, require, run

LIMIT = 20  # seconds of --timeout; setting NCCL up counts too, and the processes take turns on the card
END = LIMIT + 60  # seconds after which a job without one rank has ended


def chunked(schedule):
    return ("--schedule", schedule, *(("--chunks", "2") if schedule in ("interleaved", "zb-v") else ()))


def cases(ranks):
    nccl = ("--transport", "nccl")

    def library(filter):
        def case(card):
            card.program(ranks, "tests/comm/comm_nccl_mpi_test", environment={"GTEST_FILTER": filter})
        return case

    def trainings(card):
        card.program(ranks, "tests/runtime/runtime_device_mpi_test", environment={"GTEST_FILTER": "*Nccl*"})

    def bits(schedule, *more):
        def case(card):
            expected = card.train(1, "--steps", "5")
            found = card.train(ranks, "--steps", "5", "--pipeline", ranks, *chunked(schedule), *nccl, *more, apart=True)
            require(found == expected, f"{found} on {ranks} processes, {expected} on one")
        return case

    def tensor(card):
        for more in ((), ("--precision", "bf16", "--dropout", "0.1", "--no-sequence-parallel")):
            options = ("--steps", "5", "--tensor-shards", ranks, *more)
            expected = card.train(1, *options)
            found = card.train(ranks, *options, "--tensor", ranks, *nccl, apart=True)
            require(found == expected, f"{found} on {ranks} processes with {' '.join(more)}, {expected} on one")

    def sums(card):
        replicas = ("--steps", "5", "--pipeline", "1", "--replicas", ranks)
        expected = card.train(ranks, *replicas, "--transport", "mpi")
        found = card.train(ranks, *replicas, *nccl, apart=True)
        require(found == expected, f"{found} over NCCL, {expected} through host memory")

    def all_reduce(card):
        replicas = ("--steps", "5", "--pipeline", "1", "--replicas", ranks)
        expected, _ = card.train(ranks, *replicas, *nccl, apart=True)
        found, _ = card.train(ranks, *replicas, *nccl, "--all-reduce", apart=True)
        require(all(abs(a - b) <= 1e-4 * abs(b) for a, b in zip(found, expected)), f"{found} instead of {expected}")

    def endless(card):
        job = card.start(ranks, card.setup.sluice, "train", "--data", card.setup.data, *MODEL, "--device",
                         "cuda:0", "--pipeline", ranks, *nccl, "--steps", "1000000", "--metrics",
                         card.folder / f"endless-{card.setup.jobs}.jsonl", "--timeout", LIMIT, apart=True)
        metrics = card.folder / f"endless-{card.setup.jobs - 1}.jsonl"
        job.wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") > 3, "no step is reached")
        return job

    def killed(card):
        job = endless(card)
        os.kill(job.rank(ranks - 1), signal.SIGKILL)
        code = job.finish(within=card.within(END))
        require(code != 0, f"exit 0\n{job.tail()}")
        require(re.search(rf"rank {ranks - 1} on \S+ \(stage \d+\) is gone", job.output), f"nobody names it\n{job.tail()}")

    def stopped(card):
        job = endless(card)
        since = time.monotonic()
        os.kill(job.rank(ranks - 1), signal.SIGSTOP)
        code = job.finish(within=card.within(END))
        require(code == 11, f"exit {code} instead of 11\n{job.tail()}")
        require(re.search(rf"^sluice: error: ranks? {ranks - 1} on ", job.output, re.MULTILINE),
                f"no report names it\n{job.tail()}")
        return f"all ended {time.monotonic() - since:.1f} s later, with a limit of {LIMIT} s"

    # Each suite by itself: one that hangs hides no other. The last takes what no other names.
    suites = {"communicators": "*NcclTest.*", "peers": "*NcclPeersTest.*", "the queue": "*NcclQueueTest.*",
              "sums": "*NcclSums*", "messages": "*NcclTransportTest.*"}
    others = "*-" + ":".join(suites.values())
    return [*((f"tests of {name}", library(filter)) for name, filter in {**suites, "the rest": others}.items()),
            ("trainings of the tests", trainings),
            *((f"bits of {schedule}", bits(schedule)) for schedule in ("1f1b", "interleaved", "zb-v")),
            ("bits of CUDA graphs", bits("1f1b", "--cuda-graphs")), ("bits of tensor ranks", tensor),
            ("sums over replicas", sums), ("all-reduce", all_reduce), ("SIGKILL of a rank", killed),
            ("SIGSTOP of a rank", stopped)]


def main():
    parser = arguments(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--report", help="a file for one JSON line")
    options = parser.parse_args()
    if options.ranks not in (2, 4):
        parser.error(f"--ranks {options.ranks}; legal: 2 or 4")
    try:
        card = Card(options)
    except Violation as violation:
        parser.error(str(violation))
    return run(card, cases(options.ranks), options.report)


if __name__ == "__main__":
    sys.exit(main())
