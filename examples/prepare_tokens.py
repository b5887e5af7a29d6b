#!/usr/bin/env python3
"""Makes a file of tokens, for `sluice train --data`, of text.

    examples/prepare_tokens.py --vocabulary 4096 book.txt --output book.bin
    examples/prepare_tokens.py --tokenizer DIR/tokenizer.json a.txt b.txt --output both.bin

Trains a byte-level BPE tokenizer, or takes a tokenizer.json, also of a model's directory of Hugging Face. Puts
tokenizer.json beside the output. Each file is a document, and standard input too ("-"); --separator LINE begins a new
one at each such line. --end-of-text TOKEN ends each document with that special token. The text of special tokens
within a document is ordinary text.

The output has 256 bytes of header (<sluice/data.hpp> describes it: its TokenFormat::kSluice) and a number for each token:
16 bits for vocabularies of up to 65,536, else 32. It gets its name when it is complete.

Needs the package `tokenizers` of PyPI. Text is read in pieces of --piece characters. A piece ends where the tokens do
not depend on it. Training a tokenizer keeps each different word once, and standard input in a temporary file.
"""

import argparse
import array
import codecs
import hashlib
import os
import pathlib
import signal
import struct
import sys
import tempfile

MAGIC, VERSION, HEADER_BYTES, NO_TOKEN = b"\xffSLTOKEN", 1, 256, 0xFFFFFFFF
READ_BYTES = 1 << 20
AROUND = 2000      # characters on each side of a cut that are encoded with it and without it
MOST_PIECES = 64   # a document without a cut in so many pieces is refused


class Refusal(Exception):
    """What the user has to change; one line."""


def header(width, count, vocabulary, end_of_text, tokenizer_hash):
    used = struct.pack("<8sIIQII32s", MAGIC, VERSION, width, count, vocabulary,
                       NO_TOKEN if end_of_text is None else end_of_text, tokenizer_hash)
    return used.ljust(HEADER_BYTES, b"\0")


class NewFile:
    """A file beside `path` that gets its name by commit(), and is gone otherwise."""

    def __init__(self, path):
        self.path = pathlib.Path(path)
        self.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # until __exit__ is sure to come
        descriptor, self.name = tempfile.mkstemp(prefix=f".{self.path.name}.", dir=self.path.parent)
        self.file = os.fdopen(descriptor, "w+b")

    def __enter__(self):
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, self.mask)  # a signal that waited acts here
        except BaseException:
            self.__exit__()
            raise
        return self

    def commit(self):
        self.file.flush()
        mask = os.umask(0)
        os.umask(mask)
        os.fchmod(self.file.fileno(), 0o666 & ~mask)
        os.fsync(self.file.fileno())
        self.file.close()
        os.replace(self.name, self.path)
        self.name = None
        directory = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def __exit__(self, *error):
        if self.name is not None:
            try:
                self.file.close()  # may fail again on a full disk
            except OSError:
                pass
            os.unlink(self.name)


def text_of(path, most=READ_BYTES):
    """The text of a file in pieces, as it is: line ends too."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    done = 0
    with open(path, "rb") as file:
        while True:
            data = file.read(min(most, READ_BYTES))
            before = len(decoder.getstate()[0])
            try:
                text = decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                place = done - before + error.start
                raise Refusal(f"'{path}' is not UTF-8: {error.reason} at byte {place}") from None
            done += len(data)
            if text:
                yield text
            if not data:
                return


def split_at_lines(pieces, separator):
    """Yields (text, ends a document). The separator's lines are left out."""
    if separator is None:
        for text in pieces:
            yield text, False
        yield "", True
        return
    rest, line_starts, something = "", True, False
    for text in pieces:
        lines = (rest + text).split("\n")
        rest = lines.pop()
        for line in lines:
            if line_starts and line.removesuffix("\r") == separator:
                if something:
                    yield "", True
                something = False
            else:
                something = True
                yield line + "\n", False
            line_starts = True
        # What cannot become the separator's line goes on, so that a long line is not kept.
        if not (line_starts and (separator + "\r").startswith(rest)):
            yield rest, False
            rest, line_starts, something = "", False, True
    if rest and not (line_starts and rest.removesuffix("\r") == separator):
        something = True
        yield rest, False
    if something:
        yield "", True


def whole_lines(pieces):
    """The same text in pieces that end with a line, so that no word is cut; a line beyond READ_BYTES is."""
    rest = []
    for text in pieces:
        end = len(text) if sum(map(len, rest)) > READ_BYTES else text.rfind("\n") + 1
        if end > 0:
            yield "".join(rest) + text[:end]
            rest = []
        if end < len(text):
            rest.append(text[end:])
    if rest:
        yield "".join(rest)


def encode(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False).ids


def cut_of(tokenizer, text):
    """Where the text may be cut: the tokens around that place are the same with the cut and without it. 0: nowhere."""
    place, tries = len(text) - AROUND, 0
    while tries < 200:
        place = max(text.rfind("\n", 0, place), text.rfind(" ", 0, place))
        if place <= 0:
            return 0
        for cut in (place, place + 1):
            left, right = text[max(0, cut - AROUND):cut], text[cut:cut + AROUND]
            if encode(tokenizer, left + right) == encode(tokenizer, left) + encode(tokenizer, right):
                return cut
        tries += 1
    return 0


def tokens_of(tokenizer, chunks, end_of_text, piece, name):
    """Yields lists of tokens for chunks as of split_at_lines()."""
    parts, size, wanted = [], 0, piece
    for text, ends in chunks:
        parts.append(text)
        size += len(text)
        if size >= wanted and not ends:
            whole = "".join(parts)
            cut = cut_of(tokenizer, whole)
            if cut > 0:
                yield encode(tokenizer, whole[:cut])
                wanted = piece
            elif size >= MOST_PIECES * piece:
                raise Refusal(f"'{name}' has {size} characters in which each cut changes the tokens; legal are documents "
                              f"(--separator LINE) of less than {MOST_PIECES} times --piece {piece}")
            else:
                wanted = 2 * size
            parts, size = [whole[cut:]], size - cut
        if ends:
            ids = encode(tokenizer, "".join(parts))
            if end_of_text is not None:
                ids = ids + [end_of_text]
            yield ids
            parts, size, wanted = [], 0, piece


def train(paths, options):
    import tokenizers
    special = [] if options.end_of_text is None else [options.end_of_text]
    if not 256 + len(special) <= options.vocabulary <= 1 << 24:
        raise Refusal(f"option --vocabulary is {options.vocabulary}; legal are {256 + len(special)} (all bytes"
                      f"{', --end-of-text' if special else ''}) to {1 << 24}")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=options.vocabulary, special_tokens=special, show_progress=False,
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))
    texts = (text for path, _ in paths
             for text in whole_lines(text for text, _ in split_at_lines(text_of(path), options.separator)))
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer, (tokenizer.to_str(pretty=True) + "\n").encode()


def load(path):
    import tokenizers
    try:
        text = pathlib.Path(path).read_bytes()
        tokenizer = tokenizers.Tokenizer.from_str(text.decode())
    except OSError as error:
        raise Refusal(f"tokenizer '{path}' cannot be read: {error.strerror}") from None
    except Exception as error:  # the package raises Exception itself
        raise Refusal(f"tokenizer '{path}' is no tokenizer.json: {' '.join(str(error).split())}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer, text


def save_tokenizer(path, text):
    """Writes tokenizer.json, unless it is there. Another one is not replaced: other data may name it."""
    if path.exists() or path.is_symlink():
        if path.read_bytes() != text:
            raise Refusal(f"'{path}' is another tokenizer, which files beside it may need; legal is another place: "
                          "--output or --save-tokenizer")
        return
    with NewFile(path) as new:
        new.file.write(text)
        new.commit()


def write_tokens(paths, tokenizer, hashed, options):
    tokenizer.encode_special_tokens = True
    vocabulary = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    if vocabulary < 1:
        raise Refusal("the tokenizer has no tokens")
    end_of_text = None
    if options.end_of_text is not None:
        end_of_text = tokenizer.token_to_id(options.end_of_text)
        if end_of_text is None:
            raise Refusal(f"option --end-of-text: the tokenizer has no token '{options.end_of_text}'")
    width, code = (2, "H") if vocabulary <= 65536 else (4, "I")
    count = 0
    with NewFile(options.output) as new:
        new.file.write(bytes(HEADER_BYTES))
        for path, name in paths:
            chunks = split_at_lines(text_of(path, options.piece), options.separator)
            for ids in tokens_of(tokenizer, chunks, end_of_text, options.piece, name):
                values = array.array(code, ids)
                if sys.byteorder == "big":
                    values.byteswap()
                new.file.write(values.tobytes())
                count += len(ids)
        if count == 0:
            raise Refusal("the text has no tokens")
        new.file.seek(0)
        new.file.write(header(width, count, vocabulary, end_of_text, hashed))
        new.commit()
    return count, vocabulary, width


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("files", nargs="*", default=[], help="text in UTF-8; '-' or none: standard input")
    parser.add_argument("--output", required=True, metavar="OUT.bin", help="the file of tokens")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--vocabulary", type=int, metavar="N", help="train a tokenizer of N tokens, with these files")
    which.add_argument("--tokenizer", metavar="FILE", help="take this tokenizer.json")
    parser.add_argument("--save-tokenizer", metavar="FILE", help="where it goes; default: tokenizer.json beside the output")
    parser.add_argument("--end-of-text", metavar="TOKEN", help="ends each document, such as '<|endoftext|>'")
    parser.add_argument("--separator", metavar="LINE", help="a line that stands between documents; one that begins with -: --separator=LINE")
    parser.add_argument("--piece", type=int, default=1 << 16, metavar="N", help="characters to encode at a time")
    options = parser.parse_args(arguments)
    if options.piece < 2 * AROUND:
        parser.error(f"option --piece is {options.piece}; legal are numbers from {2 * AROUND} on")
    if options.separator is not None and (not options.separator or "\n" in options.separator):
        parser.error("option --separator is one line that is not empty")
    return options


def run(options, directory):
    paths = []
    for name in options.files or ["-"]:
        path = name
        if name == "-":
            path = os.path.join(directory, f"input-{len(paths)}")
            with open(path, "wb") as copy:
                while data := sys.stdin.buffer.read(READ_BYTES):
                    copy.write(data)
        elif not os.path.isfile(name):
            raise Refusal(f"'{name}' is no file")
        paths.append((path, name))
    beside = pathlib.Path(options.output).parent / "tokenizer.json"
    saved = pathlib.Path(options.save_tokenizer) if options.save_tokenizer else beside
    tokenizer, text = load(options.tokenizer) if options.tokenizer else train(paths, options)
    save_tokenizer(saved, text)
    count, vocabulary, width = write_tokens(paths, tokenizer, hashlib.sha256(text).digest(), options)
    print(f"{options.output}: {count} tokens of {width} bytes, vocabulary {vocabulary}, tokenizer {saved}")


def main():
    options = parse(sys.argv[1:])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # removes what is not complete
    try:
        import tokenizers  # noqa: F401
    except ImportError:
        sys.exit("prepare_tokens: the package tokenizers is missing: pip install tokenizers")
    try:
        # On the output's disk: standard input may be larger than /tmp.
        parent = pathlib.Path(options.output).parent
        if parent.exists() and not parent.is_dir():
            raise Refusal(f"'{parent}' is no directory; --output needs one")
        parent.mkdir(parents=True, exist_ok=True)
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        with tempfile.TemporaryDirectory(prefix=".prepare_tokens-", dir=parent) as directory:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            run(options, directory)
    except Refusal as refusal:
        sys.exit(f"prepare_tokens: {refusal}")
    except OSError as error:
        sys.exit(f"prepare_tokens: cannot read or write '{error.filename or options.output}': {error.strerror}")


if __name__ == "__main__":
    main()
