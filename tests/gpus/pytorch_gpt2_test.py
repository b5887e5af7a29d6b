#!/usr/bin/env python3
"""The micro-batch that PyTorch trains with, from the one that is asked for. PyTorch itself is not needed."""

import contextlib
import importlib.util
import io
import pathlib
import sys
import types
import unittest
from unittest import mock

SCRIPT = pathlib.Path(__file__).parents[1] / "benchmarks/pytorch_gpt2.py"


def micro_batch(*options):
    torch = types.ModuleType("torch")
    torch.nn = types.ModuleType("torch.nn")
    torch.nn.Module, torch.nn.functional = object, None
    spec = importlib.util.spec_from_file_location("pytorch_gpt2", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    with mock.patch.dict(sys.modules, {"torch": torch, "torch.nn": torch.nn}), \
            mock.patch.object(sys, "argv", [str(SCRIPT), *options]):
        spec.loader.exec_module(module)
    return module.OPTIONS.micro_batch


class MicroBatchTest(unittest.TestCase):
    def test_one_whose_logits_can_be_counted_stays(self):
        self.assertEqual(micro_batch("--model", "124m", "--micro-batch", "32"), 32)

    def test_a_larger_one_is_halved(self):
        self.assertEqual(micro_batch("--model", "124m", "--micro-batch", "64"), 32)
        self.assertEqual(micro_batch("--model", "1.5b", "--batch", "512", "--micro-batch", "256"), 32)

    def test_the_largest_number_of_logits(self):
        size = ("--context", "1", "--vocabulary", str(2**31 - 1), "--batch", "2")
        self.assertEqual(micro_batch(*size, "--micro-batch", "1"), 1)
        self.assertEqual(micro_batch(*size, "--micro-batch", "2"), 1)

    def test_an_odd_one_that_is_too_large_is_refused(self):
        with self.assertRaises(SystemExit), contextlib.redirect_stderr(io.StringIO()) as said:
            micro_batch("--batch", "99", "--micro-batch", "99")
        self.assertIn("--micro-batch 99", said.getvalue())


if __name__ == "__main__":
    unittest.main()
