#!/usr/bin/env python3
"""What an engine sends of the sources to a build of an image, by .dockerignore, is enough for docker/Dockerfile.

    tests/docker/context_test.py ROOT BUILD

BUILD has the libraries and the program, which need not be compiled again to see that they can be installed. A header
outside the context would not be seen.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT, BUILD = (pathlib.Path(word).resolve() for word in (sys.argv.pop(1), sys.argv.pop(1)))
DOCKERFILE = re.sub(r"^#.*$", "", (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8"), flags=re.M).replace("\\\n", " ")


class Ignored:
    """.dockerignore as engines read it: the last pattern that matches a path, or a folder above it, decides."""

    def __init__(self, text):
        lines = [line.strip() for line in text.splitlines()]
        self.rules = [(not line.startswith("!"), re.compile(self.expression(line.lstrip("!"))))
                      for line in lines if line and not line.startswith("#")]

    @staticmethod
    def expression(pattern):
        parts = {"**/": "(.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
        return re.sub(r"\*\*/|\*\*|\*|\?|[^*?]+", lambda part: parts.get(part[0], re.escape(part[0])), pattern.strip("/"))

    def __contains__(self, path):
        paths = [str(path), *map(str, path.parents)]
        answer = False
        for ignores, expression in self.rules:
            if any(map(expression.fullmatch, paths)):
                answer = ignores
        return answer


class ContextTest(unittest.TestCase):
    ignored = Ignored((ROOT / ".dockerignore").read_text(encoding="utf-8"))

    def setUp(self):
        temporary = tempfile.TemporaryDirectory(dir=BUILD)  # where files of the build can be linked
        self.addCleanup(temporary.cleanup)
        self.folder = pathlib.Path(temporary.name)
        self.context = self.folder / "context"
        for folder, folders, files in os.walk(ROOT):
            inside = pathlib.Path(folder).relative_to(ROOT)
            if inside == pathlib.Path("."):  # what a user's own runs leave there is no source
                folders[:] = [name for name in folders if pathlib.Path(name) not in self.ignored or name == "docker"]
            for name in files:
                if inside / name not in self.ignored:
                    (self.context / inside).mkdir(parents=True, exist_ok=True)
                    shutil.copy2(pathlib.Path(folder) / name, self.context / inside / name)

    def run_words(self, *words):
        done = subprocess.run(list(map(str, words)), cwd=self.context, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              text=True, check=False)
        self.assertEqual(done.returncode, 0, done.stdout)
        return done.stdout

    def test_what_is_no_source_stays_out(self):
        for path in (".git/config", "build/release/sluice", "data/kjv.txt", "runs/kjv/latest", "tests/README.md",
                     "stages/__pycache__/a.pyc"):
            self.assertIn(pathlib.Path(path), self.ignored)

    def test_the_files_that_the_dockerfile_names_are_there(self):
        copied = [word for line in re.findall(r"^COPY (?!--from)(.*) \S+$", DOCKERFILE, re.M) for word in line.split()]
        self.assertIn("LICENSE", copied)
        for name in copied + re.findall(r"\s(docker/\S+\.sh) ", DOCKERFILE):
            self.assertTrue((self.context / name).exists(), name)

    def test_it_can_be_configured_built_and_installed(self):
        (arguments,) = re.findall(r"cmake --preset release (.*?) *\$\{", DOCKERFILE)
        build = self.context / "build" / "release"
        # The programs of BUILD may have other libraries, and so another search path.
        self.run_words("cmake", "--preset", "release", *arguments.replace('"$CUDA"', "off").split(), "-DCMAKE_SKIP_RPATH=ON")
        self.run_words("cmake", "--build", build, "--", "-n")  # every source has its place
        made = [file for folder in ("comm", "runtime", "schedules", "stages") for file in BUILD.glob(f"{folder}/libsluice_*.a")]
        for file in made + [BUILD / name for name in ("sluice", "sluice-job", "sluice.1", "sluice.bash")]:
            os.link(file, build / file.relative_to(BUILD))
        self.run_words("cmake", "--install", build, "--prefix", self.folder / "stage")
        for name in ("bin/sluice", "libexec/sluice/sluice-job", "include/sluice/pipeline.hpp", "share/doc/sluice/CHANGELOG.md"):
            self.assertTrue((self.folder / "stage" / name).exists(), name)


if __name__ == "__main__":
    unittest.main()
