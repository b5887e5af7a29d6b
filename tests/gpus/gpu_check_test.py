#!/usr/bin/env python3
"""What tests/gpu_check.sh makes of steps that fail, hang, are killed or skipped, with shell scripts as programs."""

import json
import os
import pathlib
import shutil
import subprocess
import tempfile
import unittest

TESTS = pathlib.Path(__file__).resolve().parents[1]
OPERATORS, GRADIENTS = "tests/stages/stages_cuda_double_test", "tests/stages/stages_cuda_golden_test"
BENCHMARK = "tests/benchmarks/gpu_benchmark"
PROGRAMS = ("sluice", "sluice-job", OPERATORS, GRADIENTS, BENCHMARK)
# An older driver, with one card.
NVIDIA_SMI = """case $* in
  -L) echo "GPU 0: none" ;;
  *clocks_event_reasons*) echo 'Field "clocks_event_reasons.active" is not a valid field to query.'; exit 2 ;;
  *) echo "asked for $1" ;;
esac"""
# The first model trains never, others have a micro-batch of 2.
SOME_ROWS = """[[ "$*" != "training --model 124m"* ]] || exit 1
while [[ $1 != --json ]]; do shift; done
echo '{"benchmark": "GPU: other", "gpu": "none", "rows": [{"micro-batch": 2}]}' >"$2"
"""


class GpuCheckTest(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = pathlib.Path(temporary.name)
        # A tree without what runs leave in this one, such as data/kjv.txt.
        self.tree = self.folder / "tree"
        self.tree.mkdir()
        (self.tree / "tests").symlink_to(TESTS)
        self.build = self.folder / "build"
        for program in PROGRAMS:
            self.write(self.build / program, "")
        (self.build / "CMakeCache.txt").write_text("SLUICE_CUDA:STRING=emulated\n", encoding="utf-8")
        self.tools = self.folder / "tools"
        self.write(self.tools / "nvidia-smi", "exit 1")

    @staticmethod
    def write(path, text):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("#!/bin/bash\n" + text + "\n", encoding="utf-8")
        path.chmod(0o755)

    def run_script(self, *words, **settings):
        """Exit code and output; `settings` of the environment without their common prefix."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("SLUICE_")}
        environment["PATH"] = f"{self.tools}:{environment['PATH']}"
        environment["TMPDIR"] = str(self.folder)
        for name, value in {"TREE": self.build, "STATE": self.folder / "state", "REPORT": self.folder / "report",
                            "SECONDS": 500, **settings}.items():
            environment[f"SLUICE_GPU_{name}"] = str(value)
        ran = subprocess.run([str(self.tree / "tests/gpu_check.sh"), *map(str, words)], env=environment, stdout=subprocess.PIPE,
                             stderr=subprocess.STDOUT, text=True, check=False)
        return ran.returncode, ran.stdout

    def records(self, command="check"):
        """{step: record}"""
        text = (self.folder / f"report/{command}.jsonl").read_text(encoding="utf-8")
        return {record["step"]: record for record in map(json.loads, text.splitlines()) if "step" in record}

    def log(self, command="check"):
        return (self.folder / f"report/{command}.txt").read_text(encoding="utf-8")

    def test_a_stopped_step_is_in_the_report(self):
        self.write(self.build / OPERATORS, "sleep 2")
        self.write(self.build / GRADIENTS, "echo here it hangs; sleep 60; true")
        code, output = self.run_script("check", SECONDS=16, MARGIN=1)
        self.assertEqual(code, 75, output)
        stopped = self.records()["gradients"]
        self.assertEqual(stopped["result"], "stopped: time is up")
        self.assertIn("here it hangs", stopped["log"])
        self.assertIn("here it hangs", self.log())

    def test_a_step_that_is_not_begun_is_in_the_report(self):
        self.write(self.build / OPERATORS, "sleep 60; true")
        code, output = self.run_script("check", SECONDS=16, MARGIN=8)
        self.assertEqual(code, 75, output)
        self.assertEqual(self.records()["operators"]["result"], "failed: longer than a whole call")
        self.assertEqual(self.records()["gradients"]["result"], "stopped: time is up")

    def test_a_step_that_takes_a_whole_call_hides_no_later_one(self):
        self.write(self.build / OPERATORS, f"[[ -f {self.folder}/mended ]] || sleep 60")
        self.run_script("check", SECONDS=16, MARGIN=8)
        (self.folder / "mended").touch()
        for words in ("-- operators: failed before", "-- operators\n"):
            code, output = self.run_script("check")
            self.assertEqual(code, 1, output)  # there is no training here
            self.assertIn(words, output)
            self.assertEqual(self.records()["gradients"]["result"], "passed")

    def test_a_killed_program_is_not_late(self):
        self.write(self.build / OPERATORS, "kill -KILL $$")
        code, output = self.run_script("check")
        self.assertEqual(code, 1, output)
        self.assertEqual(self.records()["operators"]["result"], "failed: exit code 137")

    def test_what_passed_is_not_done_again_unless_its_program_changes(self):
        self.run_script("check")
        _, output = self.run_script("check")
        self.assertIn("-- gradients: done before", output)
        self.write(self.build / GRADIENTS, "true")
        _, output = self.run_script("check")
        self.assertIn("-- gradients\n", output)

    def test_a_build_without_nccl_says_so_each_time(self):
        for _ in range(2):
            _, output = self.run_script("check")
            self.assertIn("; skipped: nccl-2;", output)
            self.assertEqual(self.records()["nccl-2"]["result"], "skipped")
            self.assertIn("this build has no NCCL", self.records()["nccl-2"]["log"])

    def test_a_build_without_nccl_fails_where_it_was_brought_to_a_card(self):
        self.write(self.tools / "nvidia-smi", NVIDIA_SMI)
        (self.build / "CMakeCache.txt").unlink()
        (self.build / "folders").write_text("made=now\n", encoding="utf-8")
        self.write(self.build / GRADIENTS, "echo numbers in $SLUICE_GOLDEN_TRANSFORMERS")
        code, output = self.run_script("check", BUILD=self.build)
        self.assertEqual(code, 1, output)
        self.assertEqual(self.records()["nccl-2"]["result"], "failed: exit code 1")
        self.assertIn(f"numbers in {self.tree}/tests/stages/transformer/golden.json", self.log())
        self.assertIn("temperature.gpu,clocks_throttle_reasons.active", self.log())

    def test_a_failure_hides_no_later_row(self):
        self.write(self.tools / "nvidia-smi", NVIDIA_SMI)
        self.write(self.build / BENCHMARK, SOME_ROWS)
        code, output = self.run_script("benchmark")
        self.assertEqual(code, 1, output)
        results = {name: record["result"].split(":")[0] for name, record in self.records("benchmark").items()}
        for turn in "123":
            self.assertEqual(results[f"training-124m-{turn}"], "failed")
            self.assertEqual(results[f"pytorch-124m-{turn}"], "skipped")
            self.assertEqual(results[f"training-1.5b-{turn}"], "passed")
        self.assertIn("no training of ours", self.records("benchmark")["pytorch-124m-1"]["log"][0])
        for name in ("products-124m", "biases-124m", "stream-124m", "logits-124m", "moments-1.5b", "training-lean-1.5b",
                     "training-1.5b-512-1", "training-lean-1.5b-512"):
            self.assertEqual(results[name], "passed", name)
        self.assertIn("pytorch-1.5b-512-1", results)
        self.assertEqual(list(results)[-1], "training-lean-1.5b-512")

    def test_a_packed_build_is_one_file_that_runs(self):
        self.write(self.tools / "apt-get", "")
        for program in PROGRAMS:
            shutil.copy("/bin/true", self.build / program)
        (self.build / "CTestTestfile.cmake").write_text("", encoding="utf-8")
        packed = self.folder / "packed"
        code, output = self.run_script("pack", packed, self.build, PACK_MIB=0)
        self.assertEqual(code, 1, output)
        self.assertIn("has 1 MiB", output)
        self.assertIn("more than SLUICE_GPU_PACK_MIB=0", output)
        code, output = self.run_script("pack", packed, self.build, PACK_MIB=10)
        self.assertEqual(code, 0, output)
        self.assertFalse((packed / "build").exists())
        self.write(self.tools / "nvidia-smi", NVIDIA_SMI)
        self.run_script("benchmark", BUILD=packed / "build.tar.xz")
        self.assertEqual(self.records("benchmark")["kernels"]["result"], "passed")


if __name__ == "__main__":
    unittest.main()
