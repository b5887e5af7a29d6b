#!/usr/bin/env python3
"""The pages (*.md) against the repository and the program that they describe.

    tests/pages_test.py ROOT BUILD CXX [FLAG...]   checks every page; CXX with FLAGs compiles the C++
    tests/pages_test.py --program PAGE             prints the page's first complete C++ program

Links and their anchors exist. A path in backticks exists, and so does every `--option`. README.md and
CONTRIBUTING.md keep their number of words and have no sentence above MOST_WORDS words. Commands of `sluice`
in fenced blocks run in page order in a temporary directory and exit with 0. Fenced C++ compiles.

What a page shows needs no mark, with these exceptions, as a comment in the line before the fence:
  <!-- not run: REASON -->         the commands need what a test has not got, such as a second machine
  <!-- compile: PARAMETERS -->     the C++ is the body of a function with these parameters
C++ with an #include is a complete source. Other C++ follows an include of every public header.

Prints one line per violation, a summary with every command that did not run, and exits 1 after a violation.
First it checks its own rules on the violations planted below.
"""

import concurrent.futures
import os
import pathlib
import re
import subprocess
import sys
import tempfile

MOST_WORDS = 30  # of a sentence
PAGE_WORDS = {"README.md": 900, "CONTRIBUTING.md": 500}
FOLDERS = ("schedules", "comm", "stages", "runtime", "examples", "tests", "docker", ".ci")
MADE = ("build", "data", "runs")  # folders that a build or a run makes
SUFFIXES = ("cpp", "hpp", "cu", "cuh", "py", "sh", "md", "svg", "cmake")

# Programs that are not Sluice's, and those of their options that pages name.
FOREIGN_OPTIONS = {
    "mpirun": "oversubscribe hostfile host bind-to map-by mca timeout",
    "srun": "mpi kill-on-bad-exit wait container-image container-mounts container-workdir",
    "sbatch": "signal requeue nodes ntasks-per-node batch",
    "timeout": "preserve-status",
    "tests/faults/run.sh": "full",
    "tests/stages/network/golden.py": "check",
    "docker, podman, compose": "rm gpus shm-size ulimit network volume volumes read-only tmpfs user detach tag file "
                               "no-healthcheck no-deps stop-timeout",
    "docker/build.sh": "target engine base packages",
    "docker/test.sh": "suite cuda cold keep",
    "kubectl": "for timeout follow",
    "apptainer": "bind pwd",
    "cmake": "build fresh install preset prefix target",
    "ctest": "output-on-failure parallel test-dir",
    "nvidia-smi": "query-gpu",
    "pkg-config": "static cflags libs",
    "nvcc": "extended-lambda",
}
# Commands at the start of a line that the test leaves to other tests or to the reader.
NOT_RUN = {
    "./train.sh": "takes minutes",
    "./test.sh": "runs every test",
    ".ci/run": "runs every check",
    "cmake": "builds",
    "ctest": "runs tests",
    "srun": "needs Slurm",
    "sbatch": "needs Slurm",
    "sluice doctor --hosts": "needs several hosts",
    "tests/": "runs for minutes or needs a GPU",
    "clang-format-14": "needs a changed source",
    "python3": "a script of the tests, which has its own test",
    "nvidia-smi": "needs a GPU",
}
RUN = ("sluice", "build/release/sluice", "mpirun", "build/release/examples/", "build/release/tests/page_")
# Run in place of a command that takes too long.
INSTEAD = {"./train.sh": "mpirun -n 4 sluice train --data data/kjv.txt --pipeline 2 --replicas 2 --save runs/kjv"}
# Added to each `sluice train`: of an option given twice the last one counts.
QUICK = "--steps 2 --layers 8 --heads 2 --width 32 --context 16 --validation-samples 2 --device cpu"


class Fence:
    def __init__(self, line, language, mark, text):
        self.line, self.language, self.mark, self.text = line, language, mark, text


def split_page(text):
    """The prose of a page, with blank lines where fenced blocks were, and its fenced blocks."""
    prose, fences, opened, before = [], [], None, ""
    for number, line in enumerate(text.splitlines(), 1):
        if match := re.match(r"\s*```(\w*)\s*$", line):
            if opened is None:
                opened = Fence(number, match.group(1), before, "")
            else:
                fences.append(opened)
                opened = None
            prose.append("")
        elif opened is not None:
            opened.text += line + "\n"
            prose.append("")
        else:
            prose.append(line)
        if line.strip():
            before = line
    return "\n".join(prose), fences


def line_of(text, position):
    return text.count("\n", 0, position) + 1


# --- links ---

def anchors(prose):
    """The anchors that GitHub makes of a page's headings."""
    found = set()
    for heading in re.findall(r"^#+ +(.*)$", prose, re.MULTILINE):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        slug = re.sub(r"[^\w\- ]", "", plain.strip().lower()).replace(" ", "-")
        count = 1
        unique = slug
        while unique in found:
            unique = f"{slug}-{count}"
            count += 1
        found.add(unique)
    return found


def link_violations(page, prose, read, exists):
    for match in re.finditer(r"\]\(([^()\s]+)\)", prose):
        target, _, anchor = match.group(1).partition("#")
        if re.match(r"\w+:", target):
            continue
        path = os.path.normpath(os.path.join(os.path.dirname(page), target)) if target else page
        if not exists(path):
            yield line_of(prose, match.start()), f"{match.group(1)}: no such file"
        elif anchor and anchor not in anchors(split_page(read(path))[0]):
            yield line_of(prose, match.start()), f"{match.group(1)}: {path} has no such heading"


# --- files ---

def in_backticks(page, prose):
    for number, line in enumerate(prose.splitlines(), 1):
        if page in ("CHANGELOG.md", "examples/FROM_0.2_TO_0.3.md") and line.startswith("|"):
            line = line.split("|", 2)[2]  # its first column has the names of before
        for text in re.findall(r"`([^`]+)`", line):
            yield number, text


def file_violations(page, prose, exists):
    for number, text in in_backticks(page, prose):
        for include in re.findall(r"<(sluice/\w+\.hpp)>", text):
            if not any(exists(f"{folder}/include/{include}") for folder in (*FOLDERS, "comm/error")):
                yield number, f"<{include}>: no such public header"
        path = text.split()[0].removeprefix("./")
        if not re.fullmatch(r"[\w.*+-]+(/[\w.*+-]+)*/?", path) or path.split("/")[0] in MADE:
            continue
        folder = os.path.dirname(page)
        known = path.split("/")[0] in FOLDERS or ("/" in path and exists(f"{folder}/{path.split('/')[0]}"))
        if not known and not re.search(r"\w\.(%s)$" % "|".join(SUFFIXES), path):
            continue
        # From the root, from the page, or the name alone; a program by the name of its source.
        if not any(exists(name) for name in (path, f"{folder}/{path}", f"**/{path}", f"{path}.*")):
            yield number, f"`{text}`: no such file or folder"


# --- options ---

def option_violations(prose, fences, options):
    for start, text in [(1, prose)] + [(fence.line + 1, fence.text) for fence in fences]:
        for match in re.finditer(r"(?<![\w-])--([a-z][\w-]*)", text):
            if match.group(1) not in options:
                yield start + line_of(text, match.start()) - 1, f"--{match.group(1)}: no program here has it"


# --- words ---

def sentences(prose):
    """(line, text) of each sentence; items of a list, cells of a table and headings stand alone."""
    prose = re.sub(r"<!--.*?-->", "", prose, flags=re.DOTALL)
    prose = re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", prose)
    block, start = [], 0
    for number, line in enumerate(prose.splitlines() + [""], 1):
        alone = re.match(r"\s*(#|\||[-*] |\d+\. |$)", line)
        if alone and block:
            for sentence in re.split(r"(?<=[.!?:])\s+", " ".join(block)):
                yield start, sentence
            block = []
        if line.startswith("|"):
            for cell in line.split("|"):
                for sentence in re.split(r"(?<=[.!?:])\s+", cell):
                    yield number, sentence
        elif line.strip() and not line.startswith("#"):
            block.append(re.sub(r"^\s*([-*]|\d+\.) ", "", line).strip())
            start = start if len(block) > 1 else number


def word_violations(page, text, prose):
    if page not in PAGE_WORDS:
        return
    if len(text.split()) > PAGE_WORDS[page]:
        yield 1, f"{len(text.split())} words; at most {PAGE_WORDS[page]}"
    for line, sentence in sentences(prose):
        if len(sentence.split()) > MOST_WORDS:
            yield line, f"a sentence of {len(sentence.split())} words: {sentence[:50]}..."


# --- commands ---

def commands(fence):
    """(line, command, mark) of each command in a block of the shell; a line's comment is cut off."""
    text = fence.text.replace("\\\n", " \x00")  # keeps the count of lines
    lines = 0
    for line in text.splitlines():
        command = re.sub(r"(^|\s)#.*$", "", line.replace("\x00", " ")).strip()
        if command:
            yield fence.line + 1 + lines, " ".join(command.split())
        lines += 1 + line.count("\x00")


def starts_with(command, names):
    first = re.sub(r"^(\w+=\S+ +)+", "", command).split()[0]
    return next((name for name in names if first == name or name.endswith(("/", "_")) and first.startswith(name)),
                None)


def sort_commands(fences):
    """Violations, what is to be run, and what is not: each (line, text)."""
    wrong, run, left = [], [], []
    for fence in fences:
        if fence.language not in ("", "sh", "bash"):
            continue
        reason = re.search(r"<!-- not run: (.*?) -->", fence.mark)
        for line, command in commands(fence):
            if reason:
                left.append((line, f"{command}: {reason.group(1)}"))
            elif command in INSTEAD or starts_with(command, RUN):
                run.append((line, INSTEAD.get(command, command)))
            elif name := starts_with(command, NOT_RUN):
                left.append((line, f"{command}: {NOT_RUN[name]}"))
            elif fence.language:
                wrong.append((line, f"{command}: neither a command of sluice nor one this test knows"))
    return wrong, run, left


def make_quick(command):
    return f"{command} {QUICK}" if re.search(r"\bsluice train\b(?!.*--help)", command) else command


def run_commands(page, found, root, build):
    """The page's commands, one after the other: a later one may read what an earlier one wrote."""
    with tempfile.TemporaryDirectory() as folder:
        place = pathlib.Path(folder)
        (place / "build").mkdir()
        for preset in ("release", "cuda"):
            (place / "build" / preset).symlink_to(build)
        (place / "schedules").symlink_to(root / "schedules")
        (place / "examples").symlink_to(root / "examples")
        text = "".join((root / name).read_text(encoding="utf-8") for name in ("LICENSE", "README.md")) * 4
        for name in ("text.txt", "data/kjv.txt", "shared/text.txt"):
            (place / name).parent.mkdir(exist_ok=True)
            (place / name).write_text(text, encoding="utf-8")
        for name in ("hosts", "hosts.txt"):
            (place / name).write_text("localhost slots=16\n", encoding="utf-8")
        environment = {**os.environ, "PATH": f"{build}:{os.environ['PATH']}"}
        for line, command in found:
            done = subprocess.run(["timeout", "60", "bash", "-c", make_quick(command)], cwd=place, env=environment,
                                  text=True, errors="replace", stdin=subprocess.DEVNULL, capture_output=True)
            if done.returncode != 0:
                said = (done.stderr.strip() or done.stdout.strip()).splitlines() or [""]
                why = next((text for text in said if text.startswith("sluice: error")), said[-1])
                yield f"{page}:{line}: {command}: exit code {done.returncode}: {why}"


# --- C++ ---

def source_of(fence, headers):
    """What is compiled for a block of C++, with its lines numbered as on the page."""
    if "#include" in fence.text:
        return f'#line {fence.line + 1}\n{fence.text}'
    source = "".join(f"#include <sluice/{name}>\n" for name in headers) + "using namespace sluice;\n"
    parameters = re.search(r"<!-- compile: (.*?) -->", fence.mark)
    if parameters:
        return f"{source}void page({parameters.group(1)}) {{\n#line {fence.line + 1}\n{fence.text}}}\n"
    return f"{source}#line {fence.line + 1}\n{fence.text}"


def compiles(source, root, compiler):
    """The compiler's first error, or ""."""
    includes = [f"-I{folder}" for pattern in ("*/include", "comm/*/include") for folder in sorted(root.glob(pattern))]
    done = subprocess.run([*compiler, "-std=c++20", "-Wall", "-Wextra", "-Werror", "-Wno-unused", "-fsyntax-only",
                           *includes, "-x", "c++", "-"], input=source, text=True, capture_output=True)
    errors = [line for line in done.stderr.splitlines() if "error:" in line]
    return "" if done.returncode == 0 else (errors or done.stderr.splitlines() or ["no reason given"])[0]


def programs(text):
    return [fence.text for fence in split_page(text)[1] if fence.language == "cpp" and "int main(" in fence.text]


# --- the rules on planted pages ---

PLANTED_FILES = {"README.md", "LICENSE", "comm", "comm/README.md", "comm/base/error.cpp", "comm/include/sluice/error.hpp"}
PLANTED_TEXT = {"comm/README.md": "# comm\n\n## Five `models`, two\n"}
LONG = " ".join(["word"] * 31) + ".\n"
# (page, text, a word of the violation that must be found; "" where none may be)
PLANTED = (
    ("README.md", "[a](comm/README.md#five-models-two) [b](https://x.org/#c) [d](#e)\n\n# E\n", ""),
    ("README.md", "[a](comm/GONE.md)\n", "no such file"),
    ("README.md", "[a](comm/README.md#six)\n", "no such heading"),
    ("README.md", "`comm/base/error.cpp` `error.cpp` `<sluice/error.hpp>` `build/x.cpp` `a/b` `comm/base/error`\n", ""),
    ("comm/README.md", "`base/error.cpp` and `base/`\n", ""),
    ("comm/README.md", "`base/gone.cpp`\n", "no such file"),
    ("README.md", "`comm/base/gone.cpp`\n", "no such file"),
    ("README.md", "`gone.cpp`\n", "no such file"),
    ("README.md", "`comm/gone/`\n", "no such file"),
    ("README.md", "`<sluice/gone.hpp>`\n", "no such public header"),
    ("CHANGELOG.md", "| `gone.cpp` | `error.cpp` |\n", ""),
    ("CHANGELOG.md", "| `error.cpp` | `gone.cpp` |\n", "no such file"),
    ("README.md", "`--steps 3`, `--preset` -- and\n", ""),
    ("README.md", "`--stepz`\n", "no program here"),
    ("comm/README.md", "```sh\nsluice train --stepz 2\n```\n", "no program here"),
    ("README.md", LONG, "a sentence of 31"),
    ("README.md", "* one\n* " + LONG, "a sentence of 31"),
    ("README.md", "| a | " + LONG.strip() + " |\n", "a sentence of 31"),
    ("comm/README.md", LONG, ""),
    ("README.md", "word. " * 901, "901 words"),
    ("README.md", "```sh\nsluice train \\\n  --steps 2   # two\ncmake --preset release\n```\n", ""),
    ("README.md", "```sh\nslice train\n```\n", "neither a command"),
)
PLANTED_SOURCES = (
    ("", "#include <sluice/error.hpp>\nint f() { return 1; }\n", True),
    ("", "int f() { return 1; }\n", True),
    ("", "int f() { return gone; }\n", False),
    ("<!-- compile: int x -->", "x += 1;\n", True),
    ("<!-- compile: int x -->", "y += 1;\n", False),
)


def planted_exists(name):
    if name.startswith("**/"):
        return any(file.endswith(name[2:]) for file in PLANTED_FILES)
    if name.endswith(".*"):
        return any(file.startswith(name[:-1]) for file in PLANTED_FILES)
    return name.strip("/") in PLANTED_FILES | {"comm/base"}


def check_page(page, text, read, exists, options):
    prose, fences = split_page(text)
    yield from link_violations(page, prose, read, exists)
    yield from file_violations(page, prose, exists)
    yield from option_violations(prose, fences, options)
    yield from word_violations(page, text, prose)
    yield from sort_commands(fences)[0]


def check_rules(root, compiler):
    for page, text, wanted in PLANTED:
        read = lambda name, page=page, text=text: text if name == page else PLANTED_TEXT[name]
        found = [sentence for _, sentence in check_page(page, text, read, planted_exists, {"steps", "preset"})]
        if not any(wanted in sentence for sentence in found) if wanted else found:
            yield f"rule check: {page}: {text[:50]!r}: expected '{wanted}', found {found}"
    for mark, text, good in PLANTED_SOURCES:
        error = compiles(source_of(Fence(1, "cpp", mark, text), ["error.hpp"]), root, compiler)
        if (error == "") != good:
            yield f"rule check: {text!r}: {error or 'compiled'}"
    made = [command for _, command in commands(Fence(1, "sh", "", "sluice digest DIR \\\n  x  # text\n\n"))]
    if made != ["sluice digest DIR x"]:
        yield f"rule check: commands are {made}"


def planted_run(root, build):
    """A command that fails is found; one that works is not."""
    good = list(run_commands("README.md", [(1, "sluice --version"), (2, "build/release/sluice --help")], root, build))
    bad = list(run_commands("README.md", [(1, "sluice digest gone")], root, build))
    return [f"rule check: {good} {bad}"] if good or len(bad) != 1 else []


def all_options(root, build):
    """Options of Sluice's commands by their help, of its tests and scripts by their sources, and of FOREIGN_OPTIONS."""
    found = set(" ".join(FOREIGN_OPTIONS.values()).split()) | {"help", "version", "config"}
    for command in ("train", "run", "generate", "digest", "doctor", "schedule", "schedule compare", "schedule auto"):
        text = subprocess.run([build / "sluice", *command.split(), "--help"], check=True, text=True,
                              capture_output=True).stdout
        found.update(re.findall(r"^  --([\w-]+)", text, re.MULTILINE))
    for file in [*(root / "tests").glob("*.py"), *(root / "examples").glob("*.py"), *(root / "tests/benchmarks").glob("*")]:
        if file.suffix in (".py", ".cpp", ".hpp", ".sh") and file.name != "pages_test.py":
            found.update(re.findall(r"[\"']--([\w-]+)", file.read_text(encoding="utf-8")))
    return found


def program_commands(page, text, build):
    """How the build's copies of a page's programs are run: on two ranks, with a text."""
    name = "page_" + re.sub(r"\W", "_", page.removesuffix(".md").lower())
    return [(1, f"mpirun -n 2 build/release/tests/{name} text.txt")] if programs(text) else []


def check(root, build, compiler):
    failures, left, counts = list(check_rules(root, compiler)) + planted_run(root, build), [], [0, 0]
    def exists(name):
        if "*" in name:
            return any(True for _ in root.glob(name.removesuffix("/")))
        return (root / name).exists()
    def read(name):
        return (root / name).read_text(encoding="utf-8")

    pages = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.md")
                   if path.relative_to(root).parts[0] not in MADE and ".git" not in path.parts)
    headers = sorted(path.name for path in root.glob("*/include/sluice/*.hpp") if path.name not in ("mpi.hpp", "cuda.hpp", "torch.hpp"))
    options = all_options(root, build)
    jobs = []
    for page in pages:
        text = read(page)
        fences = split_page(text)[1]
        failures += [f"{page}:{line}: {sentence}" for line, sentence in check_page(page, text, read, exists, options)]
        _, run, others = sort_commands(fences)
        if page in ("README.md", "examples/README.md"):
            run += program_commands(page, text, build)
        left += [f"{page}:{line}: {sentence}" for line, sentence in others]
        counts[0] += len(run)
        jobs.append(lambda page=page, run=run: list(run_commands(page, run, root, build)))
        for fence in fences:
            if fence.language == "cpp":
                counts[1] += 1
                jobs.append(lambda page=page, fence=fence: [
                    f"{page}:{fence.line}: {error}" for error in [compiles(source_of(fence, headers), root, compiler)]
                    if error])
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for found in pool.map(lambda job: job(), jobs):
            failures += found
    print("\n".join(["Not run:"] + left) if left else "Every command ran.")
    print(f"{len(pages)} pages, {counts[0]} commands run, {counts[1]} pieces of C++ compiled, "
          f"{len(failures)} violations")
    return failures


def main():
    if sys.argv[1] == "--program":
        print(programs(pathlib.Path(sys.argv[2]).read_text(encoding="utf-8"))[0], end="")
        return 0
    root, build = (pathlib.Path(name).resolve() for name in sys.argv[1:3])
    failures = check(root, build, sys.argv[3:])
    print("\n".join(failures))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
