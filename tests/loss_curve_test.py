"""loss_curve.py: the largest deviation and its step, and nothing but the same training."""

import contextlib
import io
import json
import pathlib
import sys
import tempfile
import unittest

sys.dont_write_bytecode = True  # nothing of ours into the sources' folder
import loss_curve


def run(device="cuda:0", precision="fp32", losses=(4.0, 2.0, 1.0), **options):
    options = {"device": device, "precision": precision, "seed": "1", "steps": "3", **options}
    lines = [{"step": i + 1, "loss": loss} for i, loss in enumerate(losses)]
    lines[0]["run"] = {"options": options}
    return [*lines, {"step": len(lines), "val_loss": 9.0}]


class LossCurve(unittest.TestCase):
    def compare(self, *runs):
        """(exit code, what is printed, the rows) for the files of `runs`."""
        with tempfile.TemporaryDirectory() as folder:
            paths = []
            for i, lines in enumerate(runs):
                paths.append(pathlib.Path(folder, f"{i}.jsonl"))
                paths[-1].write_text("".join(json.dumps(line) + "\n" for line in lines),
                                     encoding="utf-8")
            report = pathlib.Path(folder, "report")
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                code = loss_curve.main(["--json", str(report), "--gpu", "H", *map(str, paths)])
            rows = json.loads(report.read_text())["rows"] if report.exists() else None
        return code, output.getvalue(), rows

    def test_prints_the_largest_deviation_of_each_curve_and_its_step(self):
        code, text, rows = self.compare(run("cpu"), run(losses=(4.0, 2.002, 1.0)),
                                        run(precision="bf16", losses=(4.0, 2.002, 0.99001)))
        self.assertEqual(code, 0)
        self.assertIn("fp32: largest deviation 0.001 at step 2 of 3", text)
        self.assertIn("bf16: largest deviation 0.00999 at step 3 of 3", text)
        self.assertEqual([row["at step"] for row in rows], [2, 3])

    def test_fails_above_a_hundredth_and_for_what_is_no_number(self):
        for losses in ((4.0, 2.0201, 1.0), (4.0, "nan", 1.0), (4.0, "inf", 1.0)):
            code, text, _ = self.compare(run("cpu"), run(), run(precision="bf16", losses=losses))
            self.assertEqual(code, 1)
            self.assertIn("further off than 1%: bf16", text)
            self.assertIn("at step 2 of 3", text)

    def test_refuses_what_is_not_the_same_training(self):
        for runs, why in (((run("cpu"), run(seed="2")), "--seed 2, on the CPU 1"),
                          ((run("cpu"), run("cpu")), "--device cpu, not cuda"),
                          ((run(), run()), "not of a run on the CPU"),
                          ((run("cpu"), run(losses=(4.0, 2.0))), "2 steps, 3 on the CPU, of 3"),
                          ((run("cpu"), [{"step": 1}]), "no losses")):
            code, text, rows = self.compare(*runs)
            self.assertEqual((code, rows), (1, None))
            self.assertIn(why, text)


if __name__ == "__main__":
    unittest.main()
