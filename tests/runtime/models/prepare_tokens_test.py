"""examples/prepare_tokens.py against the package's own encoding and the reader of token files.

Usage: prepare_tokens_test.py PATH_OF_prepare_tokens.py PATH_OF_token_file_facts; exits with 77 (skipped) where
the package tokenizers cannot be imported.
"""

import hashlib
import pathlib
import random
import resource
import signal
import subprocess
import sys
import tempfile
import unittest

try:
    import tokenizers
except ImportError as error:
    print(f"SKIPPED: {error}")
    sys.exit(77)

FACTS, PROGRAM = sys.argv.pop(), sys.argv.pop()
WORDS = "in the beginning god created heaven and earth évening 日本 'tis we'll 42 1,000 ...".split()


def text_of(seed, words):
    draw = random.Random(seed)
    return "".join(draw.choice(WORDS) + draw.choice([" ", " ", " ", "  ", "\n", "\n\n", ".\n", "\r\n", " \n "])
                   for _ in range(words))


class PrepareTokensTest(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.directory = pathlib.Path(directory.name)

    def write(self, name, text):
        path = self.directory / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    def run_it(self, *arguments, **more):
        return subprocess.run([sys.executable, PROGRAM, *map(str, arguments)], cwd=self.directory,
                              capture_output=True, timeout=60, **more)

    def made(self, *arguments, **more):
        done = self.run_it(*arguments, **more)
        self.assertEqual(done.returncode, 0, done.stderr)
        facts = subprocess.run([FACTS, self.directory / "out.bin"], capture_output=True, text=True)
        self.assertEqual(facts.returncode, 0, facts.stderr)
        first, _, tokens = facts.stdout.partition("\n")
        return first.split(), [int(token) for token in tokens.split()]

    def refused(self, part, *arguments, **more):
        before = sorted(self.directory.iterdir())
        done = self.run_it(*arguments, **more)
        self.assertNotEqual(done.returncode, 0)
        lines = done.stderr.decode().strip().split("\n")
        self.assertIn(part, lines[-1])
        self.assertNotIn("Traceback", done.stderr.decode())
        self.assertEqual(sorted(self.directory.iterdir()), before)

    def load(self):
        tokenizer = tokenizers.Tokenizer.from_file(str(self.directory / "tokenizer.json"))
        tokenizer.encode_special_tokens = True
        return tokenizer

    def encoded(self, text):
        return self.load().encode(text, add_special_tokens=False).ids

    def test_trains_and_writes_what_the_reader_reads(self):
        text = text_of(1, 3000)
        self.write("a.txt", text)
        facts, tokens = self.made("--vocabulary", 300, "a.txt", "--output", "out.bin")
        saved = (self.directory / "tokenizer.json").read_bytes()
        self.assertEqual(facts, ["3", "2", "300", "-1", hashlib.sha256(saved).hexdigest()])
        self.assertEqual(tokens, self.encoded(text))
        self.assertEqual(self.load().decode(tokens), text)
        self.assertEqual(sorted(p.name for p in self.directory.iterdir()), ["a.txt", "out.bin", "tokenizer.json"])

    def test_makes_the_folder_of_the_output(self):
        self.write("a.txt", "some text")
        done = self.run_it("--vocabulary", 300, "a.txt", "--output", "new/tokens/out.bin")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(sorted(p.name for p in (self.directory / "new/tokens").iterdir()), ["out.bin", "tokenizer.json"])

    def test_pieces_of_any_size_and_standard_input_give_the_same_file(self):
        text = text_of(2, 20000)
        self.write("a.txt", text)
        self.made("--vocabulary", 320, "a.txt", "--output", "out.bin")
        whole = (self.directory / "out.bin").read_bytes()
        for piece in (4000, 4001, 30000):
            self.made("--tokenizer", "tokenizer.json", "a.txt", "--output", "out.bin", "--piece", piece)
            self.assertEqual((self.directory / "out.bin").read_bytes(), whole)
        (self.directory / "out.bin").unlink()
        (self.directory / "tokenizer.json").unlink()
        self.made("--vocabulary", 320, "--output", "out.bin", input=text.encode())
        self.assertEqual((self.directory / "out.bin").read_bytes(), whole)

    def test_pieces_hold_with_the_pattern_of_llama_3(self):
        text = text_of(3, 20000)
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
        pattern = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
                   r"\s*[\r\n]+|\s+(?!\S)|\s+")
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        tokenizer.train_from_iterator([text], tokenizers.trainers.BpeTrainer(
            vocab_size=400, show_progress=False, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()))
        tokenizer.save(str(self.directory / "tokenizer.json"))
        self.write("a.txt", text)
        _, tokens = self.made("--tokenizer", "tokenizer.json", "a.txt", "--output", "out.bin", "--piece", 4000)
        self.assertEqual(tokens, self.encoded(text))

    def test_documents_end_with_the_token_and_their_text_cannot_forge_it(self):
        self.write("a.txt", "one\n---\n---\ntwo <|end|>\n---x\n---\r\n")
        self.write("b.txt", "three\n---")
        facts, tokens = self.made("--vocabulary", 257, "a.txt", "b.txt", "--output", "out.bin", "--separator=---",
                                  "--end-of-text", "<|end|>")
        end = self.load().token_to_id("<|end|>")
        self.assertEqual(int(facts[3]), end)
        wanted = []
        for document in ("one\n", "two <|end|>\n---x\n", "three\n"):
            wanted += self.encoded(document) + [end]
        self.assertEqual(tokens, wanted)

    def test_large_vocabularies_have_32_bits(self):
        words = {chr(0x4E00 + i % 20000) + chr(0x4E00 + i // 20000): i for i in range(70000)}
        model = tokenizers.models.WordLevel(words, unk_token="一一")
        tokenizer = tokenizers.Tokenizer(model)
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        tokenizer.save(str(self.directory / "tokenizer.json"))
        last = max(words, key=words.get)
        self.write("a.txt", f"{last} {last}")
        facts, tokens = self.made("--tokenizer", "tokenizer.json", "a.txt", "--output", "out.bin")
        self.assertEqual(facts[:3], ["3", "4", "70000"])
        self.assertEqual(tokens, [69999, 69999])

    def test_refuses_in_one_line_and_leaves_nothing(self):
        self.write("a.txt", "some text")
        self.write("bad.txt", b"a" * 5000 + b"\xff")
        self.write("cut.txt", b"a" * 5000 + b"\xe6\x97")
        self.write("empty.txt", "")
        self.write("other.json", "{")
        output = ("--output", "out.bin")
        self.refused("at byte 5000", "--vocabulary", 300, "bad.txt", *output)
        self.refused("at byte 5000", "--vocabulary", 300, "cut.txt", *output)
        self.refused("'none.txt' is no file", "--vocabulary", 300, "none.txt", *output)
        self.refused("'other.json' is no tokenizer.json", "--tokenizer", "other.json", "a.txt", *output)
        self.refused("'none.json' cannot be read", "--tokenizer", "none.json", "a.txt", *output)
        self.refused("legal are 256", "--vocabulary", 255, "a.txt", *output)
        self.refused("legal are 257", "--vocabulary", 256, "a.txt", "--end-of-text", "<e>", *output)
        self.refused("is no directory", "--vocabulary", 300, "a.txt", "--output", "a.txt/out.bin")
        self.refused("--piece is 10", "--vocabulary", 300, "a.txt", "--piece", 10, *output)
        self.refused("--separator", "--vocabulary", 300, "a.txt", "--separator", "", *output)
        self.refused("--tokenizer", "a.txt", *output)
        self.write("tokenizer.json", "{}")
        self.refused("is another tokenizer", "--vocabulary", 300, "a.txt", *output)
        self.made("--vocabulary", 300, "a.txt", "--save-tokenizer", "mine.json", *output)
        (self.directory / "out.bin").unlink()
        self.refused("no tokens", "--tokenizer", "mine.json", "--save-tokenizer", "mine.json", "empty.txt", *output)
        self.refused("no token '<e>'", "--tokenizer", "mine.json", "--save-tokenizer", "mine.json", "a.txt",
                     "--end-of-text", "<e>", *output)

    def test_a_full_disk_leaves_the_old_file(self):
        self.write("a.txt", text_of(4, 50000))
        self.made("--vocabulary", 260, "a.txt", "--output", "out.bin")
        before = (self.directory / "out.bin").read_bytes()

        def limit():
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (100000, 100000))

        self.refused("cannot read or write", "--tokenizer", "tokenizer.json", "a.txt", "--output", "out.bin",
                     preexec_fn=limit)
        self.assertEqual((self.directory / "out.bin").read_bytes(), before)

    def test_a_stopped_run_leaves_nothing(self):
        self.write("a.txt", "some text")
        self.made("--vocabulary", 260, "a.txt", "--output", "out.bin")
        before = sorted(self.directory.iterdir())
        process = subprocess.Popen([sys.executable, PROGRAM, "--tokenizer", "tokenizer.json", "--output", "out.bin"],
                                   cwd=self.directory, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
        while sorted(self.directory.iterdir()) == before:  # until it copies its input
            self.assertIsNone(process.poll())
        process.send_signal(signal.SIGTERM)
        self.assertEqual(process.wait(60), 143)
        process.stdin.close()
        self.assertEqual(sorted(self.directory.iterdir()), before)


if __name__ == "__main__":
    unittest.main()
