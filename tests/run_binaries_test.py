"""run_binaries.py: shards that fail are named, skips are none, and nothing outlives its time."""

import contextlib
import io
import pathlib
import sys
import tempfile
import unittest
from unittest import mock

sys.dont_write_bytecode = True  # nothing of ours into the sources' folder
import run_binaries


def shell(script):
    return ("bash", "-c", script)


class RunBinaries(unittest.TestCase):
    def run_all(self, *programs):
        """(whether something failed, output) of (script, is of GoogleTest, number of tests)."""
        tests = {(shell(script), (), "/", whole): ["name"] * count for script, whole, count in programs}
        output = io.StringIO()
        with mock.patch.object(run_binaries, "tests_of", return_value=tests), contextlib.redirect_stdout(output):
            failed = run_binaries.main("build", "unit")
        return failed, output.getvalue()

    def test_runs_a_program_once_for_each_shard_and_others_once(self):
        with tempfile.TemporaryDirectory() as folder:
            note = f"touch {folder}/$GTEST_SHARD_INDEX-$GTEST_TOTAL_SHARDS-"
            failed, output = self.run_all((note + "a", True, 9), (note + "b", True, 2), (note + "c", False, 1))
            self.assertEqual(sorted(path.name for path in pathlib.Path(folder).iterdir()),
                             ["--c", "0-4-a", "0-4-b", "1-4-a", "1-4-b", "2-4-a", "3-4-a"])
        self.assertFalse(failed)
        self.assertIn("12 tests in 7 runs of 3 programs, 0 runs failed", output)

    def test_names_the_shard_that_fails_with_its_output(self):
        failed, output = self.run_all(("echo at $GTEST_SHARD_INDEX; exit $((GTEST_SHARD_INDEX == 2))", True, 9))
        self.assertTrue(failed)
        self.assertIn("GTEST_SHARD_INDEX=2)\nat 2", output)
        self.assertNotIn("at 1", output)

    def test_starts_none_after_its_time_and_keeps_a_failure(self):
        tests = {(shell(f"exit {code}"), (), "/", False): ["name"] for code in range(1, 9)}
        output = io.StringIO()
        with mock.patch.object(run_binaries, "tests_of", return_value=tests), contextlib.redirect_stdout(output), \
                mock.patch.object(run_binaries.os, "cpu_count", return_value=1):
            failed = run_binaries.main("build", "unit", 0)
        self.assertTrue(failed)
        self.assertRegex(output.getvalue(), r"stopped after 0 s: [1-7] of 8 runs were not reached")

    def test_a_skip_is_no_failure_of_a_script_alone(self):
        self.assertFalse(self.run_all(("exit 77", False, 1))[0])
        self.assertTrue(self.run_all(("exit 77", True, 1))[0])

    def test_ends_what_a_late_program_started(self):
        code, output = run_binaries.run(shell("sleep 1000 & wait"), (), "/", None, seconds=0.5)
        self.assertEqual(code, 1)
        self.assertTrue(output.endswith("\nnot done after 0.5 s"), output)


if __name__ == "__main__":
    unittest.main()
