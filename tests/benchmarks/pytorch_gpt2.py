"""GPT-2 trained by PyTorch 2 on one GPU, for comparison with gpu_benchmark's training row: the same
sizes and random tokens, bf16 autocast over fp32 weights, torch.compile, flash attention through
scaled_dot_product_attention, fused AdamW. Prints one JSON line; exit code 77: no PyTorch or no GPU.

    python3 tests/benchmarks/pytorch_gpt2.py --model 124m --micro-batch 32

A micro-batch whose logits a 32-bit index cannot count is halved until one can; the line says which it is.
"""

import argparse
import json
import statistics
import sys
import time

MODELS = {  # layers, heads, width, samples per step
    "124m": (12, 12, 768, 64),
    "1.5b": (48, 25, 1600, 16),
}
MOST_LOGITS = 2**31 - 1
PEAK_FLOPS = 989e12  # dense bf16 of an H100 or H200


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="124m")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--heads", type=int)
    parser.add_argument("--width", type=int)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=50304)
    parser.add_argument("--batch", type=int, help="samples per step")
    parser.add_argument("--micro-batch", type=int, required=True, help="samples")
    parser.add_argument("--rounds", type=int, default=3, help="timed turns; the median counts")
    parser.add_argument("--steps", type=int, default=4, help="steps of a turn")
    parser.add_argument("--attention", choices=("flash", "cudnn", "any"), default="flash")
    parser.add_argument("--device", default="cuda", help="cpu tries the program, not its speed")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--json", help="append the line to this file as well")
    options = parser.parse_args()
    defaults = MODELS[options.model]
    for name, value in zip(("layers", "heads", "width", "batch"), defaults):
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.batch % options.micro_batch:
        parser.error(f"--micro-batch {options.micro_batch} does not divide --batch {options.batch}")
    while options.micro_batch * options.context * options.vocabulary > MOST_LOGITS:
        if options.micro_batch % 2:
            parser.error(f"--micro-batch {options.micro_batch} has more than {MOST_LOGITS} logits and cannot be halved")
        options.micro_batch //= 2
    return options


OPTIONS = parse()
try:
    import torch
    from torch import nn
    from torch.nn import functional
except ImportError as missing:
    print(f"no PyTorch: {missing}", file=sys.stderr)
    sys.exit(77)


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        samples, sequence, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(samples, sequence, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.output(mixed.transpose(1, 2).reshape(samples, sequence, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Gpt2(nn.Module):
    def __init__(self, options):
        super().__init__()
        self.tokens = nn.Embedding(options.vocabulary, options.width)
        self.positions = nn.Embedding(options.context, options.width)
        self.blocks = nn.ModuleList(
            Block(options.width, options.heads) for _ in range(options.layers))
        self.norm = nn.LayerNorm(options.width)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens, targets):
        x = self.tokens(tokens) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        logits = functional.linear(self.norm(x), self.tokens.weight)  # tied
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def choose_attention(name):
    if name == "any":
        return
    cuda = torch.backends.cuda
    cuda.enable_flash_sdp(name == "flash")
    cuda.enable_cudnn_sdp(name == "cudnn")
    cuda.enable_mem_efficient_sdp(False)
    cuda.enable_math_sdp(False)


class Training:
    def __init__(self, options):
        self.options = options
        torch.manual_seed(1)
        torch.set_float32_matmul_precision("high")
        self.model = Gpt2(options).to(options.device)
        self.parameters = sum(p.numel() for p in self.model.parameters())
        self.loss_of = self.model if options.no_compile else torch.compile(self.model)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-5, betas=(0.9, 0.95), weight_decay=0.0,
            fused=options.device == "cuda")
        self.loss = 0.0

    def step(self):
        options = self.options
        shape = (options.micro_batch, options.context)
        pieces = options.batch // options.micro_batch
        for _ in range(pieces):
            tokens = torch.randint(min(50257, options.vocabulary), shape, device=options.device)
            with torch.autocast(options.device, dtype=torch.bfloat16):
                self.loss = self.loss_of(tokens, tokens) / pieces
            self.loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def drain(self):
        if self.options.device == "cuda":
            torch.cuda.synchronize()

    def seconds_per_step(self):
        self.drain()
        start = time.perf_counter()
        for _ in range(self.options.steps):
            self.step()
        self.drain()
        return (time.perf_counter() - start) / self.options.steps


def main():
    if OPTIONS.device == "cuda" and not torch.cuda.is_available():
        print("no GPU that PyTorch can use", file=sys.stderr)
        return 77
    if OPTIONS.device == "cuda":
        choose_attention(OPTIONS.attention)
    training = Training(OPTIONS)
    for _ in range(3):  # compiles
        training.step()
    seconds = statistics.median(training.seconds_per_step() for _ in range(OPTIONS.rounds))
    speed = OPTIONS.batch * OPTIONS.context / seconds
    flops = 6 * training.parameters + 6 * OPTIONS.layers * OPTIONS.width * OPTIONS.context
    line = json.dumps({
        "benchmark": "PyTorch: training",
        "pytorch": torch.__version__,
        "gpu": torch.cuda.get_device_name() if OPTIONS.device == "cuda" else "none",
        "rows": [{
            "model": OPTIONS.model,
            "parameters": training.parameters,
            "samples": OPTIONS.batch,
            "micro-batch": OPTIONS.micro_batch,
            "attention": OPTIONS.attention,
            "compiled": not OPTIONS.no_compile,
            "tokens/s": speed,
            "share of 989 TFLOP/s": speed * flops / PEAK_FLOPS,
            "ms per step": seconds * 1e3,
            "loss": float(training.loss.detach()) * (OPTIONS.batch // OPTIONS.micro_batch),
        }],
    })
    print(line)
    if OPTIONS.json:
        with open(OPTIONS.json, "a", encoding="utf-8") as out:
            out.write(line + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
