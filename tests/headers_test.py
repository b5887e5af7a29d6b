#!/usr/bin/env python3
"""The public headers, as a program's own: compiled with the warnings that a strict project has, as errors.

    tests/headers_test.py ROOT CXX [FLAG...]

CXX and, where one is installed that knows std::source_location (from 15 on), clang compile one source that includes
every public header by -I, not -isystem. FLAGs name what the headers include of others. First a header that is wrong has to be refused.
"""

import pathlib
import shutil
import subprocess
import sys
import tempfile

WARNINGS = "-Wall -Wextra -Wconversion -Wshadow -Werror".split()
WRONG = "inline int narrow(long value) { return value; }\n"  # -Wconversion
NEEDED = "#include <source_location>\nstd::source_location here;\n"


def compile_all(compiler, source, folders, flags):
    own = [f"-I{folder}" for folder in folders]
    return subprocess.run([compiler, "-std=c++20", "-fsyntax-only", *WARNINGS, *own, *flags, source],
                          capture_output=True, text=True)


def main():
    root, compilers, flags = pathlib.Path(sys.argv[1]), [sys.argv[2]], sys.argv[3:]
    clang = shutil.which("clang++-16") or shutil.which("clang++")
    if clang and subprocess.run([clang, "-std=c++20", "-fsyntax-only", "-x", "c++", "-"], input=NEEDED, text=True,
                                capture_output=True).returncode == 0:
        compilers.append(clang)
    else:
        print("no clang with std::source_location is installed: the headers were compiled by one compiler")
    folders = sorted([*root.glob("*/include"), *root.glob("*/*/include")])
    headers = sorted(header.relative_to(folder) for folder in folders for header in folder.glob("sluice/*.hpp")
                     if header.name != "torch.hpp")  # needs LibTorch
    failures = [] if headers else [f"no public header under {root}"]
    with tempfile.TemporaryDirectory() as scratch:
        planted = pathlib.Path(scratch)
        (planted / "wrong.hpp").write_text(WRONG)
        source = planted / "headers.cpp"
        for compiler in compilers:
            source.write_text("#include <wrong.hpp>\n")
            if compile_all(compiler, source, [planted], []).returncode == 0:
                failures.append(f"{compiler} accepts a header that narrows")
            source.write_text("".join(f"#include <{header}>\n" for header in headers))
            run = compile_all(compiler, source, folders, flags)
            if run.returncode != 0:
                failures.append(f"{compiler}: {run.stderr}")
    for line in failures:
        print(line)
    print(f"{len(headers)} headers, {len(compilers)} compilers, {len(failures)} violations")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
