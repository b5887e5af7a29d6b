"""Every example has the bits of depth 1 under three schedules, at equal replicas and micro-batches.

usage: bits_test.py MPIEXEC PROGRAMS [CASES...]      (PROGRAMS: the folder of the recorded_* executables)

The programs are the examples' own objects with their calls recorded (recorded_pipeline.cpp): what is compared is a
digest of every loss, gradient norm, output, parameter and buffer of each of their pipelines.
"""

import os
import re
import subprocess
import sys
import tempfile
import unittest

MPIEXEC, PROGRAMS = sys.argv[1], os.path.abspath(sys.argv[2])
SCHEDULES = ("gpipe", "1f1b", "zb-h1")
CLOTHES = "/usr/share/datasets/fashion-mnist"  # Debian's package dataset-fashion-mnist


def digests(ranks, program, orders, arguments):
    """[order] Those of all pipelines of the program; of equal ones, on several ranks, one."""
    with tempfile.TemporaryDirectory() as folder:
        output = subprocess.run(
            [MPIEXEC, "--oversubscribe", "--timeout", "300", "-n", str(ranks), f"{PROGRAMS}/recorded_{program}",
             *arguments], check=True, text=True, stdout=subprocess.PIPE, cwd=folder,
            env={**os.environ, "SLUICE_EXAMPLE_ORDERS": " ".join(orders)}).stdout
    return [sorted(set(re.findall(r"recorded (\d+ calls [0-9a-f]{64})$", part, re.MULTILINE)))
            for part in output.split("end of order\n") if "recorded" in part]


class Bits(unittest.TestCase):
    def same(self, program, deep=2, flat=1, chunks=1, pipelines=1, arguments=(), own_main=False):
        """On `deep` ranks under each schedule as on `flat` ones, which have `chunks` stages each."""
        first = f"{flat} looped-bfs 2" if chunks > 1 else f"{flat} 1f1b 1"
        orders = [first] + [f"{deep} {schedule} 1" for schedule in SCHEDULES]
        if own_main:
            found = [digests(int(order[0]), program, [order], arguments)[0] for order in orders]
        else:
            found = digests(deep, program, orders, arguments)
        self.assertEqual(len(found), len(orders))
        self.assertEqual(len(found[0]), pipelines, "pipelines with digests of their own")
        for schedule, other in zip(SCHEDULES, found[1:]):
            with self.subTest(schedule=schedule):
                self.assertEqual(other, found[0])

    def test_two_stage_mlp(self):
        self.same("two_stage_mlp", pipelines=2)

    def test_regression(self):
        self.same("regression")

    def test_micro_batching(self):
        self.same("micro_batching", deep=4)

    def test_gradient_across_devices(self):
        self.same("gradient_across_devices")

    def test_conv_two_devices(self):
        self.same("conv_two_devices")

    def test_segmentation_data_parallel(self):
        self.same("segmentation_data_parallel", deep=4, flat=2, pipelines=8, arguments=("2",))

    @unittest.skipUnless(os.path.isdir(CLOTHES), "no dataset-fashion-mnist")
    def test_fashion_mnist(self):
        self.same("fashion_mnist", arguments=("1", "1280"))

    def test_custom_layer(self):
        self.same("custom_layer")

    def test_custom_stage(self):
        self.same("custom_stage", chunks=2)

    def test_own_loop(self):
        self.same("own_loop", chunks=2)

    def test_pipelined_inference(self):
        self.same("pipelined_inference")

    def test_in_situ(self):
        self.same("in_situ", deep=3, flat=2, own_main=True)

    @unittest.skipUnless(os.path.exists(f"{PROGRAMS}/recorded_torch_resnet"), "no LibTorch")
    def test_torch_resnet(self):
        self.same("torch_resnet", chunks=2)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1] + sys.argv[3:], verbosity=2)
