#!/usr/bin/env python3
"""Trains over two hosts with the MPI that a build uses, and prints a row for matrix.md.

    tests/hosts/matrix.py [--build build/release] [--case NAME]

For a build with another MPI than the machine's first one:

    cmake -S . -B build/mpich -G Ninja -DMPI_C_COMPILER=mpicc.mpich -DMPIEXEC_EXECUTABLE=mpiexec.mpich
    cmake --build build/mpich --target sluice && tests/hosts/matrix.py --build build/mpich

Every training must have the digest of one rank without a launcher.
"""

import functools
import os
import re
import sys

from cases import PATIENCE, TRAINED, require, run

STEPS = 4
STOPPED = 12  # exit code: stopped as asked
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-v")


def launcher(build):
    """The command that CMake found for this build's MPI."""
    with open(os.path.join(build, "CMakeCache.txt"), encoding="utf-8") as cache:
        return re.search(r"^MPIEXEC_EXECUTABLE:\w+=(.+)$", cache.read(), re.MULTILINE).group(1)


def places(command, ranks):
    """Its words for ranks on two hosts, filled one after the other."""
    if "mpich" in command:
        return [command, "-launcher", "ssh", "-hosts", "node1,node2", "-ppn", str(ranks // 2), "-n", str(ranks)]
    return [command, "--host", f"node1:{ranks // 2},node2:{ranks // 2}", "-n", str(ranks)]


def trained(setup, command, ranks, directory, *options):
    words = setup.train("--steps", STEPS, "--save", directory, *options)
    done = setup.hosts.run(1, "timeout", PATIENCE, *places(command, ranks), *words, timeout=2 * PATIENCE)
    require(done.returncode == 0 and TRAINED.search(done.stdout), f"exit {done.returncode}\n{done.stdout}")


def alone(setup, steps):
    """The digest of one rank without a launcher."""
    if steps not in setup.digests:
        done = setup.hosts.run(1, *setup.train("--steps", steps, "--save", f"alone-{steps}"), timeout=PATIENCE)
        require(done.returncode == 0, done.stdout)
        setup.digests[steps] = setup.digest(f"alone-{steps}")
    return setup.digests[steps]


def same_bits(setup, directory, steps):
    found, wanted = setup.digest(directory), alone(setup, steps)
    require(found == wanted, f"{directory}: digest {found}, of one rank {wanted}")


def schedule(setup, command, name):
    chunks = ("--chunks", 2) if name == "interleaved" else ()
    trained(setup, command, 2, name, "--pipeline", 2, "--schedule", name, *chunks)
    same_bits(setup, name, STEPS)


def replicas(setup, command):
    """Both orders give the same bits."""
    for order in ("pipeline-first", "replica-first"):
        trained(setup, command, 4, order, "--pipeline", 2, "--replicas", 2, "--rank-order", order)
    require(setup.digest("pipeline-first") == setup.digest("replica-first"), "the orders differ")


def resume(setup, command):
    """Two hosts stop half-way, one rank goes on to the end."""
    (setup.folder / "half").mkdir()
    (setup.folder / "half" / "stop").touch()
    done = setup.hosts.run(1, "timeout", PATIENCE, *places(command, 2),
                           *setup.train("--pipeline", 2, "--steps", STEPS, "--save", "half"), timeout=2 * PATIENCE)
    require(done.returncode == STOPPED, f"exit {done.returncode} instead of {STOPPED}\n{done.stdout}")
    done = setup.hosts.run(1, setup.sluice, "train", "--resume", "half")
    require(done.returncode == 0, f"exit {done.returncode}\n{done.stdout}")
    same_bits(setup, "half", STEPS)


def cases(setup):
    build = os.path.dirname(setup.sluice)
    command = launcher(build)
    version = setup.hosts.check(1, command, "--version").splitlines()
    print(f"{command}: {next(line for line in version if re.search('[0-9]+[.][0-9]+', line)).strip()}")
    found = {name: functools.partial(schedule, setup, command, name) for name in SCHEDULES}
    return found | {"replicas": functools.partial(replicas, setup, command),
                    "resume": functools.partial(resume, setup, command)}


if __name__ == "__main__":
    sys.exit(run("MPI over hosts", __doc__, 2, cases))
