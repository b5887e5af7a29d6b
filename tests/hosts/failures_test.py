#!/usr/bin/env python3
"""What mpirun says and does where a training does not start over hosts, and what puts it right.

    tests/hosts/failures_test.py [--case NAME] [--build DIR]

The table of comm/README.md has these symptoms. Each start ends by itself. Open MPI's texts are those of 4.1.
"""

import functools
import re
import subprocess

from cases import ROOT, TRAINED, metrics_so_far, require, run, wait_for

BOUND = 50  # seconds in which each start ends by itself
KILLED = 124  # exit code of `timeout`


def start(setup, *words, hosts="node1,node2", model=("--pipeline", 2, "--steps", 2)):
    """mpirun with one rank a host and none of the tests' settings: exit code and output. Taking longer fails."""
    done = setup.hosts.run(1, "timeout", BOUND, "mpirun", "--host", hosts, *words, "-n", 2, *setup.train(*model),
                           plain=True, timeout=2 * BOUND)
    require(done.returncode != KILLED, f"mpirun {' '.join(words)} did not end in {BOUND} s\n{done.stdout}")
    return done.returncode, done.stdout


def fails(setup, *words, says, **others):
    """Such a start fails and says each of these."""
    code, output = start(setup, *words, **others)
    require(code != 0 and not TRAINED.search(output), f"exit {code}\n{output}")
    for part in says:
        require(re.search(part, output), f"the output lacks '{part}'\n{output}")


def trains(setup, *words):
    code, output = start(setup, *words)
    require(code == 0 and TRAINED.search(output), f"mpirun {' '.join(words)}: exit {code}\n{output}")


def no_program(setup):
    setup.hosts.check(2, "mount", "-t", "tmpfs", "none", setup.hosts.bin)
    program = setup.sluice
    setup.sluice = str(setup.hosts.bin / "sluice")
    try:
        fails(setup, says=[f"Executable: {setup.sluice}", "Node: +node2"])
    finally:
        setup.sluice = program
        setup.hosts.check(2, "umount", setup.hosts.bin)


def no_orted(setup):
    """Open MPI is not on the PATH of an ssh without login; --prefix says where it is."""
    setup.hosts.start_sshd(2, "-o", "SetEnv=PATH=/nowhere")
    fails(setup, says=["orted: command not found"])
    trains(setup, "--prefix", "/usr")
    setup.hosts.start_sshd(2)


def no_sshd(setup):
    setup.hosts.stop_sshd(2)
    fails(setup, says=["connect to host node2 port 22: Connection refused"])
    setup.hosts.start_sshd(2)


def no_key(setup):
    setup.hosts.start_sshd(2, "-o", "AuthorizedKeysFile=none")
    fails(setup, "--mca", "plm_rsh_args", "-o BatchMode=yes", says=["node2: Permission denied"])
    setup.hosts.start_sshd(2)


def unknown_host_key(setup):
    fails(setup, "--mca", "plm_rsh_args", "-o StrictHostKeyChecking=yes",
          says=["host key is known for node2", "Host key verification failed"])


def no_name(setup):
    fails(setup, hosts="node1,node9", says=["Could not resolve hostname node9"])


def no_host(setup):
    """Nothing answers. Without ConnectTimeout ssh waits for the kernel, up to two minutes."""
    setup.hosts.kill(2)
    fails(setup, "--mca", "plm_rsh_args", "-o ConnectTimeout=5",
          says=["connect to host node2 port 22: (No route to host|Connection timed out)"])
    setup.hosts.boot(2)
    trains(setup)


def no_slots(setup):
    fails(setup, hosts="node2", says=["not enough slots available"])


def no_interface(setup):
    for layer, text in (("btl", "Value: +eth9"), ("oob", "Value given: eth9")):
        fails(setup, "--mca", f"{layer}_tcp_if_include", "eth9", says=[text])


def same_address(setup):
    """Docker gives each host a bridge of the same address, over which no peer answers: the start ends and says so. The
    option leaves the bridge out."""
    for host in setup.hosts:
        for words in ("link add docker0 type bridge", "address add 172.17.0.1/16 dev docker0", "link set docker0 up"):
            setup.hosts.check(host, "ip", *words.split())
    network = f"{setup.hosts.address(0)}/24"
    fails(setup, "-x", "SLUICE_START_TIMEOUT=5", says=["no message from rank 1 reached rank 0 on node1 within 5 s"])
    trains(setup, "--mca", "btl_tcp_if_include", network, "--mca", "oob_tcp_if_include", network)
    for host in setup.hosts:
        setup.hosts.check(host, "ip", "link", "delete", "docker0")


def ports(setup):
    """The page's options for a firewall: nobody listens to the network outside these ports."""
    page = (ROOT / "comm/README.md").read_text()
    options = dict(re.findall(r"--mca ((?:oob|btl)_tcp_\w*_?port\w*) (\S+)", page))
    allowed = {22}
    for name, value in options.items():
        if name.endswith("ports"):
            first, last = map(int, value.split("-"))
            allowed |= {*range(first, last + 1)}
        elif "_min_" in name:
            allowed |= {*range(int(value), int(value) + int(options[name.replace("_min_", "_range_")]))}
    require(len(options) == 6 and len(allowed) < 200, f"the page has {options}")
    words = [word for name, value in options.items() for word in ("--mca", name, value)]
    metrics = setup.folder / "ports.jsonl"
    job = setup.hosts.start(1, "mpirun", "--host", "node1,node2", *words, "-n", 2, *setup.train(
        "--pipeline", 2, "--steps", 1000000, "--metrics", metrics), plain=True, stdout=subprocess.DEVNULL)
    try:
        wait_for(lambda: metrics_so_far(metrics), "no training")
        for host in (1, 2):
            said = setup.hosts.check(host, "ss", "-Hltn")
            found = {int(port) for address, port in re.findall(r"^\S+ +\d+ +\d+ +(\S+):(\d+) ", said, re.MULTILINE)
                     if not address.startswith("127.")}
            require(len(found) > 2 and found <= allowed, f"{setup.hosts.name(host)} listens at {sorted(found)}")
    finally:
        setup.hosts.run(1, "pkill", "-TERM", "-x", "mpirun")
        job.wait(BOUND)


def taken_port(setup):
    """The only port of the range is another program's. The peer says that it cannot connect."""
    listen = "import socket, time; s = socket.create_server(('', 46000)); print(flush=True); time.sleep(1000)"
    other = setup.hosts.start(1, "python3", "-c", listen)
    other.stdout.readline()
    fails(setup, "--mca", "oob_tcp_dynamic_ipv4_ports", "46000", says=["Local host: +node2", "Remote host: +node1"])
    setup.hosts.run(1, "pkill", "-KILL", "-x", "python3")
    other.communicate()


def cases(setup):
    functions = (no_program, no_orted, no_sshd, no_key, unknown_host_key, no_name, no_host, no_slots, no_interface,
                 same_address, ports, taken_port)
    return {function.__name__.replace("_", " "): functools.partial(function, setup) for function in functions}


if __name__ == "__main__":
    run("failures", __doc__, 2, cases)
