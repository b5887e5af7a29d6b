#!/usr/bin/env python3
"""The scripts of docker/ where no image is needed: what they refuse, each in one line, and what the entrypoint sets.

    tests/docker/scripts_test.py [ROOT]
"""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(sys.argv.pop(1) if len(sys.argv) > 1 else pathlib.Path(__file__).parents[2]).resolve()
DOCKER = ROOT / "docker"
TOOLS = ("bash", "awk", "cat", "chmod", "cp", "dirname", "env", "find", "getent", "grep", "head", "id", "mkdir",
         "printenv", "rm", "sed", "stat", "tr")


class ScriptsTest(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="sluice-scripts-"))
        self.addCleanup(shutil.rmtree, self.folder)
        self.bin = self.folder / "bin"
        self.bin.mkdir()
        for tool in TOOLS:
            (self.bin / tool).symlink_to(shutil.which(tool))

    def engine(self, name, script="exit 0"):
        """A stand-in for an engine; it writes the words it is started with."""
        path = self.bin / name
        path.write_text(f"#!/usr/bin/env bash\necho \"$*\" >>'{self.folder}/words'\n{script}\n")
        path.chmod(0o755)

    def run_script(self, script, *words, environment=None):
        return subprocess.run([DOCKER / script, *words], capture_output=True, text=True, check=False,
                              env={"PATH": str(self.bin), "HOME": str(self.folder), "TMPDIR": str(self.folder),
                                   **(environment or {})})

    def refused(self, script, *words, part):
        done = self.run_script(script, *words)
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertEqual(len(done.stderr.splitlines()), 1, done.stderr)
        self.assertIn(part, done.stderr)

    def test_bad_words_are_refused(self):
        self.engine("docker")
        self.refused("build.sh", part="unknown kind ''; legal are cpu and cuda")
        self.refused("build.sh", "tpu", part="unknown kind 'tpu'")
        self.refused("build.sh", "cpu", "--target", "test", part="unknown target 'test'; legal are runtime and devel")
        self.refused("build.sh", "cpu", "--targets", "devel", part="unknown option '--targets'")
        self.refused("build.sh", "cpu", "--base", part="--base needs a value")
        self.refused("build.sh", "cpu", "--base", "two words", part="legal are names of images")
        self.refused("build.sh", "cpu", "--engine", "kaniko", part="unknown engine 'kaniko'")
        self.refused("build.sh", "cpu", "--packages", "none.txt", part="cannot read the list of packages 'none.txt'")
        self.refused("test.sh", "--suite", "sid", part="unknown suite 'sid'")
        self.refused("test.sh", "--fast", part="unknown option '--fast'")

    def test_an_engine_that_is_missing_or_does_not_answer_is_refused(self):
        self.refused("build.sh", "cpu", part="none of docker, podman and buildah works here")
        self.refused("build.sh", "cpu", "--engine", "podman", part="'podman' is not installed")
        self.engine("docker", "exit 1")
        self.refused("build.sh", "cpu", "--engine", "docker", part="'docker' is not installed or does not answer")

    def test_an_unknown_base_is_refused_before_the_build(self):
        self.engine("podman", "[[ $1 == version ]]")
        self.refused("build.sh", "cpu", "--base", "none/none", part="there is no base 'none/none' here")
        self.assertNotIn("build", (self.folder / "words").read_text())

    def test_the_first_engine_that_answers_builds_in_dockers_format(self):
        self.engine("docker", "exit 1")
        self.engine("podman")
        done = self.run_script("build.sh", "cuda", "--target", "devel", "--architectures", "90")
        self.assertEqual(done.returncode, 0, done.stderr)
        build = next(line for line in (self.folder / "words").read_text().splitlines() if line.startswith("build "))
        for part in ("--format docker", "--target devel", "--tag sluice:cuda-devel", "CUDA=on", "CUDA_ARCHITECTURES=90",
                     "RUNTIME_BASE=docker.io/nvidia/cuda:"):
            self.assertIn(part, build)

    def environment_of(self, **given):
        done = self.run_script("entrypoint.sh", "env", environment=given)
        self.assertEqual(done.returncode, 0, done.stderr)
        return dict(line.split("=", 1) for line in done.stdout.splitlines())

    def test_both_versions_of_open_mpi_read_what_the_operator_sets(self):
        operator = {"OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile", "OMPI_MCA_orte_set_default_slots": "4",
                    "OMPI_MCA_orte_keep_fqdn_hostnames": "true", "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10",
                    "OMPI_MCA_rmaps_base_oversubscribe": "1"}
        version5 = {"PRTE_MCA_prte_default_hostfile": "/etc/mpi/hostfile", "PRTE_MCA_prte_set_default_slots": "4",
                    "PRTE_MCA_prte_keep_fqdn_hostnames": "true", "PRTE_MCA_plm_ssh_args": "-o ConnectionAttempts=10"}
        self.assertLessEqual(version5.items(), self.environment_of(**operator).items())
        self.assertEqual(self.environment_of(**operator)["PRTE_MCA_rmaps_default_mapping_policy"], ":oversubscribe")
        del operator["OMPI_MCA_rmaps_base_oversubscribe"]
        self.assertLessEqual(operator.items(), self.environment_of(**version5).items())

    def test_what_the_user_sets_stays(self):
        given = {"OMPI_MCA_orte_default_hostfile": "a", "PRTE_MCA_prte_default_hostfile": "b", "OMPI_MCA_smsc": "xpmem",
                 "OMPI_MCA_btl_vader_single_copy_mechanism": "cma"}
        self.assertLessEqual(given.items(), self.environment_of(**given).items())

    def test_a_command_that_is_missing_is_refused(self):
        self.refused("entrypoint.sh", part="no command")
        self.refused("entrypoint.sh", "sluise", part="there is no program 'sluise'")


if __name__ == "__main__":
    unittest.main()
