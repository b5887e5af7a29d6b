"""run_binaries.py: tests that fail are named, skips are none, and nothing outlives its time."""

import contextlib
import io
import sys
import unittest
from unittest import mock

sys.dont_write_bytecode = True  # nothing of ours into the sources' folder
import run_binaries


def shell(script):
    return ["bash", "-c", script]


class RunBinaries(unittest.TestCase):
    def run_all(self, *scripts):
        """(whether something failed, output)."""
        tests = [(f"test{i}", shell(script), {"INDEX": str(i)}, "/", 60) for i, script in enumerate(scripts)]
        output = io.StringIO()
        with mock.patch.object(run_binaries, "tests_of", return_value=tests), contextlib.redirect_stdout(output), \
                mock.patch.object(run_binaries.os, "cpu_count", return_value=1):
            failed = run_binaries.main("build", "unit", 100)
        return failed, output.getvalue()

    def test_names_the_test_that_fails_with_its_output(self):
        failed, output = self.run_all(*["echo at $INDEX; exit $((INDEX == 2))"] * 4)
        self.assertTrue(failed)
        self.assertIn("FAILED with 1: test2\nat 2", output)
        self.assertNotIn("at 1", output)
        self.assertIn("4 tests, 1 failed", output)

    def test_starts_none_after_its_time_and_keeps_a_failure(self):
        clock = [0, 0, 0, 101, 102]  # at the start, and before each test
        with mock.patch.object(run_binaries.time, "monotonic", side_effect=clock):
            failed, output = self.run_all("exit 1", "exit 0", "exit 1", "exit 1")
        self.assertTrue(failed)
        self.assertIn("stopped after 100 s: not reached: test2 test3\n4 tests, 1 failed", output)

    def test_a_skip_is_no_failure(self):
        self.assertFalse(self.run_all("exit 77")[0])

    def test_ends_what_a_late_program_started(self):
        code, output = run_binaries.run(shell("sleep 1000 & wait"), {}, "/", 0.5)
        self.assertEqual(code, 1)
        self.assertTrue(output.endswith("\nnot done after 0.5 s"), output)


if __name__ == "__main__":
    unittest.main()
