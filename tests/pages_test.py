"""The pages against the code: links, file names, options, lengths, commands, snippets.

usage: pages_test.py ROOT SLUICE README_PROGRAM     runs the tests
       pages_test.py --extract ROOT FOLDER          writes the C++ snippets of all pages to FOLDER

A page is a *.md file of the repository. Its fences:
  ```cpp   a translation unit; CMake compiles it, and links those with a main
  ```sh    commands; those of sluice, with or without mpirun, run in order in a folder with text.txt
  ```      anything else: output, sketches, commands for several machines; nothing is run
CHANGELOG.md names files and options of the past, so only its links are checked.
"""

import os
import re
import subprocess
import sys
import tempfile
import unittest

LIMITS = {"README.md": 900, "CONTRIBUTING.md": 500}  # words; their sentences have at most 30
LONGEST_SENTENCE = 30
HISTORY = {"CHANGELOG.md"}
# Made by a run or a build.
GENERATED = ("build/", "data/", "runs/")
# Options of other programs that pages name.
FOREIGN = {
    "--preset", "--build", "--install", "--prefix", "--target", "--test-dir",  # cmake, ctest
    "--oversubscribe", "--hostfile", "--bind-to", "--mca", "--host",           # mpirun
    "--mpi",                                                                   # srun
    "--query-gpu",                                                             # nvidia-smi
    # of scripts and benchmarks in tests/
    "--write", "--stages", "--rounds", "--sequence", "--samples",
}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def fences(text, language):
    return [body for kind, body in FENCE.findall(text) if kind == language]


def slug(heading):
    heading = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", heading).replace(" ", "-")


def anchors(text):
    return {slug(line) for line in re.findall(r"^#+ (.*)$", FENCE.sub("", text), re.M)}


def link_errors(page, pages, exists):
    """`pages`: text by path; `exists`: whether a path relative to the root is there."""
    errors = []
    for target in LINK.findall(FENCE.sub("", pages[page])):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        path = os.path.normpath(os.path.join(os.path.dirname(page), path)) if path else page
        if not exists(path):
            errors.append(f"{page}: link to {target}: no such file")
        elif anchor and anchor not in anchors(pages.get(path, "")):
            errors.append(f"{page}: link to {target}: no such heading")
    return errors


def path_errors(page, text, exists):
    errors = []
    for name in re.findall(r"`([\w.\-]+/[\w./*<>-]*)`", FENCE.sub("", text)):
        looks_like_one = name.endswith("/") or re.search(r"\.(cpp|hpp|cu|cuh|py|sh|md|svg|cmake|txt)$", name)
        if not looks_like_one or name.startswith(GENERATED) or "<" in name:
            continue
        if not exists(name) and not exists(os.path.join(os.path.dirname(page), name)):
            errors.append(f"{page}: `{name}` is not in this repository")
    return errors


def option_errors(page, text, known):
    found = set(re.findall(r"(?<![\w-])(--[a-z][a-z0-9-]+)", text))
    return [f"{page}: {option} is an option of no command" for option in sorted(found - known)]


def sentences(text):
    text = re.sub(r"^(\|.*|#.*|!\[.*)$", "", FENCE.sub("", text), flags=re.M)
    for paragraph in re.split(r"\n\s*\n|\n(?=[*-] )", text):
        yield from re.split(r"(?<=[.!?:;])\s+", paragraph.strip())


def length_errors(page, text):
    errors = []
    words = len(text.split())
    if words > LIMITS[page]:
        errors.append(f"{page}: {words} words, at most {LIMITS[page]}")
    errors += [f"{page}: a sentence of {len(s.split())} words: {s[:60]}..."
               for s in sentences(text) if len(s.split()) > LONGEST_SENTENCE]
    return errors


def commands(text):
    for body in fences(text, "sh"):
        for line in body.replace("\\\n", " ").splitlines():
            line = line.split(" #")[0].strip()
            if re.match(r"(mpirun\s.*\s)?sluice\s", line):
                yield line


def read_pages(root):
    listed = subprocess.run(["git", "-C", root, "ls-files", "*.md"], text=True, stdout=subprocess.PIPE)
    names = listed.stdout.split()
    if not names:  # an unpacked archive
        for folder, folders, files in os.walk(root):
            folders[:] = [f for f in folders if f not in ("build", ".git", "runs", "data")]
            names += [os.path.relpath(os.path.join(folder, f), root) for f in files if f.endswith(".md")]
    return {name: open(os.path.join(root, name), encoding="utf-8").read() for name in names}


def options_of(sluice):
    known = set()
    top = subprocess.run([sluice, "--help"], check=True, text=True, stdout=subprocess.PIPE).stdout
    helps = [top]
    for command in re.findall(r"^  ([a-z]+(?: [a-z]+)?)  ", top, re.M):
        shown = subprocess.run([sluice, *command.split(), "--help"], text=True, stdout=subprocess.PIPE)
        helps.append(shown.stdout if shown.returncode == 0 else "")
    for more in (["schedule", "compare"], ["schedule", "auto"]):
        helps.append(subprocess.run([sluice, *more, "--help"], check=True, text=True,
                                    stdout=subprocess.PIPE).stdout)
    for text in helps:
        known |= set(re.findall(r"(--[a-z][a-z0-9-]+)", text))
    return known


def extract(root, folder):
    os.makedirs(folder, exist_ok=True)
    kept = set()
    for page, text in sorted(read_pages(root).items()):
        for i, body in enumerate(fences(text, "cpp")):
            name = re.sub(r"\W", "_", page.lower().removesuffix(".md")) + f"_{i}"
            name += "_main.cpp" if "int main(" in body else ".cpp"
            kept.add(name)
            path = os.path.join(folder, name)
            body = f"// {page}, snippet {i}\n{body}"
            if not os.path.exists(path) or open(path, encoding="utf-8").read() != body:
                with open(path, "w", encoding="utf-8") as file:
                    file.write(body)
    for name in os.listdir(folder):
        if name.endswith(".cpp") and name not in kept:
            os.remove(os.path.join(folder, name))


class Pages(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.pages = read_pages(ROOT)

    @staticmethod
    def exists(path):
        import glob
        return bool(glob.glob(os.path.join(ROOT, path)))

    def test_links_lead_somewhere(self):
        self.assertEqual([e for p in self.pages for e in link_errors(p, self.pages, self.exists)], [])

    def test_files_they_name_exist(self):
        self.assertEqual([e for p, text in self.pages.items() if p not in HISTORY
                          for e in path_errors(p, text, self.exists)], [])

    def test_options_they_name_exist(self):
        known = options_of(SLUICE) | FOREIGN
        self.assertEqual([e for p, text in self.pages.items() if p not in HISTORY
                          for e in option_errors(p, text, known)], [])

    def test_are_short(self):
        self.assertEqual([e for p in LIMITS for e in length_errors(p, self.pages[p])], [])

    def test_commands_run(self):
        ran = 0
        for page, text in self.pages.items():
            with tempfile.TemporaryDirectory() as folder:
                self.prepare(folder)
                for command in commands(text):
                    self.run_in(folder, command, page)
                    ran += 1
        self.assertGreater(ran, 1)

    def test_the_program_of_the_readme_trains(self):
        with tempfile.TemporaryDirectory() as folder:
            self.prepare(folder)
            out = self.run_in(folder, f"mpirun -n 2 {PROGRAM}", "README.md")
            self.assertEqual(sorted(out.split("\n")), ["", "rank 0 is done", "rank 1 is done"])

    @staticmethod
    def prepare(folder):
        with open(os.path.join(folder, "text.txt"), "w", encoding="utf-8") as file:
            file.write("In the beginning was the word. " * 500)
        os.makedirs(os.path.join(folder, "bin"))
        os.symlink(os.path.abspath(SLUICE), os.path.join(folder, "bin", "sluice"))

    def run_in(self, folder, command, page):
        environment = dict(os.environ, PATH=f"{folder}/bin:{os.environ['PATH']}")
        done = subprocess.run(["bash", "-c", command], cwd=folder, env=environment, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=120)
        self.assertEqual(done.returncode, 0, f"{page}: {command}\n{done.stdout}{done.stderr}")
        return done.stdout


class Violations(unittest.TestCase):
    """Each check finds what is planted."""

    def test_dead_link(self):
        pages = {"a.md": "[x](b.md) [y](b.md#two) [z](#three) [w](c.md) [e](https://x.y)\n## Three",
                 "b.md": "# One"}
        found = link_errors("a.md", pages, lambda path: path in pages)
        self.assertEqual(len(found), 2)
        self.assertIn("b.md#two", found[0])
        self.assertIn("c.md", found[1])

    def test_missing_file(self):
        found = path_errors("f/a.md", "`f/b.cpp` `b.cpp/` `g/` `x/y.hpp` `build/x.cpp` `a/b`",
                            lambda path: path in ("f/b.cpp", "f/g/"))
        self.assertEqual(len(found), 2)

    def test_unknown_option(self):
        self.assertEqual(option_errors("a.md", "`--yes` and `--no`, a--b", {"--yes"}),
                         ["a.md: --no is an option of no command"])

    def test_length(self):
        self.assertEqual(len(length_errors("README.md", "word. " * 901)), 1)
        self.assertEqual(len(length_errors("README.md", "word " * 31 + ".")), 1)
        self.assertEqual(length_errors("README.md", "word " * 29 + "."), [])

    def test_commands_are_found(self):
        text = "```sh\n./x\nsluice a \\\n  b  # c\nmpirun -n 2 sluice d\n```\n```\nsluice e\n```"
        self.assertEqual([c.split() for c in commands(text)],
                         [["sluice", "a", "b"], ["mpirun", "-n", "2", "sluice", "d"]])


if __name__ == "__main__":
    if sys.argv[1] == "--extract":
        extract(*sys.argv[2:4])
    else:
        ROOT, SLUICE, PROGRAM = sys.argv[1:4]
        unittest.main(argv=sys.argv[:1], verbosity=2)
