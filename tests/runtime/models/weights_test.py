#!/usr/bin/env python3
"""Models of Hugging Face through the program: training from them, saves, restarts, export, refusals.

    weights_test.py SLUICE MPIEXEC

Writes small directories itself; needs the standard library alone. One mpirun each, on 1 to 4 ranks.
"""

import json
import math
import os
import pathlib
import random
import shutil
import struct
import subprocess
import sys
import tempfile
import unittest

MPIEXEC, SLUICE = sys.argv.pop(), sys.argv.pop()
V, W, LAYERS, HEADS, HIDDEN = 256, 24, 3, 4, 40
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": W, "num_hidden_layers": LAYERS,
         "num_attention_heads": HEADS, "num_key_value_heads": 2, "intermediate_size": HIDDEN, "vocab_size": V,
         "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "bos_token_id": 1, "eos_token_id": 2,
         "initializer_range": 0.5}
QWEN3 = {**LLAMA, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 10,
         "tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
GPT2 = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": W, "n_layer": LAYERS, "n_head": HEADS,
        "n_positions": 64, "vocab_size": V}
DATA = ["--context", "16", "--batch-size", "8", "--micro-batch-size", "2", "--learning-rate", "0.01", "--seed", "3"]


def llama_tensors(config):
    head = config.get("head_dim", W // HEADS)
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], W), "model.norm.weight": (W,)}
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (config["vocab_size"], W)
    for i in range(LAYERS):
        at = f"model.layers.{i}"
        shapes |= {f"{at}.input_layernorm.weight": (W,), f"{at}.post_attention_layernorm.weight": (W,),
                   f"{at}.self_attn.q_proj.weight": (HEADS * head, W), f"{at}.self_attn.k_proj.weight": (2 * head, W),
                   f"{at}.self_attn.v_proj.weight": (2 * head, W), f"{at}.self_attn.o_proj.weight": (W, HEADS * head),
                   f"{at}.mlp.gate_proj.weight": (HIDDEN, W), f"{at}.mlp.up_proj.weight": (HIDDEN, W),
                   f"{at}.mlp.down_proj.weight": (W, HIDDEN)}
        if config["model_type"] == "qwen3":
            shapes |= {f"{at}.self_attn.q_norm.weight": (head,), f"{at}.self_attn.k_norm.weight": (head,)}
    return shapes


def gpt2_tensors(_):
    shapes = {"transformer.wte.weight": (V, W), "transformer.wpe.weight": (64, W), "transformer.ln_f.weight": (W,),
              "transformer.ln_f.bias": (W,)}
    for i in range(LAYERS):
        for name, shape in {"ln_1": (W,), "ln_2": (W,), "attn.c_attn": (W, 3 * W), "attn.c_proj": (W, W),
                            "mlp.c_fc": (W, 4 * W), "mlp.c_proj": (4 * W, W)}.items():
            shapes[f"transformer.h.{i}.{name}.weight"] = shape
            shapes[f"transformer.h.{i}.{name}.bias"] = shape[-1:]
    return shapes


def write_tensors(path, shapes):
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, shape in shapes.items():
        draw, size = random.Random(name), 1
        for each in shape:
            size *= each
        gain = "norm" in name or ".ln_" in name
        values = struct.pack(f"<{size}f", *(draw.uniform(-0.3, 0.3) + (1 if gain else 0) for _ in range(size)))
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [len(data), len(data) + len(values)]}
        data += values
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def model(directory, config, parts=2):
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    shapes = (gpt2_tensors if config["model_type"] == "gpt2" else llama_tensors)(config)
    names, file_of = sorted(shapes), {}
    for part in range(parts):
        file = f"model-{part + 1:05}-of-{parts:05}.safetensors"
        write_tensors(directory / file, {name: shapes[name] for name in names[part::parts]})
        file_of |= {name: file for name in names[part::parts]}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": file_of}))
    return directory


class Weights(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.place = pathlib.Path(directory.name)
        draw = random.Random(7)
        (self.place / "text.txt").write_text("".join(draw.choice("in the beginning god ") for _ in range(6000)))

    def call(self, ranks, *words, code=0):
        launch = [] if ranks == 0 else [MPIEXEC, "-n", str(ranks)]
        done = subprocess.run([*launch, SLUICE, *map(str, words)], cwd=self.place, capture_output=True, text=True,
                              timeout=100)
        self.assertEqual(done.returncode, code, f"{words}\n{done.stdout}{done.stderr}")
        if code == 0:
            return done.stdout
        lines = [line for line in done.stderr.splitlines() if line.startswith("sluice: error: ")]
        self.assertEqual(len(lines), 1, done.stderr)
        return lines[0]

    def train(self, ranks, *words, data="text.txt", steps=4, code=0):
        return self.call(ranks, "train", "--data", data, *DATA, "--steps", steps, *words, code=code)

    def digest(self, directory):
        return self.call(0, "digest", directory).splitlines()[-1]

    def tokens(self, directory, ranks=0):
        return self.call(ranks, "generate", "--weights", directory, "--prompt-ids", "9 8 7", "--tokens", 12, "--ids",
                         "--temperature", 0, "--stop-ids", "none")

    def test_every_layout_gives_the_bits_of_one_rank_and_hands_the_model_back(self):
        for name, config in {"llama": LLAMA, "qwen3": QWEN3, "gpt2": GPT2}.items():
            with self.subTest(name):
                model(self.place / name, config)
                (self.place / name / "tokenizer_config.json").write_text('{"a": 1}')
                digests = set()
                for ranks in (1, 3):
                    self.train(ranks, "--weights", name, "--save", f"{name}-{ranks}")
                    digests.add(self.digest(f"{name}-{ranks}"))
                self.assertEqual(len(digests), 1)
                self.train(4, "--weights", name, "--save", f"{name}-4", "--pipeline", 2, "--replicas", 2)
                step = self.place / f"{name}-4" / "step-00000004"
                written = json.loads((step / "config.json").read_text())
                self.assertEqual({key: written[key] for key in config}, config)
                self.assertEqual((step / "tokenizer_config.json").read_text(), '{"a": 1}')
                self.assertTrue((step / "generation_config.json").exists())
                self.assertEqual(self.tokens(f"{name}-4"), self.tokens(step, ranks=3))
                # Another program's directory again, from the save and by the command.
                shutil.copytree(step, self.place / f"{name}-copy", ignore=shutil.ignore_patterns("state.json", "optim*"))
                self.call(0, "export", f"{name}-4", f"{name}-out")
                for other in ("copy", "out"):
                    self.assertEqual(self.digest(f"{name}-{other}"), self.digest(step))
                    self.assertEqual(self.tokens(f"{name}-{other}"), self.tokens(step))
                self.assertIn(config["architectures"][0], self.call(0, "inspect", f"{name}-out"))

    def test_rounded_saves_resume_with_their_bits(self):
        model(self.place / "m", QWEN3)
        self.train(2, "--weights", "m", "--save", "whole")
        self.train(2, "--weights", "m", "--save", "run", "--save-every", 2, "--keep", 9, "--save-precision", "bf16")
        self.assertEqual(self.digest("run"), self.digest("whole"))
        shutil.rmtree(self.place / "run" / "step-00000004")
        self.call(3, "train", "--resume", "run")
        self.assertEqual(self.digest("run"), self.digest("whole"))
        listed = self.call(0, "inspect", "run")
        self.assertIn("bf16", listed)
        self.call(0, "export", "run", "exact", "--precision", "fp32")
        self.assertEqual(self.digest("exact"), self.digest("whole"))
        self.call(0, "export", "run", "rounded")
        self.assertNotEqual(self.digest("rounded"), self.digest("whole"))
        self.assertEqual(self.tokens("rounded"), self.tokens("run"))
        self.assertIn("ok", self.call(0, "verify", "run"))

    def test_ranges_of_one_state_are_one_tensor_of_inspect(self):
        model(self.place / "m", {**LLAMA, "vocab_size": 2000})  # two matrices of three blocks
        for shard in ("none", "optimizer"):
            self.train(2, "--weights", "m", "--save", shard, "--replicas", 2, "--shard", shard)
        self.assertIn('"range"', (self.place / "optimizer" / "step-00000004" / "state.json").read_text())
        whole, divided = (self.call(0, "inspect", shard).splitlines()[-1] for shard in ("none", "optimizer"))
        self.assertIn("state of the optimizer: ", whole)
        self.assertEqual(divided, whole)

    def test_weights_count_for_the_first_start_alone(self):
        model(self.place / "m", GPT2)
        words = ("--weights", "m", "--save", "run", "--save-every", 2, "--resume", "auto")
        self.assertIn("starting from the weights of 'm'", self.train(2, *words))
        before = self.digest("run")
        shutil.rmtree(self.place / "run" / "step-00000004")
        shutil.rmtree(self.place / "m")
        self.assertIn("going on after step 2", self.train(2, *words))
        self.assertEqual(self.digest("run"), before)
        # A save's weights, in a run of its own.
        for source in ("run", "run/step-00000002"):
            self.train(2, "--weights", source, "--save", "next", "--overwrite", steps=1)
        self.assertEqual(json.loads((self.place / "next/step-00000001/config.json").read_text())["n_positions"], 64)

    def test_ranks_that_share_a_stage_have_one_model(self):
        # As on two hosts: each rank has a folder of its own.
        for rank in ("0", "1"):
            (self.place / rank).mkdir()
            model(self.place / rank / "m", LLAMA, parts=1)
        file = self.place / "1" / "m" / "model-00001-of-00001.safetensors"
        sound = bytearray(file.read_bytes())
        at = 8 + struct.unpack("<Q", sound[:8])[0]
        entries = json.loads(sound[8:at])
        own = ["sh", "-c", 'cd "$OMPI_COMM_WORLD_RANK" && exec "$@"', "sh"]
        train = ("train", "--data", "../text.txt", *DATA, "--steps", 2, "--weights", "m", "--tensor", 2, "--check-replicas", 1)
        for name, legal in ((None, True), ("model.layers.1.post_attention_layernorm.weight", False)):
            if name:
                sound[at + entries[name]["data_offsets"][0]] ^= 1  # the last bit of its first element
                file.write_bytes(sound)
            done = subprocess.run([MPIEXEC, "-n", "2", *own, SLUICE, *map(str, train)], cwd=self.place, capture_output=True,
                                  text=True, timeout=100)
            self.assertEqual(done.returncode, 0 if legal else 5, done.stderr)
        lines = [line for line in done.stderr.splitlines() if line.startswith("sluice: error: ")]
        self.assertRegex(lines[0], r"tensor '.*1.*norm.*' in 'm' differs between rank 0 on host '.*' and rank 1 on host '.*'")
        self.assertEqual(len(lines), 1, done.stderr)

    def refused(self, code, parts, *words, ranks=2):
        line = self.call(ranks, *words, code=code)
        for part in parts:
            self.assertIn(part, line)

    def test_contradictions_and_damage_are_named(self):
        model(self.place / "m", LLAMA)
        train = ("train", "--data", "text.txt", *DATA, "--steps", "1")
        self.refused(2, ["--layers", "5", "'m' has 3"], *train, "--weights", "m", "--layers", 5)
        self.refused(2, ["--model", "--weights"], *train, "--model", "auto")
        self.refused(2, ["--save-precision", "--save DIR"], *train, "--weights", "m", "--save-precision", "bf16")
        self.refused(2, ["--context 100", "64"], *train[:3], "--context", 100, "--steps", 1, "--weights", "m")
        self.refused(5, ["nowhere"], *train, "--weights", "nowhere")
        self.train(1, "--weights", "m", "--model", "auto", "--layers", "3", "--save", "run", steps=1)
        self.refused(4, ["not empty"], "export", "run", "m", ranks=0)
        config = self.place / "m" / "config.json"
        for change, parts in (({"architectures": ["Bloom"]}, ["'Bloom'", "LlamaForCausalLM"]),
                              ({"hidden_act": "gelu"}, ["'hidden_act'", "silu"]),
                              ({"rope_scaling": {"rope_type": "yarn", "factor": 2}}, ["'yarn'", "llama3"]),
                              ({"vocab_size": 300}, ["model.embed_tokens.weight", "[300, 24]"])):
            config.write_text(json.dumps({**LLAMA, **change}))
            self.refused(5, parts, *train, "--weights", "m")
        config.write_text(json.dumps(LLAMA))
        for name, parts in (("extra.weight", ["'extra.weight'", "model-00003"]), (None, ["model-00003", "does not name"])):
            write_tensors(self.place / "m" / "model-00003-of-00003.safetensors", {name or "x": (2, 2)})
            index = self.place / "m" / "model.safetensors.index.json"
            sound = json.loads(index.read_text())
            if name:
                index.write_text(json.dumps({"weight_map": {**sound["weight_map"],
                                                            name: "model-00003-of-00003.safetensors"}}))
            self.refused(5, parts, *train, "--weights", "m")
            index.write_text(json.dumps(sound))
        (self.place / "m" / "model-00003-of-00003.safetensors").unlink()
        part = self.place / "m" / "model-00001-of-00002.safetensors"
        part.write_bytes(part.read_bytes()[:-10])
        self.refused(5, ["model-00001-of-00002.safetensors"], *train, "--weights", "m")
        self.refused(5, ["model-00001-of-00002.safetensors"], "generate", "--weights", "m")

    def test_a_config_that_cannot_be_read_is_named(self):
        model(self.place / "m", LLAMA)
        config, generation = self.place / "m" / "config.json", self.place / "m" / "generation_config.json"
        train = ("train", "--data", "text.txt", *DATA, "--steps", "1", "--weights", "m")
        sound = json.dumps(LLAMA)
        for text, part in ((sound + " " * (20 << 20), "legal are at most"), (sound[:-1] + ', "a": ' + "[" * 100000, "50 levels"),
                           (sound[:-1] + ', "a": ' + "[" * 60 + "]" * 60 + "}", "50 levels"), ("", "50 levels"),
                           ("{}", "'model_type'")):
            config.write_text(text)
            self.refused(5, ["'m/config.json'", part], *train, ranks=0)
            self.refused(5, ["'m/config.json'", part], "inspect", "m", ranks=0)
            shown = subprocess.run([SLUICE, "inspect", "m"], cwd=self.place, capture_output=True, text=True, check=False)
            self.assertEqual(shown.stdout, "")
            self.refused(5, ["'m/config.json'", part], "export", "m", "out", ranks=0)
        # Nobody writes to a pipe: a reader must not wait for it.
        config.unlink()
        os.mkfifo(config)
        self.refused(5, ["'m/config.json'", "regular"], *train)
        self.refused(5, ["'m/config.json'", "regular"], "generate", "--weights", "m", ranks=0)
        config.unlink()
        config.write_text(sound)
        os.mkfifo(generation)
        self.tokens("m")
        generation.unlink()
        generation.symlink_to("/dev/zero")
        self.tokens("m")

    def test_missing_tensors_and_weights_are_named(self):
        model(self.place / "m", LLAMA, parts=1)
        only = self.place / "m" / "model-00001-of-00001.safetensors"
        only.rename(self.place / "m" / "model.safetensors")
        (self.place / "m" / "model.safetensors.index.json").unlink()
        self.tokens("m")
        shapes = llama_tensors(LLAMA)
        del shapes["model.layers.1.mlp.up_proj.weight"]
        write_tensors(self.place / "m" / "model.safetensors", shapes)
        train = ("train", "--data", "text.txt", *DATA, "--steps", "1", "--weights", "m")
        self.refused(5, ["'m'", "'model.layers.1.mlp.up_proj.weight'", "[40, 24]"], *train)
        with open(self.place / "m" / "model.safetensors", "wb") as file:
            file.write(struct.pack("<Q", 1 << 40))
            file.truncate(1 << 41)
        self.refused(5, ["m/model.safetensors", "100000000"], *train, ranks=0)
        (self.place / "m" / "model.safetensors").unlink()
        (self.place / "m" / "pytorch_model.bin").touch()
        self.refused(5, ["'m'", "pytorch_model.bin", "safetensors"], *train)

    def test_an_export_is_trained_like_its_save(self):
        model(self.place / "m", GPT2)
        self.train(2, "--weights", "m", "--save", "run", steps=1)
        for source, out in (("run", "from-save"), ("out", "from-export")):
            if source == "out":
                self.call(0, "export", "run", "out")
            self.train(2, "--weights", source, "--save", out, steps=2)
        self.assertEqual(self.digest("from-save"), self.digest("from-export"))

    def test_an_export_that_cannot_be_written_leaves_nothing(self):
        model(self.place / "m", LLAMA)
        (self.place / "made").mkdir()
        limited = ["bash", "-c", "trap '' XFSZ; ulimit -f 16; exec \"$@\"", "bash", SLUICE, "export", "m"]
        for out, left in (("new", None), ("made", [])):
            done = subprocess.run([*limited, out], cwd=self.place, capture_output=True, text=True, check=False)
            self.assertEqual(done.returncode, 4, done.stderr)
            self.assertIn(f"{out}/model.safetensors", done.stderr)
            self.assertEqual(list((self.place / out).iterdir()) if (self.place / out).exists() else None, left)
            self.call(0, "export", "m", out)

    # Beside the parameters: the largest tensor and what a small model takes.
    def test_generating_takes_the_memory_of_the_parameters(self):
        small, large = self.place / "small", self.place / "large"
        model(small, LLAMA)
        width, hidden, vocabulary, layers = 512, 2048, 8192, 6
        config = {**LLAMA, "hidden_size": width, "intermediate_size": hidden, "vocab_size": vocabulary,
                  "num_hidden_layers": layers, "num_key_value_heads": HEADS, "torch_dtype": "bfloat16"}
        at = "model.layers.{}."
        shapes = {"model.embed_tokens.weight": (vocabulary, width), "lm_head.weight": (vocabulary, width),
                  "model.norm.weight": (width,)}
        for i in range(layers):
            shapes |= {f"{at.format(i)}{name}.weight": shape for name, shape in {
                "input_layernorm": (width,), "post_attention_layernorm": (width,),
                **{f"self_attn.{each}_proj": (width, width) for each in "qkvo"},
                "mlp.gate_proj": (hidden, width), "mlp.up_proj": (hidden, width),
                "mlp.down_proj": (width, hidden)}.items()}
        large.mkdir()
        (large / "config.json").write_text(json.dumps(config))
        header, elements = {}, 0
        for name, shape in shapes.items():
            size = math.prod(shape)
            header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [2 * elements, 2 * (elements + size)]}
            elements += size
        text = json.dumps(header).encode()
        with open(large / "model.safetensors", "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + 2 * elements)

        def peak(directory):
            child = subprocess.Popen([SLUICE, "generate", "--weights", directory, "--prompt-ids", "9 8 7", "--tokens",
                                      "2", "--ids"], stdout=subprocess.DEVNULL)
            _, status, used = os.wait4(child.pid, 0)
            child.returncode = os.waitstatus_to_exitcode(status)
            self.assertEqual(child.returncode, 0)
            return used.ru_maxrss << 10

        spare = 12 << 20  # activations, logits, and the largest matmuls' workspace
        self.assertLess(peak(large) - peak(small), 4 * (elements + vocabulary * width) + spare)

    def test_a_changed_file_beside_the_weights_is_found(self):
        model(self.place / "m", LLAMA)
        (self.place / "m" / "tokenizer.json").write_text('{"version": "1.0"}')
        text = (self.place / "text.txt").read_text()
        (self.place / "text.bin").write_bytes(text.encode("utf-16-le"))  # numbers of 16 bits, as in nanoGPT's files
        self.train(2, "--weights", "m", "--save", "run", data="text.bin", steps=1)
        for name in ("config.json", "tokenizer.json"):
            file = self.place / "run/step-00000001" / name
            sound = file.read_text()
            file.write_text(sound.replace("1", "2", 1))
            done = subprocess.run([SLUICE, "verify", "run"], cwd=self.place, capture_output=True, text=True)
            self.assertEqual(done.returncode, 5)
            self.assertIn(f"step-00000001/{name}'", done.stdout)
            self.assertIn(name, self.call(2, "train", "--resume", "run", "--steps", 2, code=5))
            file.write_text(sound)
        self.assertIn("ok", self.call(0, "verify", "run"))


if __name__ == "__main__":
    os.environ["OMPI_MCA_btl"] = "^tcp,ofi"  # looking for fabrics takes ofi a second a start
    unittest.main(verbosity=2)
