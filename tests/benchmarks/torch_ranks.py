"""A GPT-2 of PyTorch's over two processes of a thread each, for comparison in turns: tensor_turns.py, shard_turns.py."""

import socket
import statistics
import subprocess
import sys
import time

from turns import ENVIRONMENT, heads_of

VOCABULARY = 256


def seconds(script, *words):
    """What `script` prints on rank 0: run as `script WORDS --torch-rank R` twice, the ranks of a job."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = {**ENVIRONMENT, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [subprocess.Popen([sys.executable, script, *sys.argv[1:], *words, "--torch-rank", str(r)], env=environment,
                              stdout=subprocess.PIPE, text=True) for r in (0, 1)]
    out = [each.communicate()[0] for each in ranks]
    if ranks[0].returncode != 0:
        sys.exit(f"PyTorch: exit {ranks[0].returncode}")
    return float(out[0].split()[-1])


def begin(rank):
    """The mesh of both ranks."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    torch.manual_seed(1)
    return init_device_mesh("cpu", (2,))


def gpt2(options, width, heads=None):
    """`heads`: of this rank."""
    import torch
    from torch import nn
    from torch.nn import functional

    heads = heads or heads_of(width)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
            self.output = nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x):
            samples, sequence, _ = x.shape
            normed = self.norm1(x)
            q, k, v = (each(normed).view(samples, sequence, heads, -1).transpose(1, 2)
                       for each in (self.q, self.k, self.v))
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.output(mixed.transpose(1, 2).reshape(samples, sequence, -1))
            return x + self.down(functional.gelu(self.up(self.norm2(x)), approximate="tanh"))

    class Gpt2(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(options.context, width)
            self.blocks = nn.ModuleList(Block() for _ in range(options.layers))
            self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

        def forward(self, tokens):
            x = self.tokens(tokens) + self.positions.weight
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x))

    return Gpt2()


def train(options, model, optimizer):
    """Prints the median seconds of a step after the first."""
    import torch
    from torch.nn import functional

    tokens = torch.randint(VOCABULARY, (options.tokens // options.context, options.context))
    times = []
    for _ in range(options.steps + 1):
        start = time.perf_counter()
        optimizer.zero_grad()
        for _ in range(options.micro_batches):
            logits = model(tokens)
            functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        times.append(time.perf_counter() - start)
    print(statistics.median(times[1:]))
    torch.distributed.destroy_process_group()
