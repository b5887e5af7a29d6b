"""The pictures in schedules/pictures are what `sluice schedule` draws today.

usage: pictures_test.py SLUICE FOLDER [--write]    --write draws them anew
"""

import os
import subprocess
import sys
import unittest

SLUICE, FOLDER = sys.argv[1:3]

# By file: the schedule and its chunks, for 4 ranks and 8 micro-batches.
PICTURES = {
    "gpipe": 1,
    "1f1b": 1,
    "interleaved": 2,
    "zb-h1": 1,
    "zb-v": 2,
    "v-half": 2,
}


def draw(name):
    return subprocess.run(
        [SLUICE, "schedule", "--schedule", name, "--chunks", str(PICTURES[name]),
         "--ranks", "4", "--micro-batches", "8", "--format", "svg"],
        check=True, text=True, stdout=subprocess.PIPE).stdout


class Pictures(unittest.TestCase):
    def test_are_drawn_by_this_program(self):
        for name in PICTURES:
            with open(os.path.join(FOLDER, f"{name}.svg"), encoding="utf-8") as kept:
                self.assertEqual(kept.read(), draw(name), f"{name}: draw anew with --write")

    def test_are_all_there_is(self):
        self.assertEqual(sorted(os.listdir(FOLDER)), sorted(f"{name}.svg" for name in PICTURES))


if __name__ == "__main__":
    if sys.argv[3:] == ["--write"]:
        for picture in PICTURES:
            with open(os.path.join(FOLDER, f"{picture}.svg"), "w", encoding="utf-8") as file:
                file.write(draw(picture))
    else:
        unittest.main(argv=sys.argv[:1], verbosity=2)
