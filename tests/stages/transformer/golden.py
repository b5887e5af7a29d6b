#!/usr/bin/env python3
"""Makes golden.json: what transformers computes for small models of the architectures of <sluice/transformer.hpp>.

    pip install torch==2.15.0 transformers==4.57.6 numpy==2.4.6
    tests/stages/transformer/golden.py           # writes golden.json beside itself
    tests/stages/transformer/golden.py --check   # the file has these numbers

golden_transformer_test.cpp compares. Parameters follow from their names in Sluice by a formula, values() here and
there; they are exact in f32. Results are those of the models in double precision, except where transformers itself
takes f32: angles and norms. The loss is the sum over all positions of the cross-entropy of the token after.
"""

import pathlib
import sys

import numpy
import torch
import transformers

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
from golden_files import need, text_of, write_or_check  # noqa: E402

VERSIONS = {"torch": "2.15.0", "transformers": "4.57.6", "numpy": "2.4.6"}
FILE = pathlib.Path(__file__).with_name("golden.json")
SAMPLES, SEQUENCE = 2, 17
KEPT = 12  # of a gradient's numbers, evenly spread
SHAPE = {"layers": 2, "heads": 4, "kv_heads": 2, "width": 20, "mlp_width": 27, "vocabulary": 37, "head_dim": 6,
         "context": 64, "tied": False}


def cases():
    """Of each: the architecture, fields of TransformerConfig besides SHAPE, and transformers' names of them."""
    llama3 = {"kind": "llama3", "factor": 8.0, "low": 1.0, "high": 3.0, "original_context": 24}
    return {
        "gpt2": ("GPT2", {"kind": "gpt2", "kv_heads": 4, "head_dim": 5, "tied": True, "norm_epsilon": 1e-3}, {}),
        "llama": ("Llama", {"norm_epsilon": 1e-6, "rotary_base": 500.0, "tied": True}, {}),
        "llama with all biases": ("Llama", {"qkv_bias": True, "attention_output_bias": True, "mlp_bias": True},
                                  {"attention_bias": True, "mlp_bias": True}),
        "llama with linear scaling": ("Llama", {"rotary_scaling": {"kind": "linear", "factor": 2.5}},
                                      {"rope_scaling": {"rope_type": "linear", "factor": 2.5}}),
        "llama 3": ("Llama", {"rotary_scaling": llama3, "rotary_base": 300.0, "head_dim": 16},
                    {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                                      "high_freq_factor": 3.0, "original_max_position_embeddings": 24}}),
        "mistral": ("Mistral", {"window": 5, "norm_epsilon": 1e-6}, {"sliding_window": 5}),
        "qwen2": ("Qwen2", {"qkv_bias": True, "norm_epsilon": 1e-6, "tied": True, "width": 24}, {}),
        "qwen2 with windows": ("Qwen2", {"qkv_bias": True, "window": 4, "full_layers": [0], "width": 24},
                               {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
        "qwen3": ("Qwen3", {"qk_norm": True, "norm_epsilon": 1e-6, "tied": True, "head_dim": 10}, {}),
        "qwen3 with windows": ("Qwen3", {"qk_norm": True, "window": 6, "full_layers": [1], "head_dim": 10},
                               {"use_sliding_window": True, "sliding_window": 6,
                                "layer_types": ["sliding_attention", "full_attention"]}),
    }


def values(name, shape):
    """A parameter by its name in Sluice."""
    seed = 2166136261
    for byte in name.encode():
        seed = (seed ^ byte) * 16777619 % 2**32
    i = numpy.arange(int(numpy.prod(shape)), dtype=numpy.uint64)
    x = (i * numpy.uint64(2654435761) + numpy.uint64(seed)) % numpy.uint64(2**32)
    x ^= x >> numpy.uint64(15)
    x = x * numpy.uint64(739982445) % numpy.uint64(2**32)
    x ^= x >> numpy.uint64(12)
    unit = (x >> numpy.uint64(12)).astype(numpy.float64) / 2**19 - 1
    made = 1 + unit / 4 if "norm" in name and name.endswith(".weight") else unit / 2
    return torch.from_numpy(made.reshape(shape))


def tokens(shape):
    i = numpy.arange(SAMPLES * SEQUENCE)
    return torch.from_numpy((i * i * 7 + i * 3 + i // SEQUENCE) % shape["vocabulary"]).reshape(SAMPLES, SEQUENCE)


def model_of(architecture, shape, extra):
    kind = lambda part: getattr(transformers, architecture + part)
    if architecture == "GPT2":
        config = kind("Config")(n_layer=shape["layers"], n_head=shape["heads"], n_embd=shape["width"],
                                n_inner=shape["mlp_width"], n_positions=shape["context"],
                                vocab_size=shape["vocabulary"], layer_norm_epsilon=shape["norm_epsilon"],
                                attn_pdrop=0, embd_pdrop=0, resid_pdrop=0, attn_implementation="eager")
        return kind("LMHeadModel")(config).double()
    own_head = {} if architecture == "Qwen2" else {"head_dim": shape["head_dim"]}  # Qwen2: width / heads
    config = kind("Config")(num_hidden_layers=shape["layers"], num_attention_heads=shape["heads"],
                            num_key_value_heads=shape["kv_heads"], hidden_size=shape["width"],
                            intermediate_size=shape["mlp_width"], max_position_embeddings=shape["context"],
                            vocab_size=shape["vocabulary"], tie_word_embeddings=shape["tied"],
                            rms_norm_eps=shape["norm_epsilon"], rope_theta=shape["rotary_base"],
                            attn_implementation="eager", **own_head, **extra)
    return kind("ForCausalLM")(config).double()


class Parameters:
    """Gives a model its values, and the gradients back in Sluice's shapes. `parts`: name in Sluice, then the
    parameters of transformers that it is made of, in rows."""

    def __init__(self, model, shape, architecture):
        self.named, self.transposed, self.parts = dict(model.named_parameters()), set(), {}
        (self.gpt2 if architecture == "GPT2" else self.llama)(shape)
        left = set(self.named) - {part for parts in self.parts.values() for part in parts}
        assert not left, left

    def add(self, name, *modules, transposed=False):
        for kind in ("weight", "bias"):
            parts = [f"{module}.{kind}" for module in modules]
            if parts[0] in self.named:
                self.parts[f"{name}.{kind}"] = parts
                if transposed and kind == "weight":
                    self.transposed.update(parts)

    def gpt2(self, shape):
        self.add("token_embedding", "transformer.wte")
        self.add("position_embedding", "transformer.wpe")
        for i in range(shape["layers"]):
            mine, theirs = f"blocks.{i}", f"transformer.h.{i}"
            self.add(f"{mine}.norm1", f"{theirs}.ln_1")
            self.add(f"{mine}.attention.qkv", f"{theirs}.attn.c_attn", transposed=True)
            self.add(f"{mine}.attention.output", f"{theirs}.attn.c_proj", transposed=True)
            self.add(f"{mine}.norm2", f"{theirs}.ln_2")
            self.add(f"{mine}.mlp.up", f"{theirs}.mlp.c_fc", transposed=True)
            self.add(f"{mine}.mlp.down", f"{theirs}.mlp.c_proj", transposed=True)
        self.add("final_norm", "transformer.ln_f")

    def llama(self, shape):
        self.add("token_embedding", "model.embed_tokens")
        for i in range(shape["layers"]):
            mine, theirs = f"blocks.{i}", f"model.layers.{i}"
            self.add(f"{mine}.norm1", f"{theirs}.input_layernorm")
            self.add(f"{mine}.attention.qkv", *(f"{theirs}.self_attn.{x}_proj" for x in "qkv"))
            self.add(f"{mine}.attention.query_norm", f"{theirs}.self_attn.q_norm")
            self.add(f"{mine}.attention.key_norm", f"{theirs}.self_attn.k_norm")
            self.add(f"{mine}.attention.output", f"{theirs}.self_attn.o_proj")
            self.add(f"{mine}.norm2", f"{theirs}.post_attention_layernorm")
            self.add(f"{mine}.mlp.gate_up", f"{theirs}.mlp.gate_proj", f"{theirs}.mlp.up_proj")
            self.add(f"{mine}.mlp.down", f"{theirs}.mlp.down_proj")
        self.add("final_norm", "model.norm")
        self.add("head", "lm_head")

    def turned(self, part, tensor):
        return tensor.T if part in self.transposed else tensor

    def fill(self):
        with torch.no_grad():
            for name, parts in self.parts.items():
                shapes = [self.turned(part, self.named[part]).shape for part in parts]
                whole = values(name, (sum(shape[0] for shape in shapes), *shapes[0][1:]))
                for part, piece in zip(parts, whole.split([shape[0] for shape in shapes])):
                    self.named[part].copy_(self.turned(part, piece))

    def gradients(self):
        return {name: torch.cat([self.turned(part, self.named[part].grad) for part in parts])
                for name, parts in self.parts.items()}


def rounded(tensor):
    return [float(f"{value:.7g}") for value in tensor.flatten().tolist()]


def gradient_case(gradient):
    flat = gradient.flatten()
    return {"shape": list(gradient.shape), "norm": rounded(flat.norm())[0],
            "values": rounded(flat[::max(1, len(flat) // KEPT)])}


def case(architecture, fields, extra):
    shape = {**SHAPE, "kind": "llama", "norm_epsilon": 1e-5, "rotary_base": 10000.0, **fields}
    if architecture == "GPT2":
        del shape["rotary_base"]
    model = model_of(architecture, shape, extra)
    parameters = Parameters(model, shape, architecture)
    parameters.fill()
    inputs = tokens(shape)
    targets = inputs.roll(-1, dims=1)
    logits = model(inputs).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    loss.backward()
    if architecture in ("GPT2", "Qwen2"):
        assert shape["width"] == shape["heads"] * shape["head_dim"]
        shape["head_dim"] = 0
    return {"config": shape, "tokens": inputs.flatten().tolist(), "targets": targets.flatten().tolist(),
            "loss": rounded(loss)[0], "logits": rounded(logits[:, ::3]),
            "gradients": {name: gradient_case(each) for name, each in parameters.gradients().items()}}


def main():
    need(VERSIONS)
    torch.set_num_threads(1)
    everything = {"made by": "tests/stages/transformer/golden.py", **VERSIONS, "samples": SAMPLES,
                  "sequence": SEQUENCE, "logits of every": 3, "models": {name: case(*each)
                                                                        for name, each in cases().items()}}
    write_or_check({FILE: text_of(everything) + "\n"}, __doc__)


if __name__ == "__main__":
    main()
