#!/usr/bin/env python3
"""Makes golden.json: what PyTorch computes for every layer, loss, optimizer and rate of <sluice/layers.hpp>.

    pip install torch==2.15.0 numpy==2.4.6
    tests/stages/network/golden.py           # writes golden.json beside itself
    tests/stages/network/golden.py --check   # the file has these numbers

Parameters and operands are f32. Results are those of PyTorch's modules in double precision; its own f32 results
are within a tenth of the tests' tolerances of them, or the script stops. golden_test.cpp and
golden_training_test.cpp compare. The names of the cases are the names there.
"""

import pathlib
import sys

import numpy
import torch
from torch import nn
from torch.nn import functional

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
from golden_files import need, text_of, write_or_check  # noqa: E402

VERSIONS = {"torch": "2.15.0", "numpy": "2.4.6"}
FILE = pathlib.Path(__file__).with_name("golden.json")
OUTPUTS, GRADIENTS = 1e-5, 1e-4  # the tests' tolerances, as shares of the largest number


class Residual(nn.Sequential):
    """As residual() of Sluice: names "0.weight", and "shortcut.0.weight"."""

    def __init__(self, layers, shortcut=()):
        super().__init__(*layers)
        if shortcut:
            self.shortcut = nn.Sequential(*shortcut)

    def forward(self, x):
        y, added = x, x
        for name, layer in self.named_children():
            if name == "shortcut":
                added = layer(x)
            else:
                y = layer(y)
        return y + added


class GlobalAverage(nn.Module):
    def forward(self, x):
        return x.mean((2, 3))


def layers():
    """name -> (module, shape of x)."""
    rows, images = (3, 2, 10), (2, 4, 7, 6)
    return {
        "linear": (nn.Linear(10, 7), rows),
        "linear without bias": (nn.Linear(10, 5, bias=False), (4, 10)),
        "layer_norm": (nn.LayerNorm(10), rows),
        "rms_norm": (nn.RMSNorm(10, eps=1e-5), rows),
        "embedding of rows": (nn.Embedding(5, 6), (4, 3)),
        "embedding of samples": (nn.Embedding(5, 4), (6,)),
        "relu": (nn.ReLU(), rows),
        "gelu": (nn.GELU(), rows),
        "gelu_tanh": (nn.GELU(approximate="tanh"), rows),
        "silu": (nn.SiLU(), rows),
        "tanh": (nn.Tanh(), rows),
        "sigmoid": (nn.Sigmoid(), rows),
        "softmax": (nn.Softmax(-1), rows),
        "dropout of nothing": (nn.Dropout(0), rows),
        "flatten": (nn.Flatten(), rows),
        "unflatten": (nn.Unflatten(1, (5, 2)), (3, 10)),
        "group": (nn.Sequential(nn.Linear(10, 4), nn.Sequential(nn.Tanh(), nn.RMSNorm(4, eps=1e-5))), rows),
        "conv2d": (nn.Conv2d(4, 6, 3), images),
        "conv2d with stride and padding": (nn.Conv2d(4, 6, 3, stride=2, padding=1), images),
        "conv2d of two sizes": (nn.Conv2d(4, 6, (5, 2), stride=(1, 3), padding=(2, 0), bias=False), images),
        "conv2d in groups": (nn.Conv2d(4, 6, 3, padding=1, groups=2), images),
        "conv2d of each channel": (nn.Conv2d(4, 4, 3, groups=4), images),
        "batch_norm2d": (nn.BatchNorm2d(4), images),
        "batch_norm2d in evaluation": (nn.BatchNorm2d(4, momentum=0.3).eval(), images),
        "group_norm of one": (nn.GroupNorm(1, 4), images),
        "group_norm of two": (nn.GroupNorm(2, 4), images),
        "group_norm of each": (nn.GroupNorm(4, 4), images),
        "max_pool2d": (nn.MaxPool2d(2), images),
        "max_pool2d that overlaps": (nn.MaxPool2d(3, stride=2, padding=1), images),
        "avg_pool2d": (nn.AvgPool2d((3, 2)), images),
        "avg_pool2d that overlaps": (nn.AvgPool2d(3, stride=(1, 2), padding=1), images),
        "global_avg_pool2d": (GlobalAverage(), images),
        "residual": (Residual([nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(),
                               nn.Conv2d(4, 4, 1)]), images),
        "residual with a shortcut": (Residual([nn.Conv2d(4, 6, 3, stride=2, padding=1), nn.ReLU()],
                                              [nn.Conv2d(4, 6, 1, stride=2, bias=False), nn.BatchNorm2d(6)]),
                                     images),
    }


def losses():
    """name -> (shape of outputs, targets, function of outputs and targets, as a sum)."""

    def classes(shape, count):
        return (torch.arange(int(numpy.prod(shape))) * 7 % count).reshape(shape)

    def entropy(ignored=-100, smoothing=0.0):
        return lambda y, t: functional.cross_entropy(y, t, reduction="sum", ignore_index=ignored,
                                                     label_smoothing=smoothing)

    rows, pixels = classes((9,), 5), classes((2, 4, 3), 5)
    numbers = torch.linspace(-1, 1, 12).reshape(4, 3)
    return {
        "mse_loss": ((4, 3), numbers, lambda y, t: functional.mse_loss(y, t, reduction="sum")),
        "cross_entropy_loss": ((9, 5), rows, entropy()),
        "cross_entropy_loss of i64": ((9, 5), rows, entropy()),
        "cross_entropy_loss with an ignored class": ((9, 5), rows, entropy(3)),
        "cross_entropy_loss with smoothing": ((9, 5), rows, entropy(3, 0.1)),
        "cross_entropy_loss of pixels": ((2, 5, 4, 3), pixels, entropy()),
        "cross_entropy_loss of pixels with all": ((2, 5, 4, 3), pixels, entropy(0, 0.2)),
        "elementwise_loss": ((4, 3), numbers, lambda y, t: functional.huber_loss(y, t, reduction="sum")),
    }


def optimizers():
    return {
        "sgd": lambda p: torch.optim.SGD(p, 0.1),
        "sgd with momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        "sgd with nesterov": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
        "sgd with decay": lambda p: torch.optim.SGD(p, 0.1, momentum=0.8, weight_decay=0.05),
        "adam": lambda p: torch.optim.Adam(p, 0.1),
        "adam with decay": lambda p: torch.optim.Adam(p, 0.1, betas=(0.8, 0.99), eps=1e-6, weight_decay=0.05),
        "adamw": lambda p: torch.optim.AdamW(p, 0.1),
    }


def rates():
    """name -> (scheduler, how many of its steps come before Sluice's step 1)."""
    schedules = torch.optim.lr_scheduler

    def warmed(optimizer):
        warmup = schedules.LinearLR(optimizer, start_factor=0.25, end_factor=1.0, total_iters=3)
        cosine = schedules.CosineAnnealingLR(optimizer, 16, eta_min=0.02)
        return schedules.SequentialLR(optimizer, [warmup, cosine], milestones=[3])

    return {
        "constant": (lambda o: schedules.LambdaLR(o, lambda _: 1.0), 0),
        "step": (lambda o: schedules.StepLR(o, 6, gamma=0.5), 0),
        "cosine": (lambda o: schedules.CosineAnnealingLR(o, 20, eta_min=0.02), 1),
        "cosine after a warmup": (warmed, 0),
        "linear": (lambda o: schedules.LinearLR(o, start_factor=1.0, end_factor=0.1, total_iters=20), 1),
    }


def adamw_of_matrices(parameters):
    """Without decay of biases and norms, as Sluice does it."""
    every = list(parameters)
    return torch.optim.AdamW([{"params": [p for p in every if p.dim() > 1]},
                              {"params": [p for p in every if p.dim() == 1], "weight_decay": 0}], 0.01)


def networks():
    """name -> (model, x, targets, mean loss, optimizer, scheduler, its steps before step 1)."""
    images = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 6, 3, groups=2),
        nn.GroupNorm(2, 6), nn.SiLU(), nn.AvgPool2d(2, stride=1), nn.Flatten(), nn.Linear(6, 3))
    rows = nn.Sequential(
        nn.Embedding(11, 6), Residual([nn.LayerNorm(6), nn.Linear(6, 12), nn.GELU(approximate="tanh"),
                                       nn.Linear(12, 6)]),
        nn.RMSNorm(6, eps=1e-5), nn.Flatten(), nn.Linear(24, 5))
    numbers = nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 12), nn.GELU(), nn.Linear(12, 1))
    schedules = torch.optim.lr_scheduler
    return {
        "numbers": (numbers, torch.randn(12, 10), torch.randn(12, 1), functional.mse_loss,
                    lambda p: torch.optim.SGD(p, 0.02, momentum=0.9, nesterov=True),
                    lambda o: schedules.StepLR(o, 8, gamma=0.5), 0),
        "images": (images, torch.randn(12, 1, 8, 8), torch.arange(12) % 3, functional.cross_entropy,
                   lambda p: torch.optim.Adam(p, 0.01), lambda o: schedules.LambdaLR(o, lambda _: 1.0), 0),
        "rows": (rows, torch.randint(0, 11, (12, 4)), torch.arange(12) % 5,
                 lambda y, t: functional.cross_entropy(y, t, label_smoothing=0.1),
                 adamw_of_matrices, lambda o: schedules.CosineAnnealingLR(o, 25, eta_min=0.001), 1),
    }


def tensor(values):
    """A tensor for the file: integers, or numbers rounded to f32, in the fewest digits that name them."""
    flat = values.detach().numpy().reshape(-1)
    if flat.dtype.kind == "f":
        return {"shape": list(values.shape), "values": [float(str(v)) for v in flat.astype(numpy.float32)]}
    return {"shape": list(values.shape), "values": flat.tolist()}


def tensors(named):
    return {name: tensor(values) for name, values in named}


def draw_values(model):
    """Off what the modules begin with, where a weight of 1 and a bias of 0 hide mistakes."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.rand_like(parameter) - 0.5)
        for name, buffer in model.named_buffers():
            if "running" in name:
                buffer.add_(torch.rand_like(buffer))


def close(a, b, tolerance, what):
    """PyTorch's f32 numbers against its own in double precision."""
    off, most = (a.double() - b).abs().max().item(), b.abs().max().item()
    if off > tolerance / 10 * most:
        sys.exit(f"golden.py: {what}: f32 is off by {off:.2e} of {most:.2e}")


def run_layer(model, x, dy):
    model.zero_grad()
    point = x.detach().clone().requires_grad_(x.is_floating_point())
    y = model(point)
    (y * dy).sum().backward()
    return y, point.grad, {name: p.grad.clone() for name, p in model.named_parameters()}


def running(model):
    return [(name, b) for name, b in model.named_buffers() if "running" in name]


def layer_case(name, module, shape):
    model = nn.Sequential(module)
    draw_values(model)
    x = torch.randint(0, 5, shape) if "embedding" in name else torch.rand(shape) * 6 - 3
    case = {"x": tensor(x), "parameters": tensors(model.named_parameters()), "buffers": tensors(running(model))}
    state = {key: value.clone() for key, value in model.state_dict().items()}
    dy = torch.rand_like(model(x)) * 2 - 1
    model.load_state_dict(state)
    y, dx, grads = run_layer(model, x, dy)
    model.load_state_dict(state)
    model.double()
    y64, dx64, grads64 = run_layer(model, x.double() if x.is_floating_point() else x, dy.double())
    close(y, y64, OUTPUTS, name)
    case |= {"dy": tensor(dy), "y": tensor(y64), "gradients": tensors(grads64.items()),
             "buffers after": tensors(running(model))}
    if dx is not None:
        close(dx, dx64, GRADIENTS, name)
        case["dx"] = tensor(dx64)
    for key, grad in grads.items():
        close(grad, grads64[key], GRADIENTS, f"{name}: {key}")
    return case


def loss_case(name, shape, targets, function):
    y = torch.rand(shape) * 6 - 3
    results = []
    for kind in (torch.float32, torch.float64):
        point = y.detach().to(kind).requires_grad_()
        total = function(point, targets.to(kind) if targets.is_floating_point() else targets)
        (total * 0.5).backward()
        results.append((total.detach(), point.grad))
    close(results[0][0], results[1][0], OUTPUTS, name)
    close(results[0][1], results[1][1], GRADIENTS, name)
    return {"y": tensor(y), "targets": tensor(targets), "sum": results[1][0].item(), "gradient": tensor(results[1][1])}


def optimizer_case(make):
    start, grads = torch.rand(3, 4) - 0.5, torch.rand(5, 3, 4) - 0.5
    parameter = start.double().requires_grad_()
    optimizer = make([parameter])
    values = []
    for grad in grads:
        parameter.grad = grad.double()
        optimizer.step()
        values.append(parameter.detach().clone())
    return {"start": tensor(start), "gradients": tensor(grads), "values": tensor(torch.stack(values))}


def rate_case(make, ahead):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.2)
    scheduler = make(optimizer)
    made = []
    for step in range(ahead + 24):
        made.append(scheduler.get_last_lr()[0])
        optimizer.step()
        if step + 1 < 20 + ahead:  # Sluice's rates stay where they end
            scheduler.step()
    return made[ahead:]


def training(model, x, targets, loss, make_optimizer, make_scheduler, ahead):
    optimizer = make_optimizer(model.parameters())
    scheduler = make_scheduler(optimizer)
    optimizer.zero_grad()
    optimizer.step()  # without gradients: PyTorch wants it before the schedule's first step
    for _ in range(ahead):
        scheduler.step()
    values = []
    for _ in range(20):
        optimizer.zero_grad()
        value = loss(model(x), targets)
        value.backward()
        optimizer.step()
        scheduler.step()
        values.append(value.item())
    return values


def network_case(name, model, x, targets, *rest):
    start = {key: value.clone() for key, value in model.state_dict().items()}
    named = list(model.named_parameters()) + running(model)
    case = {"x": tensor(x), "targets": tensor(targets), "parameters": tensors(named)}
    mine = torch.tensor(training(model, x, targets, *rest))
    model.load_state_dict(start)
    model.double()
    cast = lambda t: t.double() if t.is_floating_point() else t
    case["losses"] = training(model, cast(x), cast(targets), *rest)
    close(mine, torch.tensor(case["losses"], dtype=torch.float64), 1e-4, name)
    return case


def main():
    need(VERSIONS)
    torch.manual_seed(20)
    torch.set_num_threads(1)
    everything = {
        "made by": "tests/stages/network/golden.py", **VERSIONS,
        "layers": {name: layer_case(name, *case) for name, case in layers().items()},
        "losses": {name: loss_case(name, *case) for name, case in losses().items()},
        "optimizers": {name: optimizer_case(make) for name, make in optimizers().items()},
        "rates": {name: rate_case(*case) for name, case in rates().items()},
        "networks": {name: network_case(name, *case) for name, case in networks().items()},
    }
    write_or_check({FILE: text_of(everything) + "\n"}, __doc__)


if __name__ == "__main__":
    main()
