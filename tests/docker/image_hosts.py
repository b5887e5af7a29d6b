"""Hosts whose programs and files are those of an image: what a container engine would start, without one.

A host is one of tests/hosts/hosts.py. Below /run/image it has the image's files, read-only, with what an engine
mounts: /proc, /sys, /dev, /tmp, the secret with SSH's keys, and the shared folder as /work. Commands run there by
chroot, as user 1000, through the image's entrypoint.
"""

import os
import pathlib
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "hosts"))
from hosts import PATIENCE, Hosts, find, wait_for  # noqa: E402

IMAGE = "/run/image"
KEYS = "/etc/sluice/ssh"

# $1: the image's files, $2: the shared folder, $3: the secret, $4: /etc/hosts.
PREPARE = f"""set -e
mkdir {IMAGE}
mount --bind "$1" {IMAGE}
mount -o remount,bind,ro {IMAGE}
mount --rbind /dev {IMAGE}/dev
mount --rbind /sys {IMAGE}/sys
mount -t proc proc {IMAGE}/proc
mount -t tmpfs -o mode=1777 tmp {IMAGE}/tmp
mount --bind "$2" {IMAGE}/work
mount --bind "$3" {IMAGE}{KEYS}
mount --bind "$4" {IMAGE}/etc/hosts
"""


def make_secret(folder, key, mode=0o440):
    """Files as Kubernetes mounts them: links into a folder of root's, which group 1000 may read."""
    data = folder / "..2026_01_01"
    data.mkdir(parents=True)
    (folder / "..data").symlink_to(data.name)
    for name, text in (("id_ed25519", key.read_text()), ("authorized_keys", key.with_suffix(".pub").read_text())):
        (data / name).write_text(text)
        os.chown(data / name, 0, 1000)
        (data / name).chmod(mode)
        (folder / name).symlink_to(f"..data/{name}")
    return folder


class ImageHosts(Hosts):
    """`root`: the image's mounted file system; `environment`: the ENV of its configuration, by name."""

    def __init__(self, root, environment, count):
        self.root, self.environment = str(root), environment
        super().__init__(count)

    def write_files(self):
        super().write_files()
        os.chown(self.shared, 1000, 1000)
        self.secret = make_secret(self.folder / "secret", self.folder / "ssh" / "key")

    def in_host(self, host, *command, **options):
        """Runs a command of this machine's in the host's namespaces."""
        return subprocess.run([*super().on(host), *map(str, command)], capture_output=True, text=True, check=False,
                              **options)

    def on(self, host, *command, directory="/work", user="1000:1000", entrypoint=True):
        words = ["/usr/local/bin/sluice-entrypoint"] if entrypoint else []
        return [*super().on(host), find("chroot"), f"--userspec={user}", IMAGE, "/usr/bin/env", "-C", str(directory),
                *words, *map(str, command)]

    def start(self, host, *command, environment=None, user="1000:1000", entrypoint=True, **others):
        options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, **others}
        return subprocess.Popen(self.on(host, *command, user=user, entrypoint=entrypoint),
                                env={"HOME": "/home/sluice", **self.environment, **(environment or {})}, **options)

    def start_sshd(self, host, *options):
        done = self.in_host(host, "sh", "-c", PREPARE, "sh", self.root, self.shared, self.secret,
                            self.folder / "hosts")
        if done.returncode != 0:
            raise RuntimeError(f"{self.name(host)}: the image's files cannot be mounted: {done.stderr.strip()}")
        log = open(self.folder / self.name(host) / "sshd.log", "wb")  # pylint: disable=consider-using-with
        self.processes[f"sshd{host}"] = self.start(host, "sshd", stdout=log)
        log.close()
        # The file is there once sshd listens.
        wait_for(lambda: self.in_host(host, "test", "-e", f"{IMAGE}/tmp/sluice-1000/sshd.pid").returncode == 0,
                 f"sshd on {self.name(host)} does not listen", PATIENCE)
