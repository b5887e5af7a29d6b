"""Files of ours read by the reference library, and its files read by us.

Usage: safetensors_test.py PATH_OF_safetensors_exchange; exits with 77 (skipped) where the packages
safetensors or numpy cannot be imported.
"""

import hashlib
import pathlib
import subprocess
import sys
import tempfile
import unittest

try:
    import numpy
    import safetensors
    import safetensors.numpy
except ImportError as error:
    print(f"SKIPPED: {error}")
    sys.exit(77)

EXCHANGE = sys.argv.pop(1)


class SafetensorsTest(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.directory = pathlib.Path(directory.name)

    def test_the_reference_reads_what_we_write(self):
        path = self.directory / "ours.safetensors"
        subprocess.run([EXCHANGE, "write", path], check=True)
        tensors = safetensors.numpy.load_file(path)
        wanted = {
            "block.0.f32": numpy.arange(6, dtype=numpy.float32).reshape(2, 3),
            'i32 "\u00e4"': numpy.array([[-7], [1 << 30]], dtype=numpy.int32),
            "u8": numpy.array([1, 2, 255], dtype=numpy.uint8),
            "f64": numpy.array(0.1),
            "empty": numpy.zeros((0, 4), dtype=numpy.float32),
        }
        self.assertEqual(set(tensors), set(wanted))
        for name, value in wanted.items():
            self.assertEqual(tensors[name].dtype, value.dtype, name)
            self.assertEqual(tensors[name].shape, value.shape, name)
            self.assertEqual(tensors[name].tobytes(), value.tobytes(), name)
        with safetensors.safe_open(path, framework="numpy") as opened:
            self.assertEqual(opened.metadata(), {"step": "3"})

    def test_we_read_what_the_reference_writes(self):
        random = numpy.random.default_rng(5)
        tensors = {
            "layer.1.weight": random.standard_normal((5, 7)).astype(numpy.float32),
            "bytes": random.integers(0, 256, 9).astype(numpy.uint8),
            "tokens": random.integers(0, 1000, (2, 3, 4, 1)).astype(numpy.int32),
            "double": random.standard_normal(3),
            "scalar": numpy.array(2.5, dtype=numpy.float32),
            "none": numpy.zeros((3, 0), dtype=numpy.float32),
        }
        path = self.directory / "model.safetensors"
        safetensors.numpy.save_file(tensors, path, metadata={"format": "np"})
        lines = subprocess.run(
            [EXCHANGE, "read", self.directory], check=True, capture_output=True, text=True
        ).stdout.splitlines()
        names = {"float32": "f32", "uint8": "u8", "int32": "i32", "float64": "f64"}
        wanted = [
            f"{name}\t{names[value.dtype.name]} {list(value.shape)}\t"
            + hashlib.sha256(value.tobytes()).hexdigest()
            for name, value in sorted(tensors.items())
        ]
        self.assertEqual(lines, wanted)

    def test_both_refuse_the_same_damage(self):
        path = self.directory / "model.safetensors"
        safetensors.numpy.save_file({"a": numpy.ones(4, numpy.float32)}, path)
        whole = path.read_bytes()
        damaged = {
            "truncated": whole[:-1],
            "longer": whole + b"\0",
            "header too long": b"\xff\0\0\0\0\0\0\0" + whole[8:],
            "a gap": whole.replace(b"[0,16]", b"[4,20]") + b"0000",
            "other shape": whole.replace(b"[4]", b"[3]"),
            "not JSON": whole.replace(b"{", b"[", 1),
        }
        for name, data in damaged.items():
            self.assertNotEqual(data, whole, name)
            path.write_bytes(data)
            with self.assertRaises(Exception, msg=name):
                safetensors.numpy.load_file(path)
            run = subprocess.run([EXCHANGE, "read", self.directory], capture_output=True, text=True)
            self.assertEqual(run.returncode, 5, f"{name}: {run.stdout}{run.stderr}")


if __name__ == "__main__":
    unittest.main(verbosity=2)
