#!/usr/bin/env python3
"""Makes the files that TokenDecoder is compared with: three tokenizers and what the package `tokenizers` decodes.

    tests/runtime/models/token_golden.py           # writes data/
    tests/runtime/models/token_golden.py --check   # compares it

byte_level.json is trained on a text with letters of every Unicode block. fallback.json and metaspace.json have
the decoders of Llama 2 and of older files of its kind. golden.json has lists of ids and their texts. Needs the version of
the package that is named below, and a Python with Unicode 14, such as 3.11.
"""

import json
import pathlib
import random
import sys
import unicodedata

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
from golden_files import need, write_or_check  # noqa: E402

VERSION, UNICODE = "0.23.3", "14.0.0"
DATA = pathlib.Path(__file__).parent / "data"
# Blocks of many thousands of letters: one of 256 letters is enough.
LARGE = ((0x3400, 0xA000), (0xAC00, 0xD7B0), (0xE000, 0xF900), (0x12000, 0x12400), (0x13000, 0x14700),
         (0x17000, 0x18D00))


def every_block():
    """A letter of each 16: no block is smaller."""
    letters = []
    for first in range(0, 0x110000, 16):
        sparse = first % 4096 if first >= 0x20000 else first % 256
        if sparse and (first >= 0x20000 or any(low <= first < high for low, high in LARGE)):
            continue
        row = [chr(code) for code in range(first, first + 16)]
        known = [letter for letter in row if unicodedata.category(letter) not in ("Cn", "Cs")]
        letters += known[:2] if first < 0x3000 else known[:1]
    return "".join(letters)


def byte_level(text):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=990, special_tokens=["<|endoftext|>", "<|ünïcode|>"], show_progress=False,
                                  initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.train_from_iterator([text], trainer)
    tokenizer.add_tokens([AddedToken("two words", special=False), AddedToken("日本", special=False)])
    tokenizer.add_special_tokens(["<pad>", "Ġ"])
    return tokenizer


def fallback(decoder):
    words = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    words += ["▁", "a", "b", "é", "日", "▁a", "▁b", "ab", "▁▁", "▁é▁", "<0xZZ>", "<0xaf>", "x▁y▁", "<0x41", "  "]
    model = models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], byte_fallback=True, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.add_tokens([AddedToken("▁added ▁", special=False)])
    tokenizer.decoder = decoder
    return tokenizer


def lists_of(tokenizer, text, draw):
    size = tokenizer.get_vocab_size()
    if text:
        yield tokenizer.encode(text, add_special_tokens=False).ids
    yield []
    yield list(range(size))
    for length in (1, 2, 3, 10, 60, 300):
        for _ in range(6):
            yield [draw.randrange(size + 3) for _ in range(length)]  # the last three have no token
    for start in ("▁", "▁▁", "a"):
        token = tokenizer.token_to_id(start)
        if token is not None:
            yield [1, token, token, 4, 5, token]
            yield [token]


def make():
    need({"tokenizers": VERSION})
    if unicodedata.unidata_version != UNICODE:
        sys.exit(f"token_golden.py: this Python has Unicode {unicodedata.unidata_version}, {UNICODE} is needed")
    draw = random.Random(5)
    llama = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                               decoders.Strip(content=" ", left=1, right=0)])
    text = every_block()
    prose = "In the beginning God created the heaven and the earth. And the earth was without form, and void;\n" * 3
    made = {
        "byte_level": (byte_level(text + prose), prose + text),
        "fallback": (fallback(llama), ""),
        "metaspace": (fallback(decoders.Metaspace()), ""),
        "metaspace_never": (fallback(decoders.Metaspace(prepend_scheme="never")), ""),
    }
    files, cases = {}, []
    for name, (tokenizer, sample) in made.items():
        files[DATA / f"{name}.json"] = tokenizer.to_str(pretty=False) + "\n"
        for ids in lists_of(tokenizer, sample, draw):
            shown, skipped = (tokenizer.decode(ids, skip_special_tokens=skip) for skip in (False, True))
            case = {"tokenizer": name, "ids": ids, "text": shown}
            if skipped != shown:
                case["without_special"] = skipped
            cases.append(json.dumps(case, ensure_ascii=False, separators=(",", ":")))
    files[DATA / "golden.json"] = "[\n" + ",\n".join(cases) + "\n]\n"
    return files


write_or_check(make(), __doc__)
