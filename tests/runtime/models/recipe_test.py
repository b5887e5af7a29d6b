"""The guide's recipe on real text, in small: a tokenizer, tokens, training over 2 x 2 ranks, greedy text from the save.

    recipe_test.py SOURCE SLUICE MPIEXEC [MPIEXEC'S OPTIONS ...]

Needs the package `tokenizers` and the text of `docker/install_dependencies.sh data`; exits with 77 (skipped) without. Where
`transformers` can be imported too, it must load the saves and find the same 256 tokens, and models that it writes itself
are trained by --weights and loaded back: the target compare_with_transformers.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

try:
    import tokenizers
except ImportError as error:
    print(f"SKIPPED: {error}")
    sys.exit(77)
try:
    import torch
    import transformers
except ImportError:
    transformers = None

SOURCE, SLUICE, MPIEXEC = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
PROMPT, TOKENS = "In the beginning", 256
VOCABULARY, CONTEXT = 512, 320


def run(*words):
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{words}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def sluice(ranks, *words):
    return run(*MPIEXEC, "-n", ranks, SLUICE, *words)


def make_text(directory):
    if shutil.which("bible") is None:
        print("SKIPPED: the program bible is not installed")
        sys.exit(77)
    run(SOURCE / "docker/make_text.sh", directory / "kjv.txt")
    if transformers is None:
        text = (directory / "kjv.txt").read_text()
        (directory / "kjv.txt").write_text(text[:400_000])


def greedy(ranks, model, ids, *more):
    return sluice(ranks, "generate", "--weights", model, "--temperature", 0, "--tokens", TOKENS, "--stop-ids", "none",
                  "--prompt-ids", " ".join(map(str, ids)), *more)


def compare(model, ids, found):
    """Greedy text of transformers from the same directory."""
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(model, output_loading_info=True)
    assert not any(info.values()), info
    theirs = loaded.eval().generate(torch.tensor([ids]), max_new_tokens=TOKENS, do_sample=False, eos_token_id=None,
                                    pad_token_id=0)[0].tolist()
    same = sum(a == b for a, b in zip(theirs[len(ids):], found[len(ids):]))
    print(f"{pathlib.Path(model).parent.name}: {type(loaded).__name__}, {same} of {TOKENS} tokens equal")
    assert theirs == found, (theirs, found)
    return loaded


def loss_of(loaded, tokens, windows):
    """Mean loss over the windows at the end of the tokens."""
    tokens = tokens[-(windows * CONTEXT + 1):]
    sums = 0.0
    for window in range(windows):
        part = tokens[window * CONTEXT:(window + 1) * CONTEXT + 1]
        logits = loaded(part[None, :-1]).logits[0].double()
        sums += float(torch.nn.functional.cross_entropy(logits, part[1:]).detach())
    return sums / windows


def fine_tune(directory, name, config, ids, ranks=3, layout=()):
    """A model that transformers writes, trained by one line of the guide."""
    torch.manual_seed(1)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory / name, max_shard_size="300KB")
    shutil.copy(directory / "tokenizer.json", directory / name / "tokenizer.json")
    sluice(ranks, "train", "--weights", directory / name, "--data", directory / "kjv.bin", "--context", CONTEXT, "--steps", 40,
           "--batch-size", 8, "--learning-rate", 0.003, "--save", directory / f"{name}-run", *layout)
    save = directory / f"{name}-run" / "step-00000040"
    assert (save / "tokenizer.json").read_bytes() == (directory / "tokenizer.json").read_bytes()
    found = [int(word) for word in greedy(2, save, ids, "--ids").split()]
    loaded = compare(save, ids, found)
    tokens = torch.frombuffer(bytearray((directory / "kjv.bin").read_bytes()[256:]), dtype=torch.uint16).long()
    said = sluice(2, "evaluate", "--weights", save, "--data", directory / "kjv.bin", "--validation-share",
                  (4 * CONTEXT + 1) / len(tokens))
    mine, theirs = float(said.split("loss ")[1].split()[0]), loss_of(loaded, tokens, 4)
    print(f"{name}: loss {mine:.4f}, transformers {theirs:.4f}")
    assert abs(mine - theirs) < 2e-4, (mine, theirs)


def recipe(directory):
    make_text(directory)
    run(sys.executable, SOURCE / "examples/prepare_tokens.py", "--vocabulary", VOCABULARY, directory / "kjv.txt",
        "--output", directory / "kjv.bin")
    sluice(4, "train", "--model", "llama", "--data", directory / "kjv.bin", "--vocabulary", VOCABULARY, "--context", CONTEXT,
           "--pipeline", 2, "--replicas", 2, "--layers", 4, "--width", 64, "--heads", 4, "--kv-heads", 2, "--steps", 40,
           "--batch-size", 8, "--learning-rate", 0.003, "--validation-samples", 4, "--save", directory / "run")
    save = directory / "run" / "step-00000040"
    assert json.loads((save / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    encoder = tokenizers.Tokenizer.from_file(str(save / "tokenizer.json"))
    ids = encoder.encode(PROMPT).ids
    found = [int(word) for word in greedy(1, save, ids, "--ids").split()]
    assert len(found) == len(ids) + TOKENS and found[:len(ids)] == ids
    assert found == [int(word) for word in greedy(3, save, ids, "--ids").split()]
    assert greedy(2, save, ids) == encoder.decode(found) + "\n"
    if transformers is None:
        print("transformers is not installed: its tokens are not compared")
        return
    compare(save, ids, found)
    shape = {"vocab_size": VOCABULARY, "hidden_size": 60, "intermediate_size": 150, "num_hidden_layers": 3,
             "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1000}
    fine_tune(directory, "qwen3", transformers.Qwen3Config(**shape, head_dim=22, tie_word_embeddings=True), ids)
    fine_tune(directory, "llama", transformers.LlamaConfig(**shape, head_dim=14), ids, 4, ("--pipeline", 2, "--tensor", 2))
    fine_tune(directory, "gpt2", transformers.GPT2Config(vocab_size=VOCABULARY, n_embd=60, n_layer=3, n_head=4,
                                                         n_positions=500), ids)


if __name__ == "__main__":
    os.environ.pop("OPENBLAS_CORETYPE", None)
    with tempfile.TemporaryDirectory() as place:
        recipe(pathlib.Path(place))
    print("done")
