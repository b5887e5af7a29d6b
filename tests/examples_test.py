"""The examples as a user runs them: what they print, and to the bit.

usage: examples_test.py MPIEXEC PROGRAMS SOURCES      (PROGRAMS: the folder of the executables)
"""

import math
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

MPIEXEC, SOURCES = sys.argv[1], sys.argv[3]
PROGRAMS = os.path.abspath(sys.argv[2])
CLOTHES = "/usr/share/datasets/fashion-mnist"  # Debian's package dataset-fashion-mnist


def run(ranks, program, *arguments, folder=None):
    """Standard output of the example on that many ranks; fails the test where it fails."""
    return subprocess.run(
        [MPIEXEC, "--oversubscribe", "--timeout", "100", "-n", str(ranks), f"{PROGRAMS}/{program}", *arguments],
        check=True, text=True, stdout=subprocess.PIPE, cwd=folder).stdout


def lines_of(source):
    with open(f"{SOURCES}/{source}", encoding="utf-8") as text:
        return len(text.readlines())


def numbers(pattern, text):
    return [float(value) for value in re.findall(pattern, text)]


class CustomStage(unittest.TestCase):
    def test_learns_its_line(self):
        output = run(2, "custom_stage")
        self.assertIn("a = 3.0000", output)
        self.assertIn("b = 1.0000", output)

    def test_stays_small(self):
        # 60 lines are the promise of what a stage of one's own takes.
        self.assertLessEqual(lines_of("custom_stage.cpp"), 60)


class TensorStage(unittest.TestCase):
    def test_ranks_that_share_stages_train_as_one_does(self):
        def losses(ranks, *shape):
            return numbers(r"loss (\S+)", run(ranks, "tensor_stage", *shape))

        alone = losses(1)
        self.assertEqual(len(alone), 5)
        self.assertLess(alone[-1], alone[0] / 2)
        for other in (losses(2), losses(8, "2", "2", "2")):
            for one, many in zip(alone, other, strict=True):
                self.assertAlmostEqual(one, many, delta=1e-6 * one)


class CustomSchedule(unittest.TestCase):
    def test_is_drawn_and_gives_the_bits_of_one_rank(self):
        outputs = [run(ranks, "custom_schedule", f"{SOURCES}/own_loop.cpp") for ranks in (1, 2, 3)]
        self.assertIn("waves: makespan 24, bubble 0.375, in flight 2\n", outputs[1])
        self.assertIn("rank 0 | F0 F1       B0 B1 F2 F3       B2 B3 F4       B4\n", outputs[1])
        losses = [output.splitlines()[-1] for output in outputs]
        self.assertRegex(losses[0], r"loss after three steps: 5\.\d{10,}")
        self.assertEqual(losses, [losses[0]] * 3)

    def test_stays_small(self):
        self.assertLess(lines_of("custom_schedule.cpp"), 60)


class CustomLayer(unittest.TestCase):
    def test_learns_with_the_bits_of_one_rank(self):
        output = run(2, "custom_layer")
        self.assertLess(numbers(r"step 500  loss (\S+)", output)[0], 1e-3)
        self.assertEqual(output, run(1, "custom_layer"))


class OwnMlp(unittest.TestCase):
    def test_learns_with_the_bits_of_one_rank(self):
        output = run(2, "own_mlp", f"{SOURCES}/own_loop.cpp")
        losses = numbers(r"loss (\S+)", output)
        self.assertEqual(len(losses), 4)
        self.assertLess(losses[-1], losses[0])
        self.assertEqual(output, run(1, "own_mlp", f"{SOURCES}/own_loop.cpp"))

    def test_stays_small(self):
        self.assertLess(lines_of("own_mlp.cpp"), 60)


class OwnLoop(unittest.TestCase):
    def test_stops_early_and_answers(self):
        output = run(2, "own_loop")
        epochs = int(output.split("stopped after ")[1].split()[0])
        self.assertLess(epochs, 200)
        self.assertLess(float(output.split("held-out loss ")[1].split()[0]), 0.01)
        answers = [line.split() for line in output.splitlines() if line.startswith("sin(")]
        self.assertEqual(len(answers), 3)
        for question, _, answer in answers:
            self.assertAlmostEqual(math.sin(float(question[4:-1])), float(answer), delta=0.3)


class TwoStageMlp(unittest.TestCase):
    def test_two_ranks_give_the_bits_of_one_and_micro_batches_overlap(self):
        two = run(2, "two_stage_mlp")
        losses = re.findall(r"epoch .*", two)
        self.assertEqual(losses, re.findall(r"epoch .*", run(1, "two_stage_mlp")))
        values = numbers(r"epoch +\d+  loss (\S+)", two)
        self.assertEqual(len(values), 10)
        self.assertLess(values[4], values[0])
        # Micro-batches change the loss by rounding only.
        for whole, parts in zip(values[:5], values[5:]):
            self.assertAlmostEqual(whole, parts, delta=1e-6)
        naive, pipelined = re.findall(r"rank 0 \|(.*)\nrank 1 \|(.*)\nmakespan", two)
        # As measured: an action shorter than a column is not drawn.
        self.assertLessEqual(max(row.count("F") for row in naive), 1)
        self.assertEqual(len(pipelined), 2)

    def test_stays_small(self):
        # Of the program, the model, the loop and the output.
        self.assertLessEqual(lines_of("two_stage_mlp.cpp"), 45)


class Regression(unittest.TestCase):
    def test_reaches_the_noise(self):
        losses = numbers(r"loss (\S+)", run(1, "regression"))
        self.assertEqual(len(losses), 5)
        self.assertLess(losses[-1], 0.02)  # the noise alone has 0.01

    def test_stays_small(self):
        self.assertLessEqual(lines_of("regression.cpp"), 35)


class MicroBatching(unittest.TestCase):
    def test_draws_gpipe_planned_and_measured(self):
        output = run(4, "micro_batching")
        self.assertIn("outputs f32 [16, 5]", output)
        self.assertIn("rank 0 | F0 F1 F2 F3                   B0 B1 B2 B3\n", output)
        self.assertIn("rank 3 |          F0 F1 F2 F3 B0 B1 B2 B3\n", output)
        self.assertEqual(len(re.findall(r"^makespan", output, re.MULTILINE)), 2)


class LoaderWorkers(unittest.TestCase):
    def test_keeps_order_and_names_the_item_that_throws(self):
        output = subprocess.run([f"{PROGRAMS}/loader_workers"], check=True, text=True, stdout=subprocess.PIPE).stdout
        in_order, shuffled = output.split("shuffled; item 6 cannot be read\n")
        self.assertEqual([int(item) for item in re.findall(r"(\d+) by worker", in_order)], list(range(15)))
        for worker in re.findall(r"by worker (\d+)", output):
            self.assertIn(worker, "012")
        self.assertEqual(shuffled.count("the picture cannot be decoded"), 1)
        self.assertIn("item 6 of the data set", shuffled)
        items = [int(item) for item in re.findall(r"(\d+) by worker", shuffled)]
        self.assertEqual(len(items), 11)
        self.assertNotIn(6, items)


class GradientAcrossDevices(unittest.TestCase):
    def test_is_six_everywhere(self):
        for ranks in (1, 2):
            self.assertEqual(run(ranks, "gradient_across_devices"), "the sum is 55; its gradient: 6 6 6 6 6\n")


class ConvTwoDevices(unittest.TestCase):
    def test_two_ranks_give_the_bits_of_one(self):
        output = run(2, "conv_two_devices")
        losses = numbers(r"loss (\S+)", output)
        self.assertLess(losses[1], losses[0])
        self.assertEqual(output, run(1, "conv_two_devices"))


class SegmentationDataParallel(unittest.TestCase):
    def test_gradients_are_those_of_one_replica_but_for_batch_norm(self):
        output = run(2, "segmentation_data_parallel")
        groups, shares, batches, all_replicas = (float(line.split()[-1]) for line in output.splitlines()[1:5])
        self.assertLess(groups, 1e-6)
        self.assertGreater(shares, 1e-4)
        self.assertLess(batches, 1e-6)
        self.assertLess(all_replicas, 1e-5)


class FashionMnist(unittest.TestCase):
    @unittest.skipUnless(os.path.isdir(CLOTHES), "no dataset-fashion-mnist")
    def test_one_epoch_gives_85_percent_and_pictures(self):
        with tempfile.TemporaryDirectory() as folder:
            output = run(4, "fashion_mnist", "1", folder=folder)
            self.assertGreaterEqual(numbers(r"accuracy (\S+) %", output)[0], 85)
            for name in ("accuracy.svg", "confusion.svg"):
                picture = (pathlib.Path(folder) / name).read_text(encoding="utf-8")
                self.assertTrue(picture.startswith("<svg") and picture.endswith("</svg>\n"))

    @unittest.skipUnless(os.path.isdir(CLOTHES), "no dataset-fashion-mnist")
    def test_two_stages_give_the_bits_of_one(self):
        with tempfile.TemporaryDirectory() as folder:
            outputs = [run(ranks, "fashion_mnist", "1", "1280", folder=folder) for ranks in (1, 2)]
        losses = [re.findall(r"loss .* %", output) for output in outputs]
        self.assertEqual(losses[0], losses[1])


class PipelinedInference(unittest.TestCase):
    def test_answers_in_order_and_the_same(self):
        output = run(2, "pipelined_inference")
        self.assertIn("200 results in order, the same both ways", output)
        self.assertGreater(numbers(r": (\S+) times", output)[0], 0)


class InSitu(unittest.TestCase):
    def test_learns_while_the_simulation_runs(self):
        for ranks in (2, 4):
            losses = numbers(r"loss (\S+)", run(ranks, "in_situ"))
            self.assertEqual(len(losses), 6)
            self.assertLess(losses[-1], losses[0] / 10)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
