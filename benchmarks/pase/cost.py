"""What a vertex costs in each configuration, in FLOP: the table of PaSE's model, and the parts that are corrected.

Sizes are those of one device's part. A word that is sent costs ``word`` FLOP: what the device computes meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pase.configurations import Configs
from pase.corrections import Corrections
from pase.network import BATCH_NORM, EMBEDDING, Product, Vertex

Costs = NDArray[np.float64]


def vertex_costs(vertex: Vertex, configs: Configs, word: float, fix: Corrections) -> Costs:
    """The cost of each configuration, forward and backward."""
    counts = configs.astype(np.float64)
    local = np.array(vertex.space) / counts
    elements = _size(local)
    match vertex.kind:
        case "Einsum" if vertex.role == EMBEDDING and fix.gather:
            return _gather(local, counts, word)
        case "LSTM":
            return _lstm(vertex, local, counts, word, fix)
        case "Conv" | "FC" | "Einsum":
            assert vertex.product is not None
            return _product(vertex.product, local, counts, word, vertex.pointwise, fix)
        case "Pooling":
            return elements + word * _border(vertex, counts)
        case "Norm" if vertex.role == BATCH_NORM and fix.batch_norm:
            # Two sums for the statistics, and two on the way back that are the gradients of scale and shift as well.
            return 16 * elements + 4 * word * all_reduce(local[:, 1], _size(counts, (0, 2, 3)))
        case "Norm":
            (axis,) = vertex.axes
            others = _size(counts) / counts[:, axis]
            sums = all_reduce(elements / local[:, axis], counts[:, axis]) + all_reduce(local[:, axis], others)
            return 16 * elements + 4 * word * sums
        case "Softmax":
            (axis,) = vertex.axes
            length, q = vertex.space[axis], counts[:, axis]
            rows = elements / local[:, axis]
            return (4 + length) * elements + word * (2 * all_reduce(rows, q) + all_reduce(rows * length, q))
        case "SoftmaxCrossEntropy":
            rows = elements / local[:, -1]
            return 4 * elements + 2 * rows + word * 2 * rows * (counts[:, -1] > 1)
        case "Elementwise":
            return (1 + vertex.pointwise) * elements
        case "ReduceMean":
            return word * all_reduce(elements, _size(counts, vertex.axes))
        case _:  # stacking, splitting and reshaping are free; what moves is on the edges
            return np.zeros(len(configs))


def all_reduce(words: Costs, devices: Costs) -> Costs:
    """Words that a device sends to sum ``words`` over so many devices by a ring."""
    return 2 * (devices - 1) * words / devices


def words_missing(held: Costs, wanted: Costs, holders: Costs, wanters: Costs) -> Costs:
    """Words that a device must receive to have a part of shape ``wanted`` of a tensor that lies in parts like ``held``.

    The last axis runs over the tensor's own. A device keeps what both parts share, placed as well as can be; where more
    devices want a part than hold one, some keep nothing.
    """
    shared = np.where(wanters > holders, 0.0, np.minimum(held, wanted).prod(axis=-1))
    return np.asarray(np.maximum(wanted.prod(axis=-1) - shared, 0.0), dtype=np.float64)


def _product(product: Product, local: Costs, counts: Costs, word: float, pointwise: int, fix: Corrections) -> Costs:
    m, n, k = (_size(local, dims) for dims in (product.m, product.n, product.k))
    by_m, by_n, by_k = (_size(counts, dims) for dims in (product.m, product.n, product.k))
    # The result's partial sums, the gradient of the left operand, the gradient of the right one.
    sent = all_reduce(m * n, by_k) + all_reduce(m * k, by_n) + all_reduce(n * k, by_m)
    passes = 3 * (2 if fix.units else 1)  # one forward, two backward
    return _size(local, product.batch) * (passes * m * n * k + 3 * pointwise * m * n + word * sent)


def _lstm(vertex: Vertex, local: Costs, counts: Costs, word: float, fix: Corrections) -> Costs:
    # Four gates, of what comes in and of the state: one product, four times as wide and summing over twice as much.
    assert vertex.product is not None
    layers, length = vertex.space[:2]
    cost = _product(vertex.product, local * [1, 1, 1, 4, 2], counts, word, 3, fix)
    made, read = [2, 3], [2, 4]
    back = words_missing(local[:, made], local[:, read], _size(counts, made), _size(counts, read))
    return cost + word * layers * length * back


def _gather(local: Costs, counts: Costs, word: float) -> Costs:
    # Rows read forward and added to backward. Where the table is split by rows, each device looks up those it has and
    # the parts are summed; the table's gradient is summed over the devices that read from the same part of it.
    b, s, d, v = range(4)
    out = _size(local, (b, s, d))
    sent = all_reduce(out, counts[:, v]) + all_reduce(_size(local, (v, d)), _size(counts, (b, s)))
    return 2 * out + word * sent


def _border(vertex: Vertex, counts: Costs) -> Costs:
    part = np.array(vertex.inputs[0].shape) / counts
    grown = part + np.array((0, 0, *vertex.window)) * (counts > 1)
    return (_size(grown, (2, 3)) - _size(part, (2, 3))) * _size(part, (0, 1))


def _size(columns: Costs, dims: Sequence[int] | None = None) -> Costs:
    picked = columns if dims is None else columns[:, list(dims)]
    return np.asarray(picked.prod(axis=1), dtype=np.float64)
