"""Elastic attention: heads, their groups and their features may vary, each a prefix along its own dimension."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

from weft.elastic.linear import Grid, Linear, linears
from weft.elastic.mixture import Mixture, Pick
from weft.elastic.module import Module
from weft.elastic.sizes import Dim, Sizes, combinations
from weft.errors import SupernetError
from weft.space import Expr, Space


class Attention(Module):
    """Self-attention over (batch, tokens, width), with ``heads`` of ``head_dim`` features, which need not make up the
    width.

    With fewer ``kv_heads``, that many keys and values serve groups of heads. The rows of q, k and v form grids (group,
    head of the group, feature), of which a subnet uses a corner, so that subnets share what they have in common and a
    mixture adds each head to itself. Raises SupernetError for sizes that do not divide. Attention weights are not
    dropped out.
    """

    def __init__(
        self,
        space: Space,
        width: Dim,
        heads: Dim,
        head_dim: Dim,
        kv_heads: Dim | None = None,
        *,
        causal: bool = False,
        bias: bool = True,
        out_bias: bool = True,
        rotary: Rotary | None = None,
        scale: float | None = None,
        eager: bool = False,
    ) -> None:
        """``scale`` stands in for 1 / sqrt(head_dim); ``eager`` multiplies the matrices one by one, without a fused
        kernel."""
        super().__init__()
        groups, each = (heads, 1) if kv_heads is None else (kv_heads, heads // kv_heads)
        _check(space, heads, groups, head_dim, None if rotary is None else rotary.dim)
        self.sizes = Sizes(space, groups, each, head_dim, what=f"Attention({heads} heads of {head_dim})")
        self.causal, self.eager, self.rotary = causal, eager, rotary
        self._scale = scale
        # A mixture of head sizes has a mixture of scales: they are folded into what it expects of q.
        self._folds = scale is None and not self.sizes.is_fixed(2)
        self._make(space, width, (groups, each, head_dim), bias, out_bias)

    @property
    def reads(self) -> tuple[str, ...]:
        return self.sizes.names

    def _make(self, space: Space, width: Dim, grid: tuple[Dim, Dim, Dim], bias: bool, out_bias: bool) -> None:
        """The layers that hold the weights."""
        groups, each, dim = grid
        self.q: Module
        self.k: Module
        self.v: Module
        self.out: Module
        full_heads = self.sizes.is_fixed(2)  # heads are used as a full_heads, so corners of (groups, dim) are prefixes
        if full_heads and (self.sizes.is_fixed(1) or self.sizes.largest[0] == 1):
            self.q = Linear(space, width, groups * each * dim, bias)
            self.out = Linear(space, groups * each * dim, width, out_bias)
        else:
            self.q = Grid(space, width, grid, bias, scaled=self._folds)
            self.out = Grid(space, grid, width, out_bias)
        self.k = Linear(space, width, groups * dim, bias) if full_heads else Grid(space, width, (groups, dim), bias)
        self.v = Linear(space, width, groups * dim, bias) if full_heads else Grid(space, width, (groups, dim), bias)

    def project(self, x: Tensor, pick: Pick) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, the heads side by side."""
        if self.rotary is None:
            q, k, v = linears((self.q, self.k, self.v), x, pick)
        else:  # v is kept for the backward, what is turned is not: they do not share memory
            q, k = linears((self.q, self.k), x, pick)
            v = self.v(x, pick=pick)
        return q, k, v

    def forward(self, x: Tensor, pick: Pick) -> Tensor:
        groups, each, dim = self.sizes.largest if isinstance(pick, Mixture) else self.sizes.of(pick)
        q, k, v = self.project(x, pick)
        q = torch.unflatten(q, -1, (groups * each, dim)).transpose(1, 2)
        k = torch.unflatten(k, -1, (groups, dim)).transpose(1, 2)
        v = torch.unflatten(v, -1, (groups, dim)).transpose(1, 2)
        if self.rotary is not None:
            q, k = self.rotary(q, k, pick=pick)
        scale = dim**-0.5 if self._scale is None else self._scale
        y = self._attend(q, k, v, 1.0 if self._folds and isinstance(pick, Mixture) else scale, each)
        return cast("Tensor", self.out(y.transpose(1, 2).flatten(2), pick=pick))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, each: int) -> Tensor:
        if not self.eager:
            return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, scale=scale, enable_gqa=each > 1)
        if each > 1:
            k, v = k.repeat_interleave(each, 1), v.repeat_interleave(each, 1)
        scores = torch.matmul(q, k.transpose(2, 3)) * scale
        if self.causal:
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
        return torch.matmul(torch.softmax(scores, -1), v)


def _check(space: Space, heads: Dim, groups: Dim, head_dim: Dim, rotary_dim: int | None) -> None:
    derived = space.rules.layout.derived
    exprs = {
        "heads": Expr.of(heads).substitute(derived),
        "kv_heads": Expr.of(groups).substitute(derived),
        "head_dim": Expr.of(head_dim).substitute(derived),
    }
    reads = set().union(*(expr.names for expr in exprs.values()))
    dims = set()
    for values in combinations(space, [name for name in space.choices if name in reads]):
        if space.rules.broken(values):
            continue
        number = {name: float(expr.value(values)) for name, expr in exprs.items()}
        chosen = " ".join(f"{name}={value}" for name, value in values.items()) or "these sizes"
        for name, value in number.items():
            if value < 1 or value != int(value):
                raise SupernetError(f"attention needs a whole number of {name}, but with {chosen} it is {value:g}")
        if number["heads"] % number["kv_heads"]:
            raise SupernetError(
                f"attention needs as many heads for every key and value, but with {chosen} there are "
                f"{number['heads']:g} heads and {number['kv_heads']:g} kv_heads: let one divide the other"
            )
        dims.add(int(number["head_dim"]))
    if rotary_dim is not None and dims != {rotary_dim}:
        raise SupernetError(
            f"rotary embedding pairs the first half of a head's features with the second, so head_dim is the one that "
            f"it was made for, {rotary_dim}, not {', '.join(map(str, sorted(dims)))}"
        )


# Rotary position embedding: queries and keys turned by an angle that grows with their place.


class Rotary(Module):
    """Turns the pairs of features (i, i + d/2) of heads of d features, as Llama does.

    ``frequencies`` are the angles from one place to the next, d/2 of them, if not Llama's own; ``gain`` is a factor on
    the result, as some ways to stretch a context want it.
    """

    frequencies: Tensor

    def __init__(self, dim: int, frequencies: Sequence[float] | None = None, gain: float = 1.0) -> None:
        super().__init__()
        if dim < 2 or dim % 2 or (frequencies is not None and len(frequencies) != dim // 2):
            number = "" if frequencies is None else f" and {len(frequencies)} frequencies"
            raise SupernetError(f"rotary embedding turns pairs of features: an even number of them, not {dim}{number}")
        self.dim, self._gain = dim, gain
        self._given = None if frequencies is None else tuple(frequencies)
        self.register_buffer("frequencies", torch.empty(dim // 2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fills in the frequencies, a buffer, after a build on the meta device."""
        if self._given is not None:
            values = torch.tensor(self._given, device="cpu")
        else:
            values = 1.0 / 10_000.0 ** (torch.arange(0, self.dim, 2, device="cpu").float() / self.dim)
        if not self.frequencies.is_meta:
            self.frequencies.copy_(values)

    def forward(self, q: Tensor, k: Tensor, pick: Pick) -> tuple[Tensor, Tensor]:
        angles = positions(q[0, 0, :, 0])[:, None].to(torch.float32) * self.frequencies
        angles = torch.cat((angles, angles), -1)
        cos, sin = angles.cos(), angles.sin()
        if self._gain != 1.0:
            cos, sin = cos * self._gain, sin * self._gain
        cos, sin = cos.to(q.dtype), sin.to(q.dtype)
        return q * cos + _half_turn(q) * sin, k * cos + _half_turn(k) * sin


def positions(row: Tensor) -> Tensor:
    """0, 1, 2, ... for the entries of a vector; tracing fails with ``torch.arange`` of its length."""
    return torch.ones_like(row, dtype=torch.int64).cumsum(0) - 1


def _half_turn(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)
