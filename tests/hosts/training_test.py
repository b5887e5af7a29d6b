#!/usr/bin/env python3
"""Trainings over two and three hosts: the bits of one host.

    tests/hosts/training_test.py [--case NAME] [--build DIR]

Messages go over TCP between network namespaces. Parameters are compared by `sluice digest`.
"""

import functools
import re

from cases import PATIENCE, ROOT, TRAINED, metrics_so_far, require, run, wait_for

STEPS = 4
USAGE = 2  # exit code: options that cannot work
OUTPUT = 4  # exit code: an output that cannot be written
PEER = 11  # exit code: a rank or host does not answer
STOPPED = 12  # exit code: asked to stop
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-v")


def over(setup, hosts):
    """Places for one rank a host."""
    names = ",".join(setup.hosts.name(host) for host in range(1, hosts + 1))
    return ["--host", names, "-n", str(hosts)]


def pipeline(setup, hosts, schedule):
    """A stage, or a pair of chunks, on each host."""
    directory = f"{schedule}-{hosts}"
    chunks = ("--chunks", 2) if schedule == "interleaved" else ()
    setup.trains(hosts, "--pipeline", hosts, "--schedule", schedule, *chunks, "--steps", STEPS, "--save", directory,
                 places=over(setup, hosts))
    setup.same_bits(directory, STEPS)


def replicas(setup, hosts, order):
    """Two replicas of a stage on each host. By one order replicas share a host, by the other neighbours do."""
    directory = f"{order}-{hosts}"
    names = ",".join(f"{setup.hosts.name(host)}:2" for host in range(1, hosts + 1))
    setup.trains(2 * hosts, "--pipeline", hosts, "--replicas", 2, "--rank-order", order, "--steps", STEPS, "--save",
                 directory, places=["--host", names, "-n", str(2 * hosts)])
    setup.same_bits(directory, STEPS, replicas=2)


def arranged(setup):
    """mpirun deals ranks out in turn. Neighbours share a host all the same, and the table of ranks says which."""
    common = ("--pipeline", 2, "--replicas", 2, "--steps", STEPS)
    places = ["--host", "node1:2,node2:2", "-n", "4", "--map-by", "node"]
    interface = setup.hosts.check(1, "sh", "-c", "ip -o -4 address show up scope global | cut -d' ' -f2").strip()
    # With few samples messages are small beside the gradients.
    wanted = {"replicas": ((), {"0": ("node1", "0", "0"), "2": ("node1", "1", "0")}, "replicas of a stage"),
              "pipelines": (("--micro-batch-size", 16), {"0": ("node1", "0", "0"), "2": ("node1", "0", "1")},
                            "ranks of a pipeline")}
    for name, (options, rows, shares) in wanted.items():
        output = setup.trains(4, *common, *options, "--save", name, places=places)
        require(f"order of ranks: the {shares} share hosts: a host then exchanges at most" in output, output)
        table = {words[0]: words[1:] for words in map(str.split, output.splitlines()) if words[2:3] == ["cpu"]}
        require(len(table) == 4, output)
        for rank, (host, replica, stage) in rows.items():
            found = table[rank]
            require((found[0], found[2], found[3]) == (host, replica, stage), f"rank {rank}: {found}\n{output}")
        require({row[-1] for row in table.values()} >= {interface}, output)
    setup.same_bits("replicas", STEPS, replicas=2)


def own_directories(setup):
    """Each host saves what its ranks read again: replicas of a stage share a host, or the job is refused."""
    common = ("--pipeline", 2, "--replicas", 2, "--micro-batch-size", 16)
    places = ["--host", "node1:2,node2:2", "-n", "4"]
    loss = functools.partial(re.search, r"^  training loss .*$", flags=re.MULTILINE)
    wanted = loss(setup.trains(4, *common, "--steps", 2 * STEPS, "--save", "whole", places=places))
    local = ("--save", "/tmp/own", "--save-local", "--steps", 2 * STEPS, "--save-every", STEPS)
    code, output = setup.mpirun(4, *common, *local, "--rank-order", "pipeline-first", places=places)
    require(code == USAGE and "hold the same stages on hosts 'node1' and 'node2'" in output, f"exit {code}\n{output}")
    setup.trains(4, *common, *local, places=places)
    output = setup.trains(4, "--resume", f"/tmp/own/step-{STEPS:08d}", "--overwrite", places=places)
    require("as --save-local needs" in output and loss(output).group() == wanted.group(), f"{wanted.group()}\n{output}")


def only_replicas(setup):
    """Each host has a whole model."""
    setup.trains(3, "--pipeline", 1, "--replicas", 3, "--steps", STEPS, "--save", "only-replicas")
    setup.same_bits("only-replicas", STEPS, replicas=3)


def copies(setup):
    """Two of four replicas on each host. A copy of the parameters on each takes the gathers of 6 micro-batches off the
    link, which has what whole parameters send; a host with one replica can have no group."""
    common = ("--pipeline", 1, "--replicas", 4, "--width", 64, "--steps", STEPS)
    places = ["--host", "node1:2,node2:2", "-n", "4"]
    parameters = ("--shard", "parameters", "--shard-gather", "use", "--shard-group")

    def sent():
        lines = setup.hosts.check(1, "cat", "/proc/net/dev").splitlines()[2:]
        return sum(int(line.split(":")[1].split()[8]) for line in lines if not line.strip().startswith("lo:"))

    found = {}
    for name, shards in {"whole": (), "all": (*parameters, "all"), "host": (*parameters, "host")}.items():
        before = sent()
        output = setup.trains(4, *common, *shards, "--save", f"copies-{name}", places=places)
        found[name] = (sent() - before, setup.digest(f"copies-{name}"))
        require(("2 copies, each in shards of 2 replicas" in output) == (name == "host"), output)
    print("   " + ", ".join(f"{name}: {bytes / STEPS / 2 ** 20:.2f} MiB a step" for name, (bytes, _) in found.items()))
    require(len({digest for _, digest in found.values()}) == 1, str(found))
    require(found["host"][0] < 1.2 * found["whole"][0] and found["all"][0] > 3 * found["host"][0], str(found))
    code, output = setup.mpirun(3, "--pipeline", 1, "--replicas", 3, *parameters, "host", "--steps", STEPS)
    require(code == USAGE and "(--shard-group) is host, but" in output and "legal: all" in output,
            f"exit {code}\n{output}")


def resumes_on_fewer(setup):
    """Three hosts save; two go on from the middle of that, one from the middle of theirs. Every save verifies."""
    steps = 3 * STEPS
    common = ("--schedule", "1f1b", "--steps", steps, "--save-every", STEPS, "--keep", 3)
    setup.trains(3, "--pipeline", 3, *common, "--save", "three")
    setup.trains(2, "--pipeline", 2, *common, "--save", "two", "--resume", f"three/step-{STEPS:08d}")
    setup.trains(1, "--pipeline", 1, *common, "--save", "one", "--resume", f"two/step-{2 * STEPS:08d}")
    for directory in ("three", "two", "one"):
        code, output = setup.sluice_says("verify", directory)
        require(code == 0, f"sluice verify {directory}: exit {code}\n{output}")
        setup.same_bits(directory, steps)


def unshared(setup):
    """A directory that one host does not see: refused at the start, with that host's name."""
    directory = setup.folder / "unshared"
    directory.mkdir()
    setup.hosts.check(2, "mount", "-t", "tmpfs", "none", directory)
    code, output = setup.mpirun(3, "--pipeline", 3, "--steps", STEPS, "--save", directory)
    require(code == OUTPUT, f"exit {code} instead of {OUTPUT}\n{output}")
    line = next((line for line in output.splitlines() if str(directory) in line and "error" in line), "")
    require("'node2'" in line and "node3" not in line, f"the line does not name node2 alone\n{output}")
    setup.hosts.check(2, "umount", directory)


def as_the_readme_says(setup):
    """A file of hosts and a program on the PATH; no other setting of MPI than the permission of root."""
    (setup.folder / "hosts").write_text("node1 slots=2\nnode2 slots=2\n")
    code, output = setup.sluice_says("doctor", "--hosts", "hosts", "--data", "text.txt", "--save", "readme")
    require(code == 0 and "do:\n  nothing\n" in output, f"sluice doctor --hosts: exit {code}\n{output}")
    done = setup.hosts.run(1, "timeout", PATIENCE, "mpirun", "--hostfile", "hosts", "-n", 4, "sluice",
                           *setup.train("--pipeline", 2, "--replicas", 2, "--steps", STEPS, "--save", "readme")[1:],
                           plain=True, timeout=2 * PATIENCE)
    require(done.returncode == 0 and TRAINED.search(done.stdout), f"exit {done.returncode}\n{done.stdout}")
    setup.same_bits("readme", STEPS, replicas=2)


def asked_first(setup):
    """`sluice doctor --hosts` names each host that is not ready, with what to do, and takes no data for data."""
    (setup.folder / "hosts").write_text("node1\nnode2\nnode3\nnode9\n")
    local = setup.folder / "local"
    local.mkdir()
    (local / "text.txt").write_text("the same on all hosts but one")
    setup.hosts.check(2, "mount", "-t", "tmpfs", "none", local)
    setup.hosts.check(3, "sh", "-c", "kill $(cat /run/sshd.pid)")
    code, output = setup.sluice_says("doctor", "--hosts", "hosts", "--data", local / "text.txt", "--save", local)
    require(code == PEER, f"exit {code} instead of {PEER}\n{output}")
    for part in ("! node2: the file of --data is missing", "! node2: it does not see the directory of --save",
                 "! node3 cannot be reached (ssh: connect to host node3 port 22: Connection refused)",
                 "! node9 cannot be reached (ssh: Could not resolve hostname node9", "3 of 4 hosts are not ready"):
        require(part in output, f"the output lacks '{part}'\n{output}")
    require("! node1" not in output, output)
    setup.hosts.start_sshd(3)
    setup.hosts.check(2, "umount", local)


def node_leaves(setup):
    """A node that the images' entrypoint made is asked to end: the job stops after its step, saved, and then the node
    ends."""
    entrypoint, keys = ROOT / "docker/entrypoint.sh", setup.hosts.folder / "keys"
    keys.mkdir()
    (keys / "authorized_keys").write_text((setup.hosts.folder / "ssh/key.pub").read_text())
    environment = {"SLUICE_SSH_PORT": "22", "SLUICE_SSH_KEYS": str(keys)}
    setup.hosts.stop_sshd(2)
    try:
        node = setup.hosts.start(2, entrypoint, "sshd", environment=environment)
        listens = ["test", "-s", "/tmp/sluice-0/sshd.pid"]
        wait_for(lambda: setup.hosts.run(2, *listens).returncode == 0, "the node does not listen")
        metrics = setup.folder / "leaves.jsonl"
        job = setup.hosts.start(1, "mpirun", *over(setup, 2), *setup.train(
            "--pipeline", 2, "--steps", 1000000, "--metrics", metrics, "--save", "leaves"))
        wait_for(lambda: job.poll() is not None or len(metrics_so_far(metrics)) > 5, "no step is done", PATIENCE)
        setup.hosts.check(2, "pkill", "-TERM", "-f", "entrypoint.sh sshd")
        wait_for(lambda: job.poll() is not None, "the job trains on", PATIENCE)
        output = job.communicate()[0].decode()
        require(job.returncode == STOPPED, f"exit {job.returncode} instead of {STOPPED}\n{output}")
        code, output = setup.sluice_says("verify", "leaves")
        require(code == 0, f"sluice verify leaves: exit {code}\n{output}")
        require(node.wait(PATIENCE) == 0, f"the node ends with {node.returncode} instead of 0")
    finally:
        setup.hosts.run(1, "pkill", "-KILL", "-x", "mpirun")
        setup.hosts.run(2, "pkill", "-KILL", "-f", "entrypoint.sh sshd")
        setup.hosts.start_sshd(2)


def slow_link(setup):
    """A host whose link has a hundredth of the bandwidth: slower, the same bits."""
    setup.hosts.limit(2, "10mbit")
    setup.trains(2, "--pipeline", 2, "--steps", STEPS, "--save", "slow", places=over(setup, 2))
    setup.hosts.limit(2, "off")
    setup.same_bits("slow", STEPS)


def cases(setup):
    found = {f"{schedule} over {hosts} hosts": functools.partial(pipeline, setup, hosts, schedule)
             for hosts in (2, 3) for schedule in SCHEDULES}
    found |= {f"replicas, {order}, {hosts} hosts": functools.partial(replicas, setup, hosts, order)
              for hosts in (2, 3) for order in ("pipeline-first", "replica-first")}
    return found | {
        "ranks dealt out in turn": functools.partial(arranged, setup),
        "a directory on each host": functools.partial(own_directories, setup),
        "a replica on each of 3 hosts": functools.partial(only_replicas, setup),
        "a copy on each host": functools.partial(copies, setup),
        "resume on fewer hosts": functools.partial(resumes_on_fewer, setup),
        "a directory that node2 lacks": functools.partial(unshared, setup),
        "hosts that are not ready": functools.partial(asked_first, setup),
        "as the README says": functools.partial(as_the_readme_says, setup),
        "a node is asked to end": functools.partial(node_leaves, setup),
        "a slow link": functools.partial(slow_link, setup),
    }


if __name__ == "__main__":
    run("training over hosts", __doc__, 3, cases)
