"""What a mixture of all sizes costs, against the plain step of the largest network.

    python benchmarks/elastic.py [--quick] [--device cpu|cuda] [--only TEXT] [--json FILE] [--check]

A step is forward and backward with the gradients of weights, inputs of a single layer, and probabilities. `ours` is
what weft does: one pass over each weight, nothing kept of it. `padded` is the sum of TangleNAS: every combination of
options is sliced, weighed, padded and added, then one operation, its LayerNorm over all features (in our own words, and
without the conversions to Python numbers that make a GPU wait in its code). Both are divided by `plain`, the extracted
largest subnet in training mode; all three take turns in one process. `memory_ratio` is the bytes of distinct storages
that a forward saves for the backward, weights and constant tables left out, over those of the plain one.

On a CPU: one thread, process time, the least over the repeats. On a GPU: CUDA events, the median, each step as it is
(`eager`) and as a CUDA graph (`graph`), in fp32 (TF32 off, which is torch's default) and under bf16 autocast; `syncs`
is how often the host waits for the device in one step, and ours must not. A file that is there already is gone on with.

To reach: single layers at most 1.10 at 3k tokens and more, 1.5 at 197; networks 1.15; memory 1.02; no syncs.

`--check`, on a GPU, compares the fused kernels with the eager path (largest error, relative to the largest entry of
the double-precision result) and two runs bit for bit.
"""

from __future__ import annotations

import argparse
import copy
import gc
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from machine import read_rows, write
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

import weft
from weft.elastic import LayerNorm, Leaf, Linear, Mixture, Sizes
from weft.elastic.ops import linear, norm
from weft.elastic.ops import weight as passes
from weft.elastic.ops.linear import mixed_linear
from weft.elastic.sizes import combinations
from weft.supernet import extract
from weft.utils.rng import generator

SPACES: dict[str, dict[str, list[float]]] = {
    "autoformer-t": {"width": [192, 216, 240], "heads": [3, 4], "ratio": [3.5, 4]},
    "autoformer-s": {"width": [320, 384, 448], "heads": [5, 6, 7], "ratio": [3, 3.5, 4]},
    "gpt-small": {"width": [384, 576, 768], "heads": [6, 8, 12], "ratio": [2, 3, 4]},
}
SEQUENCE = 197  # a class token and 14 x 14 patches of an image of 224 pixels
VOCABULARY = 8192  # of 50,304: so that the head is not most of the language model, nor its logits most of the memory
TOKENS = (SEQUENCE, 16 * SEQUENCE, 256 * SEQUENCE)

Step = Callable[[], Any]


def layer_of(name: str, what: str) -> tuple[weft.Space, Leaf]:
    space = weft.Space()
    width, heads, ratio = (space.categorical(choice, options) for choice, options in SPACES[name].items())
    makers: dict[str, Callable[[], Leaf]] = {
        "fc1": lambda: Linear(space, width, ratio * width),
        "fc2": lambda: Linear(space, ratio * width, width),
        "q": lambda: Linear(space, width, 64 * heads),
        "qkv": lambda: Linear(space, width, 192 * heads),
        "proj": lambda: Linear(space, 64 * heads, width),
        "norm": lambda: LayerNorm(space, width),
    }
    return space, makers[what]()


class Case:
    """One layer or network in three ways, on the same inputs."""

    def __init__(self, what: str, name: str, tokens: int, device: str, dtype: torch.dtype | None) -> None:
        self.device, self.dtype = device, dtype
        if what == "network":
            self._network(name, tokens)
        else:
            self._layer(name, what, tokens)
        rng = generator(0, "probabilities")
        self.probabilities = {
            choice: torch.tensor(rng.dirichlet([3.0] * len(option.options or ())), dtype=torch.float32, device=device)
            for choice, option in self.space.choices.items()
        }
        for probability in self.probabilities.values():
            probability.requires_grad_()
        self.padded = copy.deepcopy(self.mixed)
        for module in self.padded.modules():
            if isinstance(module, Leaf):
                summed_by_combination(module)
        with torch.no_grad(), self.autocast():
            self.gradient = torch.randn_like(self.plain(self.x))
        self.grads_of_x = (self.x,) if self.x.requires_grad else ()

    def _layer(self, name: str, what: str, tokens: int) -> None:
        self.space, leaf = layer_of(name, what)
        self.mixed = leaf.to(self.device).train()
        self.plain = leaf.plain(self.space.last()).train()
        largest = leaf.sizes.largest[-1]
        self.x = torch.randn(tokens // SEQUENCE, SEQUENCE, largest, device=self.device, requires_grad=True)

    def _network(self, name: str, tokens: int) -> None:
        chain = weft.initialise(networks()[name], 0, self.device).train()
        self.space, self.mixed = chain.space, chain
        batch = tokens // SEQUENCE
        if name.startswith("gpt"):
            self.x = torch.randint(0, VOCABULARY, (batch, SEQUENCE), device=self.device)
        else:
            self.x = torch.randn(batch, 3, 224, 224, device=self.device)
        self.plain = extract(chain, chain.largest()).train()

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device, self.dtype or torch.bfloat16, enabled=self.dtype is not None)

    def forward(self, way: str) -> Any:
        with self.autocast():
            if way == "plain":
                return self.plain(self.x)
            module = self.mixed if way == "ours" else self.padded
            mixture = Mixture.unchecked(self.space, self.probabilities)  # anew: what is derived from it is part of it
            return module(self.x, mixture)

    def step(self, way: str) -> tuple[Tensor | None, ...]:
        module = {"plain": self.plain, "ours": self.mixed, "padded": self.padded}[way]
        wanted = [*self.grads_of_x, *module.parameters()]
        if way != "plain":
            wanted += self.probabilities.values()
        return torch.autograd.grad(self.forward(way), wanted, self.gradient, allow_unused=True)

    def saved(self, way: str) -> int:
        """Bytes that a forward keeps for its backward; not what is there anyway: weights and tables."""
        found: dict[int, tuple[StorageWeakRef, int]] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = (StorageWeakRef(storage), storage.nbytes())
            return tensor.detach()  # the tensor itself would hold the graph that holds it

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = self.forward(way)
        del out  # with it goes what belongs to this forward
        own = self.x.untyped_storage().data_ptr()
        return sum(size for place, (held, size) in found.items() if held.expired() or place == own)


def networks() -> dict[str, Callable[[], weft.Chain]]:
    from weft.zoo.transformers import autoformer_small, autoformer_tiny, gpt_small

    return {
        "autoformer-t": autoformer_tiny,
        "autoformer-s": autoformer_small,
        "gpt-small": partial(gpt_small, VOCABULARY, dropout=0.0),
    }


# The way of TangleNAS


class Alone(Linear):
    """A linear layer that is not joined with others of its sizes."""


def summed_by_combination(leaf: Leaf) -> None:
    """Lets a leaf compute with the padded sum over all combinations; leaves that have no such sum stay as they are."""
    own = leaf.forward
    if type(leaf) is Linear:
        leaf.__class__ = Alone

    def run(x: Tensor, pick: Any) -> Tensor:
        if isinstance(leaf, LayerNorm):
            weight, bias = (padded_sum(value, leaf.sizes, pick, 1) for value in (leaf.weight, leaf.bias))
            return F.layer_norm(x, weight.shape, weight, bias, leaf.eps)
        if isinstance(leaf, Linear):
            bias = None if leaf.bias is None else padded_sum(leaf.bias, leaf.sizes, pick, 1)
            return F.linear(x, padded_sum(leaf.weight, leaf.sizes, pick, 2), bias)
        out: Tensor = own(x, pick=pick)
        return out

    leaf.forward = run  # type: ignore[method-assign]


def padded_sum(weight: Tensor, sizes: Sizes, mixture: Mixture, dims: int) -> Tensor:
    """The sum over all combinations of options of the first sizes of a weight, weighed and padded."""
    chances = mixture.joint(sizes.names) if sizes.names else weight.new_ones(1)
    total = torch.zeros_like(weight)
    for index, values in enumerate(combinations(sizes.space, sizes.names)):
        part, pad = weight, []
        for dim, expr in enumerate(sizes._exprs[:dims]):
            size = int(expr.value({name: values[name] for name in expr.names}))
            part = part.narrow(dim, 0, size)
            pad = [0, weight.shape[dim] - size, *pad]
        total = total + F.pad(part * chances[index], pad)
    return total


# Measuring


def on_cpu(steps: dict[str, Step], repeats: int) -> dict[str, float]:
    """Milliseconds: the least over the repeats, of process time on one thread."""
    found = dict.fromkeys(steps, math.inf)
    for repeat in range(repeats):
        for way in steps if repeat % 2 else reversed(steps):
            began = time.process_time()
            steps[way]()
            found[way] = min(found[way], (time.process_time() - began) * 1e3)
    return found


def on_gpu(steps: dict[str, Step], repeats: int) -> dict[str, float]:
    """Milliseconds: the median over the repeats, between events."""
    found: dict[str, list[float]] = {way: [] for way in steps}
    for repeat in range(repeats + 2):
        for way in steps if repeat % 2 else reversed(steps):
            first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            first.record()
            steps[way]()
            last.record()
            last.synchronize()
            if repeat >= 2:
                found[way].append(first.elapsed_time(last))
    return {way: statistics.median(times) for way, times in found.items()}


def captured(step: Step, pool: Any) -> Step:
    """The step as a CUDA graph; graphs of one pool share memory, so their results cannot be read."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        step()
    return graph.replay


def synchronisations(step: Step) -> int:
    """How often the host waits for the device."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchroni" in str(warning.message) for warning in seen)


@contextmanager
def no_synchronisation() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def measure(what: str, name: str, tokens: int, device: str, precision: str, repeats: int) -> list[dict[str, Any]]:
    gc.collect()  # the last case's
    torch.manual_seed(0)
    case = Case(what, name, tokens, device, torch.bfloat16 if precision == "bf16" else None)
    ways = ("plain", "ours", "padded")
    saved = {way: case.saved(way) for way in ways}
    steps: dict[str, Step] = {way: partial(case.step, way) for way in ways}
    syncs: dict[str, int | None] = dict.fromkeys(ways)
    if device == "cpu":
        for way in ways if repeats > 2 else ():
            steps[way]()
        times = {"eager": on_cpu(steps, repeats)}
    else:
        for way in ways:
            steps[way]()
            syncs[way] = synchronisations(steps[way])
        with no_synchronisation():
            steps["ours"]()
        times = {"eager": on_gpu(steps, repeats)}
        pool = torch.cuda.graph_pool_handle()
        torch.cuda.empty_cache()
        graphs = {way: captured(step, pool) for way, step in steps.items()}
        times["graph"] = on_gpu(graphs, repeats)
    return [
        {
            "what": what,
            "space": name,
            "tokens": tokens,
            "device": device,
            "mode": mode,
            "precision": precision,
            "way": way,
            "ratio": found[way] / found["plain"],
            "plain_ms": found["plain"],
            "memory_ratio": saved[way] / saved["plain"],
            "extra_mib": (saved[way] - saved["plain"]) / 2**20,
            "syncs": syncs[way],
        }
        for mode, found in times.items()
        for way in ways[1:]
    ]


def show(row: dict[str, Any]) -> None:
    print(
        f"{row['what']:9}{row['space']:14}{row['tokens']:7}{row['device']:>6}{row['mode']:>7}{row['precision']:>6}"
        f"{row['way']:>8}{row['ratio']:8.3f}{row['plain_ms']:12.3f}{row['memory_ratio']:9.3f}{row['extra_mib']:9.3f}"
        f"{'-' if row['syncs'] is None else row['syncs']:>7}",
        flush=True,
    )


# Kernels against the eager path


def check() -> list[dict[str, Any]]:
    """Errors of the fused kernels, and whether two runs give the same bits."""
    rows = []
    for dtype in (None, torch.bfloat16):
        for rank, shape in ((1, (768, 240)), (3, (960, 240)), (3, (240, 960)), (16, (333, 517)), (2, (3072, 768))):
            rows.append(check_linear(rank, shape, dtype))
        for name, what, count in (("autoformer-t", "fc1", 1), ("autoformer-s", "fc2", 2), ("gpt-small", "q", 3)):
            rows.append(check_layers(name, what, count, dtype))
        for width, bias in ((240, True), (768, True), (768, False), (65, True)):
            rows.append(check_norm(width, bias, dtype))
    return rows


def check_linear(rank: int, shape: tuple[int, int], dtype: torch.dtype | None) -> dict[str, Any]:
    height, width = shape
    x, weight, bias, gradient = (
        torch.randn(*size, device="cuda") for size in ((1000, width), shape, (height,), (1000, height))
    )
    rows, columns = torch.rand(rank, height, device="cuda"), torch.rand(rank, width, device="cuda")
    columns[:, 0] = 1
    values = [x, weight, bias, rows, columns]
    shown = f"{rank} x {height} x {width}"
    return compared("linear", shown, mixed_linear, values, gradient, dtype, (passes, "weight_kernels"))


def check_layers(name: str, what: str, count: int, dtype: torch.dtype | None) -> dict[str, Any]:
    """Layers of the same sizes in one product, down to the probabilities."""
    space, leaf = layer_of(name, what)
    (height, width), names = leaf.sizes.largest, leaf.sizes.names
    x, gradient = torch.randn(1000, width, device="cuda"), torch.randn(1000, count * height, device="cuda")
    shapes = [(height, width)] * count + [(height,)] * count
    held = [torch.randn(*shape, device="cuda") for shape in shapes]
    chances = [torch.rand(len(space.choices[n].options or ()), device="cuda").softmax(0) for n in names]

    def run(x: Tensor, *given: Tensor) -> Tensor:
        mixture = Mixture.unchecked(space, dict(zip(names, given[2 * count :], strict=True)))
        return linear.mixed_linears(x, given[:count], given[count : 2 * count], leaf.sizes, mixture)

    shown = f"{count} x {what} {name}"
    return compared("layers", shown, run, [x, *held, *chances], gradient, dtype, (linear, "linear_kernels"))


def check_norm(width: int, bias: bool, dtype: torch.dtype | None) -> dict[str, Any]:
    widths = (width // 3, width // 2, width)
    x = torch.randn(1013, width, device="cuda") * 2 + 1
    weight, shift, gradient = torch.randn(width), torch.randn(width), torch.randn(1013, width)
    chances = torch.tensor([0.2, 0.5, 0.3])
    values = [x, *(value.cuda() for value in ([weight, shift] if bias else [weight])), chances.cuda()]

    def run(x: Tensor, weight: Tensor, *rest: Tensor) -> Tensor:
        return norm.mixed_norm(x, weight, rest[0] if bias else None, rest[-1], widths, 1e-5, centred=bias)

    return compared("norm", f"{width}", run, values, gradient.cuda(), dtype, (norm, "norm_kernels"))


def compared(
    what: str,
    shape: str,
    work: Callable[..., Tensor],
    values: Sequence[Tensor],
    gradient: Tensor,
    dtype: torch.dtype | None,
    switch: tuple[Any, str],
) -> dict[str, Any]:
    """``switch`` is the function that finds the kernels."""

    def run(values: Sequence[Tensor], gradient: Tensor) -> list[Tensor]:
        leaves = [value.detach().clone().requires_grad_() for value in values]
        with torch.autocast("cuda", dtype or torch.bfloat16, enabled=dtype is not None and leaves[0].is_cuda):
            out = work(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, gradient.to(out.dtype))]

    truth = run([value.double().cpu() for value in values], gradient.double().cpu())
    finder, found = getattr(*switch), []

    def noticed(*given: Any) -> Any:
        found.append(finder(*given))
        return found[-1]

    try:
        setattr(*switch, noticed)
        fused, again = run(values, gradient), run(values, gradient)
        setattr(*switch, lambda *_: None)
        eager = run(values, gradient)
    finally:
        setattr(*switch, finder)

    def error(found: list[Tensor]) -> float:
        return max(float((f.cpu() - t).abs().max() / t.abs().max()) for f, t in zip(found, truth, strict=True))

    return {
        "what": what,
        "shape": shape,
        "precision": "fp32" if dtype is None else "bf16",
        "error_fused": error(fused),
        "error_eager": error(eager),
        "between": max(
            float((f - e).abs().max() / e.abs().max().clamp_min(1e-30)) for f, e in zip(fused, eager, strict=True)
        ),
        "bit_equal": all(torch.equal(f, a) for f, a in zip(fused, again, strict=True)),
        "is_fused": bool(found) and None not in found,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="AutoFormer-T alone, at 197 and 3,152 tokens")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", default="", metavar="TEXT", help="what has this in its name: network, fc1, gpt, ...")
    parser.add_argument("--check", action="store_true", help="compare the GPU's kernels with the eager path")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    gpu = options.device == "cuda"
    if options.check:
        checked = check()
        for row in checked:
            print(row)
        write(options.json, check=checked)
        return
    if not gpu:
        torch.set_num_threads(1)
    rows = read_rows(options.json)
    print("what     space          tokens device  mode  prec     way   ratio    plain ms   memory    +MiB  syncs")
    for name in list(SPACES)[:1] if options.quick else SPACES:
        layers = ["fc1", "fc2", "q", "proj"] if name.startswith("gpt") else ["fc1", "fc2", "qkv", "proj", "norm"]
        for what in (*layers, "network"):
            for tokens in TOKENS[: 2 if options.quick else 3]:
                for precision in ("fp32", "bf16") if gpu else ("fp32",):
                    key = (what, name, tokens, options.device, precision)
                    if options.only not in f"{what} {name}" or any(
                        key == tuple(row[k] for k in ("what", "space", "tokens", "device", "precision")) for row in rows
                    ):
                        continue
                    large, whole = tokens == TOKENS[2], what == "network"
                    if not gpu and whole and large:
                        continue  # a minute a step
                    if gpu:
                        repeats = 7 if large else 20
                    elif tokens > SEQUENCE:
                        repeats = 2 if large else 3 if whole else 10
                    else:
                        repeats = 10 if whole else 60
                    if options.quick:
                        repeats = max(2, repeats // 4)
                    found = measure(what, name, tokens, options.device, precision, repeats)
                    for row in found:
                        show(row)
                    rows += found
                    write(options.json, rows=rows)


if __name__ == "__main__":
    main()
