#!/usr/bin/env python3
"""What the machine code of kernels for compute capability 9.0 must have: no spilled registers, tensor cores, and no
more shared memory of its own than launch() reckons with.

    tests/kernel_code_test.py BUILD [FOLDER...]

Reads the objects of a build for GPUs with cuobjdump (NVIDIA's, of any version; its -sass needs nvdisasm beside it),
which it looks for in the FOLDERs, on PATH and among the packages of python and of SLUICE_TEST_PYTHON
(nvidia-cuda-cuobjdump, nvidia-cuda-nvdisasm).
No GPU is needed. A spill takes memory of the thread: a stack, or local memory. Kernels that may have one are listed
below by name, for the compiler of CUDA 13.0. Exit code 77: nothing to read, and why.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig

ARCHITECTURE = "sm_90"
OBJECTS = ("stages/CMakeFiles/sluice_stages.dir/cuda_kernels", "comm/CMakeFiles/sluice_comm.dir")
# A few registers over a limit that __launch_bounds__ sets. Of attention alone.
MAY_SPILL = {
    "tile_key_kernel<float, 128, true, true>", "tile_key_kernel<float, 96, true, true>",
    "tile_key_kernel<float, 64, true, true>", "tile_key_kernel<float, 32, true, true>",
    "query_kernel<float, 1, 1>", "query_kernel<float, 4, 1>", "query_kernel<float, 4, 2>", "query_kernel<Bf16, 1, 1>",
    "key_kernel<float, 1, 1>", "key_kernel<float, 4, 1>", "key_kernel<Bf16, 1, 1>",
    "forward_kernel<float, 1, 2>", "forward_kernel<Bf16, 1, 2>"}
MOST_SPILLED = 32  # bytes a thread, of those
TILES = re.compile(r"tile_\w+_kernel<(float|Bf16), \d+")
INSTRUCTIONS = {"float": r"HMMA\.\S+\.TF32", "Bf16": r"HMMA\.\S+\.BF16"}
MOST_SHARED = 20 * 1024 + 1024  # bytes of shared memory that a kernel declares (cuda.hpp), and the driver's own
LEAST_KERNELS = 200  # all objects together; fewer: the output has another form


def skip(why):
    print(f"skipped: {why}")
    sys.exit(77)


def find_tool(folders):
    packages = [pathlib.Path(sysconfig.get_paths()["purelib"])]
    if os.environ.get("SLUICE_TEST_PYTHON"):  # of an environment of its own
        packages += pathlib.Path(os.environ["SLUICE_TEST_PYTHON"]).parents[1].glob("lib/python*/site-packages")
    python = [folder for each in packages for folder in sorted(each.glob("nvidia/*/bin"))]
    path = os.pathsep.join([*filter(None, folders), *os.get_exec_path(), *map(str, python)])
    return shutil.which("cuobjdump", path=path)


def shown(tool, flag, path, *arguments):
    environment = {**os.environ, "PATH": os.pathsep.join([str(pathlib.Path(tool).parent), *os.get_exec_path()])}
    done = subprocess.run([tool, flag, *arguments, str(path)], capture_output=True, text=True, check=False,
                          env=environment)
    if "does not contain device code" in done.stderr:
        return ""
    if done.returncode != 0:
        sys.exit(f"{tool} {flag} {path}: {done.stderr.strip() or done.returncode}")
    return done.stdout


def short_names(mangled):
    """By mangled name: without namespaces, results and arguments."""
    done = subprocess.run(["c++filt"], input="\n".join(mangled), capture_output=True, text=True, check=True)
    names = {}
    for name, plain in zip(mangled, done.stdout.splitlines()):
        for space in ("(anonymous namespace)::", "sluice::", "cuda::"):
            plain = plain.replace(space, "")
        open_parentheses, end = 0, len(plain)
        while end > 0 and (end == len(plain) or open_parentheses > 0):  # the arguments, with all that is in them
            end -= 1
            open_parentheses += {")": 1, "(": -1}.get(plain[end], 0)
        names[name] = plain[:end].removeprefix("void ")
    return names


def resources(objects, tool):
    """([kernel's short name], violations)"""
    found = []
    for path in objects:
        lines = shown(tool, "-res-usage", path, "-arch", ARCHITECTURE)
        found += re.findall(r"Function (\S+):\s+REG:\d+ STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", lines)
    names = short_names([name for name, *_ in found])
    violations = []
    for name, stack, shared, local in found:
        short, taken = names[name], int(stack) + int(local)
        if int(shared) > MOST_SHARED:
            violations.append(f"{short} declares {shared} bytes of shared memory on {ARCHITECTURE}; legal: {MOST_SHARED}")
        if taken > (MOST_SPILLED if short in MAY_SPILL else 0):
            violations.append(f"{short} spills {taken} bytes a thread on {ARCHITECTURE}")
        elif taken == 0 and short in MAY_SPILL:
            print(f"note: {short} may spill, but does not with this compiler")
    return list(names.values()), violations


def without_tensor_cores(objects, tool):
    """(tiles, violations) of attention's kernels on tensor cores"""
    counts = {}
    for path in objects:
        for part in shown(tool, "-sass", path, "-arch", ARCHITECTURE).split("Function : ")[1:]:
            found = {kind: len(re.findall(pattern, part)) for kind, pattern in INSTRUCTIONS.items()}
            counts[part.split(None, 1)[0]] = found
    names = short_names(list(counts))
    tiles = {names[name]: count for name, count in counts.items() if TILES.match(names[name])}
    return tiles, [f"{name} has no {INSTRUCTIONS[kind]} on {ARCHITECTURE}" for name, count in tiles.items()
                   for kind in [TILES.match(name)[1]] if count[kind] == 0]


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    build = pathlib.Path(sys.argv[1])
    tool = find_tool(sys.argv[2:])
    if tool is None:
        skip("no cuobjdump: python's package nvidia-cuda-cuobjdump has it, nvidia-cuda-nvdisasm what it calls")
    objects = sorted(path for folder in OBJECTS for path in (build / folder).rglob("*.cu.o"))
    if not objects:
        skip(f"no objects of kernels in {build}")
    if ARCHITECTURE not in shown(tool, "-lelf", objects[0]):
        skip(f"{build} has no machine code for {ARCHITECTURE}")
    kernels, violations = resources(objects, tool)
    if len(kernels) < LEAST_KERNELS:
        violations.append(f"{len(kernels)} kernels were read; there are at least {LEAST_KERNELS}")
    violations += [f"there is no kernel {name} any more: take it from the list"
                   for name in sorted(MAY_SPILL - set(kernels))]
    tiles, more = without_tensor_cores([path for path in objects if path.name.startswith("attention_")], tool)
    violations += more
    for kind in INSTRUCTIONS:
        for work in ("tile_forward_kernel", "tile_query_kernel", "tile_key_kernel"):
            if not any(name.startswith(f"{work}<{kind},") for name in tiles):
                violations.append(f"there is no {work} of {kind}")
    for violation in violations:
        print(violation)
    print(f"{len(kernels)} kernels for {ARCHITECTURE}, {len(tiles)} of them on tensor cores")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
