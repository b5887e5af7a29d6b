#!/usr/bin/env python3
"""Makes golden.json: config.json, tensors, logits and 20 AdamW steps of small models of transformers.

    pip install torch==2.15.0 transformers==4.57.6 numpy==2.4.6
    tests/runtime/models/golden.py           # writes golden.json beside itself
    tests/runtime/models/golden.py --check   # the file has these numbers

hugging_face_training_test.cpp writes each model's directory, with values that follow from the tensors' names by the
formula of tests/stages/transformer/golden.py, rounded to the type of the files, and compares. Models run in double
precision, except where transformers itself takes f32.
"""

import json
import pathlib
import sys
import tempfile

import torch
import transformers

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "stages" / "transformer"))
import golden as by_name  # noqa: E402

FILE = HERE / "golden.json"
VOCABULARY, SAMPLES, SEQUENCE, STEPS = 37, 4, 11, 20
ADAMW = {"lr": 0.003, "betas": (0.9, 0.95), "eps": 1e-6}
DECAY, CLIP = 0.1, 1.0
SHAPE = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 20,
         "intermediate_size": 27, "vocab_size": VOCABULARY, "max_position_embeddings": 29}
GPT2 = {"n_layer": 2, "n_head": 4, "n_embd": 20, "n_positions": 29, "vocab_size": VOCABULARY, "attn_pdrop": 0,
        "embd_pdrop": 0, "resid_pdrop": 0, "bos_token_id": 0, "eos_token_id": 0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 3.0,
          "original_max_position_embeddings": 24}

# Architecture, type of the files, fields.
CASES = {
    "gpt2": ("GPT2LMHead", "float32", GPT2),
    "gpt2 untied": ("GPT2LMHead", "bfloat16",
                    {**GPT2, "n_inner": 33, "layer_norm_epsilon": 1e-3, "tie_word_embeddings": False}),
    "llama": ("LlamaForCausal", "float16", {**SHAPE, "hidden_size": 24, "rms_norm_eps": 1e-5}),
    "llama 3": ("LlamaForCausal", "float32",
                {**SHAPE, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "head_dim": 6,
                 "rope_theta": 500000.0, "rope_scaling": LLAMA3}),
    "llama linear": ("LlamaForCausal", "bfloat16",
                     {**SHAPE, "head_dim": 6, "rope_scaling": {"rope_type": "linear", "factor": 2.5}}),
    "mistral": ("MistralForCausal", "float32", {**SHAPE, "head_dim": 6, "sliding_window": 5}),
    "qwen2": ("Qwen2ForCausal", "float32",
              {**SHAPE, "hidden_size": 24, "tie_word_embeddings": True, "use_sliding_window": True,
               "sliding_window": 4, "max_window_layers": 1}),
    "qwen3": ("Qwen3ForCausal", "bfloat16", {**SHAPE, "head_dim": 10, "tie_word_embeddings": True}),
    "qwen3 windows": ("Qwen3ForCausal", "float32",
                      {**SHAPE, "head_dim": 10, "use_sliding_window": True, "sliding_window": 6,
                       "layer_types": ["sliding_attention", "full_attention"]}),
}


def values(name, shape):
    """As tests/stages/transformer/golden.py, which knows a gain by "norm" in its name."""
    gain = name.endswith(".weight") and ("norm" in name or "ln_" in name)
    return by_name.values(name.replace("ln_", "norm_") if gain else name, shape)


def model_of(architecture, dtype, fields):
    config = getattr(transformers, architecture.removesuffix("LMHead").removesuffix("ForCausal") + "Config")
    model = getattr(transformers, architecture + ("Model" if architecture.endswith("Head") else "LM"))(
        config(**fields, attn_implementation="eager"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Parameters alone: frequencies of rotary positions are no part of the files.
            parameter.copy_(values(name, parameter.shape).to(getattr(torch, dtype)))
    return model


def batch(step):
    i = torch.arange(SAMPLES * (SEQUENCE + 1))
    tokens = (i * i * 7 + i * 3 + i // (SEQUENCE + 1) + step * 5) % VOCABULARY
    tokens = tokens.reshape(SAMPLES, SEQUENCE + 1)
    return tokens[:, :-1], tokens[:, 1:]


def train(model):
    decays = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW([{"params": decays, "weight_decay": DECAY}, {"params": others, "weight_decay": 0}],
                                  **ADAMW)
    losses, norms = [], []
    for step in range(STEPS):
        x, y = batch(step)
        loss = torch.nn.functional.cross_entropy(model(x).logits.flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        losses.append(loss.item())
        optimizer.step()
    return losses, norms


def rounded(numbers, digits=8):
    return [float(f"{float(x):.{digits}g}") for x in numbers]


def measure(architecture, dtype, fields):
    model = model_of(architecture, dtype, fields)
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        config = json.loads((pathlib.Path(directory) / "config.json").read_text())
    tied = model.config.tie_word_embeddings
    tensors = {name: list(p.shape) for name, p in model.state_dict().items()
               if not (tied and name == "lm_head.weight")}
    model = model.double()
    logits = model(batch(0)[0][:1]).logits.detach().flatten()
    losses, norms = train(model)
    return {"dtype": {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}[dtype], "config": config,
            "tensors": tensors, "logits": rounded(logits, 7), "losses": rounded(losses), "norms": rounded(norms)}


def main():
    transformers.logging.set_verbosity_error()
    versions = {"torch": torch.__version__.split("+")[0], "transformers": transformers.__version__}
    models = {name: measure(*case) for name, case in CASES.items()}
    data = {"versions": versions, "vocabulary": VOCABULARY, "samples": SAMPLES, "sequence": SEQUENCE,
            "adamw": {**ADAMW, "betas": list(ADAMW["betas"]), "decay": DECAY, "clip": CLIP}, "models": models}
    if "--check" not in sys.argv[1:]:
        FILE.write_text(json.dumps(data) + "\n")
        return 0
    saved = json.loads(FILE.read_text())
    for name, model in models.items():
        for kind in ("logits", "losses", "norms"):
            worst = max(abs(a - b) / max(1, abs(b)) for a, b in zip(model[kind], saved["models"][name][kind]))
            print(f"{name}: {kind} differ by {worst:.1e}")
            if worst > 1e-6:
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
