"""Every rule, put to the test: an operator run in parts gives what it gives whole, and so do its gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from threading import Barrier
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_models import TRANSFORMERS, run_program, transformer
from torch import Tensor, nn
from torch.nn import functional as F

import weft
from weft import zoo
from weft.plan.capture import CapturedModel, capture
from weft.plan.capture.rules.view import groups
from weft.plan.runtime.local_ops import local_kernel
from weft.plan.runtime.program import CapturedProgram, Operand, ShardedCall, leaves, replace_leaves
from weft.plan.runtime.random_ops import is_random
from weft.plan.runtime.redistribute import Collective, MeshCollectives
from weft.plan.sharding import PARTIAL, REPLICATED, Mesh, Placements, result_placements, without_partials
from weft.utils.rng import generator, torch_seeded


class ThreadCollectives(MeshCollectives):
    """The collectives that kernels call, between threads that each compute one part."""

    def __init__(self, rank: int, count: int, slots: list[Any], barrier: Barrier) -> None:
        self.sizes, self.coordinate, self.device = (count,), (rank,), torch.device("cpu")
        self.slots, self.barrier = slots, barrier

    def _run(self, kind: Collective, taken: Tensor, given: Tensor, axis: int) -> None:
        self.slots[self.coordinate[0]] = given.clone()
        self.barrier.wait(60)
        found = torch.stack(self.slots).sum(0) if kind is Collective.ALL_REDUCE else torch.cat(self.slots)
        self.barrier.wait(60)
        taken.copy_(found)


def cut(tensor: Tensor, laid: Placements, count: int, number: int) -> Tensor:
    """One device's part of a tensor that lies so on a mesh of one axis."""
    return tensor.chunk(count, laid[0])[number].contiguous() if laid[0] >= 0 else tensor


def joined(parts: list[Tensor], laid: Placements) -> Tensor:
    """The whole of what the devices hold."""
    if laid[0] == PARTIAL:
        return torch.stack(parts).sum(0).to(parts[0].dtype)
    if laid[0] >= 0:
        return torch.cat(parts, laid[0])
    assert all(torch.equal(part, parts[0]) for part in parts), "parts that should be alike differ"
    return parts[0]


def computed(run: Callable[..., Any], args: Any, kwargs: Any, leaves: list[Tensor]) -> list[Tensor]:
    """What a kernel gives for these operands."""
    used = iter(leaves)
    args, kwargs = replace_leaves([args, kwargs], Operand, lambda operand: next(used))
    result = run(args, kwargs)
    return list(result) if isinstance(result, (list, tuple)) else [result]


def backward(results: list[Tensor], sent: list[Tensor | None], leaves: list[Tensor]) -> list[Tensor | None]:
    """The gradient of each operand that wants one."""
    pairs = [(one, two) for one, two in zip(results, sent, strict=True) if two is not None and one.requires_grad]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    if not pairs or not wanted:
        return [None] * len(leaves)
    found = iter(torch.autograd.grad([one for one, _ in pairs], wanted, [two for _, two in pairs], allow_unused=True))
    return [next(found) if leaf.requires_grad else None for leaf in leaves]


def in_parts(
    call: ShardedCall, whole: list[Tensor], sent: list[Tensor | None]
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Results and gradients of the operands, put together from the parts that the runtime's kernel computes."""
    how, count, read = local_kernel(call), call.mesh.devices, list(leaves([call.args, call.kwargs], Operand))
    assert [each.tensor for each in leaves([how.args, how.kwargs], Operand)] == [each.tensor for each in read]
    used = sorted(call.used_outputs)
    laid = [without_partials(call.result_placements(n)) if n in how.whole else call.result_placements(n) for n in used]
    slots: list[Any] = [None] * count
    barrier = Barrier(count)

    def part(number: int) -> tuple[list[Tensor], list[Tensor | None]]:
        collectives = ThreadCollectives(number, count, slots, barrier)
        try:
            leaves = [
                cut(value, call.operand_placements(operand), count, number)
                .detach()
                .clone()
                .requires_grad_(operand.tensor.gradient)
                for value, operand in zip(whole, read, strict=True)
            ]
            found = computed(lambda args, kwargs: how.run(collectives, args, kwargs), how.args, how.kwargs, leaves)
            # The gradient of a partial sum is that of the sum.
            given = [
                None if gradient is None else cut(gradient, each, count, number)
                for gradient, each in zip(sent, laid, strict=True)
            ]
            results = [found[n] for n in used]
            return [each.detach() for each in results], backward(results, given, leaves)
        except Exception:
            barrier.abort()
            raise

    with ThreadPoolExecutor(count) as pool:
        parts = list(pool.map(part, range(count)))
    backs: list[Tensor | None] = []
    for index, operand in enumerate(read):
        own = [gradients[index] for _, gradients in parts if gradients[index] is not None]
        backs.append(joined(own, result_placements(operand.tensor, call.split)) if len(own) == count else None)
    return [joined([results[n] for results, _ in parts], each) for n, each in enumerate(laid)], backs


def close(mine: Tensor, whole: Tensor) -> bool:
    if mine.shape != whole.shape:
        return False
    if not whole.is_floating_point() and not whole.is_complex():
        return torch.equal(mine, whole)
    scale = max(1.0, float(whole.abs().max())) if whole.numel() else 1.0
    return torch.allclose(mine, whole, rtol=2e-4, atol=2e-5 * scale, equal_nan=True)


def differences(found: Sequence[Tensor | None], wanted: Sequence[Tensor | None]) -> list[int]:
    """The numbers of those that are apart, or there in one way only."""
    return [
        number
        for number, (mine, whole) in enumerate(zip(found, wanted, strict=True))
        if (mine is None) != (whole is None) or (mine is not None and whole is not None and not close(mine, whole))
    ]


def check(
    captured: CapturedModel, values: Mapping[str, Any], seen: set[str] | None = None, module: str = ""
) -> tuple[int, list[str]]:
    """How many (operator, dimension) pairs were run in parts as plans run them, and those that came out wrong. What
    operators draw at random is looked at with processes, which have a generator each."""
    seen = set() if seen is None else seen
    wrong: list[str] = []
    checked, program = 0, CapturedProgram(captured)
    held = {captured.values[name]: value for name, value in values.items() if name in captured.values}
    for op, node in program.calls():
        entry = captured.graph.operators[op]
        plain = program.call(op, node, (REPLICATED,), Mesh((1,)))
        constants = replace_leaves([plain.args, plain.kwargs], Operand, lambda operand: None)
        key = repr((entry.target, entry.dims, [read.tensor for read in entry.reads], entry.outputs, constants))
        unsplit = all(dim.parts == 1 for dim in entry.dims)
        if module not in ("", entry.module) or unsplit or key in seen or is_random(plain) or "empty" in entry.target:
            continue
        seen.add(key)
        read = list(leaves([plain.args, plain.kwargs], Operand))
        given = [held[each.value.source, each.value.output].detach().clone() for each in read]
        fresh = [leaf.clone().requires_grad_(each.tensor.gradient) for leaf, each in zip(given, read, strict=True)]
        every = computed(lambda args, kwargs, node=node: node.target(*args, **kwargs), plain.args, plain.kwargs, fresh)
        used = sorted(plain.used_outputs)
        whole = [every[n] for n in used]
        with torch_seeded("cotangent"):
            sent = [
                torch.randn_like(out) if entry.outputs[n].gradient else None for out, n in zip(whole, used, strict=True)
            ]
        gradients = backward(whole, sent, fresh)
        whole = [each.detach() for each in whole]
        for number, dim in enumerate(entry.dims):
            divisors = [count for count in range(2, dim.parts + 1) if dim.parts % count == 0]
            few = [count for count in divisors if count <= 12] or divisors[:1]
            for count in {*few[:1], *few[-1:]}:
                checked += 1
                label = f"{entry.name} ({entry.target}) over {dim.name} in {count}"
                try:
                    results, backs = in_parts(program.call(op, node, (number,), Mesh((count,))), given, sent)
                except Exception as problem:  # to run in parts not at all is as wrong as to run wrongly
                    wrong.append(f"{label}: {problem!r}")
                    continue
                wrong += [f"{label}: result {each}" for each in differences(results, whole)]
                wrong += [f"{label}: gradient of operand {each}" for each in differences(backs, gradients)]
    return checked, wrong


def noisy(model: nn.Module) -> nn.Module:
    """Weights that are nowhere zero or equal: a bias that is added twice must show."""
    with torch_seeded("noise"), torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    return model


class Function(nn.Module):
    """A function of parameters of given shapes."""

    def __init__(self, function: Callable[..., Any], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        with torch_seeded("shapes"):
            self.weights = nn.ParameterList([nn.Parameter(torch.randn(*shape)) for shape in shapes])

    def forward(self, x: Tensor) -> Any:
        return self.function(*self.weights)


def index(*sizes: int, below: int) -> Tensor:
    return torch.arange(math.prod(sizes)).mul(7).remainder(below).view(*sizes)


def assign(x: Tensor, y: Tensor) -> Tensor:
    out = x.clone()
    out[:, 1:3] = y
    out[:, 0] = y[:, 0] * 2
    return out


def put(x: Tensor, y: Tensor) -> Tensor:
    out = x.clone()
    out[index(3, below=4)] = y
    return out


def rotated(x: Tensor) -> Tensor:
    turned = torch.view_as_complex(x.reshape(4, 6, 4, 2)) * torch.polar(torch.ones(6, 4), torch.ones(6, 4))
    return torch.view_as_real(turned).flatten(2)


SHAPE = (4, 6, 8)
CASES: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...], set[str]]] = {
    # what is computed, from what, and dimensions that must be among those that may be split
    "linear": (F.linear, ((4, 6, 8), (10, 8), (10,)), {"m0", "m1", "n", "k"}),
    "aliases": (lambda a, b: torch.divide(torch.multiply(a, b), b * b + 1).negative(), ((4, 6), (4, 6)), {"a0", "a1"}),
    "concatenate": (lambda a, b: torch.concatenate([a, b], 1), ((4, 6), (4, 2)), {"a0"}),
    "addmm": (torch.addmm, ((10,), (4, 8), (8, 10)), {"m", "n", "k"}),
    "addmm, scaled": (lambda c, a, b: torch.addmm(c, a, b, beta=2, alpha=3), ((4, 10), (4, 8), (8, 10)), {"k"}),
    "baddbmm": (torch.baddbmm, ((2, 1, 6), (2, 4, 8), (2, 8, 6)), {"b0", "m", "n", "k"}),
    "matmul that broadcasts": (torch.matmul, ((4, 1, 6, 8), (2, 8, 10)), {"b0", "b1", "m", "n", "k"}),
    "matmul with a vector": (torch.matmul, ((4, 6, 8), (8,)), {"b0", "m", "k"}),
    "vector by matrix": (torch.matmul, ((8,), (4, 8, 6)), {"b0", "n", "k"}),
    "dot": (torch.matmul, ((8,), (8,)), {"k"}),
    "outer": (torch.outer, ((8,), (6,)), {"m", "n"}),
    "einsum": (lambda a, b: torch.einsum("bqhd,bkhd->bhqk", a, b), ((2, 4, 6, 8), (2, 10, 6, 8)), set("bhqkd")),
    "einsum with dots": (lambda a, b: torch.einsum("...ij,jk", a, b), ((4, 6, 8), (8, 2)), {"i", "j", "k", "dot0"}),
    "einsum of three": (lambda *t: torch.einsum("bi,bj,ij->b", *t), ((4, 6), (4, 8), (6, 8)), {"b", "i", "j"}),
    "convolution": (
        lambda *t: F.conv2d(*t, padding=1, stride=2), ((4, 6, 8, 8), (10, 6, 3, 3), (10,)), {"n0", "c", "k"},
    ),
    "convolution of one image": (F.conv1d, ((6, 9), (4, 6, 3), (4,)), {"c", "k"}),
    "convolution in groups": (lambda *t: F.conv1d(*t, groups=2), ((4, 8, 9), (8, 4, 3), (8,)), {"n0", "g"}),
    "convolution by depth": (lambda *t: F.conv2d(*t, groups=6), ((4, 6, 5, 5), (12, 1, 3, 3)), {"n0", "g"}),
    "convolution in space": (F.conv3d, ((2, 4, 5, 5, 5), (6, 4, 2, 2, 2), (6,)), {"n0", "c", "k"}),
    "transposed": (lambda *t: F.conv_transpose2d(*t, stride=2), ((4, 6, 5, 5), (6, 8, 2, 2), (8,)), {"n0", "c", "k"}),
    "transposed in groups": (lambda *t: F.conv_transpose1d(*t, groups=2), ((4, 8, 9), (8, 3, 3), (6,)), {"n0", "g"}),
    "attention": (F.scaled_dot_product_attention, ((2, 4, 6, 8),) * 3, {"b0", "h", "q"}),
    "attention, causal": (
        lambda *t: F.scaled_dot_product_attention(*t, is_causal=True), ((2, 4, 6, 8),) * 3, {"b0", "h"},
    ),
    "attention with a mask": (
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m),
        ((2, 4, 6, 8), (2, 4, 10, 8), (2, 4, 10, 6), (4, 6, 10)), {"b0", "h", "q"},
    ),
    "attention of groups": (
        lambda *t: F.scaled_dot_product_attention(*t, enable_gqa=True),
        ((2, 8, 6, 8), (2, 4, 6, 8), (2, 4, 6, 8)), {"h"},
    ),
    "embedding": (lambda w: F.embedding(index(4, 6, below=10), w), ((10, 8),), {"i0", "i1", "d"}),
    "layer norm": (lambda x, w, b: F.layer_norm(x, (6, 8), w, b), (SHAPE, (6, 8), (6, 8)), {"b0"}),
    "rms norm": (lambda x, w: F.rms_norm(x, (8,), w), (SHAPE, (8,)), {"b0", "b1"}),
    "group norm": (lambda x, w, b: F.group_norm(x, 3, w, b), ((4, 6, 5, 5), (6,), (6,)), {"n"}),
    "batch norm": (
        lambda x, w, b: F.batch_norm(x, torch.zeros(6), torch.ones(6), w, b, True), ((4, 6, 5), (6,), (6,)), {"n", "c"},
    ),
    "batch norm, evaluated": (
        lambda x, w, b: F.batch_norm(x, torch.zeros(6), torch.ones(6), w, b), ((4, 6, 5), (6,), (6,)), {"n", "c"},
    ),
    "instance norm": (lambda x, w: F.instance_norm(x, weight=w), ((4, 6, 5), (6,)), {"n", "c"}),
    "softmax": (lambda x: F.softmax(x, 1), (SHAPE,), {"a0", "a2"}),
    "log softmax": (lambda x: F.log_softmax(x, -1), (SHAPE,), {"a0", "a1"}),
    "cumulated": (lambda x: x.cumsum(1), (SHAPE,), {"a0", "a2"}),
    "largest few": (lambda x: x.topk(2, dim=1), (SHAPE,), {"a0", "a2"}),
    "sorted": (lambda x: x.sort(1).values, (SHAPE,), {"a0", "a2"}),
    "largest": (lambda x: x.max(dim=1, keepdim=True), (SHAPE,), {"a0", "a2"}),
    "largest of all": (lambda x: x.max() * x, (SHAPE,), {"a0", "a1", "a2"}),
    "position of the largest": (lambda x: x.argmax(1), (SHAPE,), {"a0", "a2"}),
    "larger": (torch.maximum, (SHAPE, (6, 1)), {"a0", "a1", "a2"}),
    "log of a sum": (lambda x: x.logsumexp((0, 2)), (SHAPE,), {"a1"}),
    "variance": (lambda x: x.var(1), (SHAPE,), {"a0", "a2"}),
    "norm": (lambda x: F.normalize(x, dim=1), (SHAPE,), {"a0", "a2"}),
    "likeness": (lambda x, y: F.cosine_similarity(x, y, 1), (SHAPE, SHAPE), {"a0", "a2"}),
    "sum": (lambda x: x.sum((0, 1)), (SHAPE,), {"a0", "a1", "a2"}),
    "sum, kept": (lambda x: x.sum(1, keepdim=True), (SHAPE,), {"a0", "a1", "a2"}),
    "sum of all": (torch.sum, (SHAPE,), {"a0", "a1", "a2"}),
    "mean": (lambda x: x.mean(1), (SHAPE,), {"a0", "a1", "a2"}),
    "mean of all": (torch.mean, (SHAPE,), {"a0", "a1", "a2"}),
    "cross entropy": (lambda x: F.cross_entropy(x, index(8, below=5)), ((8, 5),), {"n0"}),
    "cross entropy, some ignored": (
        lambda x: F.cross_entropy(x, index(9, below=5)[:8], ignore_index=2), ((8, 5),), {"n0"},
    ),
    "cross entropy, soft": (
        lambda x, y: F.cross_entropy(x, y.softmax(1), label_smoothing=0.1), ((8, 5), (8, 5)), {"n0"},
    ),
    "cross entropy of pixels": (lambda x: F.cross_entropy(x, index(4, 3, below=5)), ((4, 5, 3),), {"n0"}),
    "cross entropy, added": (lambda x: F.cross_entropy(x, index(8, below=5), reduction="sum"), ((8, 5),), {"n0"}),
    "cross entropy, each": (lambda x: F.cross_entropy(x, index(8, below=5), reduction="none"), ((8, 5),), {"n0"}),
    "likelihood": (lambda x: F.nll_loss(x.log_softmax(1), index(8, below=5)), ((8, 5),), {"n0"}),
    "squares": (F.mse_loss, (SHAPE, SHAPE), {"a0", "a1", "a2"}),
    "absolute": (lambda x, y: F.l1_loss(x, y, reduction="sum"), (SHAPE, SHAPE), {"a0", "a1", "a2"}),
    "logits": (
        lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid(), torch.arange(8.0)), (SHAPE, SHAPE),
        {"a0", "a1", "a2"},
    ),
    "divergence": (lambda x, y: F.kl_div(x, y, log_target=True, reduction="batchmean"), (SHAPE, SHAPE), {"a0"}),
    "element-wise": (lambda x, y: F.gelu(x) * torch.tanh(y) + x / (1 + y.exp()) - 3 * y, (SHAPE, (6, 1)), {"a0", "a1"}),
    "where": (lambda x, y: torch.where(x > 0, x, y), (SHAPE, (8,)), {"a0", "a1", "a2"}),
    "filled": (lambda x: x.masked_fill(torch.arange(8) > 3, 2.0).clamp(-1, 1), (SHAPE,), {"a0", "a1", "a2"}),
    "slope": (F.prelu, (SHAPE, (6,)), {"a0", "a1", "a2"}),
    "heads apart": (lambda x: x.view(4, 6, 2, 4).transpose(1, 2), (SHAPE,), {"a0", "a1", "a2"}),
    "heads together": (lambda x: x.transpose(1, 2).reshape(4, 8, 6).flatten(0, 1), (SHAPE,), {"a0", "a1"}),
    "uneven regrouping": (lambda x: x.reshape(8, 24), ((4, 6, 8),), {"a0"}),
    "ones in and out": (lambda x: x.unsqueeze(1).squeeze(1)[None], (SHAPE,), {"a0", "a1", "a2"}),
    "squeezed": (lambda x: x[:, :, :, None].squeeze() + x[None].squeeze(0), (SHAPE,), {"a0", "a1", "a2"}),
    "expanded": (lambda x: x.expand(4, 6, 8), ((6, 1),), {"a0", "a1", "a2"}),
    "permuted": (lambda x: x.permute(2, 0, 1), (SHAPE,), {"a0", "a1", "a2"}),
    "sliced": (lambda x: x[:, 1:3, 0], (SHAPE,), {"a0", "a1", "a2"}),
    "split": (lambda x: torch.cat([part * 2 for part in x.split((2, 4), 1)][::-1], 1), (SHAPE,), {"a0", "a2"}),
    "chunked": (lambda x: torch.stack(x.chunk(2, -1), 1), (SHAPE,), {"a0", "a1"}),
    "unbound": (lambda x: x.unbind(1)[0] * 2, (SHAPE,), {"a0", "a2"}),
    "padded": (lambda x: F.pad(x, (1, 2, 0, 0)), (SHAPE,), {"a0", "a1"}),
    "mirrored": (lambda x: F.pad(x, (1, 2), mode="reflect"), (SHAPE,), {"a0", "a1"}),
    "rolled": (lambda x: x.roll((1, 2), (1, 2)).flip(1), (SHAPE,), {"a0", "a2"}),
    "repeated": (lambda x: x.repeat(2, 1, 3), (SHAPE,), {"a1"}),
    "repeated in front": (lambda x: x.repeat(2, 1, 1, 1), (SHAPE,), {"a1", "a2", "a3"}),
    "interleaved": (lambda x: x.repeat_interleave(3, dim=1), (SHAPE,), {"a0", "a1", "a2"}),
    "triangle": (lambda x: x.tril(), (SHAPE,), {"a0"}),
    "diagonal": (lambda x: x.diagonal(0, 1, 2), (SHAPE,), {"a0"}),
    "differences": (lambda x: x.diff(dim=1), (SHAPE,), {"a0", "a2"}),
    "windows": (lambda x: x.unfold(1, 2, 2), (SHAPE,), {"a0", "a2"}),
    "classes": (lambda x: F.one_hot(x.argmax(2), 8) * x, (SHAPE,), {"a0", "a1", "a2"}),
    "pairs": (rotated, (SHAPE,), {"a0", "a1", "a2"}),
    "fourier": (lambda x: torch.fft.rfft(x, dim=1).abs(), (SHAPE,), {"a0", "a2"}),
    "shuffled pixels": (lambda x: F.pixel_shuffle(x, 2), ((4, 8, 3, 3),), {"a0", "c"}),
    "unshuffled pixels": (lambda x: F.pixel_unshuffle(x, 2), ((4, 6, 4, 4),), {"a0", "c"}),
    "assigned": (assign, (SHAPE, (4, 2, 8)), {"a0", "a2"}),
    "assigned by index": (put, (SHAPE, (3, 6, 8)), {"a1", "a2"}),
    "picked rows": (lambda x: x[index(6, below=4)], (SHAPE,), {"i0", "a1", "a2"}),
    "picked apart": (lambda x: x[index(4, 1, below=4), :, index(6, below=8)], (SHAPE,), {"i0", "i1", "a1"}),
    "picked together": (lambda x: x[:, index(4, 1, below=6), index(6, below=8)], (SHAPE,), {"i0", "i1", "a0"}),
    "selected": (lambda x: x.index_select(1, index(4, below=6)), (SHAPE,), {"a0", "a1", "a2"}),
    "gathered": (lambda x: x.gather(1, index(4, 2, 8, below=6)), (SHAPE,), {"a0", "a1", "a2"}),
    "scattered": (lambda x, y: x.scatter(1, index(4, 2, 8, below=6), y), (SHAPE, (4, 2, 8)), {"a0", "a2"}),
    "scattered, added": (lambda x, y: x.scatter_add(1, index(4, 2, 8, below=6), y), (SHAPE, (4, 2, 8)), {"a0", "a2"}),
    "added by index": (lambda x, y: x.index_add(1, index(3, below=6), y), (SHAPE, (4, 3, 8)), {"a0", "a2"}),
    "looked up": (
        lambda x: torch.searchsorted(torch.arange(4.0), x) + torch.bucketize(x, torch.arange(4.0)), (SHAPE,),
        {"a0", "a1", "a2"},
    ),
    "distances": (torch.cdist, ((4, 6, 8), (4, 10, 8)), {"b0", "p", "r"}),
    "counted": (lambda x: torch.histc(x.argmax(1).float(), 6, 0, 5), (SHAPE,), {"a0", "a1"}),
    "pooled": (
        lambda x: F.max_pool2d(x, 2) + F.avg_pool2d(x, 2) + F.adaptive_avg_pool2d(x, 3), ((4, 6, 6, 6),), {"n0", "n1"},
    ),
    "pooled in a row": (lambda x: F.adaptive_max_pool1d(F.max_pool1d(x, 2), 2), ((4, 6, 8),), {"n0", "n1"}),
    "enlarged": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), ((4, 6, 3, 3),), {"n0", "n1"}),
    "enlarged by copies": (lambda x: F.interpolate(x, size=(6, 9)), ((4, 6, 3, 3),), {"n0", "n1"}),
    "columns": (lambda x: F.unfold(x, 2), ((4, 6, 4, 4),), {"n0"}),
    "sampled": (lambda x, g: F.grid_sample(x, g.tanh(), align_corners=False), ((4, 6, 4, 4), (4, 3, 3, 2)), {"n", "c"}),
    "weight norm": (lambda v, g: torch._weight_norm(v, g, 2), ((6, 4, 8), (1, 1, 8)), {"a2"}),
    "gated": (lambda x: F.glu(x, 1), (SHAPE,), {"a0", "a2"}),
}  # fmt: skip


class Cases(nn.Module):
    """All of them in one model, since a capture takes longer than what it is for."""

    def __init__(self) -> None:
        super().__init__()
        self.cases = nn.ModuleList([Function(function, *shapes) for function, shapes, _ in CASES.values()])

    def forward(self, x: Tensor) -> Any:
        return [case(x) for case in self.cases]


@pytest.fixture(scope="module")
def cases() -> tuple[CapturedModel, dict[str, Any]]:
    model, batch = Cases(), torch.zeros(1)
    captured = capture(model, batch)
    return captured, run_program(captured, model, batch)


def test_no_operator_of_the_cases_is_without_a_rule(cases: tuple[CapturedModel, dict[str, Any]]) -> None:
    assert cases[0].graph.unknown == {}
    assert cases[0].method == "export"


@pytest.mark.parametrize("name", CASES)
def test_an_operator_in_parts_is_the_operator(cases: tuple[CapturedModel, dict[str, Any]], name: str) -> None:
    captured, values = cases
    module = f"cases.{list(CASES).index(name)}"
    own = [entry for entry in captured.graph.operators if entry.module == module and entry.reads]
    splittable = {dim.name for entry in own for dim in entry.dims if dim.parts > 1}
    assert CASES[name][2] <= splittable
    checked, wrong = check(captured, values, module=module)
    assert checked
    assert wrong == []


class Steps(nn.Module):
    """Two steps of a recurrent cell."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> Any:
        return self.cell(x[:, 1], self.cell(x[:, 0]))


RECURRENT: list[tuple[Callable[[], nn.Module], int]] = [
    *((partial(kind, 6, 8, 2, bidirectional=True), 1) for kind in (nn.LSTM, nn.GRU)),
    *((partial(kind, 6, 8, 2, batch_first=True), 1) for kind in (nn.LSTM, nn.RNN)),
    *((lambda kind=kind: Steps(kind(6, 8)), 2) for kind in (nn.LSTMCell, nn.GRUCell, nn.RNNCell)),
]


@pytest.mark.parametrize(("build", "count"), RECURRENT)
def test_a_recurrent_layer_or_step_in_parts_is_the_layer_or_step(build: Callable[[], nn.Module], count: int) -> None:
    model, batch = noisy(build()), torch.randn(4, 4, 6)
    captured = capture(model, batch)
    assert [entry.dims[0].parts for entry in captured.graph.operators if entry.kind == "recurrent"] == [4] * count
    checked, wrong = check(captured, run_program(captured, model, batch))
    assert checked
    assert wrong == []


@given(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=5), st.data())
@settings(max_examples=60, deadline=None)
def test_outermost_axes_of_a_group_are_cut_alike(factors: list[int], data: st.DataObject) -> None:
    def grouped() -> tuple[int, ...]:
        ends = sorted({*data.draw(st.sets(st.integers(0, len(factors)))), 0, len(factors)})
        return tuple(math.prod(factors[one:two]) for one, two in pairwise(ends))

    before, after = grouped(), grouped()
    whole = torch.arange(math.prod(factors)).view(before)
    found = groups(before, after)
    assert [axis for ins, _ in found for axis in ins] == [axis for axis, size in enumerate(before) if size > 1]
    assert [axis for _, outs in found for axis in outs] == [axis for axis, size in enumerate(after) if size > 1]
    for ins, outs in found:
        assert math.prod(before[axis] for axis in ins) == math.prod(after[axis] for axis in outs)
        parts = math.gcd(before[ins[0]], after[outs[0]])
        local = list(after)
        local[outs[0]] //= parts
        pieces = [piece.reshape(local) for piece in whole.chunk(parts, ins[0])]
        assert torch.equal(torch.cat(pieces, outs[0]), whole.view(after))


SEEN: set[str] = set()  # an operator that one model has like another is run in parts once


LARGE = ("bert", "convnext", "gpt2", "vit", "whisper")  # the others have nearly all of their operators


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name in LARGE else ()) for name in TRANSFORMERS]
)
def test_every_operator_of_a_model_of_transformers_in_parts_is_the_operator(name: str) -> None:
    model, batch = transformer(name)
    noisy(model)
    captured = capture(model, batch)
    assert captured.graph.unknown == {}
    checked, wrong = check(captured, run_program(captured, model, batch), SEEN)
    assert checked
    assert wrong == []


@pytest.mark.parametrize("name", ["digits-conv", "nas-bench-macro", "gpt-test"])
def test_every_operator_of_a_subnet_of_the_zoo_in_parts_is_the_operator(name: str) -> None:
    chain = weft.initialise(zoo.find(name)(), 1)
    model = noisy(weft.extract(chain, chain.space.sample(generator(0, name))).train())
    shapes = {"digits-conv": (4, 1, 8, 8), "nas-bench-macro": (4, 3, 32, 32)}
    batch = torch.randn(shapes[name]) if name in shapes else index(4, 6, below=20)
    captured = capture(model, batch, loss=lambda output, batch: output.square().mean())
    assert captured.graph.unknown == {}
    assert captured.method == "export"
    checked, wrong = check(captured, run_program(captured, model, batch))
    assert checked
    assert wrong == []
