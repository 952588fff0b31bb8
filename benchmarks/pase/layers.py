"""The layers from which PaSE's networks are built, each a vertex with the tensors it reads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from pase.network import BATCH_NORM, EMBEDDING, Edge, Network, Operand, Product, Vertex

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor in a network under construction: an output of a vertex, or, without one, data or weights."""

    shape: Shape
    vertex: int | None = None
    output: int = 0


@dataclass
class Builder:
    """A network under construction: each method adds a layer and returns what it computes."""

    vertices: list[Vertex] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)

    def network(self, name: str, batch: int, cutoff: int) -> Network:
        return Network(name, batch, cutoff, tuple(self.vertices), tuple(self.edges))

    def conv(
        self,
        image: Value,
        channels: int,
        kernel: tuple[int, int],
        stride: int = 1,
        pad: tuple[int, int] = (0, 0),
        pointwise: int = 0,
    ) -> Value:
        b, c, *size = image.shape
        h, w = _windows(size, kernel, stride, pad)
        return self._add(
            Vertex(
                "Conv",
                (b, c, h, w, *kernel, channels),
                (Operand.of(image.shape),),
                (Operand.of((b, channels, h, w), 0, 6, 2, 3),),
                pointwise,
                whole=(2, 3),  # splitting an image would need its borders exchanged
                product=Product((), (0, 2, 3), (6,), (1, 4, 5)),
            ),
            image,
        )

    def pool(self, image: Value, kernel: tuple[int, int], stride: int = 1, pad: tuple[int, int] = (0, 0)) -> Value:
        b, c, *size = image.shape
        out = (b, c, *_windows(size, kernel, stride, pad))
        return self._add(Vertex("Pooling", out, (Operand.of(image.shape),), (Operand.of(out),), window=kernel), image)

    def linear(self, x: Value, units: int, pointwise: int = 0) -> Value:
        *lead, k = x.shape
        rows = tuple(range(len(lead)))
        n = len(lead)
        return self._add(
            Vertex(
                "FC",
                (*lead, units, k),
                (Operand.of(x.shape, *rows, n + 1),),
                (Operand.of((*lead, units), *rows, n),),
                pointwise,
                product=Product((), rows, (n,), (n + 1,)),
            ),
            x,
        )

    def einsum(self, equation: str, left: Value, right: Value, pointwise: int = 0) -> Value:
        """The iteration space has the dimensions of the result, then those that are summed over."""
        (a, b), result = equation.split("->")[0].split(","), equation.split("->")[1]
        sizes = dict(zip(a + b, left.shape + right.shape, strict=True))
        summed = [name for name in a if name in b and name not in result]
        names = [*result, *summed]
        place = {name: number for number, name in enumerate(names)}
        return self._add(
            Vertex(
                "Einsum",
                tuple(sizes[name] for name in names),
                tuple(
                    Operand.of(value.shape, *(place[name] for name in axes)) for axes, value in ((a, left), (b, right))
                ),
                (Operand.of(tuple(sizes[name] for name in result), *range(len(result))),),
                pointwise,
                batch=place["b"],
                product=Product(
                    tuple(place[name] for name in result if name in a and name in b),
                    tuple(place[name] for name in result if name not in b),
                    tuple(place[name] for name in result if name not in a),
                    tuple(place[name] for name in summed),
                ),
            ),
            left,
            right,
        )

    def embedding(self, tokens: Value, words: int, size: int) -> Value:
        """As PaSE has it: one-hot vectors times the table."""
        result = self.einsum("bsv,vd->bsd", Value((*tokens.shape, words)), Value((words, size)))
        self.vertices[-1] = replace(self.vertices[-1], role=EMBEDDING)
        return result

    def lstm(self, x: Value, layers: int) -> Value:
        b, s, units = x.shape
        return self._add(
            Vertex(
                "LSTM",
                (layers, s, b, units, units),
                (Operand.of(x.shape, 2, 1, 4),),
                (Operand.of(x.shape, 2, 1, 3),),
                whole=(1,),
                batch=2,
                product=Product((0,), (1, 2), (3,), (4,)),
            ),
            x,
        )

    def elementwise(self, left: Value, right: Value) -> Value:
        same = Operand.of(left.shape)
        return self._add(Vertex("Elementwise", left.shape, (same, same), (same,)), left, right)

    def batch_norm(self, x: Value) -> Value:
        return self._along("Norm", x, 0, BATCH_NORM)

    def layer_norm(self, x: Value) -> Value:
        return self._along("Norm", x, len(x.shape) - 1)

    def softmax(self, x: Value) -> Value:
        return self._along("Softmax", x, len(x.shape) - 1)

    def cross_entropy(self, x: Value) -> Value:
        return self._along("SoftmaxCrossEntropy", x, len(x.shape) - 1)

    def mean_of_image(self, x: Value) -> Value:
        out = Operand.of(x.shape[:2], 0, 1)
        return self._add(Vertex("ReduceMean", x.shape, (Operand.of(x.shape),), (out,), axes=(2, 3)), x)

    def concat(self, parts: Sequence[Value]) -> Value:
        """Along the channels, which are then not split."""
        b, _, h, w = parts[0].shape
        out = Operand.of((b, sum(part.shape[1] for part in parts), h, w))
        return self._add(Vertex("Concat", (b, 1, h, w), tuple(Operand.of(p.shape) for p in parts), (out,)), *parts)

    def stack(self, parts: Sequence[Value]) -> Value:
        shape, rank = parts[0].shape, len(parts[0].shape)
        inputs = (Operand.of(shape, *range(1, rank + 1)),) * len(parts)
        out = Operand.of((len(parts), *shape))
        return self._add(Vertex("Stack", (1, *shape), inputs, (out,), batch=1), *parts)

    def unstack(self, x: Value) -> list[Value]:
        count, *shape = x.shape
        out = Operand.of(tuple(shape), *range(1, len(x.shape)))
        first = self._add(Vertex("Unstack", (1, *shape), (Operand.of(x.shape),), (out,) * count, batch=1), x)
        return [replace(first, output=number) for number in range(count)]

    def reshape(self, x: Value, shape: Shape) -> Value:
        """By way of one flat axis, which is cut by every split at once."""
        flat = (math.prod(x.shape),)
        line = Operand(flat, (tuple(range(len(x.shape))),))
        x = self._add(Vertex("Ravel", x.shape, (Operand.of(x.shape),), (line,)), x)
        line = Operand(flat, (tuple(range(len(shape))),))
        return self._add(Vertex("Unravel", shape, (line,), (Operand.of(shape),)), x)

    def _along(self, kind: str, x: Value, axis: int, role: str = "") -> Value:
        same = Operand.of(x.shape)
        return self._add(Vertex(kind, x.shape, (same,), (same,), axes=(axis,), role=role), x)

    def _add(self, vertex: Vertex, *values: Value) -> Value:
        place = len(self.vertices)
        self.vertices.append(vertex)
        for number, value in enumerate(values):
            if value.vertex is not None:
                self.edges.append(Edge(value.vertex, value.output, place, number))
        return Value(vertex.outputs[0].shape, place)


def _windows(size: Sequence[int], kernel: tuple[int, int], stride: int, pad: tuple[int, int]) -> tuple[int, int]:
    h, w = ((n + 2 * p - r) // stride + 1 for n, r, p in zip(size, kernel, pad, strict=True))
    return h, w
