#!/usr/bin/env python3
"""Damages files of a directory with two saves, and looks at who notices.

    tests/faults/damage_campaign.py [--count CASES] [--seed S] [--case K] [--build DIR]

A case flips a bit, overwrites, cuts, lengthens, removes or exchanges one file of the directory. Then

  * `sluice verify` of the save must refuse it (exit 5) and name the file;
  * `--resume DIR/step-N` must refuse it likewise, before anything is trained;
  * `--resume DIR` must go on from the other save, say which one it passed over, and reach the digest of an
    undamaged run;
  * where a damaged file is not refused, the digest after a further step must be that of an undamaged run.

All cases are verified, one in twenty is resumed, and so is every one that verify does not refuse. `--case K`
repeats one. Prints each violation and a sum; exits 1 after a violation.
"""

import random
import shutil
import time

from harness import WEIGHTS, Setup, Violation, arguments, main, names_below, require, step_directory

STEPS = 6  # of the undamaged run; saves of steps 2 and 4 are damaged
RESUMED = 20  # one case of so many is resumed, whether or not verify refuses it


def flip(draw, data):
    at = draw.randrange(len(data))
    bit = 1 << draw.randrange(8)
    return data[:at] + bytes([data[at] ^ bit]) + data[at + 1:], f"bit {bit} of byte {at} flipped"


def overwrite(draw, data):
    at = draw.randrange(len(data))
    count = min(draw.choice((1, 4, 64, 512, 4096)), len(data) - at)
    filler = draw.choice((bytes(count), b"\xff" * count, draw.randbytes(count)))
    return data[:at] + filler + data[at + count:], f"bytes {at} to {at + count} overwritten"


def cut(draw, data):
    at = draw.choice((0, len(data) - 1, draw.randrange(len(data))))
    return data[:at], f"cut after {at} of {len(data)} bytes"


def lengthen(draw, data):
    more = draw.choice((b"\0", b"\n", b" ", draw.randbytes(17), bytes(4096)))
    return data + more, f"lengthened by {len(more)} bytes"


def remove(_, __):
    return None, "removed"


class Campaign:
    """A directory with saves of steps 2 and 4, and what undamaged runs make of it."""

    def __init__(self, setup, seed):
        self.setup, self.seed = setup, seed
        self.directory = setup.folder / "run"
        setup.train(1, "--steps", STEPS, "--save", setup.folder / "whole").expect(0)
        self.digest = setup.digest(setup.folder / "whole")
        # Stopped after step 4 by a request that waits for it there.
        self.make_saves()
        self.files = {name: (self.directory / name).read_bytes() for name in names_below(self.directory)
                      if (self.directory / name).is_file()}
        self.newest, self.older = step_directory(self.directory, 4), step_directory(self.directory, 2)
        require(self.newest.is_dir() and self.older.is_dir(), f"no two saves: {sorted(self.files)}")
        self.counts = {"refused": 0, "harmless": 0, "resumed": 0}

    def make_saves(self):
        """A run of 6 steps; the save of step 6 is taken away, as if the job had been killed before it."""
        self.setup.train(1, "--steps", STEPS, "--save", self.directory, "--save-every", 2, "--keep", 3).expect(0)
        shutil.rmtree(step_directory(self.directory, STEPS))
        (self.directory / "latest").write_text("step-00000004\n")

    def case(self, number):
        draw = random.Random(f"{self.seed} {number}")
        name = draw.choice(sorted(self.files))
        whole = self.files[name]
        other = name.replace("step-00000004", "step-00000002") if "00000004" in name else name.replace(
            "step-00000002", "step-00000004")
        if other != name and other in self.files and draw.random() < 0.1:
            data, what = self.files[other], f"exchanged for {other}"
        else:
            kind = draw.choices((flip, overwrite, cut, lengthen, remove), (5, 2, 2, 1, 1))[0]
            data, what = kind(draw, whole)
        if data == whole:
            return
        path = self.directory / name
        try:
            if data is None:
                path.unlink()
            else:
                path.write_bytes(data)
            self.check(name, draw.randrange(RESUMED) == 0)
        except Violation as error:
            raise Violation(f"case {number}, {name} {what}: {error}") from error
        finally:
            self.restore(path, whole)

    def restore(self, path, whole):
        path.write_bytes(whole)
        for name in names_below(self.directory):
            if name not in self.files and (self.directory / name).is_file():
                (self.directory / name).unlink()  # such as a log of a run that was cut

    def check(self, name, resume):
        step = name.split("/")[0] if "/" in name else ""
        if not step:
            return self.check_loose(resume)
        save, file = self.directory / step, name.split("/")[1]
        code, output = self.setup.run("verify", save)
        if code == 0:
            self.counts["harmless"] += 1
            return self.expect_undamaged(save)
        # Another save's state.json blames the other files.
        named = save.name if file == "state.json" else file
        require(code == WEIGHTS and named in output, f"verify: exit {code}, or '{file}' is not named\n{output}")
        self.counts["refused"] += 1
        if resume:
            self.resume_refused(save, file)
            self.resume_other(save)

    def check_loose(self, resume):
        """A file directly in the directory decides nothing about weights."""
        self.counts["harmless"] += 1
        if resume:
            self.expect_undamaged(self.directory)

    def resume(self, path):
        """Goes on from `path` in a directory of its own: (exit code, output)."""
        target = self.setup.folder / "resumed"
        shutil.rmtree(target, ignore_errors=True)
        self.counts["resumed"] += 1
        job = self.setup.train(1, "--resume", path, "--steps", STEPS, "--save", target, model=False)
        return job.finish(), job.output

    def resume_refused(self, save, file):
        code, output = self.resume(save)
        named = save.name if file == "state.json" else file
        require(code == WEIGHTS and named in output,
                f"--resume {save.name}: exit {code}, or '{file}' is not named\n{output}")

    def resume_other(self, save):
        code, output = self.resume(self.directory)
        require(code == 0, f"--resume DIR: exit {code}\n{output}")
        digest = self.setup.digest(self.setup.folder / "resumed")
        require(digest == self.digest, f"--resume DIR: other digest\n{output}")
        require(save.name in output or save == self.older,
                f"--resume DIR does not say that {save.name} is damaged\n{output}")

    def expect_undamaged(self, path):
        code, output = self.resume(path)
        require(code == 0, f"verify accepts it, --resume {path.name} does not: exit {code}\n{output}")
        digest = self.setup.digest(self.setup.folder / "resumed")
        require(digest == self.digest, f"accepted, and the digest is {digest} instead of {self.digest}\n{output}")


def campaign():
    parser = arguments(__doc__.splitlines()[0], count=300, seed=1)
    parser.add_argument("--case", type=int, help="this case of the seed alone")
    options = parser.parse_args()
    start, violations = time.monotonic(), 0
    setup = Setup(options)
    damage = Campaign(setup, options.seed)
    for number in range(options.count) if options.case is None else [options.case]:
        try:
            damage.case(number)
        except Violation as error:
            violations += 1
            print(f"FAILED {error}\nrepeat by --seed {options.seed} --case {number} --build {options.build}")
    counts = ", ".join(f"{value} {name}" for name, value in damage.counts.items())
    print(f"damage campaign: {options.count} cases ({counts}), seed {options.seed}, {violations} violations, "
          f"{time.monotonic() - start:.0f} s")
    setup.remove()
    return 1 if violations else 0


if __name__ == "__main__":
    main(campaign)
