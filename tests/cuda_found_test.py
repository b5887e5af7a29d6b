"""comm/cuda.cmake against made-up CUDA toolkits: what is missing is named, and what is lost.

cuda_found_test.py CMAKE GENERATOR CXX_COMPILER SOURCES
"""

import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

CMAKE, GENERATOR, COMPILER, SOURCES = sys.argv[1:5]

# What the machine has of CUDA is out of sight. {before} may change what CMake has.
PROJECT = """cmake_minimum_required(VERSION 3.25)
project(cuda_found LANGUAGES CXX)
set(CMAKE_FIND_USE_CMAKE_SYSTEM_PATH OFF)
set(CMAKE_FIND_USE_SYSTEM_ENVIRONMENT_PATH OFF)
{before}
include({sources}/comm/cuda.cmake)
message(STATUS "with CUDA: ${{SLUICE_WITH_CUDA}}")
"""

# Knows its version and compiles nothing.
NVCC = """#!/bin/sh
if [ "$1" = --version ]; then
  echo "Cuda compilation tools, release {version}, V{version}.99"
else
  echo "In file included from empty.cu:1:"
  printf '%s\\n' '{complaint}'
  exit 1
fi
"""
COMPLAINT = "host_config.h:143: error: unsupported GNU version"

FILES = ("include/cuda_runtime.h", "lib64/libcudart.so", "lib64/libcublasLt.so",
         "include/cublasLt.h")


class CudaFound(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.toolkit = self.folder / "toolkit"
        self.make_project()

    def make_project(self, before=""):
        (self.folder / "CMakeLists.txt").write_text(
            PROJECT.format(sources=SOURCES, before=before), encoding="utf-8")

    def make_toolkit(self, version, files=FILES, complaint=COMPLAINT):
        for name in ("bin/nvcc", *files):
            path = self.toolkit / name
            path.parent.mkdir(parents=True, exist_ok=True)
            nvcc = NVCC.format(version=version, complaint=complaint)
            path.write_text(nvcc if name == "bin/nvcc" else "", encoding="utf-8")
        (self.toolkit / "bin/nvcc").chmod(0o755)

    def configure(self, choice):
        """(exit code, what is printed, on one line)."""
        environment = {name: value for name, value in os.environ.items()
                       if not re.search("CUDA|SLUICE|^CMAKE_PREFIX_PATH$", name)}
        run = subprocess.run(
            [CMAKE, "-G", GENERATOR, "-S", self.folder, "-B", self.folder / "build",
             f"-DSLUICE_CUDA={choice}", f"-DCMAKE_CXX_COMPILER={COMPILER}",
             f"-DCUDAToolkit_ROOT={self.toolkit}"],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            check=False)
        return run.returncode, re.sub(r"\s+", " ", run.stdout)

    def check(self, missing):
        """Left to us, the program is built for CPUs and `missing` is said; insisted on, it is an
        error that says the same."""
        code, said = self.configure("auto")
        self.assertEqual(code, 0, said)
        self.assertIn(f"GPUs: none, {missing}", said)
        self.assertIn("Building for CPUs alone: the program will refuse --device cuda. What helps:",
                      said)
        self.assertIn("with CUDA: 0", said)
        code, said = self.configure("on")
        self.assertNotEqual(code, 0, said)
        self.assertIn(f"SLUICE_CUDA is on, but {missing}", said)

    def test_names_that_there_is_no_toolkit(self):
        self.check("no CUDA toolkit was found")

    def test_names_the_version_of_a_toolkit_that_is_too_old(self):
        self.make_toolkit("12.3")
        self.check(f"the CUDA toolkit in {self.toolkit}/bin is 12.3.99, older than 12.4")

    def test_names_what_a_toolkit_lacks(self):
        self.make_toolkit("12.4", files=())
        self.check(f"the CUDA toolkit 12.4.99 in {self.toolkit}/bin lacks cuda_runtime.h or")
        self.make_toolkit("12.4", files=FILES[:2])
        self.check(f"the CUDA toolkit 12.4.99 in {self.toolkit}/bin lacks cuBLASLt")
        self.make_toolkit("12.4", files=FILES[:3])
        self.check(f"the CUDA toolkit 12.4.99 in {self.toolkit}/bin lacks cuBLASLt")

    def test_repeats_what_a_compiler_that_does_not_work_says(self):
        self.make_toolkit("12.4")
        self.check(f"the toolkit's compiler {self.toolkit}/bin/nvcc does not work here "
                   f"({COMPLAINT})")

    def test_repeats_it_whatever_characters_are_in_it(self):
        complaint = r'a\b.h:1: error: \d ${x} @x@ "[=[; #'
        self.make_toolkit("12.4", complaint=complaint)
        self.check(f"the toolkit's compiler {self.toolkit}/bin/nvcc does not work here "
                   f"({complaint})")

    def test_forgets_what_was_missing_once_it_is_there(self):
        self.check("no CUDA toolkit was found")
        self.make_toolkit("12.4", files=FILES[:2])
        self.check(f"the CUDA toolkit 12.4.99 in {self.toolkit}/bin lacks cuBLASLt")

    def test_says_what_is_lost_without_cudnn_and_nccl(self):
        cudnn = ("cuDNN not found (SLUICE_CUDNN_ROOT says where): attention on GPUs runs in "
                 "Sluice's own, slower kernels")
        nccl = ("NCCL's header not found (SLUICE_NCCL_ROOT says where): no transport nccl and no "
                "sums over replicas by it; MPI remains, from GPU to GPU where it reads their "
                "memory and else through host memory")
        # As if the compiler worked.
        self.make_project(f"set(CMAKE_CUDA_COMPILER {self.toolkit}/bin/nvcc)\n"
                          "macro(enable_language)\nendmacro()")
        for more, lost in (((), (cudnn, nccl)),
                           (("include/cudnn.h",), (cudnn, nccl)),
                           (("lib64/libcudnn.so",), (nccl,)),
                           (("include/nccl.h",), ())):
            self.make_toolkit("12.4", files=(*FILES, *more))
            code, said = self.configure("on")
            self.assertEqual(code, 0, said)
            self.assertIn("with CUDA: 1", said)
            self.assertIn(f"cuDNN {int(cudnn not in lost)}, NCCL {int(nccl not in lost)}", said)
            self.assertEqual(tuple(what for what in (cudnn, nccl) if what in said), lost, said)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
