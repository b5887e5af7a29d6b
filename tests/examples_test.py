"""The examples as a user runs them: what they print, and to the bit.

usage: examples_test.py MPIEXEC CUSTOM_STAGE SPLIT_MLP CUSTOM_SCHEDULE OWN_LOOP SOURCES
"""

import math
import subprocess
import sys
import unittest

MPIEXEC, CUSTOM_STAGE, SPLIT_MLP, CUSTOM_SCHEDULE, OWN_LOOP, SOURCES = sys.argv[1:7]


def run(ranks, *command):
    """Standard output of `command` on that many ranks; fails the test where it fails."""
    return subprocess.run(
        [MPIEXEC, "--timeout", "50", "-n", str(ranks), *command],
        check=True, text=True, stdout=subprocess.PIPE).stdout


def lines_of(source):
    with open(f"{SOURCES}/{source}", encoding="utf-8") as text:
        return len(text.readlines())


class CustomStage(unittest.TestCase):
    def test_learns_its_line(self):
        output = run(2, CUSTOM_STAGE)
        self.assertIn("a = 3.0000", output)
        self.assertIn("b = 1.0000", output)

    def test_stays_small(self):
        # 60 lines are the promise of what a stage of one's own takes.
        self.assertLessEqual(lines_of("custom_stage.cpp"), 60)


class CustomSchedule(unittest.TestCase):
    def test_is_drawn_and_gives_the_bits_of_one_rank(self):
        outputs = [run(ranks, CUSTOM_SCHEDULE, f"{SOURCES}/split_mlp.cpp") for ranks in (1, 2, 3)]
        self.assertIn("waves: makespan 24, bubble 0.375, in flight 2\n", outputs[1])
        self.assertIn("rank 0 | F0 F1       B0 B1 F2 F3       B2 B3 F4       B4\n", outputs[1])
        losses = [output.splitlines()[-1] for output in outputs]
        self.assertRegex(losses[0], r"loss after three steps: 5\.\d{10,}")
        self.assertEqual(losses, [losses[0]] * 3)

    def test_stays_small(self):
        self.assertLess(lines_of("custom_schedule.cpp"), 60)


class OwnLoop(unittest.TestCase):
    def test_stops_early_and_answers(self):
        output = run(2, OWN_LOOP)
        epochs = int(output.split("stopped after ")[1].split()[0])
        self.assertLess(epochs, 200)
        self.assertLess(float(output.split("held-out loss ")[1].split()[0]), 0.01)
        answers = [line.split() for line in output.splitlines() if line.startswith("sin(")]
        self.assertEqual(len(answers), 3)
        for question, _, answer in answers:
            self.assertAlmostEqual(math.sin(float(question[4:-1])), float(answer), delta=0.3)


class SplitMlp(unittest.TestCase):
    @staticmethod
    def losses(output):
        return [float(line.split()[-1]) for line in output.splitlines()]

    def test_two_ranks_give_the_bits_of_one(self):
        for micro_batches in ("1", "5"):
            alone = run(1, SPLIT_MLP, micro_batches)
            self.assertEqual(len(self.losses(alone)), 5)
            self.assertEqual(alone, run(2, SPLIT_MLP, micro_batches))

    def test_micro_batches_change_the_loss_by_rounding_only(self):
        whole = self.losses(run(2, SPLIT_MLP, "1"))
        parts = self.losses(run(2, SPLIT_MLP, "5"))
        self.assertLess(whole[-1], whole[0] / 2)
        for one, other in zip(whole, parts):
            self.assertAlmostEqual(one, other, delta=1e-6)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
