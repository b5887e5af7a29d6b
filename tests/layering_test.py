#!/usr/bin/env python3
"""Reads the sources against the rooms they lie in and the direction in which rooms may use each other.

    tests/layering_test.py [ROOT [BUILD]]

Each of comm/, schedules/, stages/ and runtime/ is divided into rooms, one folder each; ORDER says which
rooms a room may use. Public headers lie in <folder>/include/sluice and belong to the room of the source
of their name, or to the one HEADER_ROOMS says. Their parts in detail/ are installed too, and included by them
alone. A public header may declare what a higher room defines, as <sluice/schedule.hpp> does generate(): then
`symbols` alone shows who uses it. Three things are checked, and no cycle is left by any:

  includes   a file includes only files of rooms that its room may use; a public header only public ones
  units      a source with the header of its name is one unit; units form no cycle, within a room either
  symbols    with BUILD, a build of ROOT: what an object leaves undefined is defined in a room that its
             room may use (nm; weak symbols aside)

Also: foreign headers stay where they belong, a folder holds at most MOST_FILES sources, there are at most
MOST_PUBLIC public headers, each of which makes its declarations visible, and MOST_TYPES types in them, and each
room has a line in its folder's README. Prints one line per violation and exits 1 if there is any; first it
checks its own rules on the planted violations below.
"""

import collections
import pathlib
import re
import subprocess
import sys

FOLDERS = ("schedules", "comm", "stages", "runtime", "examples", "tests")
SOURCES = (".hpp", ".cpp", ".cu", ".cuh", ".h", ".cc")
MOST_FILES = 25   # sources that lie flat in one folder
MOST_PUBLIC = 24  # public headers
MOST_TYPES = 178  # classes, enums and aliases at namespace level in them
MOST_BEHIND = {"pipeline": 10}  # public headers that one pulls in, itself not counted

# Rooms of a folder, lowest first: a room may use those of the lines before its own.
ORDER = {
    "comm": ("error", "base", "device", "group", "mpi nccl"),
    "schedules": ("model", "generate plan files", "simulate", "verify draw", "search"),
    "stages": ("tensor", "compute", "cpu_kernels cuda_context", "cpu cuda_kernels", "cuda", "operators",
               "network", "gradient_check layers", "transformer"),
    "runtime": ("files process", "data weights", "layout", "group", "entry engine", "watchdog gradients", "planning",
                "pipeline", "checkpoint report", "models"),
    "runtime/program": ("options", "explore supervise", "doctor saves train", "cli dispatch"),
}

# What a folder may use of another one, as folders or rooms.
ACROSS = {
    "comm": (),
    "schedules": (),
    "stages": ("comm/base", "comm/device"),
    "runtime": ("comm", "schedules", "stages"),
    "runtime/program": ("comm", "schedules", "stages", "runtime"),
}

EVERYWHERE = "comm/error"  # a header that every room may use

# Rooms that may use less than ORDER and ACROSS allow: `sluice schedule` and `sluice run` need neither MPI nor CUDA, and
# an embedded pipeline no search, no drawing and no shipped model.
ONLY = {
    "runtime/files": ("comm/base", "schedules/model"),
    "runtime/process": ("comm/base",),
    "runtime/program/options": ("comm/base", "runtime/files", "runtime/process"),
    "runtime/program/supervise": ("comm/base", "runtime/files", "runtime/layout", "runtime/process",
                                  "runtime/program/options"),
    "runtime/program/explore": ("comm/base", "schedules", "runtime/files", "runtime/process", "runtime/program/options"),
    "runtime/program/dispatch": ("comm/base", "runtime/program/explore", "runtime/program/supervise"),
}
NEVER = {
    "runtime": {"schedules/search": (), "schedules/draw": (), "stages/gradient_check": (), "stages/layers": (),
                "stages/transformer": ("models",)},
    "runtime/program": {"stages/gradient_check": (), "stages/layers": ()},
}

# Public headers without a source of their name.
HEADER_ROOMS = {
    "checkpoint": "runtime/checkpoint",
    "cuda": "comm/device",
    "data": "runtime/data",
    "detail/planned_collective": "comm/error",
    "detail/torch_stage": "stages/network",
    "device": "comm/device",
    "error": "comm/error",
    "hugging_face": "runtime/models",
    "layers": "stages/network",
    "mpi": "comm/mpi",
    "operators": "stages/compute",
    "options": "runtime/layout",
    "pipeline": "runtime/pipeline",
    "plan": "schedules/plan",
    "schedule": "schedules/model",
    "schedule_file": "schedules/files",
    "search": "schedules/search",
    "simulate": "schedules/simulate",
    "torch": "stages/network",
    "world": "comm/group",
}

# A foreign header, by its beginning, and the places that may include it.
FOREIGN = (
    (r"mpi\.h$", r"comm/mpi/|comm/include/sluice/mpi\.hpp$|examples/in_situ\.cpp$|tests/"),
    (r"nccl\.h$", r"comm/nccl/|tests/"),
    (r"(cuda|cublas|cudnn|cub/)", r"(comm|stages|tests)/|examples/[^/]+\.cu$"),
    (r"dnnl", r"(stages|tests)/"),
    (r"(torch|ATen|c10)/", r"stages/include/sluice/(detail/torch_stage|torch)\.hpp$|examples/|tests/"),
    (r"boost/asio|boost/system", r"runtime/watchdog/|tests/"),
    (r"boost/program_options", r"runtime/program/options/|tests/"),
    (r"openssl/", r"runtime/files/|tests/"),
    (r"fmt/(?!core\.h$)", r"tests/"),  # the others generate the code of numbers in each source: comm/base/joined.hpp
)

# Beyond the standard library, schedules/ may use the JSON library, inside the file reader.
SCHEDULES_FOREIGN = (re.compile(r"nlohmann/"), re.compile(r"schedules/files/[^/]+\.cpp$"))

INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(?:"([^"]+)"|<([^>]+)>)', re.MULTILINE)
# Not code, or no bracket of it: comments, directives, strings, characters.
ASIDE = re.compile(r'//[^\n]*|/\*.*?\*/|^[ \t]*#(?:[^\n]*\\\n)*[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\])\'',
                   re.MULTILINE | re.DOTALL)
# The head of a definition, up to its "{", or an alias, up to its ";".
TYPE = re.compile(r"(?:template\s*<.*>\s*)?(?:(?:class|struct|union|enum(?:\s+(?:class|struct))?)\s+(?:\[\[.*\]\]\s*)?"
                  r"(\w+)\s*(?:final\s*)?(?::[^:].*)?\{|using\s+(\w+)\s*=.*;)", re.DOTALL)
PUBLIC = re.compile(r"(\w+)(?:/error)?/include/sluice/((?:detail/)?\w+)\.hpp$")


def rooms_below(room):
    """The rooms that `room` may use, besides itself."""
    folder, name = room.rsplit("/", 1)
    below, allowed = set(), {EVERYWHERE}
    for line in ORDER[folder]:
        names = line.split()
        if name in names:
            allowed |= {f"{folder}/{other}" for other in below}
        below |= set(names)
    for across in ACROSS[folder]:
        allowed |= all_rooms(across) if across in ORDER else {across}
    if room in ONLY:
        allowed = {other for other in allowed
                   if other in (*ONLY[room], EVERYWHERE) or other.rsplit("/", 1)[0] in ONLY[room]}
    return {other for other in allowed if name in NEVER.get(folder, {}).get(other, (name,))}


def name_in_page(room):
    """As the page of its folder has it: "engine", "program/cli"."""
    return room.split("/", 1)[1]


def all_rooms(folder):
    return {f"{folder}/{name}" for line in ORDER[folder] for name in line.split()}


class Tree:
    """The sources by path, named from the root."""

    def __init__(self, texts):
        self.texts = texts
        self.public = {}  # "error" -> path
        for path in texts:
            if match := PUBLIC.match(path):
                self.public[match.group(2)] = path

    def room_of(self, path):
        """"comm/group"; "examples" or "tests"; None outside of all rooms."""
        top = path.split("/")[0]
        if top in ("examples", "tests"):
            return top
        if match := PUBLIC.match(path):
            return self.public_unit(match)[0]
        room = path.rpartition("/")[0]
        folder = room.rpartition("/")[0]
        return room if folder in ORDER and room in all_rooms(folder) else None

    def public_unit(self, match):
        """Room and unit of a public header: those of the source of its name, else by the table."""
        folder, stem = match.groups()
        for room in sorted(all_rooms(folder)):
            for ending in (".cpp", ".cu"):
                if f"{room}/{stem}{ending}" in self.texts:
                    return room, f"{room}/{stem}"
        room = HEADER_ROOMS.get(stem)
        return room, f"{room}/{stem}" if room else None

    def unit_of(self, path):
        if match := PUBLIC.match(path):
            return self.public_unit(match)[1]
        return path.rsplit(".", 1)[0]

    def target_of(self, own, foreign):
        """Path of an included file of this repository, else None."""
        if own is not None:
            return own
        match = re.match(r"sluice/([\w/]+)\.hpp$", foreign)
        return self.public.get(match.group(1), foreign) if match else None

    def includes(self, path):
        """(line, path in this repository or None, foreign name or None) of each include."""
        text = self.texts[path]
        for match in INCLUDE.finditer(text):
            target = self.target_of(match.group(1), match.group(2))
            yield (text.count("\n", 0, match.start()) + 1, target,
                   match.group(2) if target is None else None)


def include_violations(tree, path):
    room = tree.room_of(path)
    if room is None:
        yield f"{path}: lies in no room; the rooms are in tests/layering_test.py"
        return
    for line, target, foreign in tree.includes(path):
        where = f"{path}:{line}: "
        if foreign is not None:
            for header, places in FOREIGN:
                if re.match(header, foreign) and not re.match(places, path):
                    yield f"{where}<{foreign}> does not belong into {path}"
            library, places = SCHEDULES_FOREIGN
            if path.startswith("schedules/") and re.search(r"[./]", foreign):
                if not (library.match(foreign) and places.match(path)):
                    yield f"{where}schedules uses the standard library only, not <{foreign}>"
            if foreign.split("/")[0] in FOLDERS:
                yield f"{where}<{foreign}> is internal and included with quotes"
            continue
        if path.startswith("examples/") and f"examples/{target}" in tree.texts:
            continue  # from the same folder, which other projects build too
        if target not in tree.texts:
            yield f'{where}"{target}" is not named from the root of the project'
            continue
        if PUBLIC.match(path) and not PUBLIC.match(target):
            yield f'{where}a public header must not include the internal "{target}"'
        if PUBLIC.match(target) and f'"{target}"' in tree.texts[path]:
            yield f"{where}a public header is included as <sluice/...>"
        if "/sluice/detail/" in target and not PUBLIC.match(path):
            yield f"{where}<{target}> is a part of a public header, which includes it"
        other = tree.room_of(target)
        if room in ("examples", "tests"):
            if room == "examples" and not PUBLIC.match(target):
                yield f'{where}an example includes public headers only, not "{target}"'
        elif other in ("examples", "tests"):
            yield f'{where}{room} must not include "{target}"'
        elif other is not None and other != room and other not in rooms_below(room):
            yield f"{where}{room} must not include {target} of {other}"


def cycle_in(graph):
    """A cycle of a graph {node: set of nodes}, as a list, or None."""
    state = {}
    for start in sorted(graph):
        if start in state:
            continue
        stack = [(start, iter(sorted(graph.get(start, ()))))]
        state[start] = "open"
        while stack:
            node, rest = stack[-1]
            for other in rest:
                if state.get(other) == "open":
                    path = [entry[0] for entry in stack]
                    return path[path.index(other):] + [other]
                if other not in state:
                    state[other] = "open"
                    stack.append((other, iter(sorted(graph.get(other, ())))))
                    break
            else:
                state[node] = "done"
                stack.pop()
    return None


def unit_violations(tree):
    units, rooms = collections.defaultdict(set), collections.defaultdict(set)
    for path in tree.texts:
        if tree.room_of(path) in (None, "examples", "tests"):
            continue
        for _, target, _ in tree.includes(path):
            if target not in tree.texts or tree.room_of(target) in (None, "examples", "tests"):
                continue
            if tree.unit_of(target) != tree.unit_of(path):
                units[tree.unit_of(path)].add(tree.unit_of(target))
            if tree.room_of(target) != tree.room_of(path):
                rooms[tree.room_of(path)].add(tree.room_of(target))
    for what, graph in (("units", units), ("rooms", rooms)):
        if cycle := cycle_in(graph):
            yield f"a cycle of {what} by include: " + " -> ".join(cycle)


def symbol_violations(tree, objects):
    """`objects`: (source path, defined symbols, undefined symbols) of each object."""
    home = {}
    for path, defined, _ in objects:
        for symbol in defined:
            home[symbol] = path
    graph, seen = collections.defaultdict(set), set()
    for path, _, undefined in objects:
        room = tree.room_of(path)
        for symbol in undefined:
            other = tree.room_of(home[symbol]) if symbol in home else None
            if other is None or other == room:
                continue
            graph[room].add(other)
            if other not in rooms_below(room) and (path, home[symbol]) not in seen:
                seen.add((path, home[symbol]))
                yield f"{path} of {room} must not need {symbol}, which {home[symbol]} of {other} defines"
    if cycle := cycle_in(graph):
        yield "a cycle of rooms by symbol: " + " -> ".join(cycle)


def public_types(text):
    """Names of the classes, enums and aliases that a header defines at namespace level, but in no `detail`."""
    found, scopes, start = set(), [], 0  # a scope: the name of its namespace, or None
    text = ASIDE.sub("", text)
    for mark in re.finditer("[{};]", text):
        head, start = text[start:mark.end()].strip(), mark.end()
        match = TYPE.fullmatch(head)
        if match and not any(scope is None or scope.endswith("detail") for scope in scopes):
            found.add("::".join([*scopes, match[1] or match[2]]))
        if mark[0] == "{":
            space = re.fullmatch(r"(?:inline\s+)?namespace\s+([\w:]+)\s*\{", head)
            scopes.append(space[1] if space else None)
        elif mark[0] == "}" and scopes:
            scopes.pop()
    return found


def size_violations(tree):
    flat = collections.Counter(path.rsplit("/", 1)[0] for path in tree.texts)
    for folder, count in sorted(flat.items()):
        if count > MOST_FILES:
            yield f"{folder}: {count} sources lie flat in one folder; at most {MOST_FILES}"
    public = sum("/" not in stem for stem in tree.public)
    if public > MOST_PUBLIC:
        yield f"{public} public headers; at most {MOST_PUBLIC}"
    types = set().union(*(public_types(tree.texts[path]) for stem, path in tree.public.items() if "/" not in stem))
    if len(types) > MOST_TYPES:
        yield f"{len(types)} public types; at most {MOST_TYPES}"
    for stem, most in MOST_BEHIND.items():
        behind, open_paths = set(), [tree.public[stem]] if stem in tree.public else []
        while open_paths:
            for _, target, _ in tree.includes(open_paths.pop()):
                if target in tree.texts and target not in behind:
                    behind.add(target)
                    open_paths.append(target)
        if len(behind) > most:
            yield f"<sluice/{stem}.hpp> pulls in {len(behind)} public headers; at most {most}"


def visibility_violations(tree):
    """What a public header declares is visible in libsluice, which hides everything else."""
    for path in sorted(tree.public.values()):
        text = tree.texts[path]
        pushed = [match.start() for match in re.finditer(r"^#pragma GCC visibility push\(default\)$", text, re.M)]
        popped = [match.start() for match in re.finditer(r"^#pragma GCC visibility pop$", text, re.M)]
        spaces = [match.start() for match in re.finditer(r"^namespace sluice", text, re.M)]
        if spaces and not (len(pushed) == len(popped) == 1 and pushed[0] < spaces[0] < popped[0]):
            yield f"{path}: no '#pragma GCC visibility push(default)' before its namespace, or no 'pop' after it"


def read_objects(tree, build):
    """What nm says of each object of `build` that comes from a source in a room, or from all of a room's."""
    objects = []
    rules = pathlib.Path(build, "build.ninja")
    rules = rules.read_text() if rules.exists() else None
    for file in sorted(pathlib.Path(build).glob("*/CMakeFiles/*.dir/**/*.o")):
        if rules and file.relative_to(build).as_posix() not in rules:
            continue  # of a source that is gone
        folder = file.relative_to(build).parts[0]
        inner = file.as_posix().split(".dir/", 1)[1].removesuffix(".o")
        path = f"{folder}/{inner}"
        if room := re.fullmatch("Unity/unity_(.*)_cxx.cxx", inner):
            start = f"{folder}/{room[1].replace('-', '/')}/"
            path = next((text for text in sorted(tree.texts) if text.startswith(start)), path)
        if path not in tree.texts or tree.room_of(path) in (None, "examples", "tests"):
            continue
        defined, undefined = set(), set()
        names = subprocess.run(["nm", "--format=posix", file], capture_output=True, text=True, check=True)
        for line in names.stdout.splitlines():
            symbol, kind = line.split()[:2]
            if kind == "U":
                undefined.add(symbol)
            elif kind in "TDBRGSC":
                defined.add(symbol)
        objects.append((path, defined, undefined))
    return objects


# What is wrong in a tree of these texts, and with these objects; one kind of violation each, or none.
def planted(texts, objects=(), readmes=True):
    tree = Tree(texts)
    found = [text for path in texts for text in include_violations(tree, path)]
    found += list(unit_violations(tree)) + list(symbol_violations(tree, objects)) + list(size_violations(tree))
    found += list(visibility_violations(tree))
    return found


A = "// text\n"
BASE = {
    "comm/error/include/sluice/error.hpp": A,
    "comm/base/cores.cpp": "#include <sluice/error.hpp>\n",
    "comm/base/cores.hpp": A,
    "comm/include/sluice/device.hpp": "#include <sluice/error.hpp>\n",
    "comm/device/device.cpp": "#include <sluice/device.hpp>\n",
    "comm/group/transport.hpp": "#include <sluice/device.hpp>\n",
    "comm/mpi/session.cpp": '#include <mpi.h>\n#include "comm/group/transport.hpp"\n',
    "schedules/include/sluice/plan.hpp": "#include <vector>\n",
    "schedules/plan/plan.cpp": "#include <sluice/plan.hpp>\n",
    "schedules/files/json.cpp": "#include <nlohmann/json.hpp>\n",
    "stages/include/sluice/tensor.hpp": A,
    "stages/tensor/tensor.cpp": '#include <sluice/tensor.hpp>\n#include "comm/base/cores.hpp"\n',
    "stages/include/sluice/transformer.hpp": A,
    "stages/transformer/transformer.cpp": A,
    "runtime/include/sluice/pipeline.hpp": "#include <sluice/tensor.hpp>\n",
    "runtime/pipeline/pipeline.cpp": "#include <sluice/pipeline.hpp>\n#include <sluice/plan.hpp>\n",
    "runtime/program/cli/job_main.cpp": "#include <sluice/pipeline.hpp>\n#include <sluice/transformer.hpp>\n",
    "examples/mlp.cpp": "#include <sluice/pipeline.hpp>\n",
    "tests/engine_test.cpp": '#include "comm/group/transport.hpp"\n',
}
# (files put over BASE, objects, a word of the violation that must be found; "" where none may be)
PLANTED = (
    ({}, (), ""),
    ({"comm/group/a.hpp": '#include "comm/mpi/session.hpp"\n', "comm/mpi/session.hpp": A}, (), "comm/group must not"),
    ({"comm/mpi/a.hpp": '#include "comm/nccl/b.hpp"\n', "comm/nccl/b.hpp": A}, (), "comm/mpi must not"),
    ({"stages/tensor/a.cpp": '#include "comm/group/transport.hpp"\n'}, (), "stages/tensor must not"),
    ({"schedules/model/a.cpp": "#include <sluice/device.hpp>\n"}, (), "schedules/model must not"),
    ({"schedules/model/a.cpp": "#include <sluice/error.hpp>\n"}, (), ""),
    ({"schedules/model/a.cpp": "#include <fmt/format.h>\n"}, (), "standard library only"),
    ({"schedules/files/a.hpp": "#include <nlohmann/json.hpp>\n"}, (), "standard library only"),
    ({"runtime/engine/a.cpp": "#include <mpi.h>\n"}, (), "does not belong"),
    ({"comm/group/a.cpp": "#include <mpi.h>\n"}, (), "does not belong"),
    ({"comm/group/a.cpp": "#include <fmt/ranges.h>\n"}, (), "does not belong"),
    ({"runtime/pipeline/a.cpp": "#include <sluice/transformer.hpp>\n"}, (), "runtime/pipeline must not"),
    ({"runtime/program/explore/a.cpp": '#include "comm/group/transport.hpp"\n'}, (), "runtime/program/explore must not"),
    ({"runtime/engine/a.cpp": '#include "tests/engine_test.cpp"\n'}, (), "must not include"),
    ({"runtime/engine/a.cpp": '#include "../b.hpp"\n'}, (), "not named from the root"),
    ({"runtime/engine/a.cpp": "#include <comm/base/cores.hpp>\n"}, (), "with quotes"),
    ({"comm/loose.cpp": A}, (), "lies in no room"),
    ({"comm/newroom/a.cpp": A}, (), "lies in no room"),
    ({"comm/base/deep/a.cpp": A}, (), "lies in no room"),
    ({"stages/include/sluice/tensor.hpp": '#include "comm/base/cores.hpp"\n'}, (), "must not include the internal"),
    ({"examples/mlp.cpp": '#include "comm/base/cores.hpp"\n'}, (), "public headers only"),
    ({"stages/include/sluice/detail/torch_stage.hpp": "#include <torch/torch.h>\n",
      "stages/include/sluice/torch.hpp": "#include <sluice/detail/torch_stage.hpp>\n"}, (), ""),
    ({"stages/include/sluice/detail/torch_stage.hpp": A,
      "examples/mlp.cpp": "#include <sluice/detail/torch_stage.hpp>\n"}, (), "part of a public header"),
    # Within a room, and by no file alone: a.cpp -> b.hpp, b.cpp -> a.hpp.
    ({"comm/base/a.hpp": A, "comm/base/a.cpp": '#include "comm/base/b.hpp"\n', "comm/base/b.hpp": A,
      "comm/base/b.cpp": '#include "comm/base/a.hpp"\n'}, (), "cycle of units"),
    # A public header and its source are one unit.
    ({"comm/device/device.cpp": '#include "comm/device/a.hpp"\n',
      "comm/device/a.hpp": "#include <sluice/device.hpp>\n"}, (), "cycle of units"),
    ({}, (("comm/base/cores.cpp", {"f"}, {"g"}), ("comm/mpi/session.cpp", {"g"}, {"f"})), "must not need g"),
    ({}, (("comm/base/cores.cpp", {"f"}, {"g"}), ("comm/mpi/session.cpp", {"g"}, {"f"})), "cycle of rooms by symbol"),
    ({}, (("comm/base/cores.cpp", {"f"}, {"puts"}), ("comm/mpi/session.cpp", {"g"}, {"f"})), ""),
    ({f"comm/base/a{i}.hpp": A for i in range(26)}, (), "lie flat"),
    ({"stages/include/sluice/tensor.hpp": "namespace sluice {\n}\n"}, (), "no '#pragma GCC visibility"),
    ({"stages/include/sluice/tensor.hpp": "#pragma GCC visibility push(default)\nnamespace sluice {\n}\n"
      "#pragma GCC visibility pop\n"}, (), ""),
    ({f"stages/include/sluice/a{i}.hpp": A for i in range(25)}, (), "public headers; at most"),
    ({"stages/include/sluice/tensor.hpp": "using A = int;\n" + "".join(
        f"template <class T>\nstruct A{i} : B<T> {{}};\n" for i in range(MOST_TYPES))}, (), "public types; at most"),
    ({"stages/include/sluice/tensor.hpp": "class A {\n" + "".join(f"  struct A{i} {{}};\n" for i in range(MOST_TYPES)) +
      "};\nnamespace detail {\nenum class A { kA };\n}\nclass B;\nvoid f(struct B&) {}\n"}, (), ""),
    ({"runtime/include/sluice/pipeline.hpp": "".join(f"#include <sluice/a{i}.hpp>\n" for i in range(11)),
      **{f"stages/include/sluice/a{i}.hpp": A for i in range(11)}}, (), "pulls in 11"),
)


def main():
    failures = []
    for i, (texts, objects, wanted) in enumerate(PLANTED):
        found = planted({**BASE, **texts}, objects)
        unwanted = [text for text in found if "lies in no room" in text and "a0.hpp" not in str(texts)]
        if not any(wanted in text for text in found) if wanted else found:
            failures.append(f"rule check {i}: expected '{wanted}', found {found or unwanted}")

    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parents[1])
    texts = {}
    for folder in FOLDERS:
        for file in sorted((root / folder).rglob("*")):
            if file.suffix in SOURCES and file.is_file():
                texts[file.relative_to(root).as_posix()] = file.read_text(encoding="utf-8")
    if not texts:
        failures.append(f"no source file under {root}")
    tree = Tree(texts)
    for path in texts:
        failures += include_violations(tree, path)
    failures += unit_violations(tree)
    failures += size_violations(tree)
    failures += visibility_violations(tree)
    for folder in ORDER:
        readme = root / folder.split("/")[0] / "README.md"
        lines = readme.read_text(encoding="utf-8") if readme.is_file() else ""
        for room in sorted(all_rooms(folder)):
            if f"| `{name_in_page(room)}/` |" not in lines:
                failures.append(f"{readme.relative_to(root)}: no line says what `{name_in_page(room)}/` is for")

    objects = []
    if len(sys.argv) > 2:
        objects = read_objects(tree, pathlib.Path(sys.argv[2]))
        if not objects:
            failures.append(f"no object under {sys.argv[2]}")
        failures += symbol_violations(tree, objects)

    for line in failures:
        print(line)
    print(f"{len(texts)} files and {len(objects)} objects read, {len(failures)} violations")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
