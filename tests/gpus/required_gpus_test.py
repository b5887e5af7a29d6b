#!/usr/bin/env python3
"""A test that needs more GPUs than there are is skipped, and fails where SLUICE_REQUIRE_GPUS says that they are there.

usage: required_gpus_test.py CTEST BUILD PROGRAM JOB

PROGRAM is a test in one process, JOB one under mpirun; both have cases that need a GPU. They run under a ctest of
their own, with the properties that the build gave them, as on a machine without a GPU.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "SLUICE_EMULATED_DEVICES": "0"}


def registered(ctest, build, name):
    shown = subprocess.run([ctest, "--test-dir", build, "--show-only=json-v1", "-R", f"^{name}$"], check=True,
                           stdout=subprocess.PIPE, text=True)
    tests = json.loads(shown.stdout)["tests"]
    assert len(tests) == 1, f"{len(tests)} tests have the name {name}"
    return tests[0]


def quoted(value):
    return "[==[" + str(value) + "]==]"


def write(folder, tests):
    lines = []
    for test in tests:
        lines.append(f"add_test({quoted(test['name'])} " + " ".join(map(quoted, test["command"])) + ")")
        for prop in test["properties"]:
            if prop["name"].startswith("SKIP_") or prop["name"] == "ENVIRONMENT":
                value = prop["value"]
                if isinstance(value, list):
                    value = ";".join(v for v in value if not v.startswith(("SLUICE_EMULATED_DEVICES", "GTEST_OUTPUT")))
                lines.append(f"set_tests_properties({quoted(test['name'])} PROPERTIES {prop['name']} {quoted(value)})")
    (folder / "CTestTestfile.cmake").write_text("\n".join(lines) + "\n")


def run(ctest, folder, required):
    environment = {**os.environ, **NO_GPU}
    environment.pop("SLUICE_REQUIRE_GPUS", None)
    if required:
        environment["SLUICE_REQUIRE_GPUS"] = required
    ran = subprocess.run([ctest, "--test-dir", str(folder), "--output-on-failure"], env=environment,
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return ran.returncode, ran.stdout


def main(ctest, build, *names):
    tests = [registered(ctest, build, name) for name in names]
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        write(folder, tests)
        code, said = run(ctest, folder, None)
        assert code == 0 and said.count("***Skipped") == 1, said  # of a program each case says so
        for required, why in (("2", ", but SLUICE_REQUIRE_GPUS is 2"), ("none", "legal: the number of GPUs")):
            code, said = run(ctest, folder, required)
            assert code != 0 and f"{len(tests)} tests failed" in said and why in said, said
        code, said = wrapper("2", "1")
        assert code == 77, said  # it needs two, and one is there
        code, said = wrapper("1", "1")
        assert code == 1 and "SLUICE_REQUIRE_GPUS is 1" in said, said
        code, said = wrapper("1", "-1")
        assert code == 1 and "legal: the number of GPUs" in said, said
        code, said = wrapper("1", "1", "all is well")
        assert code == 0, said
    print("ok")


def wrapper(needed, required, text="device cuda:0 cannot be used: no GPU"):
    script = pathlib.Path(__file__).with_name("run_on_gpus.py")
    ran = subprocess.run([sys.executable, str(script), needed, "device cuda.* cannot be used", "echo", text],
                         env={**os.environ, "SLUICE_REQUIRE_GPUS": required}, stdout=subprocess.PIPE,
                         stderr=subprocess.STDOUT, text=True)
    return ran.returncode, ran.stdout


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    main(*sys.argv[1:])
