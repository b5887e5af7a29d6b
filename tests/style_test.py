#!/usr/bin/env python3
"""Rules of style that clang-format and clang-tidy do not know.

    tests/style_test.py [ROOT]

A header starts with the comment that is its contract and has `#pragma once`; a source includes its
own header first; nothing is marked as unfinished. Kernels of comm and stages are launched through
comm/include/sluice/cuda.hpp alone, which every kernel source includes, so that all of them are loaded
before NCCL waits for a peer. No two headers define a type of the same name in the same namespace.
Prints one line per violation and exits 1 if there is any.
"""

import pathlib
import re
import sys

FOLDERS = ("schedules", "comm", "stages", "runtime", "examples", "tests")
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b|\bnot (yet )?implemented\b|\bunimplemented\b", re.I)

# The one way to launch a kernel, and the ways that would avoid it.
LAUNCH = "comm/include/sluice/cuda.hpp"
LAUNCH_INCLUDE = "#include <sluice/cuda.hpp>"
OTHER_LAUNCH = re.compile(r"<<<|\bcu(da)?Launch(Cooperative)?Kernel|#include <cub/device/")

STRING_OR_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"", re.DOTALL)
# The beginning of a definition up to its brace; a name followed by `<` is a specialisation's.
TYPE_HEAD = re.compile(
    r"\b(?:class|struct|union|enum(?:\s+class|\s+struct)?)\s+(?:(?:alignas|__align__)\s*\([^)]*\)\s*|"
    r"\[\[[^\]]*\]\]\s*)?(\w+)\s*(?:final\s*)?(?::(?!:)[^()]*)?$")


def header_violations(text):
    if not text.startswith("//"):
        yield 1, "a header starts with the comment that is its contract"
    if not re.search(r"^#pragma once$", text, re.MULTILINE):
        yield 1, "a header has `#pragma once`"
    for match in re.finditer(r"^using namespace\b", text, re.MULTILINE):
        yield text.count("\n", 0, match.start()) + 1, "a header has no `using namespace`"


def source_violations(path, text, read):
    own = str(pathlib.PurePosixPath(path).with_suffix(".hpp"))
    first = re.search(r'^#include ["<]([^">]+)[">]', text, re.MULTILINE)
    if read(own) and first and first.group(1) != own:
        line = text.count("\n", 0, first.start()) + 1
        yield line, f'a source includes its own header first: "{own}"'


def types_defined(text):
    """Names of the classes, structs, unions and enums that a header defines outside other types and
    functions, with their namespaces: "sluice::Tensor". Specialisations are of another's name."""
    text = STRING_OR_COMMENT.sub(" ", text)
    text = re.sub(r"^[ \t]*#.*(\\\n.*)*", "", text, flags=re.MULTILINE)
    scopes, names, head = [], [], ""  # a scope: the name of a namespace; None where it is none
    for piece in re.split(r"([{};])", text):
        if piece == "{":
            space = re.search(r"\bnamespace\b\s*([\w:]*)\s*$", head)
            if space is None and None not in scopes:
                match = TYPE_HEAD.search(head)
                if match:
                    names.append("::".join([s for s in scopes if s] + [match.group(1)]))
            scopes.append(space.group(1) if space else None)
        elif piece == "}" and scopes:
            scopes.pop()
        head = "" if piece in ("{", "}", ";") else piece
    return names


def repeated_types(headers):
    """(path, sentence) for each type that two of the headers {path: text} define."""
    first = {}
    for path, text in headers.items():
        for name in types_defined(text):
            if first.setdefault(name, path) != path:
                yield path, f"{name} is defined in {first[name]} as well: give one another name"


def includes_launch(text, read, seen):
    """Whether the text includes LAUNCH, itself or through internal files that read(path) knows."""
    if LAUNCH_INCLUDE in text:
        return True
    for name in re.findall(r'^#include "([^"]+)"', text, re.MULTILINE):
        if name not in seen:
            seen.add(name)
            if includes_launch(read(name), read, seen):
                return True
    return False


def kernel_violations(path, text, read):
    if path == LAUNCH or path.split("/")[0] not in ("comm", "stages"):
        return
    for match in OTHER_LAUNCH.finditer(text):
        yield text.count("\n", 0, match.start()) + 1, f"kernels are launched through {LAUNCH}"
    if path.endswith(".cu") and not includes_launch(text, read, set()):
        yield 1, f"a kernel source includes {LAUNCH}: else its kernels are not loaded ahead"


def violations(path, text, read):
    """(line, sentence) for each broken rule of one file; read(path) gives another file's text, ""
    where there is none."""
    if path.endswith(".hpp"):
        yield from header_violations(text)
    if path.endswith(".cpp"):
        yield from source_violations(path, text, read)
    yield from kernel_violations(path, text, read)
    for number, line in enumerate(text.splitlines(), 1):
        if UNFINISHED.search(line):
            yield number, "something is marked as unfinished"
    if text and not text.endswith("\n"):
        yield text.count("\n") + 1, "no newline at the end of the file"


# path, text, whether it violates a rule; the only other files are OTHERS
OTHERS = {"comm/a.hpp": "// Contract.\n", "comm/k.cuh": f"{LAUNCH_INCLUDE}\n"}
PLANTED = (
    ("comm/a.hpp", "// Contract.\n#pragma once\n", False),
    ("comm/a.hpp", "#pragma once\n", True),
    ("comm/a.hpp", "// Contract.\n", True),
    ("comm/a.hpp", "// Contract.\n#pragma once\nusing namespace std;\n", True),
    ("comm/a.cpp", '#include "comm/a.hpp"\n\n#include <vector>\n', False),
    ("comm/a.cpp", '#include <vector>\n\n#include "comm/a.hpp"\n', True),
    ("comm/b.cpp", "#include <vector>\n", False),
    ("comm/b.cpp", "// TO" + "DO: later\n", True),
    ("comm/b.cpp", "int a;", True),
    ("stages/cuda/a.cu", f"{LAUNCH_INCLUDE}\n", False),
    ("stages/cuda/a.cu", '#include "comm/k.cuh"\n', False),
    ("stages/cuda/a.cu", '#include "comm/a.hpp"\n', True),
    ("stages/cuda/a.cu", f"{LAUNCH_INCLUDE}\nkernel<<<1, 2>>>();\n", True),
    ("stages/cuda/a.cpp", "cudaLaunchKernelEx(&config, kernel);\n", True),
    ("examples/a.cu", "kernel<<<1, 2>>>();\n", False),
)

# two headers, whether a type is defined twice
BLOCK = "namespace sluice {\nstruct Block {\n  int a = 0;\n};\n}  // namespace sluice\n"
PLANTED_TYPES = (
    (BLOCK, BLOCK, True),
    (BLOCK, BLOCK.replace("struct Block", "class Block final : public Base"), True),
    (BLOCK, BLOCK.replace("struct Block", "enum class Block : int"), True),
    (BLOCK, "namespace sluice {\nnamespace {\n}\nint f() { return 1; }\nstruct Block {};\n}\n", True),
    (BLOCK, BLOCK.replace("sluice", "sluice::gpu"), False),
    (BLOCK, BLOCK.replace("Block", "Shape"), False),
    (BLOCK, "namespace sluice {\nstruct Block;\nstruct Shape {\n  struct Block {};\n};\n}\n", False),
    (BLOCK, "namespace sluice {\n// struct Block {\ntemplate <>\nstruct Block<int> {};\n}\n", False),
)


def main():
    failures = []
    for one, other, wrong in PLANTED_TYPES:
        if bool(list(repeated_types({"comm/a.hpp": one, "comm/b.hpp": other}))) != wrong:
            failures.append(f"rule check: {other!r}: expected {'a' if wrong else 'no'} violation")
    for path, text, wrong in PLANTED:
        if bool(list(violations(path, text, lambda name: OTHERS.get(name, "")))) != wrong:
            failures.append(f"rule check: {path}: {text[:60]!r}: expected {'a' if wrong else 'no'} violation")

    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parents[1])
    def read(name):
        return (root / name).read_text(encoding="utf-8") if (root / name).is_file() else ""

    count = 0
    headers = {}
    for folder in FOLDERS:
        for file in sorted((root / folder).rglob("*")):
            if file.suffix in (".hpp", ".cpp", ".cu", ".cuh") and file.is_file():
                count += 1
                path = file.relative_to(root).as_posix()
                text = file.read_text(encoding="utf-8")
                if file.suffix in (".hpp", ".cuh"):
                    headers[path] = text
                for line, sentence in violations(path, text, read):
                    failures.append(f"{path}:{line}: {sentence}")
    for path, sentence in repeated_types(headers):
        failures.append(f"{path}: {sentence}")
    if count == 0:
        failures.append(f"no source file under {root}")

    for line in failures:
        print(line)
    print(f"{count} files read, {len(failures)} violations")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
