#!/usr/bin/env python3
"""The comparison with stored rows, and the stored files themselves."""

import contextlib
import io
import json
import pathlib
import tempfile
import unittest

import check_throughput
import check_training
from check_training import deviation

FOLDER = pathlib.Path(__file__).parent
STORED = [{"gpu": "A", "model": "124m", "tokens/s": 1000, "date": "2026-01-01", "command": "c"}]


def line(gpu, *rates, model="124m", **columns):
    return {"benchmark": "GPU: training", "gpu": gpu,
            "rows": [{"model": model, "tokens/s": rate, **columns} for rate in rates]}


class ThroughputTest(unittest.TestCase):
    def test_three_percent_less_passes_and_more_fails(self):
        self.assertTrue(check_throughput.check([line("A", 970.5)], STORED)[1])
        self.assertFalse(check_throughput.check([line("A", 969)], STORED)[1])

    def test_the_median_counts(self):
        self.assertTrue(check_throughput.check([line("A", 1000, 10), line("A", 1100)], STORED)[1])

    def test_a_card_or_a_model_without_a_row_passes_and_is_shown(self):
        for other in (line("B", 5), line("A", 5, model="1.5b")):
            texts, well = check_throughput.check([other], STORED)
            self.assertTrue(well)
            self.assertIn("no row is stored", texts[0])
            self.assertEqual(json.loads(texts[1])["tokens/s"], 5)

    def test_other_precisions_and_logits_do_not_count(self):
        default = line("A", 1000, stream="fp32", moments="fp32", **{"logit chunks": 1})
        for column, value in (("stream", "bf16"), ("moments", "bf16"), ("logit chunks", 8)):
            other = line("A", 10, 10, 10, **{column: value})
            self.assertTrue(check_throughput.check([default, other], STORED)[1], column)
            self.assertFalse(check_throughput.check([other], STORED)[1], column)  # no rows

    def test_rows_of_several_files(self):
        with tempfile.TemporaryDirectory() as folder:
            paths = [pathlib.Path(folder, name) for name in "ab"]
            for path, model in zip(paths, ("one", "two")):
                path.write_text(json.dumps(line("none", 5, model=model)) + "\n", encoding="utf-8")
            with contextlib.redirect_stdout(io.StringIO()) as said:
                self.assertEqual(check_throughput.main(*paths), 0)
            self.assertEqual(said.getvalue().count("no row is stored"), 2)

    def test_no_rows_fail(self):
        self.assertFalse(check_throughput.check([{"benchmark": "other", "rows": [{}]}], STORED)[1])

    def test_the_stored_rows_are_whole_and_each_once(self):
        rows = json.loads(check_throughput.STORED.read_text(encoding="utf-8"))
        for row in rows:
            self.assertEqual(sorted(row), sorted(STORED[0]))
        self.assertEqual(len({(row["gpu"], row["model"]) for row in rows}), len(rows))


class CurvesTest(unittest.TestCase):
    def test_the_largest_deviation_and_its_step(self):
        self.assertEqual(deviation([1, 2, 4], [1, 2.5, 3]), (0.25, 3))
        self.assertEqual(deviation([1, 2], [float("nan"), 2]), (float("inf"), 1))

    def test_the_stored_curves_are_of_the_model_and_fall(self):
        stored = json.loads(check_training.STORED.read_text(encoding="utf-8"))
        self.assertEqual(stored["model"], list(check_training.MODEL))
        for curve in stored["curves"].values():
            self.assertEqual(len(curve), check_training.STEPS)
            self.assertLess(curve[-1], 0.6 * curve[0])


if __name__ == "__main__":
    unittest.main()
