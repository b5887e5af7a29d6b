#!/usr/bin/env python3
"""What an image must be and do; docker/test.sh builds it and starts this. Needs root.

    tests/docker/image_test.py --root DIR --again DIR --devel DIR --config FILE --python FILE [--outside FILE]
                               [--case NAME]

--root: the mounted runtime image; --again: the one of a second build; --devel: the
devel image; --config: its configuration as JSON, by
`buildah inspect`; --python: one that has spdx-tools; --outside: the
program, built outside on a system like the image's, of which the same bits are expected.
"""

import argparse
import functools
import hashlib
import json
import os
import pathlib
import re
import stat
import subprocess
import sys
import time

from image_hosts import KEYS, ImageHosts, make_secret, wait_for

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "faults"))
from harness import Violation, made_up_text, metrics_so_far, require, run_cases  # noqa: E402

COMPILERS = re.compile(r"^(([\w]+-)*(gcc|g\+\+|cpp|cc|c\+\+|clang|clang\+\+|as|ld|nvcc|cicc|cc1|cc1plus|ld\.gold|ld\.bfd)"
                       r"(-[\d.]+)?)$")
SHARE = "usr/local/share/sluice"
STOPPED = 12  # exit code: saved, as asked
TOTAL = re.compile(r"^([0-9a-f]{64})\s+total$", re.MULTILINE)
MODEL = ["--data", "text.txt", "--layers", "6", "--heads", "2", "--width", "16", "--context", "16", "--micro-batches",
         "6", "--seed", "7", "--pipeline", "3", "--metrics", "metrics.jsonl"]
STEPS = 3000


def walk(root):
    """(name, status) of all files, folders and links, sorted."""
    found = []
    for folder, folders, files in os.walk(root):
        for name in folders + files:
            path = os.path.join(folder, name)
            found.append((os.path.relpath(path, root), os.lstat(path)))
    return sorted(found)


def is_private_key(path, status):
    if not stat.S_ISREG(status.st_mode) or not 32 < status.st_size < 1 << 20:
        return False
    with open(path, "rb") as file:
        return re.match(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----", file.read(64)) is not None


def nothing_dangerous(root, compilers=False):
    """No key, no setuid or setgid bit, nothing that everybody may write but /tmp, no compiler, no cache of apt."""
    wrong = []
    for name, status in walk(root):
        path, mode = os.path.join(root, name), status.st_mode
        if is_private_key(path, status) or os.path.basename(name).startswith("ssh_host_"):
            wrong.append(f"{name}: a key")
        if mode & (stat.S_ISUID | stat.S_ISGID) and not stat.S_ISLNK(mode):
            wrong.append(f"{name}: setuid or setgid")
        if mode & stat.S_IWOTH and not (stat.S_ISLNK(mode) or stat.S_ISCHR(mode)) and name not in ("tmp", "var/tmp"):
            wrong.append(f"{name}: everybody may write")
        if not compilers and COMPILERS.match(os.path.basename(name)) and mode & 0o111 and not stat.S_ISDIR(mode):
            wrong.append(f"{name}: a compiler")
        if name.startswith("var/lib/apt/lists/") or name.endswith(".deb"):
            wrong.append(f"{name}: a cache")
    require(not wrong, "; ".join(wrong[:10]))
    return f"{len(walk(root))} files"


def configuration(config):
    user, labels = config["User"], config["Labels"]
    require(user == "1000:1000", f"user {user}")
    for label in ("title", "version", "revision", "licenses", "description"):
        require(labels.get(f"org.opencontainers.image.{label}", "unknown") != "unknown", f"label {label} is missing")
    require(config["Entrypoint"] == ["/usr/local/bin/sluice-entrypoint"], config["Entrypoint"])
    require("health" in config["Healthcheck"]["Test"][-1], "no HEALTHCHECK")
    require("2222/tcp" in config["ExposedPorts"], "port 2222 is not exposed")
    return labels["org.opencontainers.image.version"] + " " + labels["org.opencontainers.image.revision"][:12]


def packages(root, python):
    listed = pathlib.Path(root, SHARE, "packages.txt").read_text()
    installed = subprocess.run(["dpkg-query", f"--admindir={root}/var/lib/dpkg", "-W", "-f", r"${Package}=${Version}\n"],
                               capture_output=True, text=True, check=True).stdout
    require(sorted(listed.split()) == sorted(installed.split()), "packages.txt is not what dpkg knows")
    spdx = pathlib.Path(root, SHARE, "sluice.spdx")
    done = subprocess.run([python, "-m", "spdx_tools.spdx.clitools.pyspdxtools", "-i", spdx], capture_output=True,
                          text=True, check=False)
    require(done.returncode == 0, f"spdx-tools: {(done.stdout + done.stderr)[-600:]}")
    require(spdx.read_text().count("\nPackageName: ") == len(listed.split()) + 1, "the SPDX list is not complete")
    return f"{len(listed.split())} packages"


def fingerprint(root):
    def content(path, status):
        if stat.S_ISLNK(status.st_mode):
            return os.readlink(path)
        if stat.S_ISREG(status.st_mode):
            with open(path, "rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        return ""
    return {name: (status.st_mode, status.st_uid, status.st_gid, content(os.path.join(root, name), status))
            for name, status in walk(root)}


def same_files(root, again):
    """A second build gives the same files: names, kinds, rights, owners, contents."""
    one, two = fingerprint(root), fingerprint(again)
    differ = sorted(name for name in one.keys() | two.keys() if one.get(name) != two.get(name))
    require(not differ, f"{len(differ)} differ, such as {', '.join(differ[:10])}")
    return f"{len(one)} files"


class Containers:
    """The cases that run the image."""

    def __init__(self, hosts, outside):
        self.hosts, self.outside, self.folder = hosts, outside, hosts.shared
        self.write("text.txt", made_up_text(20000))

    def remove(self):
        """The hosts remove the folder."""

    def write(self, name, text):
        (self.folder / name).write_text(text)
        os.chown(self.folder / name, 1000, 1000)

    def says(self, *command, host=1, code=0, parts=(), lines=None, **options):
        """Runs a command in a container: it must end with `code`, and its output have each of `parts`."""
        done = self.hosts.run(host, *command, timeout=240, **options)
        words = " ".join(map(str, command))
        require(done.returncode == code, f"{words}: exit {done.returncode}\n{done.stdout}")
        for part in parts:
            require(part in done.stdout, f"{words}: the output lacks '{part}'\n{done.stdout}")
        if lines is not None:
            require(len(done.stdout.splitlines()) == lines, f"{words}: not {lines} lines\n{done.stdout}")
        return done.stdout

    def self_test(self):
        """With and without the entrypoint, as user 1000, as root, and as one without a name."""
        told = "has the digest it must have"
        outputs = {self.says("sluice", "doctor", "--self-test", parts=[told], entrypoint=entrypoint, user=user)
                   for entrypoint in (True, False) for user in ("1000:1000", "0:0", "4321:0", "4321:4321")}
        require(len(outputs) == 1, f"different outputs: {outputs}")
        return outputs.pop().split()[-1][:16]

    def demo(self, config):
        """What `docker run --rm sluice` does, where /work cannot be written to."""
        begin = time.monotonic()
        self.folder.chmod(0o555)
        try:
            output = self.says(*config["Cmd"], user="4321:4321",
                               parts=["/work cannot be written to", "Done: 600 steps", "And the LORD said"])
        finally:
            self.folder.chmod(0o755)
        return f"{time.monotonic() - begin:.0f} s, " + re.search(r"training loss +(\S+) nats", output).group(0)

    def across_hosts(self):
        """Three containers train, are stopped, and go on: the bits of one process outside of any."""
        places = ["mpirun", "--host", "node1,node2,node3", "-n", "3"]
        train = ["sluice", "train", *MODEL, "--steps", STEPS, "--save", "three"]
        job = self.hosts.start(1, *places, *train)
        wait_for(lambda: job.poll() is not None or len(metrics_so_far(self.folder / "metrics.jsonl")) > 5,
                 "no step is done", 60)
        self.write("three/stop", "")
        output = job.communicate(timeout=60)[0].decode()
        require(job.returncode == STOPPED, f"exit {job.returncode} instead of {STOPPED}\n{output}")
        done = metrics_so_far(self.folder / "metrics.jsonl")[-1]
        require(done < STEPS, "it was not stopped in its middle")
        self.says(*places, *train, "--resume", "auto", parts=[f"Done: {STEPS} steps"])
        inside = TOTAL.search(self.says("sluice", "digest", "three")).group(1)
        alone = ["train", *MODEL[:-4], "--steps", STEPS, "--save"]
        self.says("sluice", *alone, "alone")
        digest = TOTAL.search(self.says("sluice", "digest", "alone")).group(1)
        require(inside == digest, f"digest {inside}, of one process {digest}")
        if not self.outside:
            return f"stopped after {done} of {STEPS} steps; the bits of one process; not compared with those outside"
        for words in ([*alone, "outside"], ["digest", "outside"]):
            ended = subprocess.run([self.outside, *map(str, words)], cwd=self.folder, capture_output=True, text=True,
                                   check=False)
            require(ended.returncode == 0, f"outside: {words}: exit {ended.returncode}\n{ended.stderr}")
        outside = TOTAL.search(ended.stdout).group(1)
        require(inside == outside, f"digest {inside}, outside {outside}")
        return f"stopped after {done} of {STEPS} steps; {inside[:16]}"

    def node_leaves(self):
        """A node is asked to end: the whole job stops after its step, saved, and then the node ends."""
        job = self.hosts.start(1, "mpirun", "--host", "node1,node2,node3", "-n", "3", "sluice", "train", *MODEL[:-2],
                               "--metrics", "leaves.jsonl", "--steps", 100000, "--save", "leaves")
        wait_for(lambda: job.poll() is not None or len(metrics_so_far(self.folder / "leaves.jsonl")) > 5,
                 "no step is done", 60)
        self.hosts.in_host(2, "pkill", "-TERM", "-f", "sluice-entrypoint sshd")
        node = self.hosts.processes["sshd2"]
        wait_for(lambda: node.poll() is not None or job.poll() is not None, "neither the job nor the node ends", 60)
        self.hosts.in_host(2, "pkill", "-KILL", "-x", "sluice-job")  # as a container ends with its first process
        output = job.communicate(timeout=60)[0].decode()
        require(job.returncode == STOPPED, f"exit {job.returncode} instead of {STOPPED}\n{output}")
        self.says("sluice", "verify", "leaves")
        require(self.hosts.processes.pop("sshd2").wait(timeout=60) == 0, "the node does not end with 0")

    def stopped(self):
        """SIGTERM, as an engine or a cluster sends it: the step ends, is saved, and the container ends with code 12."""
        job = self.hosts.start(1, "mpirun", "-n", "1", "sluice", "train", *MODEL[:-4], "--metrics", "stopped.jsonl",
                               "--steps", 100000, "--save", "stopped")
        wait_for(lambda: job.poll() is not None or len(metrics_so_far(self.folder / "stopped.jsonl")) > 5,
                 "no step is done", 60)
        self.hosts.in_host(1, "pkill", "-TERM", "-f", "sluice-entrypoint mpirun")
        output = job.communicate(timeout=60)[0].decode()
        require(job.returncode == STOPPED, f"exit {job.returncode} instead of {STOPPED}\n{output}")
        self.says("sluice", "verify", "stopped")

    def asks_hosts(self):
        """`doctor --hosts` reaches the other containers by SSH on port 2222."""
        self.write("hosts", "node1\nnode2\nnode3\n")
        self.says("sluice", "doctor", "--hosts", "hosts", "--data", "text.txt", "--save", "asked",
                  parts=["What looks wrong, and what to do:\n  nothing"])

    def operator_variables(self):
        """mpirun reads the file of hosts that Kubernetes' operator names."""
        self.write("hosts", "node2 slots=1\nnode3 slots=1\n")
        output = self.says("mpirun", "-n", "2", "hostname", environment={"OMPI_MCA_orte_default_hostfile": "hosts"})
        require({"node2", "node3"} <= set(output.split()), output)

    def nameless_user(self):
        """A user without an entry in /etc/passwd has a node of his own, and reaches it."""
        options = {"user": "4321:1000", "environment": {"SLUICE_SSH_PORT": "2223"}}
        sshd = self.hosts.start(2, "sshd", **options)
        self.hosts.processes["nameless"] = sshd
        wait_for(lambda: sshd.poll() is not None or self.hosts.run(2, "test", "-e", "/tmp/sluice-4321/sshd.pid",
                                                                   **options).returncode == 0,
                 "sshd of user 4321 does not listen")
        require(sshd.poll() is None, f"sshd of user 4321 ends: {sshd.stdout.read().decode() if sshd.poll() else ''}")
        output = self.says("ssh", "-p", "2223", "node2", "id -u; command -v sluice mpirun", user="4321:1000")
        require(output.split() == ["4321", "/usr/local/bin/sluice", "/usr/bin/mpirun"], output)

    def refusals(self):
        """One line each."""
        keys = {"SLUICE_SSH_PORT": "2300"}
        self.says("sshd", code=2, lines=1, parts=["port 2222 is taken"])
        self.says("sshd", code=2, lines=1, parts=["authorized_keys is missing"],
                  environment={**keys, "SLUICE_SSH_KEYS": "/work"})
        self.says("sshd", code=2, lines=1, parts=["cannot be read by user 4321"], environment=keys, user="4321:4321")
        mine = make_secret(self.folder / "mine", self.hosts.folder / "ssh" / "key")
        os.chown(mine / "id_ed25519", 1000, 1000)
        self.says("sshd", code=2, lines=1, parts=["id_ed25519 has mode 440"],
                  environment={**keys, "SLUICE_SSH_KEYS": "/work/mine"})
        self.says("sshd", code=2, lines=1, parts=["mount a writable /tmp"],
                  environment={**keys, "TMPDIR": "/usr"})
        self.says("sshd", code=2, lines=1, parts=["SLUICE_SSH_PORT is 'x'"], environment={"SLUICE_SSH_PORT": "x"})
        self.says("sluise", code=2, lines=1, parts=["there is no program 'sluise'"])
        self.says(code=2, lines=1, parts=["no command"])
        self.says("test", "-w", KEYS, code=1, lines=0)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("root", "again", "devel", "config", "python"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--outside", help="program to compare with")
    parser.add_argument("--case", help="the only case to run")
    options = parser.parse_args()
    sys.stdout.reconfigure(line_buffering=True)
    config = json.loads(pathlib.Path(options.config).read_text())["Docker"]["config"]
    environment = dict(entry.split("=", 1) for entry in config["Env"])
    with ImageHosts(options.root, environment, 3) as hosts:
        inside = Containers(hosts, options.outside and str(pathlib.Path(options.outside).resolve()))
        cases = [
            ("nothing dangerous in it", functools.partial(nothing_dangerous, options.root)),
            ("nothing dangerous in devel", functools.partial(nothing_dangerous, options.devel, compilers=True)),
            ("configuration", functools.partial(configuration, config)),
            ("list of packages, SPDX", functools.partial(packages, options.root, options.python)),
            ("built twice", functools.partial(same_files, options.root, options.again)),
            ("self-test", inside.self_test),
            ("default command", functools.partial(inside.demo, config)),
            ("stopped by SIGTERM", inside.stopped),
            ("doctor --hosts", inside.asks_hosts),
            ("the operator's variables", inside.operator_variables),
            ("a user without a name", inside.nameless_user),
            ("bad input", inside.refusals),
            ("three hosts, stop, resume", inside.across_hosts),
            ("a node is asked to end", inside.node_leaves),
        ]
        if options.case and options.case not in dict(cases):
            sys.exit(f"no case '{options.case}'; legal are {', '.join(dict(cases))}")

        def guarded(case):
            try:
                return case()
            except (RuntimeError, OSError) as error:
                raise Violation(str(error)) from error

        code = run_cases(inside, "image", [(name, functools.partial(guarded, case)) for name, case in cases
                                           if options.case in (None, name)])
        hosts.keep_files = code == 1
    sys.exit(code)


if __name__ == "__main__":
    main()
