#!/usr/bin/env python3
"""Jobs of one card that hang, skip or run out of time, with shell scripts as programs of a build."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import unittest

FOLDER = pathlib.Path(__file__).parent
# Two cases: one passes, the other's job says where it is and then hangs. `begun`: SIGTERM comes while that one is started.
CASES = """
    import os, pathlib, signal, sys
    sys.path.insert(0, {folder!r})
    import jobs
    from jobs import Card, arguments, run

    def hang(card):
        card.program(2, "hang")

    class Begun(jobs.Job):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.wait_for(lambda: "before the hang" in self.output, "nothing written")
            os.kill(os.getpid(), signal.SIGTERM)

    def begun(card):
        jobs.Job = Begun
        hang(card)

    options = arguments("").parse_args()
    sys.exit(run(Card(options), [("first", lambda card: "seen"), ("second", {second}), ("third", lambda card: None)],
                 {report!r}))
"""
HANG = "echo before the hang; echo $$ >>{pids}; sleep 600; true"
# Called as mpiexec -n 1 -x NAME=VALUE PROGRAM : ...; the first process is enough.
MPIEXEC = 'export "$4"; exec "$5"'


class JobsTest(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = pathlib.Path(temporary.name)
        self.report = self.folder / "rows"
        self.write("sluice", "")
        self.write("mpiexec", MPIEXEC)
        self.write("hang", HANG.format(pids=self.folder / "pids"))

    def write(self, name, text):
        path = self.folder / name
        path.write_text("#!/bin/bash\n" + text + "\n", encoding="utf-8")
        path.chmod(0o755)

    def start(self, second="hang", seconds=None):
        text = textwrap.dedent(CASES).format(folder=str(FOLDER), report=str(self.report), second=second)
        environment = {**os.environ, "TMPDIR": str(self.folder)}
        environment.pop("SLUICE_JOB_SECONDS", None)
        if seconds:
            environment["SLUICE_JOB_SECONDS"] = seconds
        return subprocess.Popen([sys.executable, "-c", text, "--build", str(self.folder), "--mpiexec",
                                 str(self.folder / "mpiexec")], stdout=subprocess.PIPE, text=True, env=environment)

    def rows(self):
        return {row["case"]: row for row in json.loads(self.report.read_text(encoding="utf-8"))["rows"]}

    def wait_for_job(self):
        while not (self.folder / "pids").exists() or not (self.folder / "pids").read_text(encoding="utf-8"):
            time.sleep(0.01)

    def require_no_job(self):
        for pid in (self.folder / "pids").read_text(encoding="utf-8").split():
            self.assertFalse(pathlib.Path("/proc", pid).exists(), "the job lives on")

    def test_sigterm_ends_the_jobs_and_leaves_a_report(self):
        process = self.start()
        self.wait_for_job()
        self.assertEqual(list(self.rows()), ["first"])  # written after each case
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
        self.assertEqual(process.returncode, 75, output)
        self.assertIn("before the hang", output)
        rows = self.rows()
        self.assertEqual({name: row["result"] for name, row in rows.items()}, {"first": "passed", "second": "stopped"})
        self.assertIn("before the hang", rows["second"]["said"])
        self.require_no_job()

    def test_sigterm_ends_a_job_that_is_being_started(self):
        process = self.start(second="begun")
        output, _ = process.communicate(timeout=60)
        self.assertEqual(process.returncode, 75, output)
        self.assertIn("before the hang", self.rows()["second"]["said"])
        self.require_no_job()

    def test_a_job_has_the_time_that_is_left(self):
        process = self.start(seconds="8")
        output, _ = process.communicate(timeout=60)
        self.assertEqual(process.returncode, 75, output)
        self.assertEqual(self.rows()["second"]["result"], "stopped")
        self.assertIn("before the hang", self.rows()["second"]["said"])
        self.require_no_job()

    def test_a_skipped_case_fails(self):
        self.write("skips", 'echo "requires $SLUICE_REQUIRE_GPUS"; exit "${SLUICE_TEST_SKIP_CODE:-0}"')
        process = self.start(second='lambda card: card.program(2, "skips")')
        output, _ = process.communicate(timeout=60)
        self.assertEqual(process.returncode, 1, output)
        self.assertIn("exit 77 instead of 0", self.rows()["second"]["said"])
        self.assertIn("requires 2", self.rows()["second"]["said"])
        self.assertEqual(self.rows()["third"]["result"], "passed")

    def test_a_job_that_hangs_fails_and_leaves_time_for_the_others(self):
        process = self.start(second='lambda card: setattr(card, "seconds", 2) or hang(card)', seconds="600")
        output, _ = process.communicate(timeout=60)
        self.assertEqual(process.returncode, 1, output)
        self.assertEqual({name: row["result"] for name, row in self.rows().items()},
                         {"first": "passed", "second": "failed", "third": "passed"})
        self.require_no_job()

    def test_a_failed_case_shows_what_nccl_says_of_it(self):
        self.write("fails", """
            [[ $NCCL_DEBUG == INFO && -n $NCCL_HOSTID && $OMPI_MCA_hwloc_base_binding_policy == none ]] || exit 0
            for ((i = 0; i < 200; ++i)); do echo "line $i"; done
            echo "NCCL WARN a full /dev/shm" >"${NCCL_DEBUG_FILE//%?/1}"
            exit 3""")
        process = self.start(second='lambda card: card.program(2, "fails")')
        output, _ = process.communicate(timeout=60)
        self.assertEqual(process.returncode, 1, output)
        for part in ("line 0\n", "line 199\n", "NCCL WARN a full /dev/shm"):
            self.assertIn(part, output)


if __name__ == "__main__":
    unittest.main()
