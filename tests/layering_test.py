#!/usr/bin/env python3
"""Reads every #include against the direction in which the folders may depend on each other.

    tests/layering_test.py [ROOT]

    schedules  (nothing of ours) ----------------+
    comm/{error,device} --> stages --------------+--> runtime --> examples, the program
           +--> the rest of comm ----------------+        tests may see everything

Prints one line per violation and exits 1 if there is any; first it checks its own rules on the
planted violations below.
"""

import pathlib
import re
import sys

FOLDERS = ("schedules", "comm", "stages", "runtime", "examples", "tests")
SOURCES = (".hpp", ".cpp", ".cu", ".cuh", ".h", ".cc")

# The device box: what a stage may use of comm/.
DEVICE = ("affinity", "error", "device", "device_cuda", "device_kinds", "device_graph", "device_memory", "cuda",
          "kernel_modules")

# Which boxes a box may include, besides itself.
ALLOWED = {
    "schedules": set(),
    "device": set(),
    "comm": {"device"},
    "stages": {"device"},
    "runtime": {"schedules", "device", "comm", "stages"},
    "examples": {"schedules", "device", "comm", "stages", "runtime"},
    "tests": {"schedules", "device", "comm", "stages", "runtime", "examples"},
}

# A foreign header, by its beginning, and the places that may include it.
FOREIGN = (
    (r"mpi\.h$", r"comm/[^/]+\.cpp$|comm/mpi\.hpp$|tests/"),
    (r"nccl\.h$", r"comm/[^/]+\.(cpp|cu)$|tests/"),
    (r"(cuda|cublas|cudnn|cub/)", r"(comm|stages|tests)/|examples/[^/]+\.cu$"),
    (r"dnnl", r"(stages|tests)/"),
    (r"boost/program_options", r"(runtime|tests)/"),
    (r"openssl/", r"(runtime|tests)/"),
)

# Beyond the standard library, schedules/ may use the JSON library, inside the file reader.
SCHEDULES_FOREIGN = re.compile(r"nlohmann/")

INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(?:"([^"]+)"|<([^>]+)>)', re.MULTILINE)


def box_of(path):
    """Box of a file named from the root, such as "comm/error.hpp"; None outside the layout."""
    parts = path.split("/")
    if len(parts) < 2 or parts[0] not in FOLDERS:
        return None
    if parts[0] == "comm" and parts[1].split(".")[0] in DEVICE:
        return "device"
    return parts[0]


def violations(path, text):
    """What is wrong with the includes of one file, as sentences."""
    box = box_of(path)
    found = []
    for match in INCLUDE.finditer(text):
        own, foreign = match.group(1), match.group(2)
        line = text.count("\n", 0, match.start()) + 1
        where = f"{path}:{line}: "
        if own is not None:
            target = box_of(own)
            if target is None:
                found.append(f'{where}"{own}" is not named from the root of the project')
            elif target != box and target not in ALLOWED[box]:
                found.append(f'{where}{box} must not include "{own}" of {target}')
            continue
        for header, places in FOREIGN:
            if re.match(header, foreign) and not re.match(places, path):
                found.append(f"{where}<{foreign}> does not belong into {path}")
        if box == "schedules" and re.search(r"[./]", foreign):
            if not (SCHEDULES_FOREIGN.match(foreign) and path.endswith(".cpp")):
                found.append(f"{where}schedules uses the standard library only, not <{foreign}>")
        if box_of(foreign) is not None:
            found.append(f'{where}our own <{foreign}> is included with quotes')
    return found


# path, one line of it, whether it violates a rule
PLANTED = (
    ("schedules/a.cpp", '#include "schedules/plan.hpp"', False),
    ("schedules/a.cpp", '#include "comm/error.hpp"', True),
    ("schedules/a.cpp", "#include <vector>", False),
    ("schedules/a.cpp", "#include <fmt/format.h>", True),
    ("schedules/a.cpp", "#include <mpi.h>", True),
    ("schedules/a.cpp", "#include <nlohmann/json.hpp>", False),
    ("schedules/a.hpp", "#include <nlohmann/json.hpp>", True),
    ("comm/error.hpp", '#include "comm/device.hpp"', False),
    ("comm/device.hpp", '#include "comm/transport.hpp"', True),
    ("comm/transport.hpp", '#include "comm/error.hpp"', False),
    ("comm/transport.hpp", "#include <mpi.h>", True),
    ("comm/transport.cpp", "#include <mpi.h>", False),
    ("comm/transport.cpp", '#include "stages/tensor.hpp"', True),
    ("comm/transport.cpp", '#include "schedules/plan.hpp"', True),
    ("stages/tensor.hpp", '#include "comm/device.hpp"', False),
    ("stages/tensor.hpp", '#include "comm/topology.hpp"', True),
    ("stages/tensor.cpp", '  #  include "runtime/engine.hpp"', True),
    ("stages/tensor.cpp", "#include <nccl.h>", True),
    ("stages/tensor.cpp", '#include "tensor.hpp"', True),
    ("stages/cpu/loss.cpp", '#include "../tensor.hpp"', True),
    ("stages/cpu/loss.cpp", "#include <stages/tensor.hpp>", True),
    ("runtime/engine.cpp", '#include "schedules/plan.hpp"', False),
    ("runtime/engine.cpp", "#include <mpi.h>", True),
    ("runtime/engine.cpp", '#include "tests/loopback.hpp"', True),
    ("examples/mlp.cpp", '#include "runtime/pipeline.hpp"', False),
    ("examples/mlp.cpp", "#include <cublasLt.h>", True),
    ("examples/mlp.cu", "#include <cublasLt.h>", False),
    ("tests/runtime/engine_test.cpp", '#include "runtime/engine.hpp"', False),
)


def main():
    failures = []
    for path, text, wrong in PLANTED:
        if bool(violations(path, text)) != wrong:
            failures.append(f"rule check: {path}: {text}: expected {'a' if wrong else 'no'} violation")

    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parents[1])
    count = 0
    for folder in FOLDERS:
        for file in sorted((root / folder).rglob("*")):
            if file.suffix in SOURCES and file.is_file():
                count += 1
                path = file.relative_to(root).as_posix()
                failures += violations(path, file.read_text(encoding="utf-8"))
    if count == 0:
        failures.append(f"no source file under {root}")

    for line in failures:
        print(line)
    print(f"{count} files read, {len(failures)} violations")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
